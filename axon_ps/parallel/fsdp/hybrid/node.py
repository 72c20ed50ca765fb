"""HYBRID_SHARD: the workers of a node as one replica, behind the interface that `Runtime` knows from `StepClient`.

`NodeSteps` gathers a unit from the node's workers, each of which has a shard of it in the wire dtype (`shards.py`), and
averages a gradient inside the node before each worker pushes its shard. Only shards cross the network.

Invariants:
- The workers of a node make the same calls in the same order; what they decide by (epoch, version, ticket) is agreed on
  among them first, since they are notified at different moments. `vote` compares what each has done, so that workers
  that ran different modules get an error and not a wrong sum.
- After a worker of the node was lost, no further collective inside the node is begun in that step: units come unsharded
  from the servers, gradients are dropped, and the vote is an abort. The next forward begins with groups of who is there
  then (`NodeGroups.form`), which is where a worker that replaces another begins, too. Where nobody comes back in time
  all of the node fails, and the other nodes go on.
- After any other failure inside the node every call raises that error.
- Everything that must keep its order inside the node goes through one queue; what is agreed on goes through a second
  group, so that it does not wait behind data.

Note: [On GPUs]
    The node's collectives are of device memory then, by NCCL: units are gathered into it and gradients averaged in it.
    Only a worker's own shards are copied to the host and back, once for each version and each gradient, since gRPC
    takes them from page-locked host memory, on a stream beside the caller's (`collectives.staging`). A shard that was
    uploaded stays in device memory, for backward too, unless CPUOffload offloads parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import Awaited, LoopWork, WorkQueue
from axon_ps.errors import AxonError, Broken, Closed, Disagreement
from axon_ps.parallel.dtypes import TORCH_DTYPES
from axon_ps.parallel.fsdp.hybrid.node_groups import NodeGroups
from axon_ps.parallel.fsdp.hybrid.shards import NodeShards, UnitShard
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.parallel.work import QueuedWork
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
        shared: the ticket of the node's pushes.
    """

    shared: Ticket

    def void(self, why: str) -> Self:
        """See `Ticket.void`."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why, shared=self.shared.void(why))


class NodeSteps:
    """A `StepClient` for a worker that shares its units with the other workers of its node.

    Args:
        steps: the worker's own.
        groups: the workers of the node.
        spec: of the job; a node is a replica in it.
        wire: what units are gathered as.
        num_servers: shard servers of the job.
        device: where the node's collectives are; None = in host memory. See Note: [On GPUs].
        retain_on_device: retain shards in device memory too, once they were needed there.
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
        retain_on_device: bool = True,
        meter: Meter,
    ) -> None:
        self.device = None if device is None else torch.empty(0, device=device).device  # with its number
        self._staging = Staging()
        self._steps = steps
        self._groups = groups
        self._work_queue = WorkQueue("axon-ps-node-units")
        self._units = spec.layout.units
        self._grad = spec.precision.grad
        self._wire = wire
        self._num_workers, chunk_numel = groups.data.world_size, spec.options.chunk_numel
        slices_of = spec.plan(num_servers).slices
        self._shards = NodeShards(
            steps,
            self._wanted,
            [partition_bounds(slices, chunk_numel, self._num_workers) for slices in slices_of],
            wire=wire,
            device=self.device,
            retain_on_device=retain_on_device,
            staging=self._staging,
            meter=meter,
        )
        self._shards.make(groups.data.rank)
        self._call_digest = hashlib.sha256()
        self._failure: AxonError | None = None  # what no further step can be made after
        self._group_error: AxonError | None = None  # what ended the node's groups, until they are formed again
        self._expected: Sequence[Hyper] | None = None
        self._agreed = steps.latest

    @property
    def epoch(self) -> int:
        """How often the parameters were replaced, as the node's workers agreed."""
        return self._agreed[0] if self._group_error is None else self._steps.epoch

    @property
    def asked_epoch(self) -> int:
        """The newest epoch that this worker asked for, or waited for."""
        return self._steps.asked_epoch

    @property
    def version(self) -> int:
        """Committed steps, as the node's workers agreed."""
        return self._agreed[1] if self._group_error is None else self._steps.version

    @property
    def copied(self) -> int:
        """See `StepClient.copied`; a worker was notified of nothing newer than the node agreed on."""
        return self._steps.copied

    def shard_numel(self, unit: int) -> int:
        """Elements of this worker's shard of a unit."""
        return self._shards[unit].values.numel()

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
        self._steps.wait_latest(self._agreed)  # pulls are of versions that this worker was notified of

    def _form_again(self) -> None:
        """Make the node's groups anew. What the queue still has to do is of the old ones, and does nothing."""
        self._work_queue.submit(lambda: None).result(self._steps.timeout_s)
        _logger.warning("this node makes its groups again, since a worker of it was lost: %s", self._group_error)
        self._groups.form(self._group_error)
        self._shards.make(self._groups.data.rank)
        self._call_digest, self._expected = hashlib.sha256(), None
        self._group_error = None

    @property
    def latest(self) -> Position:
        """The newest (epoch, version) that this worker was notified of; the node may not have agreed on it yet."""
        return self._steps.latest

    def ticket(self, began: Position | None = None) -> NodeTicket:
        """The ticket of the node's first worker: whether it is valid is the same for all of them.

        It is void if any of them began at something else than the node agreed on, or than is there now.
        """
        mine = self._steps.ticket(began)
        stale = mine.is_void or began not in (None, self._agreed)
        rows = self._exchange([mine.generation, mine.step, mine.num_replicas, stale])
        if rows is None:
            return self._node_ticket(mine).void(f"the node's groups ended: {self._group_error}")
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
            num_replicas=shared.num_replicas * self._num_workers,
            shared=shared,
        )

    def _exchange(self, values: Sequence[int]) -> Array | None:
        """Every worker's numbers, i64[workers, numbers]; None once a worker of the node was lost."""
        mine = np.array([values], np.int64)
        return self._within(lambda: self._groups.control.all_gather(mine))

    def _within(self, call: Callable[[], T]) -> T | None:
        """What a collective of the node gives; None, and from then on at once, if a worker of the node was lost."""
        if self._group_error is not None:
            return None
        try:
            return call()
        except (Broken, Closed) as error:
            self._group_error = error
            return None

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """As `StepClient.register_optimizer`."""
        self._steps.register_optimizer(optimizer)

    # ------------------------------------------------------------------ parameters

    def gather(self, unit: int, out: Array | torch.Tensor) -> QueuedWork[int]:
        """Fill `out` from the node's workers, each of which first pulls its shard if that is not current.

        Args:
            unit: its number.
            out: wire[unit_numel], in device memory if `device` is given and else in host memory; must stay untouched
                until the work is done.
        """
        self._record(b"g", unit)
        target = bytes_of(out)
        if self._group_error is None:
            self._shards.pull(unit)

        def run() -> int:
            version = self._within(lambda: self._gather_within(unit, target))
            return self._gather_from_servers(unit, target) if version is None else version

        return self._in_order(run, f"gathering unit {unit} inside the node")

    def _gather_within(self, unit: int, target: Flat) -> int:
        shard = self._shards[unit]
        self._shards.wait_pulled(unit)
        counts = [n * self._wire.itemsize for n in shard.counts]
        mine = dataclasses.replace(bytes_of(self._shards.values(shard)), stream=target.stream)
        self._groups.data.all_gather(mine, out=target, counts=counts)
        return self.version

    def _gather_from_servers(self, unit: int, target: Flat) -> int:
        """Fill `target`, u8[nbytes], from the servers alone."""
        host = self._staging.allocate(target.array) if target.device else target.array
        work = self._steps.gather(unit, host.view(self._wire.numpy))
        if not target.device:
            return work.wait()
        try:
            version = work.wait()
            with arrays.on_stream(target):
                self._staging.upload(host, target.array)
            return version
        finally:
            self._staging.free(host)

    def wait_pulled(self) -> None:
        """Block until this worker's shards are those of the current version."""
        self._shards.pull_all()
        for unit in range(len(self._units)):
            self._shards.wait_pulled(unit)

    def _wanted(self, unit: int) -> Position:
        """(epoch, version) that this worker's shard of a unit must have now."""
        return self.epoch, self.version if self._units[unit].trainable else self.copied

    # ------------------------------------------------------------------ gradients

    def push(
        self, unit: int, grad: Array | torch.Tensor | None, ticket: Ticket, done: Callable[[], None] | None = None
    ) -> QueuedWork[None]:
        """Add up the node's gradients of a unit, and push this worker's shard of the sum.

        Args:
            unit: its number.
            grad: wire[unit_numel], in device memory if `device` is given; overwritten. None when no worker of the node
                has one.
            ticket: from `ticket()`.
            done: called when the buffer is free again.
        """
        assert isinstance(ticket, NodeTicket)
        self._record(b"a" if grad is None else b"p", unit)
        shard = self._shards[unit]
        full = None if grad is None else arrays.flatten(typed(grad, self._grad))

        def run() -> LoopWork[None] | None:
            started = False
            try:
                mine = None if full is None else self._within(lambda: self._reduced(shard, full))
                if shard.end == shard.begin or self._group_error is not None:
                    return None
                sent, free = (None, done) if mine is None else self._on_host(mine, done)
                started = True
                pushing = self._steps.push(unit, sent, ticket.shared, free, begin=shard.begin, end=shard.end)
                if (hyper := self._expected) is not None:
                    self._shards.pull_speculative(unit, ticket.shared, hyper)
                return pushing
            finally:
                if not started and done is not None:
                    done()

        return self._in_order(run, f"pushing unit {unit} of the node", lambda: done() if done is not None else None)

    def _reduced(self, shard: UnitShard, full: Flat) -> Flat:
        """This worker's shard of the node's sum, a view of `full`."""
        mine = dataclasses.replace(full, array=full.array[shard.begin : shard.end], shape=(shard.end - shard.begin,))
        self._groups.data.reduce_scatter(full, out=mine, counts=shard.counts)
        return mine

    def _on_host(self, mine: Flat, done: Callable[[], None] | None) -> tuple[Array, Callable[[], None] | None]:
        """The shard in host memory to push from (page-locked if it was on the device), and what to call afterwards."""
        if not mine.device:
            return mine.array, done
        host = self._staging.allocate(mine.array)
        with arrays.on_stream(mine):
            self._staging.download(mine.array, host)

        def free() -> None:
            self._staging.free(host)
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
        committed: Position | None = None
        try:
            decision = self._vote(ticket, pushes, max_norm=max_norm, hyper=hyper)
            as_expected = (decision.clip_factor, decision.hyper) == (1.0, self._expected)
            if decision.outcome is Outcome.COMMIT and as_expected:
                committed = self.epoch, decision.version
        finally:
            self._shards.settle_speculative(committed)
            self._expected = None
        return self._decided(decision)

    def _vote(
        self, ticket: NodeTicket, pushes: Sequence[Awaited], *, max_norm: float, hyper: Sequence[Hyper]
    ) -> Decision:
        digest, self._call_digest = self._call_digest.digest(), hashlib.sha256()
        number = int.from_bytes(digest[:8], "little", signed=True)
        rows = self._exchange([number])
        if rows is None:
            void = ticket.shared.void(f"the node's groups ended: {self._group_error}")
            return self._steps.vote(void, (), max_norm=max_norm, hyper=hyper)
        if len({int(row[0]) for row in rows}) > 1:
            raise Disagreement(
                "the workers of this node used different units, or in another order, in this step; under HYBRID_SHARD "
                "they must run the same modules in the same order, since each of them has a shard of every unit"
            )
        return self._steps.vote(ticket.shared, pushes, max_norm=max_norm, hyper=hyper)

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """As `StepClient.copy_from`: every worker of the node votes for it."""
        return self._decided(self._steps.copy_from(source, weight))

    def _decided(self, decision: Decision) -> Decision:
        """After a commit, begin to pull what the step has changed."""
        if decision.outcome is Outcome.COMMIT and self._group_error is None:
            self._agreed = self._agreed[0], decision.version
            self._shards.pull_all()
        return decision

    def expect(self, hyper: Sequence[Hyper] | None) -> None:
        """The hyperparameters that this step will be voted for with, unclipped; None = expect nothing."""
        self._expected = None if hyper is None else tuple(hyper)

    def wait_complete(self, timeout_s: float | None = None) -> object:
        """As `StepClient.wait_complete`."""
        return self._steps.wait_complete(timeout_s)

    def statistics(self) -> dict[str, float]:
        """As `StepClient.statistics`, and bytes that were copied between the device and the host."""
        return {**self._steps.statistics(), **self._staging.statistics()}

    def close(self) -> None:
        """End the queue; the groups are the world's."""
        self._work_queue.close(_CLOSE_TIMEOUT_S)

    def _in_order(
        self, run: Callable[[], Any], what: str, given_up: Callable[[], object] = lambda: None
    ) -> QueuedWork[Any]:
        """A call on the queue; after one has failed none is made any more, since the workers have lost step."""

        def guarded() -> Any:
            if self._failure is not None:
                given_up()
                raise self._failure
            try:
                return run()
            except AxonError as error:
                self._failure = error
                raise

        return QueuedWork(self._work_queue.submit(guarded), what)

    def _record(self, what: bytes, unit: int) -> None:
        self._call_digest.update(what + unit.to_bytes(4, "little"))


def bytes_of(data: Array | torch.Tensor) -> Flat:
    """u8[nbytes]: the same memory."""
    return arrays.flatten(data.view(torch.uint8) if isinstance(data, torch.Tensor) else data.view(np.uint8))


def typed(grad: Array | torch.Tensor, dtype: DType) -> Any:
    """A gradient in its own dtype: numpy has no bf16, for which it is uint16."""
    if isinstance(grad, torch.Tensor):
        return grad
    return torch.from_numpy(grad).view(TORCH_DTYPES[dtype]) if dtype is DType.BF16 else grad
