"""Local steps over a thin line: bytes, peaks and loss of streamed DiLoCo, and goodput with dying or slow workers.

Bytes and loss: workers train a small GPT on the standard library's sources, with the same batches, by DDP, by DiLoCo
in f32 without fragments, and by streamed DiLoCo with compressors. The columns are:

    bytes    sent and received by a worker a step, the mean
    fewer    DDP's bytes over these, DDP's by its formula: a ring all-reduce of f32, 2 (n - 1) / n * 4 bytes a parameter
             each way
    peak     the most bytes within one step, over that of DiLoCo without fragments

Goodput: workers whose accelerators are emulated (a step takes `--device-s`) train for `--seconds`. Every ten seconds
one of them is killed, and started again twenty seconds later. DiLoCo goes on with the workers that are present;
synchronous steps (FULL_SHARD) either wait for all, or go on, too. The columns are:

    made       all steps
    goodput    the steps whose progress is in the job's parameters, over the steps for which workers had time, from
               being ready to join to being killed

All steps of a DiLoCo worker that lives at the end count: the next outer steps include them.

Slow: the accelerator of one worker of four takes `SLOWER` times as long for a step, and no worker is killed. "goodput"
is the time that workers' accelerators have computed, over the time that passed; without a quorum the others wait for
the slow one.

    python benchmarks/local_steps.py [loss] [goodput] [slow]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.compress import BlockTopK
from axon_ps.parallel.warm_up import warm_up
from axon_ps.testing import LocalCluster
from axon_ps_lab import report

EXAMPLES = str(Path(__file__).parent.parent / "examples")
WORKERS, BATCH, WARM_UP = 4, 8, 20
LOSS_COLUMNS = ("how", "steps", "inner_steps", "bytes", "fewer", "peak_bytes", "peak", "validation_loss")
SLOW_COLUMNS = ("how", "seconds", "outer_steps", "made", "made_by_the_slow", "goodput")
SLOWER = 4
GOODPUT_COLUMNS = ("how", "seconds", "kills", "worker_s", "made", "steps", "goodput")

INT4 = {"wire_dtype": "int4", "param_wire_dtype": "int4"}
AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "mixing": None}
"""Error feedback replaces the outer momentum, as in SparseLoCo; so there is no momentum for mixing to damp."""

WAYS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DiLoCo": {"inner_steps": 20},
    "streamed, f32": {"inner_steps": 20, "overlap_steps": 2},
    "streamed, int4": {"inner_steps": 20, "overlap_steps": 2, **INT4},
    "streamed, int4, twice as often": {"inner_steps": 10, "overlap_steps": 1, **INT4},
    "streamed, block top-k": {
        "inner_steps": 10, "overlap_steps": 1, "wire_dtype": BlockTopK(fraction=1 / 32), "param_wire_dtype": "int4",
        **AVERAGE,
    },
}  # fmt: skip


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return a learning rate: a linear warm-up, then a cosine to a twentieth."""
    if step < WARM_UP:
        return highest * (step + 1) / WARM_UP
    return highest * (0.05 + 0.95 * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * step / steps)))))


def train(way: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one worker of the first part."""
    sys.path.insert(0, EXAMPLES)
    from corpus import Corpus  # type: ignore[import-not-found]
    from gpt import GPT, Block, GPTConfig  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus, config = Corpus(), GPTConfig(context=128, channels=128, layers=options.fragments - 1, heads=4)
    with axon_ps.World.init(timeout_s=300.0) as world:
        module: nn.Module = GPT(config)
        optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        diloco, step = None, optimizer.step
        if not way:
            module = parallel.DistributedDataParallel(module, world.default_group)
        else:
            fragments = options.fragments if "overlap_steps" in way else 1
            diloco = parallel.DiLoCo(module, optimizer, world, fragments=fragments, unit_types={Block}, **way)
            step = diloco.step
        began = last = moved(diloco)
        peak = 0.0
        for number in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, options.steps, options.lr)
            tokens, targets = corpus.batch(
                seed=options.seed, step=number, replica=world.rank, batch=BATCH, context=config.context
            )
            loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            step()
            optimizer.zero_grad()
            peak, last = max(peak, moved(diloco) - last), moved(diloco)
        if diloco is not None:
            diloco.sync()
        losses = []
        with torch.no_grad():
            for tokens, targets in corpus.validation_batches(
                windows_total=256, batch=32, context=config.context, replica=0, replicas=1
            ):
                losses.append(nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).item())
        numel = sum(p.numel() for p in module.parameters())
        world.barrier("done")
        return {
            "bytes": (last - began) / options.steps,
            "peak_bytes": peak,
            "validation_loss": sum(losses) / len(losses),
            "numel": numel,
        }


def moved(diloco: parallel.DiLoCo | None) -> float:
    """Return the bytes that a worker has sent and received."""
    if diloco is None:
        return 0.0
    counters = diloco.statistics()
    return counters["wire_bytes_in"] + counters["wire_bytes_out"]


def measure_loss(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the first part, one way after the other."""
    rows = []
    for how, way in WAYS.items():
        began = time.monotonic()
        with LocalCluster(shards=1, world_size=WORKERS) as cluster:
            found = cluster.run_workers(train, args=(way, options), timeout_s=3600.0)[0].value
        ddp_bytes = 2 * 2 * (WORKERS - 1) / WORKERS * 4 * found.pop("numel")
        row = {"how": how, "steps": options.steps, "inner_steps": way.get("inner_steps", 1), **found}
        if not way:
            row |= {"bytes": ddp_bytes, "peak_bytes": ddp_bytes}
        rows.append({**row, "fewer": ddp_bytes / row["bytes"]})
        print(f"{how}: {rows[-1]} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    whole = next(row["peak_bytes"] for row in rows if row["how"] == "DiLoCo")
    return [{**row, "peak": row["peak_bytes"] / whole} for row in rows]


# ---------------------------------------------------------------------- goodput


def small() -> nn.Sequential:
    """Return a model of as many units as there are fragments."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def paced(device_s: float) -> Iterator[None]:
    """Pace steps as an accelerator does: a step begins at the end of the previous one, or when the host is ready."""
    due_s = time.monotonic()
    while True:
        due_s = max(due_s, time.monotonic()) + device_s
        yield
        time.sleep(max(0.0, due_s - time.monotonic()))


def run_diloco(
    world: axon_ps.World, device_s: float, note: Callable[[float, float], None], quorum: float | None = None
) -> None:
    """Train until killed; `note` gets the steps that are in the job's parameters."""
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = parallel.DiLoCo(
        model, inner, world, inner_steps=20, fragments=4, overlap_steps=2, quorum=quorum, unit_types={nn.Linear}
    )
    for _ in paced(device_s):
        model(torch.randn(2, 64)).square().mean().backward()
        trainer.step()
        inner.zero_grad()
        note(trainer.statistics()["inner_steps_committed"], trainer.statistics()["inner_steps"])


def run_synchronous(world: axon_ps.World, device_s: float, note: Callable[[float, float], None]) -> None:
    """Train by synchronous steps; see `run_diloco`."""
    model = parallel.FSDP(small(), world, auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    optimizer, committed, made = parallel.SGD(model.parameters(), lr=0.01), 0, 0
    for _ in paced(device_s):
        model(torch.randn(2, 64)).square().mean().backward()
        committed, made = committed + optimizer.step().committed, made + 1
        optimizer.zero_grad()
        note(committed, made)


KINDS: dict[str, Callable[..., None]] = {
    "diloco": run_diloco,
    "quorum": partial(run_diloco, quorum=0.75),
    "synchronous": run_synchronous,
}


def work(device_s: float, path: Path, kind: str) -> None:
    """Run one life of a worker, whose file has its begin, the steps it has made, and those that count."""
    torch.set_num_threads(1)
    warm_up()  # as a standby does
    with path.open("w") as file:
        began = time.monotonic()

        def note(steps: float, made: float) -> None:
            file.seek(0)
            file.write(json.dumps({"began": began, "steps": steps, "made": made}).ljust(100))
            file.flush()

        note(0, 0)
        with axon_ps.World.init(timeout_s=600.0) as world:
            KINDS[kind](world, device_s, note)


GOODPUT: dict[str, tuple[str, int | None]] = {
    "DiLoCo streamed": ("diloco", 1),
    "synchronous, all needed": ("synchronous", None),
    "synchronous, goes on": ("synchronous", 1),
}


def measure_goodput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the second part, one way after the other."""
    rows = []
    for how, (kind, least) in GOODPUT.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(shards=1, world_size=options.workers, min_workers=least) as cluster,
        ):
            rows.append({"how": how, **disturbed(cluster, kind, Path(folder), options)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def disturbed(cluster: LocalCluster, kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start the workers, kill one every ten seconds, and return the counts of steps."""
    alive: dict[int, Any] = {}
    lives = 0
    paths: dict[int, Path] = {}
    ends: dict[str, float] = {}

    def start(rank: int) -> None:
        nonlocal lives
        paths[rank] = folder / f"{lives}.json"
        lives += 1
        (alive[rank],) = cluster.start_workers(work, 1, args=(options.device_s, paths[rank], kind), ranks=[rank])

    for rank in range(options.workers):
        start(rank)
    while not all(path.exists() and path.stat().st_size for path in paths.values()):
        time.sleep(0.1)
    away: list[tuple[float, int]] = []
    began, kills = time.monotonic(), 0
    while (now := time.monotonic() - began) < options.seconds:
        if now >= (kills + 1) * options.every_s:
            victim = kills % options.workers
            alive.pop(victim).kill()
            ends[paths[victim].name] = time.monotonic()
            away.append((now + options.away_s, victim))
            kills += 1
        if away and now >= away[0][0]:
            start(away.pop(0)[1])
        time.sleep(0.05)
    notes = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stat().st_size}
    there = {path.name for rank, path in paths.items() if rank in alive}
    for worker in alive.values():
        worker.kill()
    end, made = time.monotonic(), sum(note["made"] for note in notes.values())
    worker_s = sum(ends.get(name, end) - note["began"] for name, note in notes.items())
    steps = sum(note["made" if kind == "diloco" and name in there else "steps"] for name, note in notes.items())
    return {
        "seconds": options.seconds,
        "kills": kills,
        "worker_s": worker_s,
        "made": made,
        "steps": steps,
        "goodput": steps * options.device_s / worker_s,
    }


# ---------------------------------------------------------------------- slow


def measure_slow(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the third part, without a quorum and with one."""
    rows = []
    for how, kind in (("all make 20 steps", "diloco"), ("quorum of 0.75", "quorum")):
        with tempfile.TemporaryDirectory() as folder, LocalCluster(shards=1, world_size=WORKERS) as cluster:
            rows.append({"how": how, **one_slow(cluster, kind, Path(folder), options)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def one_slow(cluster: LocalCluster, kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let the workers train, the last of which is slow; returns the steps made since all have begun."""
    device_s = [options.device_s] * (WORKERS - 1) + [options.device_s * SLOWER]
    paths = [folder / f"{rank}.json" for rank in range(WORKERS)]
    workers = [
        cluster.start_workers(work, 1, args=(device_s[rank], paths[rank], kind), ranks=[rank])[0]
        for rank in range(WORKERS)
    ]

    def made() -> list[float]:
        return [json.loads(p.read_text() or "{}").get("made", 0) if p.exists() else 0 for p in paths]

    while min(made()) < WARM_UP:
        time.sleep(0.1)
    first, outer = made(), committed_of(cluster)
    time.sleep(options.seconds / 2)
    steps = [last - before for before, last in zip(first, made(), strict=True)]
    outer = committed_of(cluster) - outer
    for worker in workers:
        worker.kill()
    computed_s = sum(n * each for n, each in zip(steps, device_s, strict=True))
    return {
        "seconds": options.seconds / 2,
        "outer_steps": outer,
        "made": sum(steps),
        "made_by_the_slow": steps[-1],
        "goodput": computed_s / (WORKERS * options.seconds / 2),
    }


def committed_of(cluster: LocalCluster) -> int:
    """Return the outer steps of all fragments that have committed."""
    return int(cluster.status().counters["steps_committed"])


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", default=["loss", "goodput", "slow"], choices=["loss", "goodput", "slow"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--fragments", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--away-s", type=float, default=20.0)
    parser.add_argument("--device-s", type=float, default=0.1)
    options = parser.parse_args()
    if "loss" in options.measures:
        rows = measure_loss(options)
        report.table("Local steps", LOSS_COLUMNS, [[row[c] for c in LOSS_COLUMNS] for row in rows])
        print(report.write("local_steps", rows, settings=vars(options)))
    if "goodput" in options.measures:
        rows = measure_goodput(options)
        report.table("Goodput", GOODPUT_COLUMNS, [[row[c] for c in GOODPUT_COLUMNS] for row in rows])
        print(report.write("goodput", rows, settings=vars(options)))
    if "slow" in options.measures:
        rows = measure_slow(options)
        report.table("A slow worker", SLOW_COLUMNS, [[row[c] for c in SLOW_COLUMNS] for row in rows])
        print(report.write("slow_worker", rows, settings=vars(options)))


if __name__ == "__main__":
    main()
