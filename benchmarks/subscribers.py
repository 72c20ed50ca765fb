"""Subscribers of a running job: a check that no pulled version is torn, and their cost to the trainers.

*torn*: every step adds 1 to each parameter, so every element shows its version. Four subscribers (f32 and bf16, with
and without `changes`) pull the newest version as fast as they can and check all of it, while shard servers are killed
at random (SIGKILL) and restarted.

*steps*: two workers train an MLP of 2M parameters on two shard servers. Four subscribers, at a lower priority (nice
10), each pull a version per `RATE_S`, in phases that alternate with phases without. The ratio is that of median steps.

*changes*: the bytes sent for consecutive versions in bf16 are measured, complete and as changes, by AdamW's learning
rate.

    python benchmarks/subscribers.py [--pulls 10000] [--pairs 10] [--quick] [--only torn|steps|changes] [--seed 0]

Pulls are made in rounds, each with its own cluster and seed; rounds of other seeds stay in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import axon_ps
import steady_job
from axon_ps import parallel
from axon_ps.compress import cast
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.testing import LocalCluster
from axon_ps.types import Role, parse_dtype
from axon_ps.wire.v1 import common_pb2, shard_pb2
from axon_ps_lab import report

SUBSCRIBERS = (("f32", False), ("f32", True), ("bf16", False), ("bf16", True))
ROUND = 1000
"""Pulls in one cluster's life; a round is repeated by its seed."""

RATE_S = 1.0
PHASE_S = 3.0
CHANGES, RATES = 20, (1e-3, 1e-4, 1e-5, 1e-6)
"""Number of versions pulled, and learning rates of AdamW."""

WIDTH, BLOCKS = 256, 4
ROWS, COLUMNS, UNITS = 256, 256, 4
FROZEN = 7.0


class Rows(nn.Module):
    """A unit of equal values."""

    def __init__(self, value: float, *, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ROWS, COLUMNS), value), requires_grad=trainable)

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


class Versioned(nn.Module):
    """A model whose trainable parameters equal its version."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([*(Rows(0.0) for _ in range(UNITS)), Rows(FROZEN, trainable=False)])

    def forward(self) -> torch.Tensor:
        return sum((unit() for unit in self.units), torch.zeros(()))


class Block(nn.Sequential):
    """One unit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train_versions(directory: Path) -> dict[str, Any]:
    """Run one worker, whose steps each add 1, until the file `stop` exists."""
    torch.set_num_threads(1)
    aborted = 0
    with axon_ps.World.init(timeout_s=120.0) as world:
        model = parallel.FSDP(Versioned(), world.default_group, unit_types={Rows})
        optimizer = parallel.SGD(model, lr=1.0)
        longest_s, before = 0.0, time.monotonic()
        while not (directory / steady_job.STOP).exists():
            (-model()).backward()
            if optimizer.step().committed:
                longest_s, before = max(longest_s, time.monotonic() - before), time.monotonic()
            else:
                aborted += 1
            optimizer.zero_grad()
        return {"version": world.version, "aborted": aborted, "longest_s": longest_s}


def train_slowly(directory: Path, lr: float) -> None:
    """Run one worker of a job whose versions are compared: AdamW, in bf16 on the wire."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=120.0) as world:
        torch.manual_seed(0)
        precision = parallel.MixedPrecision(param_dtype=torch.bfloat16)
        blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        model = parallel.FSDP(blocks, world.default_group, unit_types={Block}, mixed_precision=precision)
        optimizer = parallel.AdamW(model, lr=lr)
        while not (directory / steady_job.STOP).exists():
            model(torch.randn(16, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def train_steps(directory: Path) -> dict[str, Any]:
    """Run one worker of the job whose steps are timed."""
    return steady_job.train(directory, lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))), Block, (64, WIDTH))


# ---------------------------------------------------------------------- subscribers


def is_torn(version: int, parameters: Any, dtype: str) -> bool:
    """Return True if an element does not have the value of the version."""
    for name, values in parameters.items():
        wanted = np.array([FROZEN if name.startswith(f"units.{UNITS}") else version], np.float32)
        if not (values == cast.encoded(wanted, parse_dtype(dtype))[0]).all():
            return True
    return False


def pull_versions(options: dict[str, Any]) -> dict[str, Any]:
    """Pull so many versions as fast as possible, and check each."""
    torn, last = 0, -1
    times: list[float] = []
    with subscription(options) as subscribed:
        while len(times) < options["pulls"]:
            began = time.monotonic()
            version, parameters = next(subscribed)
            times.append(time.monotonic() - began)
            torn += is_torn(version, parameters, options["dtype"]) or version <= last
            last = version
        return {"torn": torn, "times": times, **subscribed.statistics()}


def pull_when_told(options: dict[str, Any]) -> dict[str, Any]:
    """Pull a version per `RATE_S` while the file `pull` exists, until `stop` exists."""
    directory, pulls = Path(options["directory"]), 0
    with subscription(options) as subscribed:
        subscribed.latest()
        while not (directory / steady_job.STOP).exists():
            began = time.monotonic()
            if (directory / "pull").exists():
                subscribed.latest()
                pulls += 1
            time.sleep(max(0.01, began + RATE_S - time.monotonic()) if (directory / "pull").exists() else 0.05)
        return {"pulled": pulls, **subscribed.statistics()}


def subscription(options: dict[str, Any]) -> axon_ps.Subscription:
    """Make a subscription with an observer's token."""
    return axon_ps.subscribe(
        coordinator=options["coordinator"],
        job=options["job"],
        security=Security(token=options["token"]),
        dtype=options["dtype"],
        changes=options["changes"],
        timeout_s=120.0,
    )


@contextmanager
def subscribers(cluster: LocalCluster, directory: Path, what: str, pulls: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the four subscribers, as processes of a lower priority."""
    processes = []
    for dtype, changes in SUBSCRIBERS:
        options = {
            "what": what,
            "coordinator": cluster.address,
            "job": cluster.job,
            "token": cluster.observer_token,
            "dtype": dtype,
            "changes": changes,
            "pulls": pulls,
            "directory": str(directory),
        }
        command = ["nice", "-n", "10", sys.executable, __file__, "--subscriber", json.dumps(options)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def results_of(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Return the results that the processes printed.

    Raises:
        RuntimeError: a process failed.
    """
    found = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a subscriber failed; see above")
    return [json.loads(text.splitlines()[-1]) for text in found]


# ---------------------------------------------------------------------- measurements


def settled(cluster: LocalCluster, servers: int) -> bool:
    """Return True if all servers are members and every slice has its copies."""
    status = cluster.status()
    return len(status.membership.shards) == servers and status.version > 0 and not any(m.lacking for m in status.models)


def until(true: Any) -> None:
    """Wait for a condition on other processes."""
    deadline = time.monotonic() + 90.0
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError("the job did not come to rest in time")
        time.sleep(0.05)


def measure_torn(pulls: int, seed: int) -> dict[str, Any]:
    """Kill servers at random while four subscribers pull; returns the results of all."""
    directory, order, kills, servers = Path(tempfile.mkdtemp()), random.Random(seed), 0, 3
    with LocalCluster(shards=servers, world_size=1, replication=2, lease_s=1.0) as cluster:
        workers = cluster.start_workers(train_versions, args=(directory,))
        until(lambda: settled(cluster, servers))
        began = time.monotonic()
        with subscribers(cluster, directory, "versions", pulls // len(SUBSCRIBERS)) as processes:
            while any(process.poll() is None for process in processes):
                time.sleep(order.uniform(0.2, 2.0))
                until(lambda: settled(cluster, servers))
                index = order.randrange(servers)
                cluster.kill(Role.SHARD, index, signal.SIGKILL)
                cluster.restart(Role.SHARD, index)
                kills += 1
            found = results_of(processes)
        took_s = time.monotonic() - began
        until(lambda: settled(cluster, servers))
        (directory / steady_job.STOP).touch()
        (worker,) = [worker.result() for worker in workers]
    if worker.error:
        raise RuntimeError(worker.error)
    times = sorted(t for one in found for t in one["times"])
    return {
        "pulls": len(times),
        "torn": sum(one["torn"] for one in found),
        "kills": kills,
        "versions": worker.value["version"],
        "steps_not_committed": worker.value["aborted"],
        "longest_without_commit_s": round(worker.value["longest_s"], 2),
        "took_s": round(took_s, 1),
        "pull_median_ms": round(1e3 * statistics.median(times), 1),
        "pull_p99_ms": round(1e3 * times[int(0.99 * len(times))], 1),
        "pull_worst_ms": round(1e3 * times[-1], 1),
        "attempts_repeated": int(sum(one["retries"] for one in found)),
        "versions_given_up": int(sum(one["versions_given_up"] for one in found)),
    }


def measure_steps(pairs: int) -> dict[str, Any]:
    """Measure median steps with and without subscribers, by phase, and the servers' encodings for them."""
    directory = Path(tempfile.mkdtemp())
    phases: list[tuple[bool, float, float]] = []
    with LocalCluster(shards=2, world_size=2) as cluster:
        workers = cluster.start_workers(train_steps, args=(directory,))
        until(lambda: cluster.status().version > 20)
        with subscribers(cluster, directory, "when_told", 0) as processes:
            time.sleep(5.0)
            for number in range(2 * pairs):
                pulling = number % 2 == (number // 2) % 2  # a b b a: a drift affects both kinds equally
                if pulling:
                    (directory / "pull").touch()
                else:
                    (directory / "pull").unlink(missing_ok=True)
                time.sleep(0.5)
                phases.append((pulling, time.monotonic(), time.monotonic() + PHASE_S))
                time.sleep(PHASE_S)
            (directory / "pull").touch()
            servers = statistics_of(cluster)
            results = steady_job.finish(cluster, workers, directory)
            found = results_of(processes)
    commits = results[0]["commits"]
    medians = [(pulling, phase_median(commits, begin, end)) for pulling, begin, end in phases]
    with_s, without_s = ([step for p, step in medians if p is pulling] for pulling in (True, False))
    ratios = [a / b for a, b in zip(with_s, without_s, strict=True)]
    return {
        "step_ms_without": round(1e3 * statistics.median(without_s), 2),
        "step_ms_with": round(1e3 * statistics.median(with_s), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "pulls": sum(one["pulled"] for one in found),
        "mean_ratio": round(mean_step(commits, phases, True) / mean_step(commits, phases, False), 4),
        "published": int(sum(s["published"] for s in servers)),
        "published_pulls": int(sum(s["published_pulls"] for s in servers)),
        "published_encodings": int(sum(s["published_encodings"] for s in servers)),
    }


def measure_changes(lr: float) -> dict[str, Any]:
    """Measure bytes and time of a pull, complete and as changes, one version after the other."""
    directory = Path(tempfile.mkdtemp())
    row: dict[str, Any] = {"what": "changes", "lr": lr}
    with LocalCluster(shards=2, world_size=1) as cluster:
        workers = cluster.start_workers(train_slowly, args=(directory, lr))
        until(lambda: cluster.status().version > 20)
        common = {"coordinator": cluster.address, "job": cluster.job, "token": cluster.observer_token, "dtype": "bf16"}
        for changes in (False, True):
            times: list[float] = []
            with subscription({**common, "changes": changes}) as subscribed:
                subscribed.latest()
                before = subscribed.statistics()["bytes_in"]
                for _ in range(CHANGES):
                    time.sleep(0.05)
                    began = time.monotonic()
                    next(subscribed)
                    times.append(time.monotonic() - began)
                each = (subscribed.statistics()["bytes_in"] - before) / CHANGES
            how = "changes" if changes else "whole"
            row |= {f"{how}_mb": round(each / 1e6, 3), f"{how}_ms": round(1e3 * statistics.median(times), 1)}
        (directory / steady_job.STOP).touch()
        if errors := [error for worker in workers if (error := worker.result().error)]:
            raise RuntimeError(errors[0])
    return row | {"ratio": round(row["changes_mb"] / row["whole_mb"], 3)}


def statistics_of(cluster: LocalCluster) -> list[dict[str, float]]:
    """Return the counters of every shard server, with the observer's token."""

    async def ask(address: str) -> dict[str, float]:
        channel = connect(address, Security())
        try:
            request = shard_pb2.StatsRequest(context=common_pb2.CallContext(job=cluster.job))
            stub = Stub(channel, shard_pb2.DESCRIPTOR.services_by_name["Shard"], Security(token=cluster.observer_token))
            return dict((await stub.call("Stats", request, timeout_s=10.0)).values)
        finally:
            await channel.close()

    return [asyncio.run(ask(shard.address)) for shard in cluster.status().membership.shards]


def phase_median(commits: Sequence[float], begin: float, end: float) -> float:
    """Return the median step in a phase."""
    inside = [t for t in commits if begin <= t < end]
    return statistics.median(b - a for a, b in itertools.pairwise(inside))


def mean_step(commits: Sequence[float], phases: Sequence[tuple[bool, float, float]], pulling: bool) -> float:
    """Return the mean step over all phases of a kind."""
    counts = [sum(begin <= t < end for t in commits) for p, begin, end in phases if p is pulling]
    return PHASE_S * len(counts) / sum(counts)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=10000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("torn", "steps", "changes"))
    parser.add_argument("--quick", action="store_true", help="200 pulls, 2 pairs of phases")
    parser.add_argument("--subscriber", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subscriber:
        given = json.loads(options.subscriber)
        print(json.dumps(pull_versions(given) if given["what"] == "versions" else pull_when_told(given)))
        return
    if options.quick:
        options.pulls, options.pairs = 200, 2
    path = report.RESULTS / "subscribers.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    if options.only in (None, "torn"):
        seeds = range(options.seed, options.seed + -(-options.pulls // ROUND))
        rows = [row for row in rows if not (row["what"] == "torn" and row["seed"] in seeds)]
        rows += [{"what": "torn", "seed": seed, **measure_torn(min(options.pulls, ROUND), seed)} for seed in seeds]
    if options.only in (None, "changes"):
        rows = [row for row in rows if row["what"] != "changes"] + [measure_changes(lr) for lr in RATES]
    if options.only in (None, "steps"):
        rows = [row for row in rows if row["what"] != "steps"] + [{"what": "steps", **measure_steps(options.pairs)}]
    for row in rows:
        report.table(
            f"Subscribers: {row['what']}", ("what", "value"), [(key, str(value)) for key, value in row.items()]
        )
    rounds = [row for row in rows if row["what"] == "torn"]
    total = {name: sum(row[name] for row in rounds) for name in ("pulls", "torn", "kills", "steps_not_committed")}
    print(f"in all {len(rounds)} rounds: {total}")
    settings = {"rate_s": RATE_S, "phase_s": PHASE_S, "width": WIDTH, "blocks": BLOCKS, "subscribers": SUBSCRIBERS}
    report.write("subscribers", rows, total=total, settings=settings)


if __name__ == "__main__":
    main()
