"""All loops are compiled once; `tests/conftest.py` holds that no test compiles another one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from axon_ps.cli.launch.perform import _Launcher, perform
from axon_ps.cli.launch.plan import Launch
from axon_ps.cli.settings import Settings
from axon_ps.host import loop_cache
from axon_ps.shard import loops
from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S

FINDS_ALL = """
import importlib, pkgutil
from axon_ps import kernels
from axon_ps.shard import loops
for compile_one in loops.compilations():
    compile_one()
modules = [importlib.import_module(f"axon_ps.kernels.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
found = {id(loop): loop for module in modules for loop in vars(module).values() if hasattr(loop, "stats")}
print({loop.__name__: misses for loop in found.values() if (misses := sum(loop.stats.cache_misses.values()))})
print(sum(sum(loop.stats.cache_hits.values()) for loop in found.values()) > 100)
"""

RECORDS = """
import os, sys
from pathlib import Path
from axon_ps.host import loop_cache
(Path(os.environ["NUMBA_CACHE_DIR"]) / "loop.abc.nbi").touch()
loop_cache.record(loop_cache.folder(), "abc")
"""


def test_every_loop_is_found_where_a_record_says_that_it_is() -> None:
    assert loop_cache.is_complete()  # `tests/conftest.py` has seen to it
    program = [sys.executable, "-c", FINDS_ALL]
    done = subprocess.run(program, capture_output=True, text=True, timeout=WHOLE_S, check=True)
    assert done.stdout.split("\n")[:2] == ["{}", "True"]


class Stop(Exception):
    """Ends a start."""


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop is compiled, and a program that only says it were takes the place of the one that compiles."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loops, "COMMAND", (sys.executable, "-c", RECORDS))


@pytest.mark.usefixtures("nothing_compiled")
def test_what_is_missing_is_compiled_once() -> None:
    said: list[str] = []
    loops.compile_missing(said.append)
    assert loop_cache.is_complete()
    loops.compile_missing(said.append)
    assert said == [loops.NOTICE]


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiler_that_fails_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    loops.compile_missing(lambda _: None)
    assert not loop_cache.is_complete()


@pytest.mark.usefixtures("nothing_compiled")
def test_a_cluster_compiles_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(cluster: LocalCluster, index: int, port: int) -> None:
        assert loop_cache.is_complete()
        raise Stop

    monkeypatch.setattr(LocalCluster, "_spawn_coordinator", start)
    with pytest.raises(Stop), LocalCluster():
        pass


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("shards", [1, 0])
def test_a_launch_compiles_before_it_starts_servers(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(launcher: object, *_: object) -> None:
        assert loop_cache.is_complete() == bool(shards)  # workers alone compile what they call
        raise Stop

    monkeypatch.setattr(_Launcher, "_start_shard", start)
    monkeypatch.setattr(_Launcher, "_print_how_to_watch", start)
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        at = f"127.0.0.1:{coordinator.getsockname()[1]}"
        launch = Launch(
            program=("none.py",), nproc_per_node=1, nnodes=1, node_rank=0, shards=shards, min_workers=None,
            step_timeout_s=None, max_restarts=0, standby=0, master_addr="127.0.0.1", master_port=0, coordinator_port=0,
            host="127.0.0.1", advertise="", state="memory", resume="", checkpoint_dir="", checkpoint_every="",
            checkpoint_limit=3, proxy=False, replication=0, connect_timeout_s=30.0, token="", tls=False,
        )  # fmt: skip
        with pytest.raises(Stop):
            asyncio.run(perform(launch, Settings(coordinator=at)))
