"""What holds for every test: it leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from axon_ps.host import loop_cache
from axon_ps.observe.logging import ROOT
from axon_ps.shard import loops
from axon_ps.testing import preloaded
from axon_ps_lab.faults.cluster import MODULES as SERVICES_IMPORT
from axon_ps_lab.watchdog import loop_watchdog
from tables import shown

WORKERS_IMPORT = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",  # by torch's FSDP2 and its compiler
    "axon_ps.parallel",
    "axon_ps.worker.world",
    "pytest",  # by the test's module, in which its worker is
    *SERVICES_IMPORT,
)
"""What nearly every worker of a test imports; one process does it for all of them, and for services that fork."""

loop_watchdog.install()  # in a process of pytest-xdist, if it was asked for

hypothesis.settings.register_profile("the same examples each time, and no times", deadline=None, derandomize=True)
hypothesis.settings.load_profile("the same examples each time, and no times")  # `make lab NAME=fuzz` looks for others


def pytest_addoption(parser: pytest.Parser) -> None:
    """By hand, on a machine that does nothing else: tests prove no times."""
    parser.addoption(
        "--longest-hold", type=float, metavar="MS", help="watch event loops, and fail when one was held for longer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch the event loops of all processes, as `--longest-hold` asks for."""
    if config.getoption("--longest-hold") is not None and loop_watchdog.VARIABLE not in os.environ:
        os.environ[loop_watchdog.VARIABLE] = tempfile.mkdtemp(prefix="loop-watchdog-")
        watchdogs = os.path.dirname(loop_watchdog.__file__)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (watchdogs, os.environ.get("PYTHONPATH"))))
        loop_watchdog.install()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """As `--longest-hold` asks for."""
    limit_ms, records = session.config.getoption("--longest-hold"), os.environ.get(loop_watchdog.VARIABLE)
    holds = [] if limit_ms is None or records is None else loop_watchdog.found(Path(records))
    if holds and holds[0].held_s * 1e3 > limit_ms:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """The holds of loops that were printed."""
    records = os.environ.get(loop_watchdog.VARIABLE)
    if records is not None and not hasattr(config, "workerinput"):
        shutil.rmtree(records, ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Loops are compiled before a test begins: its deadlines are not those of a compiler."""
    if not hasattr(session.config, "workerinput"):  # once, before pytest-xdist's processes start
        loops.compile_missing(print)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulation goes first: a file has one process, and one that takes minutes must not be the last to begin."""
    items.sort(key=lambda item: "simulation" not in item.path.parts)


def pytest_collection_finish() -> None:
    """No collection of garbage visits what was imported and collected: that took 0.6 s in every fifteenth test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    """For tests that parse the sources: the collector finds nothing in their trees, and takes twice as long as they."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()  # trees that are kept


@pytest.fixture(scope="session", autouse=True)
def state_is_temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Coordinators without a state of their own write their audit logs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def workers_are_forks(state_is_temporary: None) -> Iterator[None]:
    """Workers of clusters begin with torch imported."""
    with preloaded(WORKERS_IMPORT):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The tables that the tests have filled, and what held event loops."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    for line in shown(p for r in reports if r.when == "call" for p in r.user_properties):
        terminalreporter.write_line(line)
    if (records := os.environ.get(loop_watchdog.VARIABLE)) is not None:
        for line in loop_watchdog.report(Path(records)):
            terminalreporter.write_line(line)


def _left(directory: Path, pattern: str) -> set[Path]:
    return set(directory.glob(pattern)) if directory.is_dir() else set()


@functools.cache
def _cache() -> list[Path]:
    """The folders with the compiled loops of this machine."""
    directory = loop_cache.folder()
    return [] if directory is None else sorted({file.parent for file in directory.rglob("*.nbc")})


def _compiled() -> set[str]:
    """The loops that are compiled, each for certain types."""
    return {name for folder in _cache() for name in os.listdir(folder) if name.endswith(".nbc")}


def _processes() -> set[int]:
    """All processes of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _sockets() -> set[str]:
    """The sockets of this process, by what /proc calls them."""
    return {name for fd in os.listdir("/proc/self/fd") if (name := _socket(int(fd))).startswith("socket:")}


def _socket(fd: int) -> str:
    """What /proc calls the file behind a descriptor; empty when it is closed."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def _command(process: psutil.Process) -> str:
    """The command line of a process; empty when it is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _present(me: psutil.Process) -> dict[str, set[Any]]:
    """What a test could leave behind, by kind."""
    return {
        "segments in /dev/shm": _left(Path("/dev/shm"), "axon*"),
        "directories": _left(Path(tempfile.gettempdir()), f"axon-ps-{me.pid}-*"),
        "log handlers": set(logging.getLogger(ROOT).handlers),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process, listening port, shared-memory segment, directory or log handler of ours outlives a test.

    Nor does a test compile a loop: whoever trains would wait for that.

    Whose a process is, and what a socket is for, takes milliseconds to find out: of those that are new, only.
    """
    me = psutil.Process(os.getpid())
    before, processes, sockets, compiled = _present(me), _processes(), _sockets(), _compiled()
    yield
    new_loops = sorted(_compiled() - compiled)
    assert not new_loops, f"this test, or another of its time, compiled what axon_ps.shard.loops does not: {new_loops}"
    after = _present(me)
    for (what, old), new in zip(before.items(), after.values(), strict=True):
        assert not new - old, f"the test left {what} behind: {new - old}"
    if new_processes := _processes() - processes:
        left = [child for child in me.children(recursive=True) if child.pid in new_processes]
        assert not left, f"the test left processes behind: {left}: {[_command(child) for child in left]}"
    if left_open := _sockets() - sockets:
        listening = [
            c.laddr for c in me.net_connections("tcp") if c.status == psutil.CONN_LISTEN and _socket(c.fd) in left_open
        ]
        assert not listening, f"the test left listening ports behind: {listening}"
