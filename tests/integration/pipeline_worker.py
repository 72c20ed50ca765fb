"""What each process of `test_pipeline_processes` does."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from axon_ps import World
from axon_ps.collectives.group import ProcessGroup
from axon_ps.errors import Broken
from axon_ps.parallel.pipeline import Pipeline, PipelineSchedule

WIDTH, VALUES, ROWS = 8, 12, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * mask, mask


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VALUES, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), (tokens > 2)[..., None]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Failing(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("out of ideas")


def model() -> list[nn.Module]:
    """Ten modules; the first and the last share their weight."""
    torch.manual_seed(4)
    embed = Embed()
    return [embed, *(Block() for _ in range(8)), Head(embed.table.weight)]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> Tensor:
    return torch.randint(VALUES, (ROWS, 5), generator=torch.Generator().manual_seed(8))


def sequential() -> tuple[float, dict[str, Tensor]]:
    modules, tokens = model(), batch()
    x, mask = modules[0](tokens)
    for block in modules[1:-1]:
        x, mask = block(x, mask)
    loss = loss_fn(modules[-1](x, mask), tokens.roll(1, 1))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in nn.ModuleList(modules).named_parameters() if p.grad is not None}


def compare(group: ProcessGroup, schedule: PipelineSchedule) -> tuple[float, list[int], int]:
    """Largest difference to one process, peaks of all ranks, and how many actions the timeline has."""
    loss, expected = sequential()
    options: Any = {"num_microbatches": 8, "schedule": schedule, "loss_fn": loss_fn}
    stages = 8 if schedule.loops else 4
    with Pipeline.from_modules(model(), stages, group, **options) as pipeline:
        tokens = batch()
        got = pipeline.step(tokens if pipeline.is_first else None, tokens.roll(1, 1) if pipeline.is_last else None)
        worst = abs(got.item() - loss)
        for name, parameter in pipeline.named_parameters():
            assert parameter.grad is not None
            whole = expected[name.replace("9.weight", "0.table.weight")]
            worst = max(worst, float((parameter.grad - whole).abs().max()))
        peaks = [int(p) for p in group.all_gather(torch.tensor([pipeline.memory_stats().peak_activations]))]
        spans = len(pipeline.timeline().spans)
        pipeline(tokens, everywhere=True)
    return worst, peaks, spans


def fail(group: ProcessGroup) -> str:
    """What a rank is told when the stage of rank 2 fails."""
    modules = copy.deepcopy(model())
    modules[6] = Failing()
    pipeline = Pipeline.from_modules(modules, 4, group, num_microbatches=8, loss_fn=loss_fn)
    try:
        pipeline.step(batch(), batch())
    except (ValueError, Broken) as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "nothing"


def synthetic(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """A batch of the 2 x 2 x 2 example."""
    windows = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(100 * step + replica))
    return windows[:, :-1], windows[:, 1:]


def run(examples: str) -> dict[str, Any]:
    """In eight processes the 2 x 2 x 2 example; in four of them schedules over both transports, and errors."""
    sys.path.insert(0, examples)
    import train_3d

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with World.init() as world:
        config = train_3d.GPTConfig(context=8, channels=16, layers=4, heads=2)
        settings = train_3d.Settings(steps=3)
        *found["losses"], found["2 x 2 x 2"] = train_3d.run(
            world.default_group, config, settings, synthetic, check=True
        )
        local, remote = world.new_group(range(4)), world.new_group(range(4), backend="grpc")
        if world.rank < 4:
            *schedules, _ = PipelineSchedule  # zero bubble has its tests on threads: its imports cost a second
            for schedule in schedules:
                found[f"shm {schedule.value}"] = compare(local, schedule)
            found["error shm"] = fail(local)
            found["grpc 1f1b"] = compare(remote, PipelineSchedule.ONE_F_ONE_B)
            found["error grpc"] = fail(remote)
            found["after"] = float(local.all_reduce(torch.ones(1))[0])
        world.barrier()
    return found
