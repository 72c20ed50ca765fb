# Needs python3.11 or later and make, nothing else. `make help` lists what there is.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(if $(shell command -v python$(v)),python$(v))) python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard protos/axon_ps/wire/v1/*.proto)
PROTOC := $(BIN)/python -m grpc_tools.protoc -Iprotos
TEST_PROCESSES ?= 2
TORCH_VERSIONS ?= 2.11 2.15
PYTEST_ARGS ?=
DEMO_ARGS ?=
GPU_ARGS ?=
# the one that was named, else that of .venv
GPU_PYTHON = $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))
BENCH_ARGS ?=
CELLS ?=
FAULTS_ARGS ?=
SOAK_ARGS ?=
ALL_KILLED_ARGS ?=
FAILOVER_ARGS ?=
BIG_STARTS_ARGS ?=
COMPOSE_ARGS ?=
FUZZ_ARGS ?=
PROGRAMS_ARGS ?=
CASES_ARGS ?=
CHAOS_ARGS ?=
# without it, each of the hundreds of processes of a test run would compile the package anew, 0.4 s of a processor
export PYTHONDONTWRITEBYTECODE :=
# nor do they multiply matrices with numpy, whose threads spin for 0.1 s when it is imported
test pages faults-sample: export OPENBLAS_NUM_THREADS := 1

.PHONY: help setup demo test house gpu soak simulate simulate-record planted fuzz programs cases pages faults faults-sample flips all-killed big-starts cuts failover chaos loaders launchers subscribers observability integrations compose upgrade rolling-update dist schedulers torch-suite torch-range check lint audit locks format proto proto-drift bench docs clean

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

faults: $(INSTALLED) ## the grid of faults, a job of an hour; CELLS='worker*sigkill' for a part, FAULTS_ARGS=--help
	$(BIN)/python tests/faults/fault_run.py $(FAULTS_ARGS) $(foreach cell,$(CELLS),'$(cell)')

failover: $(INSTALLED) ## coordinators and etcd members that die, freeze and are cut off: how long no step commits (needs etcd)
	$(BIN)/python tests/faults/failover_run.py $(FAILOVER_ARGS)

soak: $(INSTALLED) ## 2,000 random faults on one job; 200 kills of ranks that share memory; 10,000 calls of overlapping groups
	$(BIN)/python tests/faults/fault_soak.py $(SOAK_ARGS)
	$(BIN)/python tests/faults/shm_kills.py
	$(BIN)/python tests/faults/group_soak.py

chaos: $(INSTALLED) ## 2,000 faults of every kind over all roles of one job, compared bit by bit with an undisturbed one; CHAOS_ARGS="--faults 100"
	$(BIN)/python benchmarks/chaos.py $(CHAOS_ARGS)

simulate: $(INSTALLED) ## a job under random faults in virtual time, the real services; SIMULATE_ARGS="--seeds 0:1000", --trace
	$(BIN)/python tests/simulation/simulate.py $(SIMULATE_ARGS)

simulate-record: $(INSTALLED) ## the same on every core for an hour, and a record of it; RECORD_ARGS='--from 5000 --minutes 10'
	$(BIN)/python tests/simulation/record.py $(RECORD_ARGS)

planted: $(INSTALLED) ## bugs planted in the product one at a time, all of which the simulation has to find; PLANTED_ARGS=--help
	$(BIN)/python tests/simulation/planted.py $(PLANTED_ARGS)

fuzz: $(INSTALLED) ## an hour of hostile messages, connections and checkpoints, a job training beside; FUZZ_ARGS="--seconds 600", --replay FILE
	$(BIN)/python tests/fuzz/fuzz_run.py $(FUZZ_ARGS)

programs: $(INSTALLED) ## 2,000 training programs that hypothesis draws, each against plain torch; PROGRAMS_ARGS="--seed 7", --replay FILE
	$(BIN)/python tests/programs/programs_run.py $(PROGRAMS_ARGS)

cases: $(INSTALLED) ## what people's own scripts do, in every wrapper, mapped and not, at 1 to 3 workers: a table; CASES_ARGS="schedulers"
	$(BIN)/python tests/programs/cases_run.py $(CASES_ARGS)

flips: $(INSTALLED) ## a thousand bits of shard servers' memory change while a job trains; FLIPS_ARGS="--flips 100 --steps 500"
	$(BIN)/python tests/faults/flip_run.py $(FLIPS_ARGS)

all-killed: $(INSTALLED) ## every process of a job killed at once, 20 times with a state that survives and 20 without; ALL_KILLED_ARGS=--help
	$(BIN)/python tests/faults/all_killed.py $(ALL_KILLED_ARGS)

big-starts: $(INSTALLED) ## starts of jobs of 0.5 and 1 billion parameters beside busy loops: leases lost, what held a loop; BIG_STARTS_ARGS=--help
	$(BIN)/python tests/faults/big_starts.py $(BIG_STARTS_ARGS)

cuts: $(INSTALLED) ## the network cut in eight ways between two members that all others reach (2 minutes, as root)
	$(BIN)/python -m pytest -m whole tests/faults/test_partial_partitions.py $(PYTEST_ARGS)

loaders: $(INSTALLED) ## 20 runs each of data loaders with every start method, in every kind of training
	$(BIN)/python -W ignore tests/faults/loader_runs.py

launchers: $(INSTALLED) ## the main job under `axon-ps run`, torchrun, torchrun on two hosts and mpirun: the same losses
	$(BIN)/python benchmarks/launchers.py

subscribers: $(INSTALLED) ## 10,000 pulls while shard servers are killed, and what they cost the trainers; SUBSCRIBERS_ARGS=--help
	$(BIN)/python benchmarks/subscribers.py $(SUBSCRIBERS_ARGS)

INTEGRATED := $(VENV)/.integrated

$(INTEGRATED): $(INSTALLED)
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[torch,dev,examples,integrations]'
	touch $@

integrations: $(INTEGRATED) ## what other people's tools and libraries make of us (Ray, Lightning, Trainer, Prometheus, Chromium...); PYTEST_ARGS='-k word'
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/integrations $(PYTEST_ARGS)

observability: $(INTEGRATED) ## what metrics and traces cost a training step, in processor time and in time (10 minutes); OBSERVABILITY_ARGS=--quick
	$(BIN)/python benchmarks/observability.py $(OBSERVABILITY_ARGS)

compose: $(INSTALLED) ## docker-compose.yml on a real engine: sizes of the images, scaling, deaths of services; COMPOSE_ARGS=--no-build
	$(BIN)/python tests/containers/compose_run.py $(COMPOSE_ARGS)

upgrade: $(INSTALLED) ## a job trains while every process goes from the oldest axon_ps of this protocol version to this one (needs git's history)
	PYTHONPATH=tests/integration:tests/upgrade $(BIN)/python tests/upgrade/rolling_upgrade.py

rolling-update: $(INTEGRATED) ## shard servers updated one after the other while a job trains, from deploy/kubernetes, as containers
	$(BIN)/python tests/containers/rolling_update.py

schedulers: $(INSTALLED) ## every LR scheduler of torch with every optimizer of ours, with a resume in the middle; PYTEST_ARGS='-k word'
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'whole or not whole' tests/unit/parallel/test_schedulers.py $(PYTEST_ARGS)

torch-suite: $(INSTALLED) ## run PyTorch's own collective tests over the backend "axon"; TESTS='part of a name' picks some
	$(BIN)/python tests/integration/torch_suite.py $(TESTS)

torch-range: ## run what touches torch with the oldest and the newest one; TORCH_VERSIONS='2.12 2.14' picks others
	$(PYTHON) tests/torch_range.py $(TORCH_VERSIONS) $(TORCH_RANGE_ARGS)

check: lint test pages faults-sample ## everything CI does

house: $(INSTALLED) ## measure the package: sizes, circles of imports, names used twice, private words
	@$(BIN)/python tests/house.py
	@$(BIN)/python tests/walks.py --summary

lint: $(INSTALLED) proto-drift ## format, style, types, layers, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python tests/supply_chain.py
	@$(BIN)/python tests/house.py --subjects

audit: $(INSTALLED) ## what the images hold: known vulnerabilities, where the service answers, and a bill of materials in build/sbom/
	@$(BIN)/python tests/supply_chain.py

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
