"""`make lab NAME=cases`: people's own scripts in every wrapper, mapped and as between hosts, at 1, 2 and 3 workers.

    make lab NAME=cases ARGS="schedulers 'accumulation'"
    make lab NAME=cases ARGS="--only FULL_SHARD --sample 1"

A table says what works, what is refused (and which page says so), and what has to be mended.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "integration"), str(ROOT / "tests"), str(ROOT)]

from axon_ps.testing import preloaded  # noqa: E402
from case_table import Case, Configuration, Outcome, configurations, load_all, run_case, sample  # noqa: E402
from shared_workers import SharedWorkers  # noqa: E402

PRELOADED = ("torch", "torch._dynamo", "axon_ps.parallel", "axon_ps.worker.world")
TIMEOUT_S = 60.0

Row = tuple[Case, Configuration, Outcome]


def chosen(words: Sequence[str], wrappers: Sequence[str], every: int) -> list[tuple[Case, Configuration]]:
    """The cases whose names have one of the words, each in all configurations, or every such case in one."""
    cases = [c for c in load_all().values() if not words or any(word in c.name for word in words)]
    pairs = sample(cases, every) if every else [(c, how) for c in cases for how in configurations(c)]
    return [(c, how) for c, how in pairs if not wrappers or how.wrapper in wrappers]


def table(rows: Sequence[Row]) -> str:
    """A line a case and outcome, with the configurations that have it."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for case, how, outcome in rows:
        text = outcome.text.partition("\n")[0]
        found[case.name, outcome.what, "" if outcome.what == "works" else text[:110]].append(str(how))
    lines = []
    for (name, what, text), where in found.items():
        places = ", ".join(where) if len(where) < 6 else f"{len(where)} configurations"
        lines.append(f"{name} | {what} | {places} | {text}")
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases")
    parser.add_argument("--only", nargs="+", default=(), help="wrappers")
    parser.add_argument("--sample", type=int, default=0, help="every such case, in one configuration; 3 in `make test`")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many, having taken cases at random")
    options = parser.parse_args()
    began, rows, wrong = time.monotonic(), list[Row](), 0
    pairs = chosen(options.words, options.only, options.sample)
    if options.minutes:
        random.Random(0).shuffle(pairs)
    with (
        preloaded(PRELOADED),
        tempfile.TemporaryDirectory() as logs,
        SharedWorkers(3, Path(logs), timeout_s=TIMEOUT_S) as shared,
    ):
        for case, how in pairs:
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                break
            rows.append((case, how, outcome := run_case(case, how, shared)))
            wrong += not outcome.is_right
            print(f"{case.name} | {how} | {outcome.what} | {outcome.text[:500]}", flush=True)
    print("\ncase | outcome | where | what was said, or the page that says so")
    print(table(rows))
    counts = Counter(outcome.what for _, _, outcome in rows)
    print(f"{len(rows)} of {len(pairs)} in {time.monotonic() - began:.0f} s: {dict(counts)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
