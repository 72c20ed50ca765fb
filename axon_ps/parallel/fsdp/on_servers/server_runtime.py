"""`ServerRuntime`: the steps of a model whose parameters are on the shard servers: push, vote, take the decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch

from axon_ps.data.elastic import Coordinates
from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.observe.moments import Moment, reached
from axon_ps.parallel.fsdp.abstract_runtime import LOAD_FAILED
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit, check_unchanged, release_held
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.on_servers.sent_step import SentStep
from axon_ps.parallel.fsdp.on_servers.served_masters import ServedMasters
from axon_ps.parallel.fsdp.on_servers.served_optimizer import ServedOptimizer
from axon_ps.parallel.fsdp.on_servers.speculation import Speculation
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.steps import Position, Steps, StepStatus
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.markers import profiled
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.traffic import BUFFERS
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Decision, Hyper, OptimizerChange, OptimizerSpec, Outcome, StepResult
from axon_ps.worker.checkpoints import CheckpointInfo, info_from_json, info_to_json
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.world import world_of

_logger = logging.getLogger(__name__)

MOST_REFUSED = 3
"""If this many steps in a row are aborted because of the votes, every worker raises an error."""


class ServerRuntime(Runtime):
    """`Runtime` of a model whose steps are made on the shard servers.

    Args:
        client: the worker's step client.
        steps: makes the worker's half of a step; None = `client`.
        device: the device on which `steps` takes gradients; None = in host memory.
        wrapping, units, gather_buffers: as for `Runtime`.
    """

    def __init__(
        self,
        wrapping: Wrapping,
        client: StepClient,
        units: Sequence[ModuleUnit],
        gather_buffers: BufferPool,
        *,
        steps: Steps | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(wrapping, units, gather_buffers, client.trace)
        self._client = client
        self._steps: Steps = client if steps is None else steps
        self._grad_wire = wrapping.spec.precision.grad
        most_numel = max((flat.unit.numel for flat in self.flats if flat.trainable), default=0)
        self._out = BufferPool(
            BUFFERS * most_numel * self._grad_wire.itemsize,
            self.grad_meter,
            pinned=wrapping.on_device,
            device=device,
            make=None if wrapping.on_device else client.gradients.buffer,
        )
        self._ticket: Ticket | None = None
        self._began: Position | None = None  # the version at which the step began
        self._optimizer = ServedOptimizer(wrapping, self._steps, lambda: self.version)
        first, foreign = _numbers(wrapping.spec.layout, self.flats)
        gradients, on_device = self._steps.gradients, device is not None
        self._step = SentStep(gradients, first, self._grad_wire, on_device=on_device, foreign=foreign)
        self._speculation = Speculation(self.flats, first, self.gathering)
        self.masters = ServedMasters(wrapping, client, self.flats)
        self._withdrawn: StepResult | None = None  # result of a withdrawn step, until the next forward

    @property
    def now(self) -> Position:
        """(epoch, version) that this worker computes with."""
        return self._steps.view.epoch, self._steps.view.version

    @property
    def version(self) -> int:
        """Committed steps, copies from other models included."""
        return self._client.view.latest_version

    def _begin_step(self) -> None:
        """Begin a step at the version where the one before ended, or at a newer epoch that this worker asked for."""
        if self._began is None or self._began[0] < self.one_version.at[0] == self._steps.view.asked_epoch:
            self._began = self.one_version.at
        self._withdrawn = None
        extra_bytes = self._client.parameters.in_flight_bytes  # see `gathering`, Note: [Memory]
        self.gathering.extend(extra_bytes)
        self._out.extend(extra_bytes)

    # ------------------------------------------------------------------ gradients

    def _push(self, flat: FlatUnit) -> None:
        """Flatten, scale, cast and send a unit's gradient. The vote will name the parameters that have none."""
        ticket = self._next_addend() if self._step.begins_addend(flat.index) else self._current_ticket()
        began = time.perf_counter()
        size_bytes = flat.unit.numel * self._grad_wire.itemsize
        if not self._out.has_capacity(size_bytes):
            with self.markers.within("push wait", flat.unit.name):
                self._client.wait_for_capacity(ticket, partial(self._out.wait_for_capacity, size_bytes))
        self.counters.push_wait_s += time.perf_counter() - began
        buffer = self._out.take(flat.unit.numel, TORCH_DTYPES[self._grad_wire])
        batch = self.accumulation.batch
        weight = 1.0 / ticket.num_replicas if batch is None else batch.weight
        self.grad_meter.add(-flat.grads.staged_bytes)
        with profiled("push", flat.unit.name):
            self._step.pack(flat, buffer, weight / self.loss_scale.value, self._zeroed)
        self.counters.pushed_bytes += buffer.nbytes if flat.pushes else 0
        self.sent.add(flat.index, len(flat.params))
        self._step.push(flat, buffer, ticket, partial(self._out.give, buffer), retains=bool(self.resends))

    def _after_backward(self) -> None:
        super()._after_backward()
        self._step.end_backward()

    def _gather_speculative(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """See `Speculation.gather`."""
        if flat.index in self._step:
            self._speculation.gather(unit, flat)

    def _current_ticket(self) -> Ticket:
        if self._ticket is None:
            batch = self.accumulation.batch
            self._speculate(self._steps.ticket(self._began, None if batch is None else batch.generation))
        assert self._ticket is not None
        return self._ticket

    def _next_addend(self) -> Ticket:
        """Begin another addend of the step. See `sent_step`, Note: [Several backwards]."""
        ticket = self._current_ticket()
        self._client.check_addends()
        self._step.push_absent(self.flats, ticket, self._zeroed)
        self._step.begin_addend()
        return self._speculate(ticket.next_addend())

    def _speculate(self, ticket: Ticket) -> Ticket:
        """Begin a step or another addend, with this ticket, and gather as the step is expected to be."""
        self._ticket = ticket
        expected = self.expected_hyper if self._speculation.may_begin(ticket, self._wrapping.spec.precision) else None
        hyper = None if expected is None else expected()
        self._speculation.begin(ticket, hyper)
        self._expect(hyper)
        return ticket

    def _expect(self, hyper: Sequence[Hyper] | None) -> None:
        """Expect these hyperparameters in the vote for this step, unclipped; None = they are not known."""

    # ------------------------------------------------------------------ the step

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """See `ServedOptimizer.register`."""
        self._optimizer.register(spec)

    def change_optimizer(self, spec: OptimizerSpec, *, retains_moments: bool = False) -> None:
        """See `ServedOptimizer.replace`."""
        self._optimizer.replace(spec, retains_moments=retains_moments)

    def retain_moments(self) -> None:
        """See `Runtime.retain_moments`."""
        self._optimizer.retain_moments()

    @property
    def optimizer_change(self) -> OptimizerChange | None:
        """See `Runtime.optimizer_change`; None once others have made that step without this worker."""
        return self._optimizer.change

    @property
    def committed(self) -> Mapping[str, str]:
        """See `Runtime.committed`."""
        return self._client.view.committed

    def step_status(self) -> StepStatus:
        """See `Runtime.step_status`."""
        view = self._client.view
        view.job.wait_complete()
        with view.job.changed:
            generation = view.wait_in_replica().generation
            return StepStatus(generation=generation, coordinates=self.coordinates, committed=view.committed)

    @property
    def coordinates(self) -> Coordinates:
        """See `Runtime.coordinates`."""
        view = self._client.view
        with view.job.changed:
            members, me = view.membership, view.me
        ranks = members.sharing_samples(me)
        return Coordinates(
            replica=me.replica, num_replicas=members.num_replicas, index=ranks.index(me.rank), workers=len(ranks)
        )

    def step(self, hyper: Sequence[Hyper], commit: Mapping[str, str]) -> StepResult:
        """Send the remaining gradients, vote, wait for the decision, and start gathering for the next step.

        If `zero_grad()` has withdrawn the step's gradients, and no forward ran since, the step has ended already. Its
        result is returned then, unless gradients were set to zero. The other workers make no further step.
        """
        batch = self.accumulation.batch
        if batch is not None and not batch.is_last:
            self.sent.decided(None)
            reason = f"micro-batch {batch.index + 1} of {batch.count} of this worker's in the step"
            return StepResult(committed=False, version=self.version, grad_norm=0.0, reason=reason)
        of_loader = {} if batch is None else batch.commit
        if taken := commit.keys() & of_loader.keys():
            raise InvalidRequest(f"the loader commits {min(taken)!r} with this step; give your value another name")
        together = {**commit, **of_loader}
        self.check_backward()
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None and not self._zeroed:
            return withdrawn
        self.sent.check_none_retained()
        began = time.perf_counter()
        max_norm, factor, decision = self.sent.checked_max_norm(), self.sent.factor, None
        try:
            self._step.add_to_last()
            for unit, flat in ((owner, flat) for owner in self.units for flat in owner.trained):
                if flat.grads.present or self._step.lacks(flat, self._zeroed):
                    self._push(flat)
                    self._speculation.gather(unit, flat)
            ticket = self._current_ticket()
            self._step.push_absent(self.flats, ticket, self._zeroed)
            change = self._optimizer.change
            vote = partial(
                self._steps.vote,
                max_norm=max_norm,
                hyper=hyper,
                commit=together,
                optimizer=change,
                untouched=self._step.untouched,
            )
            with profiled("vote"):
                decision = vote(ticket, self._step.pushes, weight=_weight(factor, ticket))
            for _ in range(self.resends if batch is None else 0):  # a loader gives its batches again by itself
                if decision.outcome is not Outcome.ABORT or decision.refused:
                    break
                self._speculation.settle(None)
                self.on_abort()
                self._steps.view.job.wait_complete()
                before, ticket = ticket, self._steps.ticket(self._began)
                decision = vote(ticket, self._step.push_again(before, ticket), weight=_weight(factor, ticket))
            if decision.outcome is Outcome.ABORT:
                self._steps.view.job.wait_complete()
        finally:
            self._speculation.end(decision, clipped=max_norm != 0.0)
            self._end_step(decision)
            self.counters.step_wait_s += time.perf_counter() - began
        if decision.outcome is Outcome.COMMIT and change is not None:
            self._optimizer.changed(change)
            self.moments_of = self.moments_of if change.retains_moments else decision.version
        self.gathering.training = True
        for unit in (u for u in self.units if u.depth):  # the step was made within their forward
            self.gathering.need(unit)
        result = self._decided(decision, decision.grad_norm)
        reached(Moment.BETWEEN_STEPS, decision.version)
        return result

    def _end_step(self, decision: Decision | None) -> None:
        """End a step; None = its decision is not known."""
        release_held(self.units)
        self.sent.decided(None if decision is None else decision.grad_norm)
        if decision is not None and decision.outcome is not Outcome.ABORT:
            self.sent.retain(param._axon_home for param in self._step.applied)  # type: ignore[attr-defined]
        self._ticket, self._began, self.has_gradients = None, self._steps.view.latest, False
        self.one_version.at = self.now
        for flat in self.flats:
            flat.expire_views()
        self._step.end()
        self.accumulation.batch = None
        self.decisions += 1

    def _withdraw(self) -> None:
        """See `Runtime._withdraw`."""
        if not self._step.pushes:
            return
        began, decision = time.perf_counter(), None
        try:
            ticket = self._current_ticket()
            self._step.push_absent(self.flats, ticket, self._zeroed)  # those of others may be queued behind these
            decision = self._steps.vote(ticket, self._step.pushes, max_norm=0.0, hyper=(), withdrawn=True)
            _logger.warning(
                "the gradients that were sent for step %s were withdrawn by zero_grad(): it was aborted (%s)",
                decision.step,
                decision.reason,
            )
            self._steps.view.job.wait_complete()
        finally:
            self._speculation.settle(None)
            self._end_step(decision)
            self.counters.step_wait_s += time.perf_counter() - began
        self._withdrawn = self._decided(decision, 0.0)

    def copy_from(self, other: Self, weight: float) -> StepResult:
        """See `Runtime.copy_from`.

        Raises:
            Misuse: gradients were sent for the step under way.
        """
        if self._ticket is not None:
            raise Misuse("gradients were sent for the step under way; call optimizer.step() before you copy")
        began, before = time.perf_counter(), self.version
        try:
            decision = self._steps.copy_from(other._client, weight)
            if decision.outcome is Outcome.ABORT:
                self._steps.view.job.wait_complete()
            self._optimizer.moved(decision.version - before)
        finally:
            self._began = self._steps.view.latest
            self.counters.step_wait_s += time.perf_counter() - began
        return self._decided(decision, 0.0)

    def _decided(self, decision: Decision, norm: float) -> StepResult:
        """Count a decision, and begin to gather for the next forward."""
        if decision.refused >= MOST_REFUSED:
            raise StepAborted(
                f"{decision.refused} steps in a row were aborted because of what the workers voted, the last one since "
                f"{decision.reason}. The parameters are those of version {decision.version}"
            )
        self.gathering.prefetch()
        committed = decision.outcome is Outcome.COMMIT
        if committed:
            self.on_commit()
        self.last_reason = decision.reason
        result = StepResult(committed=committed, version=decision.version, grad_norm=norm, reason=decision.reason)
        return self.counters.counted(result)

    # ------------------------------------------------------------------ checkpoints

    def save(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        states: Mapping[int, FileEntry],
        version: int | None,
    ) -> CheckpointInfo | None:
        """See `Runtime.save`. The state of the optimizer is the servers'."""
        check_unchanged(self.flats)
        world = world_of(self._wrapping.group)
        return world.save_checkpoint(uri, extra=extra, states=states) if world.is_main_process else None

    def load(self, uri: str, optimizer: torch.optim.Optimizer | None) -> CheckpointInfo:
        """See `Runtime.load`.

        Raises:
            Misuse: the optimizer is to replace another type of optimizer with the next step.
        """
        world, view = world_of(self._wrapping.group), self._client.view
        if optimizer is not None:
            self._optimizer.check_loaded()
        before = view.epoch
        # not a barrier, which would block until a server that lost its parameters has them again
        world.gather_json(None, name="axon_ps/begin_load")

        def restore() -> dict[str, Any] | None:
            first = world.is_main_process
            return info_to_json(world.restore_checkpoint(uri, models=[self._wrapping.name])) if first else None

        restored = next(r for r in self.masters.together(LOAD_FAILED, restore) if r is not None)
        view.wait_epoch(before + 1)
        if optimizer is not None:
            self.retain_moments()
        self._optimizer.restored()
        self.moments_of = self.version
        return info_from_json(restored)

    def release(self) -> None:
        """See `Runtime.release`."""
        world = world_of(self._wrapping.group)
        world.barrier("axon_ps/release")
        world.models.release(self._client)

    def reset(self) -> None:
        """See `Runtime.reset`."""
        super().reset()
        self._out.trim()

    def statistics(self) -> dict[str, float]:
        """See `Runtime.statistics`. The data plane's are `wire_*`."""
        return {**super().statistics(), **{f"wire_{k}": v for k, v in self._client.statistics().items()}}


def _numbers(layout: Layout, flats: Iterable[FlatUnit]) -> tuple[dict[int, int], list[int]]:
    """Return by unit the number of its first parameter, and the numbers of the parameters that others push.

    In a mesh workers of other lines push the gradients of trainable parameters that this worker does not push.
    """
    first = dict(enumerate(accumulate((len(unit.parameters) for unit in layout.units), initial=0)))
    pushed = {flat.index for flat in flats if flat.pushes}
    numbered = enumerate(layout.parameters())
    return first, [number for number, (unit, _) in numbered if unit not in pushed and layout.units[unit].trainable]


def _weight(factor: float, ticket: Ticket) -> float | None:
    """Return the weight of a vote by which the mean over replicas is multiplied by a factor; None = 1 in total."""
    return None if factor == 1.0 else 1.0 / (factor * ticket.num_replicas)
