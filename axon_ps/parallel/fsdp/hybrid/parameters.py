"""The parameters of a node: each worker pulls its shard of a unit, and the units are gathered from the shards."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import LoopWork
from axon_ps.errors import AxonError, Closed, StepAborted
from axon_ps.parallel.fsdp.hybrid.calls import NodeCalls
from axon_ps.parallel.fsdp.hybrid.ticket import NodeTicket
from axon_ps.parallel.fsdp.hybrid.view import NodeView
from axon_ps.parallel.fsdp.memory import Meter, host_empty
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.parallel.fsdp.steps import Position, position_of
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.parallel.work import QueuedWork
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.partitions import partition_bounds
from axon_ps.types import Array, Decision, DType, Hyper
from axon_ps.worker.steps.parameters import Parameters


class LocalShard:
    """This worker's shard of a unit: wire[end - begin], and its version."""

    def __init__(self, bounds: tuple[int, ...], rank: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.begin, self.end = bounds[rank], bounds[rank + 1]
        self.counts = [b - a for a, b in itertools.pairwise(bounds)]
        self.values = host_empty(self.end - self.begin, dtype, pinned=pinned)
        self.uploaded: torch.Tensor | None = None  # the same in device memory, once it was needed there
        self.values_at: Position | None = None  # (epoch, version) of the values here or under way
        self.work: LoopWork[int] | None = None
        self.speculative = False  # True if the pull under way is of an undecided step
        self.was_speculative = False  # True if it was begun so, and the step was decided as expected

    def drop(self) -> None:
        """Drop the values and cancel the pull."""
        if self.work is not None:
            self.work.cancel()
        self.values_at, self.work, self.speculative, self.was_speculative = None, None, False, False


class NodeParameters:
    """The shards of one worker of a node, and gathering units from those of all.

    Args:
        own: gathers from the servers.
        view: the view that the node agreed on.
        calls: the calls inside the node.
        spec: the job's; a node is a replica in it.
        wires: by unit, the dtype in which it is gathered.
        num_servers: shard servers of the job.
        device: the device of the node's collectives; None = in host memory. See `node`, Note: [On GPUs].
        retain_on_device: retain shards in device memory too, once they were needed there.
        staging: copies between the device and the host.
        meter: counts their memory.

    Attributes:
        shards: of every unit.
        expected: the hyperparameters that this step's vote is expected to have, unclipped; None = none.
    """

    def __init__(
        self,
        own: Parameters,
        view: NodeView,
        calls: NodeCalls,
        spec: JobSpec,
        wires: Sequence[DType],
        num_servers: int,
        *,
        device: torch.device | None,
        retain_on_device: bool,
        staging: Staging,
        meter: Meter,
    ) -> None:
        self._own = own
        self._view = view
        self._calls = calls
        self._device = device
        self._retain_on_device = retain_on_device
        self._staging = staging
        self._units = spec.layout.units
        self._wires = wires
        size, chunk_numel = calls.groups.data.world_size, spec.options.chunk_numel
        self._bounds = [partition_bounds(slices, chunk_numel, size) for slices in spec.plan(num_servers).slices]
        self._meter = meter
        self._rank = -1
        self.shards: list[LocalShard] = []
        self.expected: Sequence[Hyper] | None = None
        self._pulling = threading.RLock()  # speculative pulls begin on the queue's thread, others on the caller's
        self.make_shards()

    def make_shards(self) -> None:
        """Empty this worker's shards. If its rank in the node has changed, make the shards of the new rank."""
        for shard in self.shards:
            shard.drop()
            self._free_on_device(shard)
        if self._rank != self._calls.groups.data.rank:
            self._meter.add(-self.shard_bytes)
            self._rank = self._calls.groups.data.rank
            self.shards = [
                LocalShard(bounds, self._rank, TORCH_DTYPES[wire], pinned=self._device is not None)
                for bounds, wire in zip(self._bounds, self._wires, strict=True)
            ]
            self._meter.add(self.shard_bytes)

    @property
    def shard_bytes(self) -> int:
        """Memory of all shards of this worker."""
        return sum(p.values.nbytes for p in self.shards)

    def gather(self, unit: int, out: Array | torch.Tensor) -> QueuedWork[int]:
        """Fill `out` from the node's workers. Each of them first pulls its shard if it is not current.

        Args:
            unit: its number.
            out: wire[unit_numel], in device memory if `device` is given and else in host memory; must stay untouched
                until the work is done.
        """
        self._calls.record(b"g", unit)
        target = bytes_of(out)
        if self._calls.group_error is None:
            self._pull(unit)

        def run() -> int:
            version = self._calls.within(lambda: self._gather_within(unit, target))
            return self._gather_from_servers(unit, target) if version is None else version

        return self._calls.in_order(run, f"gathering unit {unit} inside the node")

    def _gather_within(self, unit: int, target: Flat) -> int:
        shard = self.shards[unit]
        with self._pulling:
            if shard.speculative:  # used once more after its push, which went through this queue before us
                self._pull(unit)
        self._wait(unit)
        counts = [n * self._wires[unit].itemsize for n in shard.counts]
        mine = dataclasses.replace(bytes_of(self._shard_values(unit)), stream=target.stream)
        self._calls.groups.data.all_gather(mine, out=target, counts=counts)
        return self._view.version

    def _gather_from_servers(self, unit: int, target: Flat) -> int:
        """Fill `target`, u8[nbytes], from the servers alone."""
        host = self._staging.allocate(target.array) if target.device else target.array
        work = self._own.gather(unit, host.view(self._wires[unit].numpy))
        if not target.device:
            return work.wait()
        try:
            version = work.wait()
            with arrays.on_stream(target):
                self._staging.upload(host, target.array)
            return version
        finally:
            self._staging.free(host)

    def _shard_values(self, unit: int) -> torch.Tensor:
        """Return this worker's shard of a unit in the memory of the node's collectives."""
        shard = self.shards[unit]
        if self._device is None:
            return shard.values
        values_at, uploaded = shard.values_at, shard.uploaded
        if uploaded is not None:
            return uploaded
        uploaded = torch.empty_like(shard.values, device=self._device)
        self._staging.upload(array_of(shard.values, self._wires[unit]), arrays.flatten(uploaded).array)
        with self._pulling:
            # else another version is being pulled
            if self._retain_on_device and shard.values_at == values_at and not shard.speculative:
                shard.uploaded = uploaded
                self._meter.add(uploaded.nbytes)
        return uploaded

    def _free_on_device(self, shard: LocalShard) -> None:
        """Free a shard's memory on the device."""
        with self._pulling:
            if shard.uploaded is not None:
                self._meter.add(-shard.uploaded.nbytes)
                shard.uploaded = None

    def pull(self) -> None:
        """Begin to pull this worker's shard of every unit that has changed, in forward order."""
        for unit in range(len(self.shards)):
            self._pull(unit)

    def wait_pulled(self) -> None:
        """Block until this worker's shards are those of the current version."""
        self.pull()
        for unit in range(len(self.shards)):
            self._wait(unit)

    def _wanted(self, unit: int) -> Position:
        return position_of(self._view, trainable=self._units[unit].trainable)

    def _pull(self, unit: int) -> None:
        shard = self.shards[unit]
        with self._pulling:
            if shard.values_at != self._wanted(unit):
                shard.drop()
                shard.values_at = self._wanted(unit)
                self._begin_pull(unit)

    def _begin_pull(self, unit: int) -> None:
        shard = self.shards[unit]
        shard.was_speculative = False
        self._free_on_device(shard)
        if shard.end > shard.begin:
            out = array_of(shard.values, self._wires[unit])
            shard.work = self._own.gather(unit, out, begin=shard.begin, end=shard.end)

    def pull_speculative(self, unit: int, ticket: NodeTicket) -> None:
        """Begin to pull the values that our shard is expected to have after the step, over the old values.

        As in `RemoteSource`, it is not pulled from memory of this host.
        """
        shard = self.shards[unit]
        with self._pulling:
            empty = shard.end == shard.begin
            if self.expected is not None and not empty and not self._own.is_near(unit, shard.begin, shard.end):
                shard.drop()
                self._free_on_device(shard)
                shard.speculative = True
                out = array_of(shard.values, self._wires[unit])
                shard.work = self._own.gather_speculative(
                    unit, out, ticket.shared, self.expected, begin=shard.begin, end=shard.end
                )

    def settle(self, decision: Decision | None) -> None:
        """Commit the speculative pulls if the step was decided as expected, and discard them if not."""
        committed_at: Position | None = None
        if (
            decision is not None
            and self.expected is not None
            and decision.applies(self.expected)
            and not decision.untouched
        ):
            committed_at = self._view.epoch, decision.version
        with self._pulling:
            for shard in self.shards:
                if not shard.speculative:
                    continue
                if committed_at is None:
                    shard.drop()
                else:
                    shard.values_at, shard.speculative, shard.was_speculative = committed_at, False, True
            self.expected = None

    def _wait(self, unit: int) -> None:
        shard = self.shards[unit]
        while (work := shard.work) is not None:
            try:
                work.wait()
            except Closed:
                if shard.work is work:
                    raise
                continue  # cancelled for a newer one
            except AxonError as error:
                # restored to an older version meanwhile, or the pull was speculative: pull in the ordinary way
                if not (shard.was_speculative or isinstance(error, StepAborted)):
                    raise
                if shard.work is work:
                    self._begin_pull(unit)
                continue
            if shard.work is work:
                shard.work = None


def bytes_of(data: Array | torch.Tensor) -> Flat:
    """Return the same memory as u8[nbytes]."""
    return arrays.flatten(data.view(torch.uint8) if isinstance(data, torch.Tensor) else data.view(np.uint8))
