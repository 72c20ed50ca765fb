"""HYBRID_SHARD: the workers of a node as one replica, behind the interface that `Runtime` knows from `StepClient`.

`NodeSteps` gathers a unit from the node's workers, each of which keeps its own part as it travels, and averages a
gradient inside the node before each worker pushes its part. Only parts cross the network.

Invariants:
- The workers of a node make the same calls in the same order; what they decide by (epoch, version, ticket) is agreed on
  among them first, since they learn of it at different moments. `vote` compares what each has done, so that workers
  that ran different modules get an error and not a wrong sum.
- After a worker of the node was lost, no further collective inside the node is begun in that step: units come unsharded
  from the servers, gradients are dropped, and the vote is an abort. The next forward begins with groups of who is there
  then (`NodeGroups.form`), which is where a worker that was started in the place of another begins, too. Where nobody
  comes back in time the node fails as a whole, and the other nodes go on.
- After any other failure inside the node every call raises that error.
- Everything that must keep its order inside the node goes through one lane; what is agreed on goes through a second
  group, so that it does not wait behind data.

Note: [On GPUs]
    The node's collectives are of device memory then, by NCCL: units are gathered into it and gradients averaged in it.
    Only a worker's own parts cross to the host and back, once for each version and each gradient, since gRPC takes them
    from page-locked host memory; they cross on a stream beside the caller's (`collectives.staging`). A part that was
    uploaded is kept in device memory, for backward too, unless CPUOffload says that parameters are kept on the host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import Awaited, Lane, LoopWork
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, StepAborted
from axon_ps.parallel.dtypes import TORCH_DTYPES
from axon_ps.parallel.fsdp.flat_unit import array_of
from axon_ps.parallel.fsdp.hybrid.node_groups import NodeGroups
from axon_ps.parallel.fsdp.memory import Meter, host_empty
from axon_ps.parallel.work import LaneWork
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.partitions import partition_bounds
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, Outcome
from axon_ps.worker.step_client import NO_GENERATION, StepClient, Ticket

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeTicket(Ticket):
    """A ticket that the workers of a node share.

    Attributes:
        num_replicas: gradients that are averaged: those of all workers of all nodes.
        shared: the ticket that pushes are named by.
    """

    shared: Ticket

    def void(self, why: str) -> Self:
        """See `Ticket.void`."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why, shared=self.shared.void(why))


class _Part:
    """This worker's part of a unit: wire[end - begin], and of which version it is."""

    def __init__(self, bounds: tuple[int, ...], rank: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.begin, self.end = bounds[rank], bounds[rank + 1]
        self.counts = [b - a for a, b in itertools.pairwise(bounds)]
        self.values = host_empty(self.end - self.begin, dtype, pinned=pinned)
        self.uploaded: torch.Tensor | None = None  # the same in device memory, if it was needed there and is kept
        self.held: tuple[int, int] | None = None  # (epoch, version) of what is here or under way
        self.work: LoopWork[int] | None = None
        self.speculative = False  # whether what is under way is of a step that is not decided
        self.was_speculative = False  # whether it was begun so, and the step was decided as expected

    def drop(self) -> None:
        """Forget what is here or under way."""
        if self.work is not None:
            self.work.cancel()
        self.held, self.work, self.speculative, self.was_speculative = None, None, False, False


class NodeSteps:
    """A `StepClient` for a worker that shares its units with the other workers of its node.

    Args:
        steps: the worker's own.
        groups: the workers of the node.
        spec: of the job; a node is a replica in it.
        wire: what units are gathered as.
        num_servers: shard servers of the job.
        device: where the node's collectives are; None = in host memory. See Note: [On GPUs].
        keep_on_device: keep parts in device memory too, once they were needed there.
        meter: counts their memory.
    """

    def __init__(
        self,
        steps: StepClient,
        groups: NodeGroups,
        spec: JobSpec,
        wire: DType,
        num_servers: int,
        *,
        device: torch.device | None = None,
        keep_on_device: bool = True,
        meter: Meter,
    ) -> None:
        self.device = None if device is None else torch.empty(0, device=device).device  # with its number
        self._keep_on_device = keep_on_device
        self._staging = Staging()
        self._steps = steps
        self._groups = groups
        self._lane = Lane("axon-ps-node-units")
        self._units = spec.layout.units
        self._grad = spec.precision.grad
        self._wire = wire
        size, chunk_numel = groups.data.world_size, spec.options.chunk_numel
        self._bounds = [partition_bounds(slices, chunk_numel, size) for slices in spec.plan(num_servers).slices]
        self._meter = meter
        self._rank = -1
        self._parts: list[_Part] = []
        self._make_parts()
        self._done = hashlib.sha256()
        self._failure: AxonError | None = None  # what no further step can be made after
        self._lost: AxonError | None = None  # what ended the node's groups, until they are made again
        self._expected: Sequence[Hyper] | None = None
        self._pulling = threading.RLock()  # speculative pulls begin on the lane's thread, others on the caller's
        self._agreed = steps.latest

    def _make_parts(self) -> None:
        """This worker's parts, empty; others than before if it has another place among the node's workers."""
        for part in self._parts:
            part.drop()
            self._let_go(part)
        if self._rank != self._groups.data.rank:
            self._meter.add(-self.part_bytes)
            self._rank = self._groups.data.rank
            dtype = TORCH_DTYPES[self._wire]
            self._parts = [_Part(bounds, self._rank, dtype, pinned=self.device is not None) for bounds in self._bounds]
            self._meter.add(self.part_bytes)

    @property
    def epoch(self) -> int:
        """How often the parameters were replaced, as the node's workers agreed."""
        return self._agreed[0] if self._lost is None else self._steps.epoch

    @property
    def asked_epoch(self) -> int:
        """The newest epoch that this worker asked for, or waited for."""
        return self._steps.asked_epoch

    @property
    def version(self) -> int:
        """Committed steps, as the node's workers agreed."""
        return self._agreed[1] if self._lost is None else self._steps.version

    @property
    def copied(self) -> int:
        """See `StepClient.copied`; a worker has heard of nothing newer than the node agreed on."""
        return self._steps.copied

    @property
    def part_bytes(self) -> int:
        """Memory of all parts of this worker."""
        return sum(p.values.nbytes for p in self._parts)

    def part_numel(self, unit: int) -> int:
        """Elements of this worker's part of a unit."""
        return self._parts[unit].values.numel()

    # ------------------------------------------------------------------ what the node agrees on

    def agree(self) -> None:
        """At the start of a forward: settle on the newest (epoch, version) that any worker of the node knows.

        If a worker of the node was lost, this waits for it to be back, or for another in its place.

        Raises:
            MemberLost: nobody came, and the job goes on without this node.

        After an error: the workers of the node do not agree; build the model again.
        """
        while (rows := self._exchange(self._steps.latest)) is None:
            self._form_again()
        self._agreed = max((int(e), int(v)) for e, v in rows)
        self._steps.wait_latest(self._agreed)  # what is pulled is of what this worker has heard of

    def _form_again(self) -> None:
        """Make the node's groups anew. What the lane still has to do is of the old ones, and does nothing."""
        self._lane.submit(lambda: None).result(self._steps.timeout_s)
        _logger.warning("this node makes its groups again, since a worker of it was lost: %s", self._lost)
        self._groups.form(self._lost)
        self._make_parts()
        self._done, self._expected = hashlib.sha256(), None
        self._lost = None

    @property
    def latest(self) -> tuple[int, int]:
        """(epoch, version) that this worker has heard of; the node may not have agreed on it yet."""
        return self._steps.latest

    def ticket(self, began: tuple[int, int] | None = None) -> NodeTicket:
        """The ticket of the node's first worker: whether it is valid is the same for all of them.

        It is void if any of them began at something else than the node agreed on, or than is there now.
        """
        mine = self._steps.ticket(began)
        stale = mine.is_void or began not in (None, self._agreed)
        rows = self._exchange([mine.generation, mine.step, mine.num_replicas, stale])
        if rows is None:
            return self._node_ticket(mine).void(f"the node's groups ended: {self._lost}")
        if any(row[3] for row in rows):
            return self._node_ticket(mine).void(
                mine.why_void or "the parameters changed since a worker of the node began its step"
            )
        generation, step, replicas = map(int, rows[0][:3])
        if mine.generation < generation:
            self._steps.wait_generation(generation, self._steps.timeout_s)
        replica = self._steps.me.replica
        return self._node_ticket(Ticket(generation=generation, step=step, replica=replica, num_replicas=replicas))

    def _node_ticket(self, shared: Ticket) -> NodeTicket:
        return NodeTicket(
            generation=shared.generation,
            step=shared.step,
            replica=shared.replica,
            num_replicas=shared.num_replicas * len(self._bounds[0][1:]),
            shared=shared,
        )

    def _exchange(self, values: Sequence[int]) -> Array | None:
        """Every worker's numbers, i64[workers, numbers]; None once a worker of the node was lost."""
        mine = np.array([values], np.int64)
        return self._within(lambda: self._groups.control.all_gather(mine))

    def _within(self, call: Callable[[], T]) -> T | None:
        """What a collective of the node gives; None, and from then on at once, if a worker of the node was lost."""
        if self._lost is not None:
            return None
        try:
            return call()
        except (Broken, Closed) as error:
            self._lost = error
            return None

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """As `StepClient.register_optimizer`."""
        self._steps.register_optimizer(optimizer)

    # ------------------------------------------------------------------ parameters

    def gather(self, unit: int, out: Array | torch.Tensor) -> LaneWork[int]:
        """Fill `out` from the node's workers, each of which first pulls its part if that is not current.

        Args:
            unit: its number.
            out: wire[unit_numel], in device memory if `device` is given and else in host memory; must stay untouched
                until the work is done.
        """
        self._noted(b"g", unit)
        target = bytes_of(out)
        if self._lost is None:
            self._pull(unit)

        def run() -> int:
            version = self._within(lambda: self._gather_within(unit, target))
            return self._gather_whole(unit, target) if version is None else version

        return self._in_order(run, f"gathering unit {unit} inside the node")

    def _gather_within(self, unit: int, target: Flat) -> int:
        part = self._parts[unit]
        with self._pulling:
            if part.speculative:  # used once more after its push, which went through this lane before us
                self._pull(unit)
        self._wait(unit)
        counts = [n * self._wire.itemsize for n in part.counts]
        mine = dataclasses.replace(bytes_of(self._part_values(part)), stream=target.stream)
        self._groups.data.all_gather(mine, out=target, counts=counts)
        return self.version

    def _gather_whole(self, unit: int, target: Flat) -> int:
        """Fill `target`, u8[nbytes], from the servers alone."""
        host = self._staging.take(target.array) if target.device else target.array
        work = self._steps.gather(unit, host.view(self._wire.numpy))
        if not target.device:
            return work.wait()
        try:
            version = work.wait()
            with arrays.on_stream(target):
                self._staging.upload(host, target.array)
            return version
        finally:
            self._staging.give(host)

    def _part_values(self, part: _Part) -> torch.Tensor:
        """This worker's part where the node's collectives take it."""
        if self.device is None:
            return part.values
        held, uploaded = part.held, part.uploaded
        if uploaded is not None:
            return uploaded
        uploaded = torch.empty_like(part.values, device=self.device)
        self._staging.upload(array_of(part.values, self._wire), arrays.flatten(uploaded).array)
        with self._pulling:
            if self._keep_on_device and part.held == held and not part.speculative:  # else another is pulled meanwhile
                part.uploaded = uploaded
                self._meter.add(uploaded.nbytes)
        return uploaded

    def _let_go(self, part: _Part) -> None:
        """Free a part's memory on the device."""
        with self._pulling:
            if part.uploaded is not None:
                self._meter.add(-part.uploaded.nbytes)
                part.uploaded = None

    def pull(self) -> None:
        """Begin to pull this worker's part of every unit that has changed, in forward order."""
        for unit in range(len(self._parts)):
            self._pull(unit)

    def wait_pulled(self) -> None:
        """Block until this worker's parts are those of the current version."""
        self.pull()
        for unit in range(len(self._parts)):
            self._wait(unit)

    def _wanted(self, unit: int) -> tuple[int, int]:
        return self.epoch, self.version if self._units[unit].trainable else self.copied

    def _pull(self, unit: int) -> None:
        part = self._parts[unit]
        with self._pulling:
            if part.held != self._wanted(unit):
                part.drop()
                part.held = self._wanted(unit)
                self._begin_pull(unit)

    def _begin_pull(self, unit: int) -> None:
        part = self._parts[unit]
        part.was_speculative = False
        self._let_go(part)
        if part.end > part.begin:
            out = array_of(part.values, self._wire)
            part.work = self._steps.gather(unit, out, begin=part.begin, end=part.end)

    def _pull_speculative(self, unit: int, ticket: NodeTicket) -> None:
        """Behind its push, begin to pull our part as the step is expected to leave it, over the old values."""
        part = self._parts[unit]
        with self._pulling:
            if self._expected is not None and part.end > part.begin:
                part.drop()
                self._let_go(part)
                part.speculative = True
                out = array_of(part.values, self._wire)
                part.work = self._steps.gather_speculative(
                    unit, out, ticket.shared, self._expected, begin=part.begin, end=part.end
                )

    def _settle(self, decision: Decision | None) -> None:
        """Commit the speculative pulls if the step was decided as expected, and discard them if not."""
        as_expected = (
            decision is not None
            and decision.outcome is Outcome.COMMIT
            and (decision.clip_factor, decision.hyper) == (1.0, self._expected)
        )
        with self._pulling:
            for part in self._parts:
                if part.speculative and decision is not None and as_expected:
                    part.held, part.speculative, part.was_speculative = (self.epoch, decision.version), False, True
                elif part.speculative:
                    part.drop()
            self._expected = None

    def _wait(self, unit: int) -> None:
        part = self._parts[unit]
        while (work := part.work) is not None:
            try:
                work.wait()
            except Closed:
                if part.work is work:
                    raise
                continue  # it was given up for a newer one
            except AxonError as error:
                # restored to an older version meanwhile, or the pull was speculative: pull in the ordinary way
                if not (part.was_speculative or isinstance(error, StepAborted)):
                    raise
                if part.work is work:
                    self._begin_pull(unit)
                continue
            if part.work is work:
                part.work = None

    # ------------------------------------------------------------------ gradients

    def push(
        self, unit: int, grad: Array | torch.Tensor | None, ticket: Ticket, done: Callable[[], None] | None = None
    ) -> LaneWork[None]:
        """Add up the node's gradients of a unit, and push this worker's part of the sum.

        Args:
            unit: its number.
            grad: wire[unit_numel], in device memory if `device` is given; overwritten. None when no worker of the node
                has one.
            ticket: from `ticket()`.
            done: called when the buffer is free again.
        """
        assert isinstance(ticket, NodeTicket)
        self._noted(b"a" if grad is None else b"p", unit)
        part = self._parts[unit]
        whole = None if grad is None else arrays.flatten(typed(grad, self._grad))

        def run() -> LoopWork[None] | None:
            started = False
            try:
                mine = None if whole is None else self._within(lambda: self._reduced(part, whole))
                if part.end == part.begin or self._lost is not None:
                    return None
                sent, free = (None, done) if mine is None else self._on_host(mine, done)
                started = True
                pushing = self._steps.push(unit, sent, ticket.shared, free, begin=part.begin, end=part.end)
                self._pull_speculative(unit, ticket)
                return pushing
            finally:
                if not started and done is not None:
                    done()

        return self._in_order(run, f"pushing unit {unit} of the node", lambda: done() if done is not None else None)

    def _reduced(self, part: _Part, whole: Flat) -> Flat:
        """This worker's part of the node's sum, in its place in `whole`."""
        mine = dataclasses.replace(whole, array=whole.array[part.begin : part.end], shape=(part.end - part.begin,))
        self._groups.data.reduce_scatter(whole, out=mine, counts=part.counts)
        return mine

    def _on_host(self, mine: Flat, done: Callable[[], None] | None) -> tuple[Array, Callable[[], None] | None]:
        """What is pushed, and what frees it: it comes from host memory, the page-locked if it was on the device."""
        if not mine.device:
            return mine.array, done
        host = self._staging.take(mine.array)
        with arrays.on_stream(mine):
            self._staging.download(mine.array, host)

        def free() -> None:
            self._staging.give(host)
            if done is not None:
                done()

        return host, free

    # ------------------------------------------------------------------ the step

    def vote(self, ticket: Ticket, pushes: Sequence[Awaited], *, max_norm: float, hyper: Sequence[Hyper]) -> Decision:
        """As `StepClient.vote`, once all workers of the node are found to have done the same.

        Raises:
            Disagreement: they have not; nobody has voted, and the step will not commit.
        """
        assert isinstance(ticket, NodeTicket)
        decision = None
        try:
            decision = self._vote(ticket, pushes, max_norm=max_norm, hyper=hyper)
        finally:
            self._settle(decision)
        if decision.outcome is Outcome.COMMIT:
            self._agreed = self._agreed[0], decision.version
            self.pull()
        return decision

    def _vote(
        self, ticket: NodeTicket, pushes: Sequence[Awaited], *, max_norm: float, hyper: Sequence[Hyper]
    ) -> Decision:
        digest, self._done = self._done.digest(), hashlib.sha256()
        number = int.from_bytes(digest[:8], "little", signed=True)
        rows = self._exchange([number])
        if rows is None:
            void = ticket.shared.void(f"the node's groups ended: {self._lost}")
            return self._steps.vote(void, (), max_norm=max_norm, hyper=hyper)
        if len({int(row[0]) for row in rows}) > 1:
            raise Disagreement(
                "the workers of this node used different units, or in another order, in this step; under HYBRID_SHARD "
                "they must run the same modules in the same order, since each of them holds a part of every unit"
            )
        return self._steps.vote(ticket.shared, pushes, max_norm=max_norm, hyper=hyper)

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """As `StepClient.copy_from`: every worker of the node votes for it."""
        decision = self._steps.copy_from(source, weight)
        if decision.outcome is Outcome.COMMIT and self._lost is None:
            self._agreed = self._agreed[0], decision.version
            self.pull()
        return decision

    def expect(self, hyper: Sequence[Hyper] | None) -> None:
        """The hyperparameters that this step will be voted for with, unclipped; None = expect nothing."""
        self._expected = None if hyper is None else tuple(hyper)

    def wait_complete(self, timeout_s: float | None = None) -> object:
        """As `StepClient.wait_complete`."""
        return self._steps.wait_complete(timeout_s)

    def statistics(self) -> dict[str, float]:
        """As `StepClient.statistics`, and bytes that crossed between the device and the host."""
        return {**self._steps.statistics(), **self._staging.statistics()}

    def close(self) -> None:
        """End the lane; the groups are the world's."""
        self._lane.close(_CLOSE_TIMEOUT_S)

    def _in_order(
        self, run: Callable[[], Any], what: str, given_up: Callable[[], object] = lambda: None
    ) -> LaneWork[Any]:
        """A call on the lane; after one has failed none is made any more, since the workers have lost step."""

        def guarded() -> Any:
            if self._failure is not None:
                given_up()
                raise self._failure
            try:
                return run()
            except AxonError as error:
                self._failure = error
                raise

        return LaneWork(self._lane.submit(guarded), what)

    def _noted(self, what: bytes, unit: int) -> None:
        self._done.update(what + unit.to_bytes(4, "little"))


def bytes_of(data: Array | torch.Tensor) -> Flat:
    """u8[nbytes]: the same memory."""
    return arrays.flatten(data.view(torch.uint8) if isinstance(data, torch.Tensor) else data.view(np.uint8))


def typed(grad: Array | torch.Tensor, dtype: DType) -> Any:
    """A gradient as what its bits are: numpy has no bf16, and we call it uint16."""
    if isinstance(grad, torch.Tensor):
        return grad
    return torch.from_numpy(grad).view(TORCH_DTYPES[dtype]) if dtype is DType.BF16 else grad
