"""`NodeShards`: this worker's shard of every unit of the model, under HYBRID_SHARD.

Owns: pulling shards from the shard servers, also speculatively behind their push, and their copies in device memory.
Refuses: to know what the node agrees on; it is told the (epoch, version) that is wanted. See `node`, Note: [On GPUs].

Thread-safe: speculative pulls begin on the thread of the node's queue, others on the caller's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from axon_ps.collectives import arrays
from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import LoopWork
from axon_ps.errors import AxonError, Closed, StepAborted
from axon_ps.parallel.dtypes import TORCH_DTYPES
from axon_ps.parallel.fsdp.memory import Meter, host_empty
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.types import DType, Hyper
from axon_ps.worker.step_client import StepClient, Ticket


class UnitShard:
    """This worker's shard of a unit: wire[end - begin], and of which version it is."""

    def __init__(self, bounds: tuple[int, ...], rank: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.begin, self.end = bounds[rank], bounds[rank + 1]
        self.counts = [b - a for a, b in itertools.pairwise(bounds)]
        self.values = host_empty(self.end - self.begin, dtype, pinned=pinned)
        self.uploaded: torch.Tensor | None = None  # the same in device memory, once it was needed there
        self.values_at: Position | None = None  # of what is here or under way
        self.work: LoopWork[int] | None = None
        self.speculative = False  # whether what is under way is of a step that is not decided
        self.was_speculative = False  # whether it was begun so, and the step was decided as expected

    def drop(self) -> None:
        """Drop the values and cancel the pull."""
        if self.work is not None:
            self.work.cancel()
        self.values_at, self.work, self.speculative, self.was_speculative = None, None, False, False


class NodeShards:
    """The shards of one worker of a node.

    Args:
        steps: pulls them.
        wanted: the (epoch, version) that a unit must have now.
        bounds: of every unit, where the shards begin and end.
        wire: what units are gathered as.
        device: where shards are needed; None = in host memory.
        retain_on_device: retain them there, once they were needed.
        staging: copies between host and device.
        meter: counts their memory.
    """

    def __init__(
        self,
        steps: StepClient,
        wanted: Callable[[int], Position],
        bounds: Sequence[tuple[int, ...]],
        *,
        wire: DType,
        device: torch.device | None,
        retain_on_device: bool,
        staging: Staging,
        meter: Meter,
    ) -> None:
        self._steps = steps
        self._wanted = wanted
        self._bounds = bounds
        self._wire = wire
        self._device = device
        self._retain_on_device = retain_on_device
        self._staging = staging
        self._meter = meter
        self._rank = -1
        self._shards: list[UnitShard] = []
        self._lock = threading.RLock()

    def __getitem__(self, unit: int) -> UnitShard:
        return self._shards[unit]

    def make(self, rank: int) -> None:
        """Make the shards of a rank of the node, empty; the same memory as before if the rank has not changed."""
        for shard in self._shards:
            shard.drop()
            self._free_on_device(shard)
        if self._rank != rank:
            self._meter.add(-self.nbytes)
            self._rank, dtype, pinned = rank, TORCH_DTYPES[self._wire], self._device is not None
            self._shards = [UnitShard(bounds, rank, dtype, pinned=pinned) for bounds in self._bounds]
            self._meter.add(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Memory of all shards in host memory."""
        return sum(shard.values.nbytes for shard in self._shards)

    def pull_all(self) -> None:
        """Begin to pull the shard of every unit that has changed, in forward order."""
        for unit in range(len(self._shards)):
            self.pull(unit)

    def pull(self, unit: int) -> None:
        """Begin to pull the shard of a unit if it has changed."""
        shard = self._shards[unit]
        with self._lock:
            if shard.values_at != (wanted := self._wanted(unit)):
                shard.drop()
                shard.values_at = wanted
                self._begin_pull(unit)

    def pull_speculative(self, unit: int, ticket: Ticket, hyper: Sequence[Hyper]) -> None:
        """Behind its push, begin to pull a shard as the step is expected to leave it, over the old values."""
        shard = self._shards[unit]
        with self._lock:
            shard.drop()
            self._free_on_device(shard)
            shard.speculative = True
            out = array_of(shard.values, self._wire)
            shard.work = self._steps.gather_speculative(unit, out, ticket, hyper, begin=shard.begin, end=shard.end)

    def settle_speculative(self, committed: Position | None) -> None:
        """A step was decided: what was pulled speculatively is of `committed`; None = it was decided otherwise."""
        with self._lock:
            for shard in self._shards:
                if shard.speculative and committed is not None:
                    shard.values_at, shard.speculative, shard.was_speculative = committed, False, True
                elif shard.speculative:
                    shard.drop()

    def wait_pulled(self, unit: int) -> None:
        """Block until the shard of a unit is there; one that is of no decided step is pulled again."""
        shard = self._shards[unit]
        with self._lock:
            if shard.speculative:  # used once more after its push
                self.pull(unit)
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

    def values(self, shard: UnitShard) -> torch.Tensor:
        """The values of a shard in the memory of the node's collectives."""
        if self._device is None:
            return shard.values
        values_at, uploaded = shard.values_at, shard.uploaded
        if uploaded is not None:
            return uploaded
        uploaded = torch.empty_like(shard.values, device=self._device)
        self._staging.upload(array_of(shard.values, self._wire), arrays.flatten(uploaded).array)
        with self._lock:
            # else another version is being pulled
            if self._retain_on_device and shard.values_at == values_at and not shard.speculative:
                shard.uploaded = uploaded
                self._meter.add(uploaded.nbytes)
        return uploaded

    def _begin_pull(self, unit: int) -> None:
        shard = self._shards[unit]
        shard.was_speculative = False
        self._free_on_device(shard)
        if shard.end > shard.begin:
            out = array_of(shard.values, self._wire)
            shard.work = self._steps.gather(unit, out, begin=shard.begin, end=shard.end)

    def _free_on_device(self, shard: UnitShard) -> None:
        with self._lock:
            if shard.uploaded is not None:
                self._meter.add(-shard.uploaded.nbytes)
                shard.uploaded = None
