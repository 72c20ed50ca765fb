"""Cost of the fault hooks in a product without fault injection: nanoseconds a call, calls a step, part of a step.

The only hook in the product is `observe.moments.reached`, a comparison while no watcher is installed. Proxies, jumping
wall clocks and full disks belong to the processes that a campaign starts; the product does not have them.

    python benchmarks/fault_hooks.py [--steps 200]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import timeit
from collections import Counter
from pathlib import Path

from axon_ps.observe import moments
from axon_ps.observe.moments import Moment, reached
from axon_ps.testing import run_threads
from axon_ps_lab import report
from axon_ps_lab.chaos.campaign import Embedded
from axon_ps_lab.chaos.training import Recipe, undisturbed

PACKAGE = Path(__file__).resolve().parents[1] / "axon_ps"
CALLS, ROUNDS = 1_000_000, 7
WORKERS, SHARDS = 2, 3


def call_ns() -> float:
    """Return the nanoseconds of a call without a watcher, less those of the loop around it; the best of some."""
    names = {"reached": reached, "moment": Moment.PUSH}
    with_call = min(timeit.repeat("reached(moment, 7)", globals=names, number=CALLS, repeat=ROUNDS))
    without = min(timeit.repeat("pass", globals=names, number=CALLS, repeat=ROUNDS))
    return (with_call - without) / CALLS * 1e9


def step_s(steps: int) -> float:
    """Return the seconds of a step of a job in this process, without pauses: the difference of two runs."""
    recipe = dataclasses.replace(Recipe.of(Embedded()), pause_s=0.0)
    times = []
    for count in (steps // 4, steps):
        began = time.monotonic()
        run_threads(undisturbed, WORKERS, args=(recipe, count), shards=SHARDS)
        times.append(time.monotonic() - began)
    return (times[1] - times[0]) / (steps - steps // 4)


def calls(steps: int) -> Counter[str]:
    """Return how often each moment is reached in so many steps, in all members together."""
    found: Counter[str] = Counter()
    recipe = dataclasses.replace(Recipe.of(Embedded()), pause_s=0.0)
    moments.watch(lambda moment, _: found.update([moment.name]))
    try:
        run_threads(undisturbed, WORKERS, args=(recipe, steps), shards=SHARDS)
    finally:
        moments.watch(None)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    each_ns = statistics.median(call_ns() for _ in range(3))
    counted = calls(options.steps)
    a_step = step_s(options.steps)
    per_step = sum(counted.values()) / options.steps
    rows = [{"moment": name, "calls_per_step": round(count / options.steps, 2)} for name, count in counted.items()]
    report.table("Moments of a step, all members", ("moment", "calls_per_step"), [list(r.values()) for r in rows])
    facts = {
        "ns_per_call": round(each_ns, 1),
        "calls_per_step": round(per_step, 1),
        "step_ms": round(1000 * a_step, 2),
        "part_of_a_step": float(f"{each_ns * per_step / (a_step * 1e9):.2g}"),
        "places": sum(text.read_text(encoding="utf-8").count(" reached(") for text in PACKAGE.rglob("*.py")) - 1,
    }
    print(facts)
    report.write("fault_hooks", rows, workers=WORKERS, shards=SHARDS, steps=options.steps, **facts)


if __name__ == "__main__":
    main()
