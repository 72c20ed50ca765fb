"""What each process of `test_pipeline_processes` does."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from axon_ps import World
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Broken
from axon_ps.parallel.pipeline import OptimizerState, Pipeline, PipelineSchedule

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


def checkpoint(directory: str) -> None:
    """Train in four stages, save with torch.distributed.checkpoint, load in others; the same bits, and it goes on."""
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("axon", init_method="axon://")
    four, two = dist.new_group(range(4)), dist.new_group(range(2))
    rank, tokens = dist.get_rank(), batch()

    def build(stages: int, group: Any, lr: float = 9.0, **options: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
        ours = None if group is None else group.group
        pipeline = Pipeline.from_modules(model(), stages, ours, num_microbatches=4, loss_fn=loss_fn, **options)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=lr)
        if lr == 9.0:  # nothing that it has now may be left when it was loaded
            for parameter in pipeline.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return pipeline, optimizer

    def state(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": pipeline, "optimizer": OptimizerState(pipeline, optimizer)}

    def step(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        pipeline.step(tokens, tokens.roll(1, 1))
        optimizer.step()

    def entries(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = OptimizerState(pipeline, optimizer).state_dict()
        found = {f"state of {n}: {k}": v for n, of in saved["state"].items() for k, v in of.items()}
        found |= {f"option of {n}: {k}": v for n, of in saved["options"].items() for k, v in of.items()}
        return found | {name: value.clone() for name, value in pipeline.state_dict().items()}

    def whole(pipeline: Pipeline, optimizer: torch.optim.Optimizer, group: Any) -> dict[str, Any]:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, entries(pipeline, optimizer), group=group)
        return {name: value for part in parts for name, value in part.items()}

    def loaded(
        expected: dict[str, Any], name: str, stages: int, group: Any, **options: Any
    ) -> tuple[Pipeline, torch.optim.Optimizer]:
        pipeline, optimizer = made = build(stages, group, **options)
        dcp.load(state(*made), checkpoint_id=f"{directory}/{name}", process_group=group, no_dist=group is None)
        for key, value in entries(pipeline, optimizer).items():
            torch.testing.assert_close(
                value, expected[key], rtol=0, atol=0, msg=f"{key} of {stages} stages: {{}}".format
            )
        return made

    if rank < 4:
        first = build(4, four, lr=3e-3)
        step(*first)
        step(*first)
        expected = whole(*first, four)
        dcp.save(state(*first), checkpoint_id=f"{directory}/four", process_group=four)
        others = [loaded(expected, "four", 8, four, schedule=PipelineSchedule.INTERLEAVED_ONE_F_ONE_B)]
        if rank < 2:
            others.append(loaded(expected, "four", 2, two))
        if rank == 0:
            others.append(loaded(expected, "four", 3, None))
            dcp.save(state(*others[-1]), checkpoint_id=f"{directory}/one", no_dist=True)
        four.barrier().wait()
        others.append(loaded(expected, "one", 4, four))  # where the shared weight was one parameter with one state
        step(*first)
        after = whole(*first, four)
        for other in others:
            step(*other)
            for key, value in entries(*other).items():
                torch.testing.assert_close(value, after[key], rtol=1e-5, atol=1e-6, msg=f"{key}: {{}}".format)
        for pipeline, _ in (first, *others):
            pipeline.close()
    dist.destroy_process_group()


def synthetic(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """A batch of the 2 x 2 x 2 example."""
    windows = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(100 * step + replica))
    return windows[:, :-1], windows[:, 1:]


def run(examples: str, directory: str) -> dict[str, Any]:
    """In eight processes the 2 x 2 x 2 example; in four schedules over both transports, errors, and checkpoints."""
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
        checkpoint(directory)
        world.barrier()
    return found
