"""A job in this process, without servers: what `FullyShardedDataParallel` needs of a world, done at once with torch.

Gathers complete only when waited for, so that code which reads a parameter without waiting reads garbage (NaN).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.coordinator.attachments import Header
from axon_ps.coordinator.client.session import Registered
from axon_ps.errors import StepAborted
from axon_ps.sharding.job import JobSpec
from axon_ps.types import (
    Array,
    Decision,
    DType,
    Grouping,
    Hyper,
    Member,
    Membership,
    OptimizerChange,
    OptimizerSpec,
    Outcome,
    Role,
)
from axon_ps.worker.models import Names
from axon_ps.worker.steps.ticket import Ticket

_VIEWS = {np.dtype(np.float32): torch.float32, np.dtype(np.uint16): torch.bfloat16, np.dtype(np.float16): torch.float16}


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array).view(_VIEWS[array.dtype])


class FakeWork:
    """Runs when waited for."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run

    def wait(self, timeout_s: float | None = None) -> Any:
        run, self._run = self._run, None
        return run() if run is not None else None

    def cancel(self) -> None:
        self._run = None


@dataclass
class FakeSteps:
    """Stands for `StepClient`: one replica, plain SGD on the "servers", every event noted in `log`."""

    trace: None = None
    epoch: int = 0
    asked_epoch: int = 0
    version: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[int, torch.Tensor | None] = field(default_factory=dict)
    addends: Counter[int] = field(default_factory=Counter)
    spec: JobSpec | None = None
    optimizer: OptimizerSpec | None = None
    outcome: Outcome = Outcome.COMMIT
    clip_factor: float = 1.0
    max_norms: list[float] = field(default_factory=list)

    lease_s: ClassVar[float] = 5.0
    copied: ClassVar[int] = 0
    name: ClassVar[str] = "model 0"
    in_flight_bytes: ClassVar[int] = 0

    @property
    def view(self) -> FakeSteps:
        return self

    job = parameters = gradients = view

    @property
    def latest_version(self) -> int:
        return self.version

    def wait_members(self, ready: Callable[[Any], bool], timeout_s: float, what: str) -> None:
        assert ready(None), what

    def check_addends(self) -> None:
        """Any number of addends is taken."""

    def wait_for_capacity(self, ticket: Ticket, wait: Callable[[float], None]) -> None:
        wait(10.0)

    def register(self, spec: JobSpec) -> Registered:
        self.spec = spec
        return Registered(first=True, initialized=False, version=0, upload=True)

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        self.optimizer = optimizer

    def upload(self, unit: int, values: Array, *, epoch: int = 0) -> None:
        self.values[unit] = torch.from_numpy(values.copy())

    def wait_initialized(self, registered: Registered) -> bool:
        assert self.spec is not None
        return set(self.values) == set(range(len(self.spec.layout.units)))

    def wait_complete(self) -> None:
        self.log.append(("wait_complete", -1))

    def gather(self, unit: int, out: Array, *, exact: bool = False, begin: int = 0, end: int | None = None) -> FakeWork:
        self.log.append(("gather", unit))
        _tensor(out).fill_(float("nan"))
        return FakeWork(lambda: _tensor(out).copy_(self.values[unit]))

    def is_near(self, unit: int, begin: int = 0, end: int | None = None) -> bool:
        return False

    def gather_speculative(
        self,
        unit: int,
        out: Array,
        ticket: Ticket,
        hyper: Sequence[Hyper],
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> FakeWork:
        self.log.append(("speculative", unit))
        _tensor(out).fill_(float("nan"))
        grad = self.grads[unit]
        if grad is None:

            def refuse() -> None:
                raise StepAborted("no replica has a gradient for it")

            return FakeWork(refuse)
        updated = self.values[unit] - hyper[0]["lr"] * grad
        return FakeWork(lambda: _tensor(out).copy_(updated))

    def mapped(self, unit: int) -> None:
        """Nothing is mapped here."""

    def map(self, unit: int, dtype: DType) -> FakeWork:
        return FakeWork(lambda: None)

    def buffer(self, size_bytes: int) -> Array:
        return np.empty(size_bytes, np.uint8)

    @property
    def latest(self) -> tuple[int, int]:
        return self.epoch, self.version

    def wait_latest(self, position: tuple[int, int]) -> None:
        pass

    vote_requested = False  # nobody waits for us

    @property
    def attempt(self) -> tuple[int, int]:
        return 1, self.version

    def ticket(self, began: tuple[int, int] | None = None, dealt: int | None = None) -> Ticket:
        ticket = Ticket(generation=1, step=self.version, replica=0, num_replicas=1)
        return ticket if began in (None, self.latest) else ticket.void("the parameters changed")

    def push(
        self,
        unit: int,
        grad: Array | None,
        ticket: Ticket,
        done: Callable[[], None] | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> FakeWork:
        self.log.append(("push" if grad is not None else "absent", unit))
        if unit not in self.grads:  # the first, or a test has dropped it
            self.addends[unit] = 0
        assert self.addends[unit] == ticket.addend
        self.addends[unit] += 1
        before = self.grads.get(unit)
        if grad is not None:
            self.grads[unit] = _tensor(grad).float() + (0.0 if before is None else before)
        else:
            self.grads[unit] = before
        if done is not None:
            done()
        return FakeWork(lambda: None)

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Any],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        commit: Mapping[str, str] | None = None,
        weight: float | None = None,
        untouched: Iterable[int] = (),
        withdrawn: bool = False,
        optimizer: OptimizerChange | None = None,
    ) -> Decision:
        for work in pushes:
            work.wait()
        self.max_norms.append(max_norm)
        assert set(self.addends.values()) <= {ticket.addend + 1}
        self.addends.clear()
        grads, self.grads = self.grads, {}
        norm = float(sum(float((g.double() ** 2).sum()) for g in grads.values() if g is not None) ** 0.5)
        outcome = Outcome.ABORT if ticket.is_void or withdrawn else self.outcome
        if outcome is Outcome.COMMIT:
            for unit, grad in grads.items():
                if grad is not None:
                    self.values[unit] -= hyper[0]["lr"] * self.clip_factor * grad / (weight or 1.0)
            self.version += 1
        self.log.append(("vote", self.version))
        return Decision(
            step=ticket.step,
            generation=1,
            outcome=outcome,
            version=self.version,
            grad_norm=norm,
            clip_factor=self.clip_factor,
            hyper=tuple(hyper),
            reason=ticket.why_void,
            untouched=tuple(untouched),
        )

    @property
    def me(self) -> Member:
        return _WORKER

    def wait_epoch(self, epoch: int) -> None:
        assert self.epoch == epoch
        self.asked_epoch = epoch

    def statistics(self) -> dict[str, float]:
        return {}

    def units(self, kind: str) -> list[int]:
        """The units of one kind of event, in order."""
        return [unit for k, unit in self.log if k == kind]


_WORKER = Member(role=Role.WORKER, rank=0, incarnation="0" * 32, node="here", replica=0)
_SHARD = Member(role=Role.SHARD, rank=0, incarnation="1" * 32, node="here")


@dataclass
class FakeView:
    """Stands for `JobView` with one worker."""

    steps: FakeSteps

    def me(self) -> Member:
        return self.steps.me

    def wait_complete(self) -> None:
        self.steps.wait_complete()

    def wait_members(self, ready: Callable[[Any], bool], timeout_s: float, what: str) -> None:
        self.steps.wait_members(ready, timeout_s, what)


class FakeAttachments:
    """Stands for `Attachments`; nothing was restored."""

    def register(self, key: str, source: Callable[[], bytes | None]) -> None: ...

    def header(self, key: str) -> Header:
        return Header()

    def attach(self, key: str, content: object) -> None: ...

    def offer(self, key: str, content: bytes) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


@dataclass
class FakeWorld:
    """Stands for `World` with one worker."""

    steps: FakeSteps = field(default_factory=FakeSteps)
    world_size: int = 1
    num_shards: int = 1
    rank: int = 0
    is_main_process: bool = True
    names: Names = field(default_factory=Names)
    attachments: FakeAttachments = field(default_factory=FakeAttachments)
    membership: Membership = field(
        default_factory=lambda: Membership(
            generation=1, step=0, version=0, workers=(_WORKER,), shards=(_SHARD,), num_replicas=1, complete=True
        )
    )

    @property
    def models(self) -> FakeWorld:
        """The one model that the fake steps are of, whatever its name."""
        return self

    def register(self, spec: JobSpec, name: str) -> tuple[FakeSteps, Registered]:
        return self.steps, self.steps.register(spec)

    @property
    def view(self) -> FakeView:
        return FakeView(self.steps)

    @property
    def lease_s(self) -> float:
        return self.steps.lease_s

    def gather_json(self, value: Any, *, name: str) -> list[Any]:
        return [value]

    def node_group(self, grouping: Grouping) -> ProcessGroup:
        return ProcessGroup.mock()

    def replace_parameters(self, units: Iterable[tuple[int, Array]], *, model: str = "") -> None:
        for unit, values in units:
            self.steps.upload(unit, values)
        self.steps.epoch = self.steps.asked_epoch = self.steps.epoch + 1


class FakeGroup:
    """Stands for the world's default group."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.ranks = (0,)
        self._group = ProcessGroup.mock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
