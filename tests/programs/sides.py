"""The two sides of a comparison: plain torch, and a wrapped model. A script is written once and run on both.

Plain torch at n workers is n threads with a model each, as n processes under DDP would have: gradients are averaged
over them before a step (or before they are clipped), and a rank without a gradient counts as one of zeros if another
rank has one. First values are rank 0's, and so is what is saved. Buffers are each rank's own. Values, hooks,
optimizers and schedulers are torch's.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")
Values = dict[str, torch.Tensor]


class Side(Protocol):
    """What a script does by other means on each side.

    Attributes:
        rank: of this worker.
        workers: how many.
    """

    rank: int
    workers: int

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """The module, ready to be trained by all workers."""

    def inner(self, model: nn.Module) -> Any:
        """The user's own module."""

    def optimizer(self, kind: str, params: Any, **hyper: Any) -> torch.optim.Optimizer:
        """An optimizer of a wrapped model's parameters."""

    def clip(self, model: nn.Module, max_norm: float) -> Any:
        """Clip the gradients of the coming step."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards inside are not averaged yet."""

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save model and optimizer, in place of what was saved before."""

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load what was saved last."""

    def values(self, model: nn.Module) -> Values:
        """Copies of parameters and buffers, under the names of the user's own module."""


_BUILDING = threading.Lock()


def built(make: Callable[[], T], seed: int = 0) -> T:
    """What `make` makes with the default random generator seeded; threads share that generator."""
    with _BUILDING:
        torch.manual_seed(seed)
        return make()


class Meeting:
    """Where the threads of plain torch exchange tensors.

    Args:
        workers: how many threads.
        timeout_s: how long one waits for the others.
    """

    def __init__(self, workers: int, timeout_s: float = 60.0) -> None:
        self._barrier = threading.Barrier(workers, timeout=timeout_s)
        self._board: list[Any] = [None] * workers

    def exchange(self, rank: int, value: T) -> list[T]:
        """The values of all ranks."""
        self._board[rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        """Wake the others: this rank has failed."""
        self._barrier.abort()


class Plain:
    """Plain torch; see the module."""

    def __init__(self, rank: int = 0, workers: int = 1, meeting: Meeting | None = None) -> None:
        self.rank, self.workers = rank, workers
        self._meeting = meeting or Meeting(1)
        self._saved: Any = None

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """See `Side`."""
        first = self._meeting.exchange(self.rank, module)[0]
        if first is not module:
            with torch.no_grad():
                module.load_state_dict(copy.deepcopy(first.state_dict()))
        self._meeting.exchange(self.rank, None)
        return module

    def inner(self, model: nn.Module) -> Any:
        """See `Side`."""
        return model

    def optimizer(self, kind: str, params: Any, **hyper: Any) -> torch.optim.Optimizer:
        """See `Side`."""
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(params, **hyper)
        optimizer.register_step_pre_hook(lambda made, _, __: self._average(_params_of(made)))
        return optimizer

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """See `Side`."""
        self._average(model.parameters())
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See `Side`."""
        return contextlib.nullcontext()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Side`."""
        state = self._meeting.exchange(self.rank, (model.state_dict(), optimizer.state_dict()))[0]
        self._saved = copy.deepcopy(state)
        self._meeting.exchange(self.rank, None)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Side`."""
        values, state = copy.deepcopy(self._saved)
        model.load_state_dict(values)
        optimizer.load_state_dict(state)

    def values(self, model: nn.Module) -> Values:
        """See `Side`."""
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def _average(self, params: Iterable[torch.Tensor]) -> None:
        params = list(params)
        by_rank = self._meeting.exchange(self.rank, [p.grad for p in params])
        means = [_mean(grads) for grads in zip(*by_rank, strict=True)]
        self._meeting.exchange(self.rank, None)  # nobody reads the old ones any more
        for param, mean in zip(params, means, strict=True):
            if param.grad is not None and mean is not None:
                param.grad.copy_(mean)
            else:
                param.grad = mean


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _mean(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    wide = torch.complex128 if there[0].is_complex() else torch.float64
    total = there[0].detach().to(wide, copy=True)
    for grad in there[1:]:
        total += grad.detach()
    return (total / len(grads)).to(there[0].dtype)


def run_plain(script: Callable[[Side], T], workers: int = 1, timeout_s: float = 60.0) -> list[T]:
    """What a script returns on each rank of plain torch.

    Raises:
        BaseException: the error of the first rank that failed by itself.
    """
    meeting = Meeting(workers, timeout_s)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = script(Plain(rank, workers, meeting))
        except threading.BrokenBarrierError as error:
            errors.append(error)
        except BaseException as error:
            errors.insert(0, error)
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"plain-{rank}") for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(workers)]


class Wrapped:
    """A model of ours, by strategy.

    Args:
        world: the worker's.
        strategy: name of a `ShardingStrategy`, or "DDP".
        uri: where checkpoints are written.
        torchs: whether optimizers are torch's own; those of DDP always are.
    """

    def __init__(self, world: Any, strategy: str, uri: str, *, torchs: bool = False) -> None:
        self.rank, self.workers = world.rank, world.world_size
        self.world, self.strategy = world, strategy
        self.uri, self._saves = uri, 0
        self._torchs = torchs or strategy == "DDP"

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """See `Side`."""
        from axon_ps import parallel

        group = self.world.default_group
        if self.strategy == "DDP":
            options = {k: v for k, v in options.items() if k not in ("unit_types", "auto_wrap_policy", "name")}
            return parallel.DDP(module, group, find_unused_parameters=True, **options)
        return parallel.FSDP(module, group, sharding_strategy=parallel.ShardingStrategy[self.strategy], **options)

    def inner(self, model: Any) -> Any:
        """See `Side`."""
        return model.module

    def optimizer(self, kind: str, params: Any, **hyper: Any) -> torch.optim.Optimizer:
        """See `Side`."""
        from axon_ps import parallel

        made: torch.optim.Optimizer = getattr(torch.optim if self._torchs else parallel, kind)(params, **hyper)
        return made

    def clip(self, model: nn.Module, max_norm: float) -> Any:
        """See `Side`."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """See `Side`."""
        return model.no_sync()

    def save(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """See `Side`."""
        self._saves += 1
        model.save_checkpoint(f"{self.uri}/{self._saves}", optimizer)

    def load(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """See `Side`."""
        model.load_checkpoint(f"{self.uri}/{self._saves}", optimizer)

    def values(self, model: nn.Module) -> Values:
        """See `Side`."""
        prefix = "module." if self.strategy == "DDP" else ""
        return {name.removeprefix(prefix): v.detach().clone() for name, v in model.state_dict().items()}


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted||, in f64; inf where only one of them is finite, or the shapes differ."""
    if got.shape != wanted.shape:
        return float("inf")
    off = (got.double() - wanted.double()).norm()
    same = torch.equal(torch.isfinite(got), torch.isfinite(wanted))
    return float(off) if torch.isfinite(off) else (0.0 if same and not torch.isfinite(wanted).all() else float("inf"))


def worst_of(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], allowed: Callable[[str], float]
) -> str:
    """The value that is furthest from right, as text; empty if all are within what is allowed for their names."""
    if set(got) != set(wanted):
        return f"names: only here {sorted(set(got) - set(wanted))}, missing {sorted(set(wanted) - set(got))}"
    off = {n: distance(got[n], w) / (allowed(n) + 1e-30) for n, w in wanted.items() if w.numel()}
    if not off or (furthest := max(off.values())) <= 1.0:
        return ""
    name = max(off, key=lambda n: off[n])
    ours, torchs = got[name].flatten()[:4].tolist(), wanted[name].flatten()[:4].tolist()
    wrong = sorted(n for n, o in off.items() if not o <= 1.0)
    return f"{name} is {ours}, torch's {torchs} ({furthest:.1e} times what rounding allows); wrong: {wrong}"
