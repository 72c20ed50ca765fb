"""The fences that import-linter cannot hold: what an import loads, and what code may say where.

The order of the rooms and who may import which library are contracts in pyproject.toml (`make lint`).
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("without_collector")
ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "axon_ps", ROOT / "axon_ps_lab")
SOURCES = sorted(p for folder in PACKAGES for p in folder.rglob("*.py") if p.parent.name != "v1")  # v1 is generated
PURE_ROOMS = ("errors.py", "types.py", "sharding/", "optim/", "compress/", "data/", "wire/")


def loaded_by(statement: str) -> set[str]:
    """The top-level names in `sys.modules` after `statement`, in a Python of its own that nobody watches (-E)."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def name_of(path: Path) -> str:
    """The path under axon_ps, with forward slashes; in the laboratory, the path with its name."""
    return path.relative_to(ROOT).as_posix().removeprefix("axon_ps/")


CORES = tuple(name for p in SOURCES if "/core/" in (name := name_of(p)))


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything imported anywhere in a module, lazily too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def attributes(tree: ast.AST) -> Iterator[str]:
    """Every `name.attribute` of a module, as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def parsed(*, but: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Module]]:
    """Every module of ours, `but` those under some paths."""
    for path in SOURCES:
        if not name_of(path).startswith(but):
            yield name_of(path), tree_of(path)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_importing_axon_ps_loads_no_heavy_library() -> None:
    heavy = {"torch", "cupy", "numba", "numpy", "grpc", "typer", "rich", "pydantic", "fsspec", "asyncio"}
    assert not loaded_by("import axon_ps") & heavy


def test_a_world_needs_neither_torch_nor_numba_nor_the_command_line() -> None:
    assert not loaded_by("import axon_ps; axon_ps.World") & {"torch", "cupy", "numba", "typer", "rich", "pydantic"}


def test_the_command_line_loads_only_what_its_help_needs() -> None:
    heavy = {"grpc", "numba", "numpy", "pydantic", "fsspec", "torch", "rich", "asyncio"}
    assert not loaded_by("import axon_ps.cli.main") & heavy
    shown = "import contextlib, io; from axon_ps.cli.main import main\nwith contextlib.redirect_stdout(io.StringIO()):"
    helped = loaded_by(f"{shown}\n    main(['--help'])\nimport json, sys")
    assert not helped & {"grpc", "numba", "numpy", "fsspec", "torch"}


def test_a_launcher_loads_neither_arrays_nor_grpc_nor_what_other_commands_need() -> None:
    """Each service that it starts loads the same again."""
    code = (
        "import sys, tempfile; from axon_ps.cli import main; file = tempfile.NamedTemporaryFile(suffix='.py');"
        "code = main.main(['run', '--shards', '1', file.name]); print(code, file=sys.stderr);"
        "print(sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(run.stdout))
    assert run.stderr.split()[-1] == "0", run.stderr
    assert "axon_ps.cli.launch.perform" in loaded
    others = {f"axon_ps.cli.{name}" for name in ("auth", "checkpoint", "serve", "status", "terminal")}
    others |= {"axon_ps_lab.commands.chaos", "axon_ps_lab.commands.simulate"}
    assert not loaded & (others | {"grpc", "numba", "numpy", "fsspec", "torch", "rich"})


def test_nothing_is_pickled() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    # A cluster for tests sends functions to the processes that it has started, and to nobody else.
    # torch's rendezvous pickles its state, which becomes JSON before it leaves the process.
    but = ("testing/worker_main.py", "parallel/torchrun/state.py")
    offenders = [name for name, tree in parsed(but=but) if forbidden & set(imports(tree))]
    offenders += [name for name, tree in parsed() if {"torch.save", "torch.load"} & set(attributes(tree))]
    assert offenders == []


def test_only_the_command_line_exits() -> None:
    exits = {"sys.exit", "os._exit", "os.abort"}
    # the fork server's children end as programs do, `ending` only notices who exits, and a service that has failed in
    # an actor of Ray's is started again by Ray when its process ends
    programs = ("cli/", "host/tether.py", "worker/ending.py", "testing/fork_server.py", "ray/service.py")
    programs += ("axon_ps_lab/__main__.py", "axon_ps_lab/campaigns/", "axon_ps_lab/fuzz/", "axon_ps_lab/interleavings/")
    programs += ("axon_ps_lab/containers/", "axon_ps_lab/upgrade/")
    offenders = [name for name, tree in parsed(but=programs) if exits & set(attributes(tree))]
    assert offenders == []


def kept_errors(tree: ast.AST) -> Iterator[int]:
    """Lines where an error is kept, or one that is kept is raised, as it is: with the frames that it has passed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            raised = node.exc
            if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Attribute):
                raised = raised.func.value if raised.func.attr == "with_traceback" else None
            if isinstance(raised, ast.Attribute) and raised.attr.lstrip("_")[:1].islower():
                yield node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield from (
                inside.lineno
                for inside in ast.walk(node)
                if isinstance(inside, ast.Assign)
                and isinstance(inside.targets[0], ast.Attribute)
                and any(
                    isinstance(v, ast.Name) and v.id == node.name
                    for v in (inside.value, *getattr(inside.value, "values", ()))
                )
            )


def test_an_error_that_is_kept_is_a_copy_and_so_is_what_is_raised_of_it() -> None:
    spared = {"parallel/pipeline/stage.py", "parallel/pipeline/lifecycle.py"}  # of a local variable: nobody keeps it
    found = [f"{name}:{line}" for name, tree in parsed() if name not in spared for line in kept_errors(tree)]
    assert found == [], "raise again(error), and keep again(error): see `errors.again`"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("raise self._error", [1]),
        ("raise self._error.with_traceback(None)", [1]),
        ("try:\n    f()\nexcept OSError as e:\n    self.error = self.error or e", [4]),
        ("raise again(self._error)\nraise asyncio.CancelledError\nraise error", []),
        ("try:\n    f()\nexcept OSError as e:\n    self.error = again(e)", []),
    ],
)
def test_a_kept_error_is_found(code: str, lines: list[int]) -> None:
    assert list(kept_errors(ast.parse(code))) == lines


def test_only_settings_and_the_workers_environment_read_the_environment() -> None:
    # World hands the environment to collectives.environment; the test cluster hands its own on to its processes.
    # and torch.distributed's entry to us does the same. `fork` sets what gRPC reads when it is loaded; a standby is
    # told the environment of the worker that it becomes, and so is a process that Ray has started.
    readers = ("cli/settings.py", "worker/environment.py", "worker/world.py", "testing/environment.py")
    readers += ("parallel/c10d/register.py", "testing/workers.py", "testing/fork_server.py", "host/fork.py")
    readers += ("cli/launch/standby.py", "ray/workers.py", "worker/subscription.py")
    readers += ("cli/main.py",)  # only the names, to say which of them are misspelt
    readers += ("parallel/torchrun/handler.py",)  # an agent's workers inherit what it was given
    readers += ("axon_ps_lab/__main__.py", "axon_ps_lab/campaigns/", "axon_ps_lab/watchdog/")
    readers += ("axon_ps_lab/containers/", "axon_ps_lab/upgrade/")
    readers += ("axon_ps_lab/faults/bit_flips.py",)  # a plugin, which is imported and not called
    readers += ("host/loop_cache.py",)  # numba's variables, which decide where its cache is
    reading = {"os.environ", "os.getenv", "os.environb"}
    assert [name for name, tree in parsed(but=readers) if reading & set(attributes(tree))] == []


@pytest.mark.parametrize("name", CORES)
def test_sans_io_cores_have_no_threads_sockets_or_clocks(name: str) -> None:
    found = set(imports(ast.parse((ROOT / "axon_ps" / name).read_text(encoding="utf-8"))))
    assert not found & {
        "asyncio",
        "threading",
        "socket",
        "time",
        "datetime",
        "grpc",
        "concurrent",
        "random",
        "os",
        "mmap",
    }


def test_pure_rooms_do_not_wait_or_talk() -> None:
    waiting = {"asyncio", "socket", "subprocess", "time", "grpc", "concurrent"}
    offenders = [n for n, tree in parsed() if n.startswith(PURE_ROOMS) and waiting & set(imports(tree))]
    assert offenders == []


def test_every_module_says_what_it_owns() -> None:
    assert [name for name, tree in parsed() if not ast.get_docstring(tree)] == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert [name_of(p) for p in SOURCES if drawers & {p.stem, *p.relative_to(ROOT).parts}] == []


def test_service_entry_points_are_thin() -> None:
    for path in sorted((ROOT / "services").glob("*/main.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path


def test_modules_that_tests_import_have_names_of_their_own() -> None:
    # Tests are imported by path, but what they import is found by its name alone; two of one name would collide.
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py"]
    names = [p.name for p in files if not p.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
    assert [str(p) for p in files if p.name.startswith(f"test_{p.parent.name}_")] == []


def test_without_torch_the_extra_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None; import axon_ps.parallel"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: axon_ps.parallel needs PyTorch, which is not installed: pip install 'axon-ps[torch]'"
    )


def test_the_page_on_architecture_names_what_is_there() -> None:
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("architecture.md", "walks.md"))
    paths = set(re.findall(r"`([a-z_]+/[a-z_/.]*)`", pages)) - {"core/", "server/", "client/", "templates/_helpers.tpl"}
    assert len(paths) > 40
    assert [p for p in sorted(paths) if not (ROOT / "axon_ps" / p).exists() and not (ROOT / p).exists()] == []


def listed_modules(page: str) -> dict[Path, set[str]]:
    """The modules of each folder, as a page lists them: "- `folder/` (remark): module (remark); `folder/`: ..."."""
    folders = {}
    for item in re.findall(r"^- (`.*?)(?=^- |^$)", page + "\n", re.MULTILINE | re.DOTALL):
        for part in re.sub(r"\s*\([^)]*\)", "", " ".join(item.split())).split("; "):
            folder, _, names = part.partition(": ")
            path = folder.strip("`").rstrip("/")
            folders[ROOT / path if path.startswith("axon_ps") else ROOT / "axon_ps" / path] = {
                name.strip(" `") for name in names.split(",")
            }
    return folders


def test_the_page_on_architecture_lists_every_module() -> None:
    modules: dict[Path, set[str]] = {}
    for package in ("axon_ps", "axon_ps_lab"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stem != "__init__" and path.parent.name != "v1":
                modules.setdefault(path.parent, set()).add(path.stem)
    assert listed_modules((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")) == modules


def test_what_a_page_lists_is_read_from_its_items() -> None:
    items = "- `host/` (this machine): fork (of a\n  worker), ports\n- `axon_ps/`: errors\n\n**Text**, more\n"
    assert listed_modules(items) == {
        ROOT / "axon_ps" / "host": {"fork", "ports"},
        ROOT / "axon_ps": {"errors"},
    }


@pytest.mark.parametrize("drawn", ["architecture", "members", "results"])
def test_a_picture_shows_what_it_is_drawn_from(drawn: str) -> None:
    subprocess.run([sys.executable, f"docs/{drawn}.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("folder", ["axon_ps", "axon_ps_lab", "benchmarks", "docs", "examples", "services", "tests"])
def test_what_a_text_imports_of_the_package_is_there(folder: str) -> None:
    """Also where the text is a script in a string, or a block of a page."""
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md") and p.parent.name != "v1"]
    written = re.compile(r"^\s*(?:from|import) (axon_ps(?:_lab)?(?:\.\w+)*)", re.MULTILINE)
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in written.findall(path.read_text(encoding="utf-8"))
        if not is_module(name)
    }
    assert missing == set()


@functools.cache
def is_module(name: str) -> bool:
    """Whether a module of that name is in the package, without importing it."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
