"""The part of a step's communication that is hidden behind compute, by a trace, at 500 Mbit/s a card.

There are four worker hosts and four server hosts (network namespaces), with the model of whole_step.py. A worker's
compute is mostly an emulated accelerator that uses no processor, like a GPU. All eight hosts share this machine's
cores, which stay free for the work of a worker's own processor: its communication. If permitted, the training thread
has priority over all communication: on a host of its own it would not wait for a core behind seven others. *Alone* is
the step of the same model without communication, four workers at a time. The trace (see step_trace.py) is that of rank
0.

A first run without the accelerator measures a step's communication:

    T    its bytes at the card's rate, in and out one after the other, as without overlap of transfers
    C    the time in which a transfer is under way; less than T, since transfers go both ways at once

The acceptance: with compute >= T, a step takes <= 1.15 x compute alone.

With compute = C a step cannot be that short. Under SHARD_GRAD_OP both directions are full during backward, two thirds
of compute; under FULL_SHARD a forward's gathers take longer than its compute, a third, and two units may be held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import whole_step
from axon_ps_lab import report
from netns import CONGESTION, Network

TEAM = whole_step.Team.of(4)
HEADERS = 1514 / 1448
"""Bytes on the wire over bytes of a TCP stream: a card's counters see large segments, with one header each."""

WORKER = [sys.executable, str(Path(__file__).with_name("step_worker.py"))]


def alone_s(options: argparse.Namespace, dtype: str) -> float:
    """Return the seconds of forward and backward without communication: the slowest of four workers at a time."""
    command = [*WORKER, "compute", *whole_step.shape(options), "--dtype", dtype]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(TEAM.size)]
    return max(float(json.loads(worker.communicate()[0])["compute_s"]) for worker in workers)


def traced(place: Network, options: argparse.Namespace, dtype: str, strategy: str) -> dict[str, float]:
    """Run once; returns the figures of rank 0's trace."""
    directory = Path(options.traces)
    directory.mkdir(parents=True, exist_ok=True)
    trace = directory / f"{strategy}-{dtype}-{options.device_s:.1f}s.json"
    arguments = ["--dtype", dtype, "--strategy", strategy, "--trace", str(trace)]
    into = whole_step.Figures()
    command = [*WORKER, "axon", *whole_step.shape(options), *arguments]
    whole_step.one_run(place, TEAM, command, options.steps, into, replication=1)
    card_s = sum(into.worker_mib) * whole_step.MIB * HEADERS / (options.rate_mbit * 1e6 / 8)
    return into.trace | {"median_s": into.median_s, "card_s": card_s}


def bench(place: Network, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all settings."""
    rows: list[dict[str, Any]] = []
    for dtype, strategy in itertools.product(options.dtypes, options.strategies):
        options.device_s = 0.0
        bare = traced(place, options, dtype, strategy)
        units = {"C": bare["communication_s"], "T": bare["card_s"]}
        for times, unit in options.compute:
            options.device_s = times * units[unit]
            alone, found = alone_s(options, dtype), traced(place, options, dtype, strategy)
            row = {"strategy": strategy, "dtype": dtype, "accelerator": f"{times:g} x {unit}"}
            row |= {"C_s": units["C"], "T_s": units["T"]}
            row |= {"alone_s": alone, "step_s": found["median_s"], "ratio": found["median_s"] / alone}
            row |= {name: found.get(name, 0.0) for name in NAMES}
            rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def times_of(text: str) -> tuple[float, str]:
    """Parse --compute: a number and C or T."""
    if text[-1:] not in ("C", "T"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number followed by C or T, such as 1.5T")
    return float(text[:-1]), text[-1]


NAMES = ("communication_s", "hidden", "blocked_gather_s", "blocked_push_s", "blocked_decision_s")
COLUMNS = ("strategy", "dtype", "accelerator", "C_s", "T_s", "alone_s", "step_s", "ratio", *NAMES)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--strategies", nargs="+", default=["full_shard", "shard_grad_op"])
    compute = [(1.0, "C"), (1.0, "T"), (1.5, "T")]
    parser.add_argument("--compute", nargs="+", type=times_of, default=compute, help="accelerator's time: 1C, 1.5T")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--traces", default="/tmp/axon-ps-traces", help="a directory for the traces, Chrome's format")
    parser.add_argument("--quick", action="store_true", help="one setting, few steps, writes no file")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.strategies, options.compute = ["bfloat16"], ["full_shard"], [(1.0, "T")]
        options.steps = 2
    with Network([*TEAM.hosts, *whole_step.server_hosts()], rate_mbit=options.rate_mbit) as place:
        rows = bench(place, options)
    report.table(f"Overlap at {options.rate_mbit:g} Mbit/s", COLUMNS, [[r[c] for c in COLUMNS] for r in rows])
    if options.quick:
        return
    settings = {k: v for k, v in vars(options).items() if k not in ("device_s", "quick")}
    report.write("overlap", rows, settings=settings, congestion=CONGESTION)


if __name__ == "__main__":
    main()
