"""`Fragment`: units of a module that are synchronized together. To the job it is a model, with versions of its own.

Owns: the copy at the last sync (f32, on the host), and the weight of the training since. Refuses: the time of a sync.

Note: [Where a worker goes on]
    progress = local - anchor         since the last sync
    push:    sent = local             the push is anchor - sent
    commit:  local' = new + progress', anchor' = new, and progress' is
        mixing None:  local - sent
        mixing a:     a * (local - new), so local' = a * local + (1 - a) * new
    the job went on without this worker:  local' = new + (local - anchor), anchor' = new
    Progress made while a push is under way is progress from the new values, and goes with the next push. Without
    mixing none of it is lost or counted twice. Mixing (Wang et al. 2020, Overlap Local-SGD,
    https://arxiv.org/abs/2002.09539; Douillard et al. 2025, Streaming DiLoCo, Algorithm 2,
    https://arxiv.org/abs/2501.18512) retains the fraction a of it, and adds the fraction a of the way back from new to
    sent. With outer momentum, new is beyond the average of the values sent. The next push then includes a part of the
    way back, so the momentum is damped. Plain averaging has none to damp. If no inner step was made after the push
    began, nothing is mixed: local' = new. (After an error the same numbers may be pushed again. Then the training in
    between is progress, as with None.)

    For parameters narrower than f32 the new local values are rounded. anchor' is the rounded values minus progress', so
    rounding is never pushed as progress.

    Mixing does not change weights: a push counts for the inner steps since the push before it. A weight is how much a
    worker's training counts in the average. All workers retain the same fraction of their training.

Invariant: `anchor` has the servers' values at `synced`, (epoch, version). The parameters are that plus progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from axon_ps.errors import StepAborted
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.parallel.fsdp.steps import Pending, Position
from axon_ps.parallel.precision import TORCH_DTYPES, view_of
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, Hyper, OptimizerSpec, Outcome
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.world import World

UNKNOWN: Position = (-1, -1)
"""Position of an anchor that has no version's values."""


@dataclass(kw_only=True)
class OuterPush:
    """An outer step of a fragment that this worker has begun.

    Attributes:
        ticket: the attempt's ticket.
        sent: f32[unit_numel] by unit, the parameters that pseudo-gradients are made of; None for a frozen unit.
        weight: the weight of the pseudo-gradients.
        works: the transfers under way.
        finite: True if the pseudo-gradients are finite.
        repeated: True if the same numbers were pushed before, in an attempt that ended in an error.
    """

    ticket: Ticket
    sent: list[torch.Tensor | None]
    weight: float
    works: list[Pending] = field(default_factory=list)
    finite: bool = True
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """The end of an outer step.

    Attributes:
        decision: the coordinator's.
        at: (epoch, version) of `values`.
        values: f32[unit_numel] by unit, the new parameters; None if it did not commit.
    """

    decision: Decision
    at: Position = UNKNOWN
    values: list[torch.Tensor] | None = None


class Fragment:
    """One fragment of a module. See the docstring of this file.

    Args:
        world: the workers that train it.
        spec: the spec that it is registered with.
        units: its units.
        name: its model's name in the job.
        pinned: True if copies are in page-locked memory, for a module on a GPU.

    Attributes:
        units: its units.
        steps: this worker's part in its outer steps.
        synced: (epoch, version) of the anchor.
        weight: the weight of the training since the last sync that committed.
        begun: an outer step whose end this worker does not know.
        anchor: f32[unit_numel] by unit, the values of the last sync.
    """

    def __init__(
        self, world: World, spec: JobSpec, units: tuple[wrap.WrappedUnit, ...], name: str, *, pinned: bool
    ) -> None:
        self._world = world
        self._pinned = pinned
        self._wire = spec.precision.grad
        self.spec = spec
        self.units = units
        self.name = name
        self.steps: StepClient
        self.synced = UNKNOWN
        self.weight = 0.0
        self.begun: OuterPush | None = None
        self.anchor = self._new_values()

    def register(self, module: nn.Module, hyper: Hyper) -> None:
        """Register it with the job. The servers' first values are those of the worker of lowest rank.

        Raises:
            LayoutMismatch: another worker registered it otherwise.
        """
        self.steps = materialize.register(self._world, self.spec, self.name, module, self.units, None)
        group_of = tuple(0 if self.units[unit].unit.trainable else -1 for unit, _ in self.spec.layout.parameters())
        self.steps.register_optimizer(OptimizerSpec(name="sgd", groups=(hyper,), group_of=group_of))

    @property
    def now(self) -> Position:
        """(epoch, version) that the job's parameters are at, as this worker knows it."""
        return self.steps.view.epoch, self.steps.view.version

    @property
    def nbytes(self) -> int:
        """Bytes of its pseudo-gradients before they are compressed."""
        return sum(w.unit.numel for w in self.units if w.unit.trainable) * self._wire.itemsize

    # ------------------------------------------------------------------ an outer step

    def push(self, out: BufferPool) -> OuterPush:
        """Begin an outer step: push weight * (anchor - parameters). Without a weight there is nothing to push.

        After an error: `begun` has the outer step. The same attempt is begun again with the same numbers, of which the
        servers may have some.
        """
        ticket = self.steps.ticket(self.synced)
        if self.begun is None or self.begun.ticket != ticket:
            sent = [self._local(wrapped) if wrapped.unit.trainable else None for wrapped in self.units]
            self.begun = OuterPush(ticket=ticket, sent=sent, weight=self.weight)
        else:
            self.begun.repeated = True
        begun, push = self.begun, self.steps.gradients.push
        begun.works = []
        for index, (wrapped, local) in enumerate(zip(self.units, begun.sent, strict=True)):
            if local is None:
                continue
            if not begun.weight:
                begun.works.append(push(index, None, ticket))
                continue
            size_bytes = wrapped.unit.numel * self._wire.itemsize
            self.steps.wait_for_capacity(ticket, partial(out.wait_for_capacity, size_bytes))
            buffer = out.take(wrapped.unit.numel, TORCH_DTYPES[self._wire])
            with torch.no_grad():
                buffer.copy_((self.anchor[index] - local).mul_(begun.weight))
            begun.finite &= bool(torch.isfinite(buffer).all())
            begun.works.append(push(index, array_of(buffer, self._wire), ticket, partial(out.give, buffer)))
        return begun

    def end(self, push: OuterPush, hyper: Hyper) -> OuterResult:
        """Vote for a push, wait for the decision, and gather the resulting parameters.

        Raises:
            Timeout: no decision came in time, or a shard server did not answer.

        After an error: the outer step may have committed.
        """
        decision = self.steps.vote(push.ticket, push.works, max_norm=0.0, hyper=[hyper], weight=push.weight)
        if decision.outcome is Outcome.ABORT:
            self.steps.view.job.wait_complete()
        if decision.outcome is not Outcome.COMMIT:
            return OuterResult(decision=decision)
        at, values = self.gather()
        return OuterResult(decision=decision, at=at, values=values)

    def take(self, push: OuterPush, ended: OuterResult, mixing: float | None) -> None:
        """Go on from the result of an outer step. See Note: [Where a worker goes on]."""
        assert ended.values is not None
        self.move(ended.at, ended.values, push.sent, mixing)
        self.weight -= push.weight

    # ------------------------------------------------------------------ values

    def gather(self) -> tuple[Position, list[torch.Tensor]]:
        """Return the (epoch, version) of the job's parameters, and the parameters.

        Raises:
            Timeout: a shard server did not answer in time.
        """
        values = self._new_values()
        while True:
            now = self.now
            works = [self.steps.parameters.gather(index, value.numpy()) for index, value in enumerate(values)]
            try:
                for work in works:
                    work.wait()
            except StepAborted:  # restored to an older version meanwhile: take that
                if now == self.now:
                    raise
            else:
                if now == self.now:
                    return now, values

    def move(
        self,
        at: Position,
        values: list[torch.Tensor],
        begun: Sequence[torch.Tensor | None] | None,
        mixing: float | None = None,
    ) -> None:
        """Set the parameters to these values plus the progress since `begun`. None = the progress is lost.

        With `mixing` they are set to mixing * their own values + (1 - mixing) * these values instead.
        """
        self.synced = UNKNOWN  # if this is interrupted
        with torch.no_grad():
            for index, wrapped in enumerate(self.units):
                new, progress = values[index], None
                before = None if begun is None or not wrapped.unit.trainable else begun[index]
                if before is not None:
                    progress = self._local(wrapped)
                    progress = progress.sub_(before) if mixing is None else progress.sub_(new).mul_(mixing)
                    new = new + progress
                for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                    param.copy_(view_of(new, spec))
                    if param.dtype != torch.float32:
                        view_of(values[index], spec).copy_(param)
                        if progress is not None:
                            view_of(values[index], spec).sub_(view_of(progress, spec))
        self.anchor, self.synced = values, at
        self.begun = None
        if begun is None:
            self.weight = 0.0

    def to_anchor(self) -> None:
        """Go back to the values of the last sync."""
        with torch.no_grad():
            for wrapped, anchor in zip(self.units, self.anchor, strict=True):
                for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                    param.copy_(view_of(anchor, spec))

    def params(self) -> Iterator[nn.Parameter]:
        """Return its parameters."""
        return (param for wrapped in self.units for param in wrapped.params)

    def _new_values(self) -> list[torch.Tensor]:
        options: Any = {"dtype": torch.float32, "device": "cpu", "pin_memory": self._pinned}
        return [torch.empty(wrapped.unit.numel, **options) for wrapped in self.units]

    @staticmethod
    def _local(wrapped: wrap.WrappedUnit) -> torch.Tensor:
        """Return the parameters of a unit, f32[unit_numel] on the host."""
        local = torch.empty(wrapped.unit.numel, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                view_of(local, spec).copy_(param)
        return local
