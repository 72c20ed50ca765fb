# Needs python3.11 or later and make, nothing else. `make help` lists what there is.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(if $(shell command -v python$(v)),python$(v))) python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard protos/axon_ps/wire/v1/*.proto)
PROTOC := $(BIN)/python -m grpc_tools.protoc -Iprotos
TEST_PROCESSES ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
GPU_ARGS ?=
# the one that was named, else that of .venv
GPU_PYTHON = $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))
BENCH_ARGS ?=
NAME ?=
ARGS ?=
# without it, each of the hundreds of processes of a test run would compile the package anew, 0.4 s of a processor
export PYTHONDONTWRITEBYTECODE :=
# nor do they multiply matrices with numpy, whose threads spin for 0.1 s when it is imported
test pages faults-sample: export OPENBLAS_NUM_THREADS := 1

# targets of the last release, which are campaigns of `make lab` now
RENAMED := all-killed audit big-starts cases chaos compose cuts dist failover faults flips fuzz house integrations launchers \
	loaders observability planted programs rolling-update schedulers simulate simulate-record soak subscribers torch-range \
	torch-suite upgrade
RENAMED_ARGS = $($(shell echo $@ | tr a-z- A-Z_)_ARGS) $(PYTEST_ARGS) $(TESTS) $(TORCH_VERSIONS) $(foreach cell,$(CELLS),'$(cell)')

.PHONY: help setup demo test pages faults-sample gpu lab bench check lint format proto proto-drift locks docs clean $(RENAMED)

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(INSTALLED) ## make .venv with everything at the pinned versions; again: nothing to do

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[torch,dev,examples]'
	$(BIN)/python -m axon_ps.shard.loops
	touch $@

demo: $(INSTALLED) ## train a small GPT on two workers and two shard servers of this machine
	$(BIN)/axon-ps run --http-port 0 --nproc-per-node 2 --shards 2 examples/train_gpt.py --time-budget-s 150 $(DEMO_ARGS)

test: $(INSTALLED) ## run the tests; PYTEST_ARGS='-k word' picks some
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 20 $(PYTEST_ARGS)

pages: $(INSTALLED) ## run what the documentation tells to type, and the examples (4 minutes); PYTEST_ARGS='-k word'
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) tests/pages $(PYTEST_ARGS)

faults-sample: $(INSTALLED) ## the tests of what dies, freezes or is cut off, one of each kind (6 minutes); PYTEST_ARGS='-k word'
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder tests/faults $(PYTEST_ARGS)

gpu: ## what needs a GPU: its tests, the main job, benchmarks; PYTHON=python3 where nothing can be installed; GPU_ARGS=--quick
	@$(GPU_PYTHON) benchmarks/gpu.py $(GPU_ARGS)

lab: $(INSTALLED) ## run a campaign or a benchmark by name: NAME=fuzz ARGS='--seconds 600'; without a name, list them
	@$(BIN)/python -m axon_ps_lab $(NAME) $(ARGS)

$(RENAMED): $(INSTALLED)
	@echo "make $@ is called make lab NAME=$@ ARGS='...' from the next release on" >&2
	@$(BIN)/python -m axon_ps_lab $@ $(RENAMED_ARGS)

check: lint test pages faults-sample ## everything CI does

lint: $(INSTALLED) proto-drift ## format, style, types, layers, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python tests/supply_chain.py
	@$(BIN)/python tests/house.py --subjects

UV_COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --constraint constraints.txt \
	--custom-compile-command 'make locks'
LOCKS := services/locks

locks: $(INSTALLED) ## write services/locks/, by which the images are installed, anew from pyproject.toml and constraints.txt
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	| $(UV_COMPILE) --no-config --output-file $(LOCKS)/build.txt -
	$(UV_COMPILE) --no-config --output-file $(LOCKS)/base.txt pyproject.toml
	in_base=$$(sed -nE 's/^([a-z0-9-]+)==.*/--no-emit-package \1/p' $(LOCKS)/base.txt) && \
	$(UV_COMPILE) --no-config $$in_base --extra etcd --output-file $(LOCKS)/etcd.txt pyproject.toml && \
	$(UV_COMPILE) --no-config $$in_base --extra s3 --output-file $(LOCKS)/s3.txt pyproject.toml && \
	$(UV_COMPILE) --no-config $$in_base --extra torch --extra cuda13 --output-file $(LOCKS)/cuda13.txt pyproject.toml && \
	$(UV_COMPILE) --config-file $(LOCKS)/torch.uv.toml $$in_base --no-emit-package torch --extra torch \
		--output-file $(LOCKS)/torch.txt pyproject.toml && \
	$(UV_COMPILE) --config-file $(LOCKS)/torch.uv.toml $$in_base --no-emit-package torch --extra torch --extra cuda12 \
		--output-file $(LOCKS)/cuda12.txt pyproject.toml

format: $(INSTALLED) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(INSTALLED) ## generate axon_ps/wire/v1 from protos/
	$(PROTOC) --python_out=. --pyi_out=. $(PROTOS)

proto-drift: $(INSTALLED)
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	$(PROTOC) --python_out="$$dir" --pyi_out="$$dir" $(PROTOS) && \
	diff -r -x __init__.py -x __pycache__ "$$dir/axon_ps/wire/v1" axon_ps/wire/v1 || \
	{ echo "axon_ps/wire/v1 is not what protos/ generates; run make proto" >&2; exit 1; }

bench: $(INSTALLED) ## measure, with the peers in the same run; tables and JSON under benchmarks/results/
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

docs: $(INSTALLED) ## build the documentation site into build/docs; a link that leads nowhere is an error
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f docs/site/mkdocs.yml

clean: ## remove the environment and every cache
	rm -rf $(VENV) .venv-torch .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
