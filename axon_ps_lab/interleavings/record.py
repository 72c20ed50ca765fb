"""Simulates seeds on every core for some minutes, and writes a record: `python -m axon_ps_lab.interleavings.record`.

Failures are printed, and are in the record, `benchmarks/results/simulation.json`, too: a row for each run, with the
commit that was simulated. With `--add` the earlier rows stay. The record is written every few minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Final

from axon_ps_lab import report
from axon_ps_lab.interleavings.simulate import simulate

ROOT: Final = Path(__file__).resolve().parents[2]
AT_A_TIME: Final = 50

WRITE_S: Final = 120.0
"""Seconds between two writes of the record."""

_WHAT: Final = {
    "killed": re.compile(r"is killed$"),
    "cut": re.compile(r"^\S+ cut "),
    "flipped": re.compile(r": Flip\("),
    "disks lost": re.compile(r"loses its disk$"),
    "reset": re.compile(r"^\S+ reset "),
    "slowed": re.compile(r"^\S+ slow "),
    "decisions": re.compile(r": step \d+ "),
}
"""The events of a trace that are counted; a decision counts once for each worker that was told of it."""


def several(first: int) -> tuple[Counter[str], dict[int, str]]:
    """Simulate `AT_A_TIME` seeds; return the counts of events, and the error of each seed that failed."""
    logging.disable(logging.CRITICAL)
    counted: Counter[str] = Counter()
    failed: dict[int, str] = {}
    for seed in range(first, first + AT_A_TIME):
        try:
            trace = simulate(seed)
        except Exception as error:
            failed[seed], trace = repr(error), error.trace  # type: ignore[attr-defined]
        for line in trace:
            for name, pattern in _WHAT.items():
                counted[name] += pattern.search(line) is not None
        counted["seeds"] += 1
        counted["virtual_s"] += int(float(trace[-1].split()[0]))
    return counted, failed


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--add", action="store_true", help="to the rows that there are")
    options = parser.parse_args()
    end_s, written_s = time.monotonic() + 60 * options.minutes, time.monotonic()
    before = json.loads((report.RESULTS / "simulation.json").read_text())["rows"] if options.add else []
    total: Counter[str] = Counter()
    failed: dict[int, str] = {}
    firsts: Iterator[int] = itertools.count(options.first, AT_A_TIME)

    def row() -> dict[str, object]:
        failures = [f"seed {seed}: {why[:300]}" for seed, why in sorted(failed.items())]
        about = {"commit": commit, "python": platform.python_version(), "first": options.first}
        return {**about, **total, "failed": len(failed), "failures": failures}

    commit = _git("describe", "--always") or "unknown"
    if _git("status", "--porcelain", "--", "axon_ps", "axon_ps_lab"):
        commit += " and changes"
    with ProcessPoolExecutor() as pool:
        running: set[Future[tuple[Counter[str], dict[int, str]]]] = set()
        while running or time.monotonic() < end_s:
            while len(running) < (os.cpu_count() or 1) and time.monotonic() < end_s:
                running.add(pool.submit(several, next(firsts)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                counted, more = each.result()
                total.update(counted)
                failed.update(more)
                for seed, why in more.items():
                    print(f"seed {seed}: {why[:300]}", flush=True)
            if time.monotonic() - written_s > WRITE_S:
                written_s = time.monotonic()
                report.write("simulation", [*before, row()])
    rows = [*before, row()]
    columns = ["commit", "seeds", "failed", "virtual_s", *_WHAT]
    report.table("Simulation", columns, [[each[column] for column in columns] for each in rows])
    print(f"{sum(each['seeds'] for each in rows)} seeds in all; wrote", report.write("simulation", rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
