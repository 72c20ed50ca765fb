"""The watchdog of event loops names what holds one, and nothing that merely was not scheduled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from axon_ps_lab.watchdog import loop_watchdog

PRODUCT = Path(loop_watchdog.__file__).parents[2] / "axon_ps"
PROGRAM = """
    import asyncio, gc, threading, time

    def spins():  # until this thread has run for a fifth of a second, however long that takes
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass

    async def spinning():
        spins()

    async def blocked():
        threading.Event().wait(0.2)

    async def collects():
        kept = [[] for _ in range(3_000_000)]
        gc.collect()

    async def main():
        await asyncio.gather({tasks})

    {forks}
    asyncio.run(main())
"""


def watched(tmp_path: Path, tasks: str, *, file: Path, forks: str = "") -> list[loop_watchdog.SlowCallback]:
    """The findings in a process whose code is said to be that of `file`."""
    folder = tmp_path / "records"
    folder.mkdir()
    source = textwrap.dedent(PROGRAM).format(tasks=tasks, forks=forks)
    program = f"exec(compile({source!r}, {str(file)!r}, 'exec'))"
    environment = {
        **os.environ,
        loop_watchdog.VARIABLE: str(folder),
        "PYTHONPATH": str(Path(loop_watchdog.__file__).parent),
    }
    subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True, timeout=120)
    return loop_watchdog.found(folder)


def test_what_works_and_what_blocks_is_named(tmp_path: Path) -> None:
    found = watched(tmp_path, "spinning(), blocked()", file=PRODUCT / "room.py")
    names = {hold.where for hold in found}
    assert names == {"room.py spins <- room.py spinning", "room.py blocked"}
    by_name = {hold.where: hold for hold in found}
    assert by_name["room.py spins <- room.py spinning"].ran_s >= 0.15
    assert by_name["room.py blocked"].ran_s < by_name["room.py blocked"].held_s / 2
    lines = loop_watchdog.report(tmp_path / "records")
    assert "at 2 places" in lines[0]
    assert any("room.py spins <- room.py spinning" in line for line in lines)


def test_the_collector_of_garbage_is_named(tmp_path: Path) -> None:
    (hold,) = watched(tmp_path, "collects()", file=PRODUCT / "room.py")
    assert hold.where == "the collector of garbage"


def test_a_fork_is_watched_too(tmp_path: Path) -> None:
    forks = "import os; child = os.fork(); child and (os.waitpid(child, 0), os._exit(0))"
    (hold,) = watched(tmp_path, "spinning()", file=PRODUCT / "room.py", forks=forks)
    assert hold.where == "room.py spins <- room.py spinning"


def test_a_test_holds_its_own_loop_only(tmp_path: Path) -> None:
    assert not watched(tmp_path, "spinning()", file=Path(__file__))
    assert list((tmp_path / "records").iterdir()), "it is recorded, and does not count"


def test_time_without_a_processor_does_not_count(tmp_path: Path) -> None:
    """The kernel's figures are given: the thread was ready for all of the time, and ran for none."""
    watchdog, before, after = loop_watchdog.LoopWatchdog(tmp_path), (1.0, 5.0), (1.0, 5.4)
    watchdog.was_long(["f"], [], 0.42, before, after)
    assert not list(tmp_path.iterdir())
    watchdog.was_long(["f"], [], 0.48, before, after)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["held_s"] == 0.08


def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    record = {"held_s": 0.2, "ran_s": 0.1, "stack": [f"{PRODUCT}/a.py:1 f"], "ours": True, "test": "t"}
    (tmp_path / "1.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record)[:20], encoding="utf-8")
    (hold,) = loop_watchdog.found(tmp_path)
    assert (hold.where, hold.count) == ("a.py f", 1)
    assert loop_watchdog.report(tmp_path / "nothing") == ["event loops: none was held for 50 ms"]
