"""The grid of faults: `make lab NAME=faults`, or `make lab NAME=faults ARGS='worker*sigkill*'` for a part of it.

Several cases run side by side, since most of their time is waiting. The outcome of each is appended to a file of
results; a run that was interrupted goes on where it was. A case in which workers were only late (or did not end, while
this process did not run for a third of a lease) is tried once more by itself, since the machine may have been busy.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from axon_ps.testing import preloaded
from axon_ps_lab.campaigns.case import PRELOADED, CaseOutcome, as_json, run
from axon_ps_lab.campaigns.grid import Case, all_cases, cannot_occur, pairwise, possible_cases

RESULTS = Path(__file__).resolve().parents[2] / "build" / "faults" / "results.jsonl"


def chosen(patterns: list[str], *, sample: bool) -> list[Case]:
    """Return the cases whose names match a pattern ("*" at its end is implied); all without one."""
    cases = pairwise(possible_cases()) if sample else possible_cases()
    wanted = [p if p.endswith("*") else f"{p}*" for p in patterns] or ["*"]
    return [c for c in cases if any(fnmatch.fnmatchcase(c.name, p) for p in wanted)]


def known(results: Path) -> dict[str, dict[str, Any]]:
    """Return the results of earlier runs, by case; the newest counts."""
    if not results.exists():
        return {}
    return {r["name"]: r for r in map(json.loads, results.read_text().splitlines())}


def write(results: Path, outcome: CaseOutcome) -> None:
    """Append an outcome; if it has problems, the output of all processes goes to a file beside it."""
    record = as_json(outcome)
    logs = record.pop("logs")
    with open(results, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    log = results.parent / "logs" / f"{outcome.name.replace('*', '.')}.log"
    log.unlink(missing_ok=True)
    if outcome.problems:
        log.parent.mkdir(exist_ok=True)
        log.write_text("\n".join(outcome.problems) + f"\n\n{logs}")


def play(cases: list[Case], jobs: int, results: Path) -> None:
    """Run cases side by side, then, one at a time, those that were only late."""
    late: list[Case] = []
    began = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        running = {pool.submit(run, case): case for case in cases}
        for number, future in enumerate(concurrent.futures.as_completed(running), 1):
            outcome = future.result()
            if outcome.suspect and jobs > 1:
                late.append(running[future])
            write(results, outcome)
            verdict = "; ".join(outcome.problems)[:150] or "well"
            minutes = (time.monotonic() - began) / 60
            print(
                f"{number}/{len(cases)} {minutes:.1f} min  {outcome.name}  {outcome.seconds} s  {verdict}", flush=True
            )
    finally:  # Ctrl-C: those under way are brought to their end, no other is begun
        pool.shutdown(cancel_futures=True)
    if late:
        print(f"{len(late)} were late, or this process was; again, one at a time", flush=True)
        play(late, 1, results)


def table(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines with the number of cases that are well, by target and fault, and the longest wait."""
    well: collections.Counter[tuple[str, str]] = collections.Counter()
    all_: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, record in records.items():
        target, fault, *_ = name.split("*")
        all_[target, fault] += 1
        well[target, fault] += not record["problems"]
    targets, faults = (list(dict.fromkeys(key[i] for key in all_)) for i in (0, 1))
    lines = ["".join(f"{text:>20}" for text in ("", *targets))]
    for fault in faults:
        counts = [f"{well[t, fault]}/{all_[t, fault]}" if all_[t, fault] else "-" for t in targets]
        lines.append("".join(f"{text:>20}" for text in (fault, *counts)))
    longest = max(
        (max(r["waited_s"].values(), default=0.0) for r in records.values() if not r["problems"]), default=0.0
    )
    return [*lines, f"longest wait after healing, of cases that are well: {longest:.2f} s"]


def main() -> int:
    """Run the cases asked for; returns 0 if all of them are well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="patterns of names, such as 'worker*sigkill*forward*'")
    parser.add_argument("--jobs", type=int, default=4 * (os.cpu_count() or 1), help="cases side by side")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="run again what an earlier run has done")
    parser.add_argument("--failed", action="store_true", help="of what an earlier run has done, run what failed again")
    parser.add_argument("--sample", action="store_true", help="only the pairwise sample")
    parser.add_argument("--list", action="store_true", help="print the cases, and why some cannot occur")
    options = parser.parse_args()
    cases = chosen(options.cells, sample=options.sample)
    if options.list:
        for case in all_cases():
            print(case.name, cannot_occur(case) or case.promise, sep="  ")
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = known(options.results)
    again = {n for n, r in done.items() if options.fresh or (options.failed and r["problems"])}
    todo = [c for c in cases if c.name not in done or c.name in again]
    print(f"{len(cases)} cases, {len(todo)} of them to run, {options.jobs} side by side", flush=True)
    began = time.monotonic()
    with preloaded(PRELOADED):
        play(todo, options.jobs, options.results)
    records = {c.name: r for c in cases if (r := known(options.results).get(c.name))}
    print("\n".join(table(records)))
    failed = [r for r in records.values() if r["problems"]]
    for record in failed:
        print(record["name"], "; ".join(record["problems"])[:300], sep="  ")
    print(f"{len(records) - len(failed)} of {len(records)} cases are well; {time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
