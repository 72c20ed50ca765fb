"""The main job: a byte-level GPT learns Python from the standard library, its parameters on shard servers.

    axon-ps run --nproc-per-node 2 --shards 2 examples/train_gpt.py

Every worker runs this file. Parameters and AdamW's moments live on the shard servers; a worker holds one transformer
block at a time. It ends with the validation loss, a checkpoint, an export that plain torch reads, and a sample of text.

Workers may be killed and started again at any moment (`axon-ps run --max-restarts 3 --standby 1`). Where a worker is in
this program follows from the version of the parameters and from what the job's key-value store says, and apart from the
steps themselves no worker waits for another: that is all it takes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps.errors import ConfigurationError
from axon_ps.parallel import AdamW, MixedPrecision, ShardingStrategy, TopK
from axon_ps.parallel import FullyShardedDataParallel as FSDP
from axon_ps.storage.export import export_model
from corpus import Corpus
from gpt import GPT, Block, GPTConfig
from progress import Report
from sample import sample

MOST_FAILED_STEPS = 20
PLAN_AFTER = 10  # steps: then it is known how many fit into the time
VALIDATION_PARTS = 8
DTYPES = ("float32", "bfloat16", "float16")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    job = parser.add_argument_group("job")
    job.add_argument("--out", type=Path, default=Path("runs/gpt"), help="where checkpoints and the export go")
    job.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: only at the end")
    job.add_argument("--resume", default="", metavar="URI", help="checkpoint, or directory of them, to go on from")
    job.add_argument("--steps", type=int, default=240)
    job.add_argument(
        "--time-budget-s", type=float, default=0.0, help="make fewer steps if these take longer; 0: no limit"
    )
    job.add_argument("--seed", type=int, default=0)
    model = parser.add_argument_group("model and batch")
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--channels", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--context", type=int, default=256, help="bytes of a window")
    model.add_argument("--batch", type=int, default=8, help="windows of each worker's batch")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    optimizer.add_argument("--final-lr", type=float, default=0.05, help="last learning rate, as a share of the highest")
    optimizer.add_argument("--warmup", type=int, default=30, metavar="STEPS")
    optimizer.add_argument("--weight-decay", type=float, default=0.1)
    optimizer.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    system = parser.add_argument_group("system")
    system.add_argument("--strategy", choices=[s.name.lower() for s in ShardingStrategy], default="full_shard")
    system.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    system.add_argument("--compute", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the faster")
    system.add_argument("--wire", choices=(*DTYPES, "int8", "int4"), default="bfloat16", help="parameters on their way")
    system.add_argument("--reduce", choices=(*DTYPES, "int8", "int4"), help="gradients on theirs; default: as --wire")
    system.add_argument("--top-k", type=float, default=0.0, metavar="SHARE", help="send this share of the gradients")
    system.add_argument("--eval-windows", type=int, default=128, help="validation windows, over all workers")
    system.add_argument("--sample-bytes", type=int, default=300)
    return parser.parse_args(arguments)


@dataclass
class Schedule:
    """Learning rate over a number of steps that may change on the way: linear warm-up, then a cosine."""

    steps: int
    warmup: int
    final: float

    def factor(self, step: int) -> float:
        """What the highest learning rate is multiplied by at `step`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))


def device_of(choice: str, world: axon_ps.World) -> torch.device:
    """Where this worker computes: of several GPUs each worker of a node has its own."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"--device {choice}: PyTorch {torch.__version__} sees no GPU; give --device cpu or auto"
        )
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def matmul_s(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a matrix product of the model's shape on this machine."""
    a, b = torch.ones(2048, 256, dtype=dtype, device=device), torch.ones(256, 1024, dtype=dtype, device=device)
    times_s = []
    for _ in range(5):
        begin_s = time.perf_counter()
        (a @ b)[0, 0].item()  # a GPU works on behind our back
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def compute_dtype(choice: str, world: axon_ps.World, device: torch.device) -> torch.dtype:
    """The dtype to compute in, the same on every worker: bf16 only where the processor multiplies it faster."""
    if choice == "auto":
        faster = matmul_s(torch.bfloat16, device) < matmul_s(torch.float32, device)
        choice = "bfloat16" if faster else "float32"
        choice = world.agree("compute", choice)
    return getattr(torch, choice)


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> AdamW:
    """AdamW that decays matrices, and leaves the gains of the norms alone."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": options.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.lr, betas=(0.9, 0.95))


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, world: axon_ps.World, options: argparse.Namespace) -> float:
    """Nats per byte over a fixed part of the held-out files, which the workers share out.

    A list of parts to be done, in the job's key-value store: everybody begins at another place of it and does what is
    not done yet. Nobody waits, and who dies is made up for. (Under HYBRID_SHARD the workers of a node must run the
    model together, so they do all parts.)
    """
    model.eval()
    first = world.replica * VALIDATION_PARTS // world.num_replicas
    losses = []
    for part in range(first, first + VALIDATION_PARTS):
        part %= VALIDATION_PARTS
        key = f"validation/{world.version}/{part}"
        known = None if options.strategy == "hybrid_shard" else world.kv_get(key)
        loss = json.loads(known) if known else part_loss(model, corpus, part, options)
        world.kv_put(key, json.dumps(loss).encode())
        losses.append(loss)
    model.train()
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)


def part_loss(model: nn.Module, corpus: Corpus, part: int, options: argparse.Namespace) -> tuple[float, int]:
    """The loss of one part of the validation windows, summed over them, and how many they are."""
    total, count = 0.0, 0
    where = {"replica": part, "replicas": VALIDATION_PARTS, "context": options.context}
    for tokens, targets in corpus.validation_batches(windows_total=options.eval_windows, batch=32, **where):
        total += float(model(*on_device(model, tokens, targets))) * len(tokens)
        count += len(tokens)
    return total, count


def on_device(model: nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors where the model computes."""
    where = next(model.parameters()).device
    return [tensor.to(where) for tensor in tensors]


def steps_in_time(version: int, began: tuple[int, float], world: axon_ps.World, options: argparse.Namespace) -> int:
    """How many steps the time budget allows at the pace so far: whoever comes here first says it, once and for all."""
    first, began_s = began
    pace = (version - first) / max(time.time() - began_s, 1e-9)
    return world.agree("steps", min(options.steps, max(version + 1, first + int(pace * options.time_budget_s))))


def model_config(options: argparse.Namespace) -> GPTConfig:
    """The size of the model that was asked for."""
    size = {"channels": options.channels, "layers": options.layers, "heads": options.heads}
    return GPTConfig(context=options.context, **size)


def save(world: axon_ps.World, options: argparse.Namespace) -> Any:
    """Have the servers write a checkpoint of the present version; called on one worker."""
    uri = str(options.out.absolute() / "checkpoints" / f"version-{world.version:06d}")
    return world.save_checkpoint(uri, extra={"model": model_config(options).as_dict(), "seed": options.seed})


def train(
    world: axon_ps.World, model: FSDP, corpus: Corpus, options: argparse.Namespace, report: Report
) -> list[tuple[int, float]]:
    """Train to the last step; returns (version, validation loss) pairs, the last one at the end."""
    optimizer = make_optimizer(model, options)
    if options.resume:
        world.resume_checkpoint(options.resume)
    began = first, _ = world.agree("began", [world.version, time.time()])
    schedule = Schedule(max(options.steps, first + 1), options.warmup, options.final_lr)
    planned = None if options.time_budget_s else schedule.steps
    failed, skipped, curve = 0, 0, []
    report.start(world.version, planned)
    while True:
        version = world.version
        if planned is None and version >= min(first + PLAN_AFTER, schedule.steps):
            schedule.steps = planned = steps_in_time(version, began, world, options)
            if planned < options.steps:
                report.say(f"{planned} of {options.steps} steps fit into the {options.time_budget_s:g} s there are")
        if version >= schedule.steps:
            break
        if not failed and version > first and version % max(1, options.steps // 5) == 0:
            curve.append((version, validation_loss(model, corpus, world, options)))
            report.say(f"step {version}: validation loss {curve[-1][1]:.3f} nats/byte")
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule.factor(version)
        where = {"seed": options.seed, "step": version + skipped, "replica": world.replica}
        tokens, targets = corpus.batch(**where, batch=options.batch, context=options.context)
        loss = model(*on_device(model, tokens, targets))
        loss.backward()
        model.clip_grad_norm(options.clip)
        result = optimizer.step()
        optimizer.zero_grad()
        if not result.committed:  # a worker came or went, or a gradient was not finite: the step never happened
            failed += 1
            skipped += not math.isfinite(result.grad_norm)
            report.say(f"a step after version {version} did not count: {result.reason}")
            if failed >= MOST_FAILED_STEPS:
                raise RuntimeError(f"{failed} steps in a row did not count; the last one because {result.reason}")
            continue
        failed, version = 0, result.version
        total = world.num_replicas * tokens.numel()
        report.step(version, planned, loss.item(), total, model.statistics())
        world.report(steps=planned, loss=report.loss, tokens_per_s=report.tokens_per_s)
        if options.checkpoint_every and version % options.checkpoint_every == 0 and world.is_main_process:
            report.say(f"checkpoint: {save(world, options).uri}")
    report.stop()
    curve.append((world.version, validation_loss(model, corpus, world, options)))
    return curve


def main(arguments: Sequence[str] | None = None) -> float:
    """Run one worker from joining to leaving; the validation loss."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    began_s = time.monotonic()
    with axon_ps.World.init() as world:
        device = device_of(options.device, world)
        dtype = compute_dtype(options.compute, world, device)
        grads = TopK(options.top_k) if options.top_k else options.reduce or options.wire
        model = FSDP(
            GPT(model_config(options)).to(device),
            world.default_group,
            sharding_strategy=ShardingStrategy[options.strategy.upper()],
            mixed_precision=MixedPrecision(param_dtype=dtype, wire_dtype=options.wire, reduce_dtype=grads),
            unit_types={Block},
        )
        corpus, report = Corpus(), Report(on=world.is_main_process)
        report.say(
            f"{model.spec.layout.numel / 1e6:.2f}M parameters on {len(world.membership.shards)} shard servers, "
            f"{world.world_size} workers, {options.strategy}, {str(dtype)[6:]} compute, {options.wire} wire; "
            f"{corpus.train.size / 1e6:.1f} MB of text"
        )
        curve = train(world, model, corpus, options, report)
        if world.is_main_process:
            finish(world, model, curve, options, report, time.monotonic() - began_s)
            world.kv_put("finished", b"yes")
        world.kv_wait("finished")
        return curve[-1][1]


def finish(
    world: axon_ps.World,
    model: FSDP,
    curve: list[tuple[int, float]],
    options: argparse.Namespace,
    report: Report,
    spent_s: float,
) -> None:
    """Checkpoint, export, sample and summary; on one worker."""
    info = save(world, options)
    export = options.out / "export"
    export.mkdir(parents=True, exist_ok=True)
    export_model(info.uri, str(export / "model.safetensors"))
    (export / "config.json").write_text(json.dumps(model_config(options).as_dict()))
    text = sample(export, length=options.sample_bytes, seed=options.seed)
    report.summary(
        {
            "validation loss": " → ".join(f"{loss:.3f}" for _, loss in curve) + " nats/byte",
            "steps": str(world.version),
            "time": f"{spent_s:.0f} s",
            "checkpoint": f"{info.uri} ({info.bytes / 1e6:.1f} MB)",
            "export": str(export / "model.safetensors"),
        },
        model.statistics(),
    )
    report.say("sample, by plain torch from the export:\n" + text)


if __name__ == "__main__":
    main()
