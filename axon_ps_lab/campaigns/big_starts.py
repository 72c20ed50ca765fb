"""Starts of a large job on a busy machine, `make lab NAME=big-starts`: members that are lost before a step commits.

Work of a shard server on GiBs (allocating, hashing, mapping, freeing them) must not delay its heartbeats. Each
start is `axon-ps run` with a model of so many parameters in eight units, until two steps are committed; busy loops run
beside it. The table has, for each replication: starts, those that trained, leases that were lost, seconds to the first
commit, and the longest callback of an event loop (`axon_ps_lab.watchdog`).

    python -m axon_ps_lab.campaigns.big_starts [--parameters 537e6 1e9] [--replication 1 2] [--shards 2] [--starts 10]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from axon_ps.host.memory import available_bytes
from axon_ps_lab.watchdog import loop_watchdog

UNITS = 8
STEPS = 2
COMMITTED = "step committed"
LOST = re.compile(r"it is no member any more|gave up this \w+")
HEADER = (
    f"{'parameters':>10} {'copies':>6} {'starts':>6} {'trained':>7} {'lost':>4} {'first commit, s':>15}  longest hold"
)


@dataclass(frozen=True)
class Start:
    """The outcome of one start.

    Attributes:
        trained: whether all steps were committed, and everything ended well.
        lost: number of lines about a lost member.
        first_s: seconds from the command to the first commit; None without one.
        output: all that was printed.
    """

    trained: bool
    lost: int
    first_s: float | None
    output: list[str]


def train(parameters: int) -> None:
    """Train a model of `UNITS` linear layers, as a worker."""
    import torch
    from torch import nn

    import axon_ps
    from axon_ps.parallel import FSDP, SGD

    width = round((parameters / UNITS) ** 0.5)
    world = axon_ps.World.init()
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(UNITS)))
    model = FSDP(layers, world.default_group, unit_types={nn.Linear})
    optimizer = SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        model(torch.ones(1, width)).sum().backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
        print(f"{COMMITTED}: {step + 1}", flush=True)
    world.close()


def needed_bytes(parameters: int, copies: int) -> int:
    """Estimate the bytes of a start: values, sums, wire copies on servers; values, gradients, units in a worker."""
    return 4 * parameters * (3 * copies + 2) + 2 * 4 * parameters // UNITS + (2 << 30)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run so many processes that compute without a pause, for a `with` block."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def start(parameters: int, copies: int, shards: int, limit_s: float, records: Path) -> Start:
    """Start the job once, and wait for its end."""
    command = [sys.executable, "-P", "-m", "axon_ps.cli.main", "run", "--http-port", "0", "--max-restarts", "0"]
    command += ["--shards", str(shards), "--replication", str(copies), __file__, "--train", str(parameters)]
    watchdog = str(Path(loop_watchdog.__file__).parent)
    environment = {**os.environ, loop_watchdog.VARIABLE: str(records), "PYTHONPATH": watchdog}
    output: list[str] = []
    first_s, began_s = None, time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as job:
        assert job.stdout is not None
        try:
            with _limited(job, limit_s):
                for line in job.stdout:
                    output.append(line.rstrip())
                    if COMMITTED in line and first_s is None:
                        first_s = time.monotonic() - began_s
                code = job.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 9)
    lost = sum(bool(LOST.search(line)) for line in output)
    trained = code == 0 and sum(COMMITTED in line for line in output) == STEPS
    return Start(trained, lost, first_s, output)


@contextlib.contextmanager
def _limited(job: subprocess.Popen[str], limit_s: float) -> Iterator[None]:
    """Terminate a job that takes longer than `limit_s` (SIGTERM)."""
    timer = threading.Timer(limit_s, job.terminate)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def row(parameters: int, copies: int, starts: Sequence[Start], records: Path) -> str:
    """Return the line of the table."""
    firsts = [s.first_s for s in starts if s.first_s is not None]
    first = f"{min(firsts):.0f} to {max(firsts):.0f}" if firsts else "never"
    slow_callbacks = loop_watchdog.found(records)
    longest = (
        f"{slow_callbacks[0].held_s * 1e3:.0f} ms {slow_callbacks[0].where}" if slow_callbacks else "none of 50 ms"
    )
    counts = f"{len(starts):6} {sum(s.trained for s in starts):7} {sum(s.lost for s in starts):4}"
    return f"{parameters / 1e6:9.0f}M {copies:6} {counts} {first:>15}  {longest}"


def main() -> None:
    """Start, count and print; exits with 1 if a lease was lost or a start did not train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[537e6, 1e9])
    parser.add_argument("--replication", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--busy", type=int, default=3, help="busy loops beside it")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one start")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    print(HEADER, flush=True)
    failed = False
    for parameters in map(int, options.parameters):
        for copies in options.replication:
            if (needed := needed_bytes(parameters, copies)) > available_bytes():
                lacking = f"about {needed / 2**30:.0f} GiB are needed, {available_bytes() / 2**30:.0f} GiB are there"
                print(f"{parameters / 1e6:9.0f}M {copies:6} not tried: {lacking}", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder, busy_loops(options.busy):
                records, starts = Path(folder), []
                for _ in range(options.starts):
                    made = start(parameters, copies, options.shards, options.limit_s, records)
                    starts.append(made)
                    if made.lost or not made.trained:
                        failed = True
                        print(*made.output[-40:], sep="\n", flush=True)
                print(row(parameters, copies, starts, records), flush=True)
                print(*loop_watchdog.report(records), sep="\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
