"""Bits of servers' memory change while a job trains: `make lab NAME=flips`, and benchmarks/results/bit_flips.json.

One bit changes at a time, in values, moments or summed gradients of one of three servers. Each must be found by the
next commit, and the server, slice, array and range must be named. Then the job makes as many steps as wanted without a
flip, in which nothing must be found. The values must be those of a job in which nothing failed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from axon_ps_lab import report
from axon_ps_lab.campaigns.ended_job import SOON_S, EndedJob, Trained, assert_same_bits
from axon_ps_lab.chaos.observer import Observer
from axon_ps_lab.faults import bit_flips
from axon_ps_lab.faults.bit_flips import Flip, flip

SERVERS: Final = 3
ARRAYS: Final = (("param",), ("exp_avg",), ("exp_avg_sq",), ())
"""The arrays of a slice in which a bit is flipped, in turn; () = any, and a summed gradient if there is one."""
POLL_S: Final = 0.002
FOUND_S: Final = 20.0
"""Seconds that the report of a flip may take: a commit takes some ten milliseconds here."""

TEXT: Final = re.compile(
    r"memory of shard server (?P<rank>\d+) .*is corrupt: (?P<blocks>.*) of unit '(?P<unit>.*)', slice (?P<slice>\d+), "
    r"found at version (?P<version>\d+)"
)
BLOCK: Final = re.compile(r"(?P<array>\w+) from element (?P<begin>\d+) to (?P<end>\d+)")


def train(_: str, end: Path) -> Trained:
    """Train until the version in the file `end`, once there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    trained = Trained()
    with axon_ps.World.init(timeout_s=SOON_S) as world:
        layers = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        options = PlanOptions(chunk_numel=512, min_slice_numel=128)
        model = parallel.FSDP(layers, world.default_group, unit_types={nn.Linear}, plan_options=options)
        optimizer = parallel.AdamW(model, lr=0.01)
        last = 0
        while not last or world.version < last:
            seeded = torch.Generator().manual_seed(1000 * world.version + world.replica)
            model(torch.randn(16, 24, generator=seeded)).square().mean().backward()
            model.clip_grad_norm(0.5)
            result = optimizer.step()
            optimizer.zero_grad()
            if not result.committed:
                trained.aborted.append(result.reason)
            if not last and end.exists():
                last = int(end.read_text() or 0)
        trained.version = world.version
        trained.values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return trained


def reported(observer: Observer, number: int) -> str:
    """Return the text of the corruption of that number, once it is reported; empty when it is not."""
    deadline = time.monotonic() + FOUND_S
    while len(found := observer.corruptions) <= number and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found[number] if len(found) > number else ""


def wrong(flipped: Flip, rank: int, text: str) -> str:
    """Return the mistake in the report of a flip; empty = none."""
    if not text:
        return "not found"
    if (found := TEXT.search(text)) is None:
        return f"told as {text!r}"
    blocks = BLOCK.findall(found["blocks"])
    if len(blocks) != 1 or blocks[0][0] != flipped.array:
        return f"{flipped} was named as {found['blocks']}"
    if not int(blocks[0][1]) <= flipped.element < int(blocks[0][2]):
        return f"{flipped} was found in {found['blocks']}"
    if (int(found["rank"]), int(found["slice"])) != (rank, flipped.slice):
        return f"{flipped} of server {rank} was named as {text}"
    if int(found["version"]) > flipped.version + 1:
        return f"{flipped} was found at version {found['version']}"
    return ""


@contextlib.contextmanager
def job(directory: Path) -> Iterator[tuple[EndedJob, Observer]]:
    """Start two workers that train on three servers, whose bits may be flipped; yields the job and its observer."""
    plugin = bit_flips.__name__
    environment = {"AXON_PS_DIRECT_MEMORY": "0", bit_flips.DIRECTORY: str(directory)}
    with LocalCluster(
        shards=SERVERS, world_size=2, replication=2, plugins=[plugin], environment=environment
    ) as cluster:
        trained = EndedJob(cluster, train, "", directory / "end")
        with Observer(lambda: cluster.address, cluster.security, cluster.job) as observer:
            yield trained, observer


def ranks(cluster: LocalCluster) -> dict[int, int]:
    """Return the rank of each server, by its index."""
    members = {m.address: m.rank for m in cluster.status().membership.shards}
    return {index: members[cluster.address_of(Role.SHARD, index)] for index in range(SERVERS)}


def run(flips: int, steps: int, seed: int, directory: Path, *, prints: bool = False) -> dict[str, Any]:
    """Flip so many bits one after the other, then make so many steps without; see the module."""
    choice = random.Random(seed)
    arrays: Counter[str] = Counter()
    faults: list[str] = []
    took_s: list[float] = []
    missed = 0  # flips that were not reported
    with job(directory) as (trained, observer):
        rank_of = ranks(trained.cluster)
        for number in range(flips):
            flipped, index = None, 0
            while flipped is None:
                trained.settle(SERVERS)
                index = choice.randrange(SERVERS)
                process = trained.cluster.process(Role.SHARD, index)
                flipped = flip(directory, process.pid, choice.getrandbits(32), ARRAYS[number % len(ARRAYS)])
            began_s = time.monotonic()
            if problem := wrong(flipped, rank_of[index], reported(observer, number - missed)):
                faults.append(problem)
                missed = number + 1 - len(observer.corruptions)
            took_s.append(time.monotonic() - began_s)
            arrays[flipped.array] += 1
            if prints and number % 50 == 49:
                print(f"{number + 1} flips, {len(faults)} not as they must be", flush=True)
        trained.settle(SERVERS)
        known, first = len(observer.corruptions), trained.version
        while trained.version < first + steps:
            time.sleep(0.05)
        falsely = len(observer.corruptions) - known
        results = trained.finish()
        if len({r.version for r in results}) != 1:
            faults.append("the workers ended at different versions")
    assert_same_bits(results, train, "", directory, timeout_s=60.0 + results[0].version)
    return {
        "flips": flips,
        "by array": dict(arrays),
        "not found or not named rightly": len(faults),
        "which": faults[:10],
        "told after, ms, median": round(1e3 * sorted(took_s)[len(took_s) // 2], 1) if took_s else 0.0,
        "steps without a flip": steps,
        "found in them": falsely,
        "steps aborted": len(results[0].aborted),
        "values": "bit-equal to those of a job in which nothing failed",
    }


def main() -> int:
    """Run the campaign; returns 1 if a flip was not found or not named rightly, or something was found falsely."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000, help="without a flip, afterwards")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        row = run(options.flips, options.steps, options.seed, Path(directory), prints=True)
    for name, value in row.items():
        print(f"{name:32} {value}")
    print("wrote", report.write("bit_flips", [row], seed=options.seed))
    return 1 if row["not found or not named rightly"] or row["found in them"] else 0


if __name__ == "__main__":
    sys.exit(main())
