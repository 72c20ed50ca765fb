from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axon_ps import kernels
from axon_ps.kernels import optimizer_loops, rounding
from axon_ps.kernels.compiled import locked, sources_hash

COMPILES = """
import sys
import numpy as np
from axon_ps.kernels import rounding
print("ready", flush=True)
sys.stdin.readline()
rounding.bf16_from_f32(np.uint32(0))
print(sum(rounding.bf16_from_f32.stats.cache_misses.values()), sum(rounding.bf16_from_f32.stats.cache_hits.values()))
"""


def test_a_loop_is_cached_under_a_name_that_changes_with_every_file(tmp_path: Path) -> None:
    package = Path(kernels.__file__).parent
    sources = {path.stem: path.read_text(encoding="utf-8") for path in package.glob("*.py")}
    loops: list[Any] = [rounding.convert, optimizer_loops.sgd]
    for loop in loops:
        assert loop.py_func.__qualname__.endswith(sources_hash(package))
        assert sources_hash(package) in loop._cache._impl.filename_base
    before = sources_hash(package)
    for changed in sources:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source + "#" * (name == changed), encoding="utf-8")
        assert sources_hash(tmp_path) != before


def test_of_processes_that_need_a_loop_at_once_one_compiles_it(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", COMPILES], env=environment, text=True, **pipes) for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in started) == ["0 1\n"] * 3 + ["1 0\n"]


def test_a_lock_is_not_kept_by_a_fork_nor_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache" / "loop.lock"
    reads, writes = os.pipe()
    with locked(path):
        if (fork := os.fork()) == 0:
            os.close(writes)
            os.read(reads, 1)  # until the parent has seen what it wants to see
            os._exit(0)
    os.close(reads)
    take = f"""
from pathlib import Path
from axon_ps.kernels import compiled
compiled.LOCK_WAIT_S = 0.1
compiled.time.sleep = lambda _: print("waits", flush=True)
with compiled.locked(Path({str(path)!r})):
    print("goes on")
"""
    try:
        assert subprocess.check_output([sys.executable, "-c", take], text=True) == "goes on\n"
        with locked(path):  # as one that is stopped would
            assert set(subprocess.check_output([sys.executable, "-c", take], text=True).split("\n")) == {
                "waits",
                "goes on",
                "",
            }
    finally:
        os.close(writes)
        os.waitpid(fork, 0)


def test_a_cache_that_cannot_be_written_or_locked_is_used_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / "loop.lock"):
        pass

    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path / "loop.lock"):
        pass
