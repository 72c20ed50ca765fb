"""The model that is trained while faults strike, and its oracle, which has the same bits: no number is rounded.

A gradient is made of whole numbers that depend on every bit of the parameters (in forward *and* in backward), on the
data, and on the values of the units before. A torn, stale or foreign parameter changes the final values, and so does a
missing, doubled or foreign gradient. Averages over 1 to 4 workers are whole numbers too, and SGD's steps are powers of
two, so no sum is ever rounded, whatever the order: plain torch gives the same bits.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions

UNITS = (30_000, 9_000, 2_000, 30_000)
"""Elements of each unit. Large ones are cut over both servers and leased. One is mapped, and one not leased."""

ROOT = 500
LR, MOMENTUM = 2.0**-7, 0.5
MOST_STEPS = 10
"""With momentum each step takes one more bit."""

Values = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def _hash(weight: torch.Tensor) -> torch.Tensor:
    """Return i64 in [0, 1021) for each element, computed from all of its bits."""
    return (weight.detach().view(torch.int32).long() * 2_654_435_761 % 4_294_967_291) % 1021


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.remainder(x + _hash(weight).sum() % 1021, 1021.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad, (12 * ((_hash(weight) + int(x)) % 3 - 1)).float()


class Mix(nn.Module):
    """One unit."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(numel).remainder(64).float() / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = _Mix.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return mixed


class MixChain(nn.Module):
    """Units behind each other, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.ones(ROOT))
        self.units = nn.Sequential(*(Mix(numel) for numel in UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = _Mix.apply(self.units(x), self.root)  # type: ignore[no-untyped-call]
        return mixed


def data(version: int, rank: int) -> torch.Tensor:
    """Return the input of a worker in the step from `version` on; it needs a gradient, so that backward's hooks run."""
    return torch.tensor([float((version * 37 + rank * 101) % 1021)], requires_grad=True)


class Linear(nn.Module):
    """A sum of products: its gradients are the data, exact in any order of summation when the data are integers."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, numel))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return (self.weight * data).sum()


def integers(step: int, replica: int) -> torch.Tensor:
    """Return the data of a replica in a step, for a `Linear` of 1000 elements."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(-8, 9, (1000,), generator=generator).float()


class Oracle:
    """Plain torch, a step at a time."""

    def __init__(self, momentum: float = 0.0) -> None:
        torch.set_num_threads(1)
        self.model = MixChain()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=momentum)
        self.version = 0
        self._saved: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, ranks: tuple[int, ...]) -> None:
        """Make a step in which these ranks take part."""
        for rank in ranks:
            self.model(data(self.version, rank)).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1

    def save(self) -> None:
        """Keep this version for `restore`."""
        self._saved = {self.version: {n: v.clone() for n, v in self.model.state_dict().items()}}

    def restore(self, version: int) -> None:
        """Go back to the version that was saved."""
        self.model.load_state_dict(self._saved[version])
        self.version = version

    def differs(self, values: dict[str, Any]) -> int:
        """Return the number of values that differ."""
        return sum(int(np.count_nonzero(values[n] != v.numpy())) for n, v in self.model.state_dict().items())


@functools.cache
def expected(steps: tuple[tuple[int, ...], ...]) -> Values:
    """Return the values of plain torch after steps, given the ranks that took part in each."""
    oracle = Oracle(MOMENTUM)
    for ranks in steps:
        oracle.step(ranks)
    return {name: value.numpy() for name, value in oracle.model.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class ExactAttempt:
    """One step of one worker.

    Attributes:
        version: the version it was computed from.
        ended: time at which `step()` returned, by the monotonic clock.
        committed: whether it counted.
        became: the version it led to.
        ranks: workers of the generation it was in.
        reason: the reason why it did not commit.
    """

    version: int
    ended: float
    committed: bool
    became: int
    ranks: tuple[int, ...]
    reason: str


def attempts_in(path: Path) -> list[ExactAttempt]:
    """Return the attempts that a worker wrote down; an incomplete last line is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [ExactAttempt(**json.loads(line)) for line in lines[:-1]]


def train(
    strategy: str, steps: float, timeout_s: float, written: Path, momentum: float = MOMENTUM, pause_s: float = 0.0
) -> Values:
    """Train to version `steps`; returns the final values. Each attempt is written down at once, and a pause follows."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=timeout_s, join_timeout_s=timeout_s) as world:
        model = parallel.FSDP(
            MixChain(),
            world.default_group,
            sharding_strategy=parallel.ShardingStrategy[strategy],
            unit_types={Mix},
            plan_options=PlanOptions(chunk_numel=10_000, min_slice_numel=5_000),
        )
        optimizer = parallel.SGD(model, lr=LR, momentum=momentum)
        while world.version < steps:
            version = world.version
            model(data(version, world.rank)).backward()
            ranks = tuple(m.rank for m in world.membership.workers)
            result = optimizer.step()
            optimizer.zero_grad()
            attempt = ExactAttempt(
                version=version,
                ended=time.monotonic(),
                committed=result.committed,
                became=result.version,
                ranks=ranks,
                reason=result.reason,
            )
            with open(written, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(attempt)) + "\n")
            time.sleep(pause_s)
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}
