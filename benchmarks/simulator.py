"""Step times of `axon-ps simulate` against steps that are measured here.

Every configuration runs as in whole_step.py, on hosts made of network namespaces. The accelerator is emulated, so that
this machine's cores are free for the other work of workers and servers. Configurations over a long line run as in
distance.py. The simulator gets a user's description: model, strategy, hosts, rates, and the time of forward and
backward alone (measured with as many workers at a time). The costs of axon_ps come from `axon-ps doctor --measure`, run
first.

Its two constants (`RECEIVED`, `FAR`) were fitted to every second configuration; these rows are marked, and the others
are held out. "error" is the simulated time over the measured one, less 1.

    python benchmarks/simulator.py [--profile FILE] [--only WORDS]

It needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overlap
import whole_step
from axon_ps_lab import report
from axon_ps_lab.simulate.profile import Profile
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.step import play
from distance_link import MTU, Distance
from netns import Network

CORES = len(os.sched_getaffinity(0))
ROOT_NUMEL_BY_WIDTH = 64  # the classifier of step_worker.py
RTT_MS = 0.15
"""Round trip between two namespaces of this machine, in milliseconds."""


@dataclass(frozen=True)
class Case:
    """One configuration; its step is measured and simulated."""

    strategy: str
    dtype: str
    device_s: float
    rate_mbit: float = 500.0
    workers: int = 4
    servers: int | None = 4  # None: one on each worker's host
    wire: str = ""
    kept: bool = False
    clip: bool = False
    replication: int = 1
    width: int = 1024
    blocks: int = 8
    rtt_ms: float = 0.0  # above 0: over one long line

    def __str__(self) -> str:
        servers = "own" if self.servers is None else self.servers
        words = [self.strategy, self.wire or self.dtype, f"{self.workers}w {servers}s", f"{self.rate_mbit:g} Mbit/s"]
        words += ["kept"] * self.kept + ["clipped"] * self.clip + [f"x{self.replication}"] * (self.replication > 1)
        words += [f"{self.blocks} x {self.width}"] if (self.width, self.blocks) != (1024, 8) else []
        words += [f"{self.rtt_ms:g} ms"] if self.rtt_ms else []
        return ", ".join([*words, f"{self.device_s:g} s"])

    def scenario(self, compute_s: float) -> Scenario:
        """Return the scenario that a user would write."""
        return Scenario.of(
            {
                "model": {
                    "blocks": self.blocks,
                    "block_numel": 2 * self.width**2 + 2 * self.width,
                    "root_numel": ROOT_NUMEL_BY_WIDTH * self.width,
                },
                "job": {
                    "strategy": self.strategy,
                    "compute": self.dtype,
                    "wire": self.wire or self.dtype,
                    "offload_params": self.kept,
                    "clip": self.clip,
                    "replication": self.replication,
                },
                "workers": [
                    {"count": self.workers, "device": "emulated", "compute_s": compute_s, "rate_mbit": self.rate_mbit}
                ],
                "servers": {"count": self.servers or 0, "rate_mbit": self.rate_mbit},
                "network": {
                    "rtt_ms": self.rtt_ms or RTT_MS,
                    "mtu": MTU if self.rtt_ms else 1500,
                    "shared_cores": CORES,
                },
            }
        )


FULL, GRAD = "full_shard", "shard_grad_op"
F32, BF16 = "float32", "bfloat16"
CASES = (
    Case(FULL, F32, 1.0),
    Case(FULL, F32, 2.5),
    Case(FULL, BF16, 0.6),
    Case(FULL, BF16, 1.5),
    Case(GRAD, F32, 1.0),
    Case(GRAD, F32, 2.0),
    Case(GRAD, BF16, 0.5),
    Case(GRAD, BF16, 1.2),
    Case(FULL, BF16, 1.5, rate_mbit=250),
    Case(GRAD, BF16, 1.5, rate_mbit=250),
    Case(FULL, F32, 1.5, rate_mbit=1000),
    Case(GRAD, F32, 1.2, rate_mbit=1000),
    Case(GRAD, BF16, 1.0, servers=2),
    Case(FULL, BF16, 1.5, servers=1),
    Case(FULL, F32, 1.0, workers=2),
    Case(GRAD, F32, 1.0, workers=2, servers=1),
    Case(FULL, BF16, 1.0, servers=None),
    Case(GRAD, BF16, 1.0, servers=None),
    Case(FULL, BF16, 1.0, servers=None, kept=True),
    Case(FULL, BF16, 0.8, wire="int8", rate_mbit=250),
    Case(GRAD, BF16, 0.8, wire="int8", rate_mbit=250),
    Case(FULL, BF16, 0.8, wire="int4", rate_mbit=100),
    Case(GRAD, F32, 1.0, clip=True),
    Case(FULL, BF16, 1.0, clip=True),
    Case(FULL, F32, 1.5, replication=2),
    Case(GRAD, BF16, 1.0, width=512, blocks=16),
    Case(FULL, BF16, 1.5, width=1536, blocks=4),
    Case(FULL, F32, 0.8, workers=1, servers=1, rtt_ms=10),
    Case(GRAD, F32, 0.8, workers=1, servers=1, rtt_ms=10),
    Case(FULL, F32, 0.8, workers=1, servers=1, rtt_ms=50),
    Case(GRAD, F32, 0.8, workers=1, servers=1, rtt_ms=50),
    Case(FULL, BF16, 0.8, workers=1, servers=1, rtt_ms=20),
    Case(GRAD, BF16, 0.4, workers=1, servers=1, rtt_ms=20),
)


def measured(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Measure the seconds of forward and backward alone, and of a step."""
    shape = argparse.Namespace(
        **vars(case)
        | {"clip": float(case.clip), "tokens": 16, "steps": options.steps, "warmup": 10 if case.rtt_ms else 3}
    )
    compute_s = alone_s(case, shape)
    command = [*overlap.WORKER, "axon", *whole_step.shape(shape), "--dtype", case.dtype, "--strategy", case.strategy]
    command += (["--wire", case.wire] if case.wire else []) + (["--offload", "params"] if case.kept else [])
    into = whole_step.Figures()
    with contextlib.ExitStack() as stack:
        if case.rtt_ms:
            place: Network = Distance(("worker0", "server0"), rate_mbit=case.rate_mbit, rtt_ms=case.rtt_ms)
        else:
            team = whole_step.Team.of(case.workers, servers=case.servers)
            place = Network(team.all_hosts, rate_mbit=case.rate_mbit)
        team = whole_step.Team.of(case.workers, servers=case.servers)
        stack.enter_context(place)
        whole_step.one_run(place, team, command, options.steps, into, replication=case.replication)
    return {"alone_s": compute_s, "measured_s": into.median_s, "measured_cpu_s": into.cpu_s[0]}


def alone_s(case: Case, shape: argparse.Namespace) -> float:
    """Return the seconds of forward and backward without communication: the slowest of so many workers at a time."""
    command = [*overlap.WORKER, "compute", *whole_step.shape(shape), "--dtype", case.dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(case.workers)]
    return max(float(json.loads(worker.communicate()[0])["compute_s"]) for worker in workers)


def rows(options: argparse.Namespace, profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield a row for every configuration: measured and simulated times."""
    for number, case in enumerate(CASES):
        if options.only not in str(case):
            continue
        found = measured(case, options)
        step = play(case.scenario(found["alone_s"]), profile)
        row = {
            "case": str(case),
            "fitted": not number % 2,
            **found,
            "simulated_s": step.step_s,
            "error": step.step_s / found["measured_s"] - 1,
        }
        print(row, file=sys.stderr, flush=True)
        yield {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def renewed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record, with those found now in place of the old ones."""
    record = json.loads((report.RESULTS / "simulator.json").read_text(encoding="utf-8"))["rows"]
    anew = {row["case"]: row for row in found}
    return [anew.get(row["case"], row) for row in record]


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="from doctor --measure; default: measured first")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="configurations whose name has this; those of the record stay")
    parser.add_argument("--quick", action="store_true", help="one configuration, few steps, writes no file")
    options = parser.parse_args()
    if options.quick:
        options.only, options.steps = str(CASES[3]), 2
    with tempfile.TemporaryDirectory() as folder:
        path = options.profile
        if path is None:
            path = Path(folder) / "profile.json"
            command = [sys.executable, "-P", "-m", "axon_ps.cli.main", "doctor", "--measure", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        profile = Profile.read(path)
    found = list(rows(options, profile))
    if options.only and not options.quick:
        found = renewed(found)
    columns = ("case", "fitted", "alone_s", "measured_s", "simulated_s", "error")
    report.table("The simulator against measured steps", columns, [[row[c] for c in columns] for row in found])
    for what, those in (("all", found), ("held out", [row for row in found if not row["fitted"]])):
        if errors := [abs(row["error"]) for row in those]:
            print(f"{what}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, of {len(errors)}")
    if not options.quick:
        print(report.write("simulator", found, profile=profile.as_dict(), steps=options.steps))


if __name__ == "__main__":
    main()
