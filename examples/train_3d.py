"""Three kinds of parallelism at once: a small GPT on 8 processes, pipeline 2 x data 2 x tensor 2.

    axon-ps run --nproc-per-node 8 --shards 1 examples/train_3d.py --check

Ranks that differ in "pipeline" have different blocks, those that differ in "tensor" different heads and columns of the
same blocks, and those that differ in "data" the same parts and other samples. `--check` trains the same model in one
process as well and compares losses and parameters. Optimizers are torch's, on each rank; the servers hold nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel.mesh import Mesh
from axon_ps.parallel.pipeline import Pipeline, PipelineSchedule
from axon_ps.parallel.tensor import ColumnParallelLinear, RowParallelLinear, clip_grad_norm, full_state_dict
from corpus import Corpus
from gpt import GPT, VOCABULARY, Attention, Block, GPTConfig, rotate

Batches = Callable[[int, int], tuple[Tensor, Tensor]]
"""Of (step, replica): tokens i64[B, T] and targets i64[B, T]."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; `pipeline * data * tensor` processes."""

    pipeline: int = 2
    data: int = 2
    tensor: int = 2
    microbatches: int = 4
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    stages_per_rank: int = 1
    steps: int = 5
    lr: float = 1e-3
    clip: float = 1.0
    seed: int = 0


class ParallelAttention(nn.Module):
    """`gpt.Attention` with its heads split among the ranks of a group."""

    def __init__(self, plain: Attention, group: ProcessGroup) -> None:
        super().__init__()
        self.head_width = plain.out.in_features // plain.heads
        parts = []
        for weight in plain.qkv.weight.detach().chunk(3):  # rows: queries, keys, values
            linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
            linear.weight = nn.Parameter(weight)
            parts.append(ColumnParallelLinear.from_linear(linear, group, gather_output=False))
        self.query, self.key, self.value = parts
        self.out = RowParallelLinear.from_linear(plain.out, group, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, own H, T, D]
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ParallelBlock(nn.Module):
    """`gpt.Block` over the ranks of a group; the norms are whole on each."""

    def __init__(self, plain: Block, group: ProcessGroup) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = plain.attention_norm, plain.mlp_norm
        self.attention = ParallelAttention(plain.attention, group)
        self.up = ColumnParallelLinear.from_linear(plain.mlp.up, group, gather_output=False)
        self.down = RowParallelLinear.from_linear(plain.mlp.down, group, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Output(nn.Module):
    """The last norm, and the output layer, whose matrix is the embedding's: on another rank, the pipeline ties them."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.weight = model.norm, model.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [B, T, V]."""
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def build(config: GPTConfig, settings: Settings, mesh: Mesh) -> Pipeline:
    """This rank's part of the model. Every rank draws the whole one, from the same seed, and keeps its part."""
    torch.manual_seed(settings.seed)
    model = GPT(config)
    blocks = [ParallelBlock(block, mesh.group("tensor")) for block in model.blocks]  # type: ignore[arg-type]
    return Pipeline.from_modules(
        [model.embedding, *blocks, Output(model)],
        settings.pipeline * settings.stages_per_rank,
        mesh.group("pipeline"),
        num_microbatches=settings.microbatches,
        schedule=settings.schedule,
        loss_fn=loss_of,
    )


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """One all-reduce of all gradients, over the ranks that have the same parameters."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    group.all_reduce(flat, axon_ps.ReduceOp.AVERAGE)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def train(pipeline: Pipeline, settings: Settings, mesh: Mesh, batches: Batches) -> list[float]:
    """Train; the loss of each step, over all replicas."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=settings.lr)
    losses = []
    for step in range(settings.steps):
        tokens, targets = batches(step, mesh.coordinate("data"))
        loss = pipeline.step(tokens, targets)  # used where the first and the last stage are
        average_gradients(pipeline.parameters(), mesh.group("data"))
        clip_grad_norm(pipeline, settings.clip, mesh=mesh, counted_elsewhere=pipeline.counted_elsewhere)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mesh.group("data").all_reduce(loss, axon_ps.ReduceOp.AVERAGE)))
    return losses


def train_alone(config: GPTConfig, settings: Settings, batches: Batches) -> tuple[GPT, list[float]]:
    """The same in plain PyTorch, in one process."""
    torch.manual_seed(settings.seed)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    losses = []
    for step in range(settings.steps):
        tokens, targets = (torch.cat(t) for t in zip(*(batches(step, r) for r in range(settings.data)), strict=True))
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def plain_parameters(pipeline: Pipeline) -> dict[str, Tensor]:
    """This rank's stages' parameters, whole and under `gpt.GPT`'s names. Collective over the tensor group."""
    whole = full_state_dict(pipeline)  # <index of the module>.<name>
    found: dict[str, Tensor] = {}
    for name, value in whole.items():
        index, _, rest = name.partition(".")
        if rest.startswith("attention.query"):
            value = torch.cat([whole[name.replace("query", part)] for part in ("query", "key", "value")])
            found[f"blocks.{int(index) - 1}.attention.qkv.weight"] = value
        elif rest.startswith(("up", "down")):
            found[f"blocks.{int(index) - 1}.mlp.{rest}"] = value
        elif rest.startswith(("attention", "mlp_norm")) and ".key." not in rest and ".value." not in rest:
            found[f"blocks.{int(index) - 1}.{rest}"] = value
        elif rest == "weight":  # of the embedding, or of the output, which is the same
            found["embedding.weight"] = value
        elif rest == "norm.weight":
            found[rest] = value
    return found


def difference(parameters: dict[str, Tensor], reference: GPT) -> float:
    """The largest, element by element."""
    plain = reference.state_dict()
    return max(float((value - plain[name]).abs().max()) for name, value in parameters.items())


def run(group: ProcessGroup, config: GPTConfig, settings: Settings, batches: Batches, *, check: bool) -> list[float]:
    """Train on every rank of a group.

    Returns:
        The losses; with `check`, behind them, this rank's largest difference to training alone, in losses and
        parameters (ranks whose parameters another one has, too, leave it to that one: 0).
    """
    mesh = Mesh(group, pipeline=settings.pipeline, data=settings.data, tensor=settings.tensor)
    with build(config, settings, mesh) as pipeline:
        losses = train(pipeline, settings, mesh, batches)
        timeline = pipeline.timeline()  # of the last step
        if group.rank == 0:
            print(timeline.gantt())
        if not check:
            return losses
        parameters = plain_parameters(pipeline)
        worst = 0.0
        if mesh.coordinate("data") == mesh.coordinate("tensor") == 0:
            reference, expected = train_alone(config, settings, batches)
            worst = max(difference(parameters, reference), *(abs(a - b) for a, b in zip(losses, expected, strict=True)))
        return [*losses, worst]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="windows of each replica's batch")
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", choices=[s.value for s in PipelineSchedule], default="1f1b")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(context=args.context, channels=args.channels, layers=args.layers, heads=4)
    schedule = PipelineSchedule(args.schedule)
    settings = Settings(
        steps=args.steps,
        microbatches=args.microbatches,
        schedule=schedule,
        stages_per_rank=2 if schedule.loops else 1,
    )
    corpus = Corpus()

    def batches(step: int, replica: int) -> tuple[Tensor, Tensor]:
        return corpus.batch(seed=0, step=step, replica=replica, batch=args.batch, context=args.context)

    with axon_ps.World.init() as world:
        found = run(world.default_group, config, settings, batches, check=args.check)
        worst = max(world.gather_json(found[-1] if args.check else 0.0))
        if world.is_main_process:
            print(f"loss {found[0]:.4f} in the first step, {found[args.steps - 1]:.4f} in the last")
            if args.check:
                print(f"largest difference to one process, in losses and parameters: {worst:.1e}")
        if worst > 1e-5:
            raise SystemExit("the parallel model is not the one that one process trains")


if __name__ == "__main__":
    main()
