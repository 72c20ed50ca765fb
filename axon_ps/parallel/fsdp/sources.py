"""`ParameterSource`: the ways in which the values of a unit come into this worker's memory.

source           where the values are              how they come
RemoteSource     on the shard servers              as messages, into `flat` or into a buffer beside it
MappedSource     on a server of this host          `flat` is the server's memory; see `flat_unit`, Note: [Mapped units]
NodeSource       in shards on the node's workers   as from the servers; in device memory where the node's groups are
HostCopySource   in host memory, once gathered     copied from there (CPUOffload.PARAMS)
LocalSource      in the masters, on this worker    copied from there (NO_SHARD; in `no_shard.replicated_unit`)

A unit's source is chosen when the model is wrapped. A `MappedSource` may later be replaced by a `RemoteSource`.
Values on their way are a `PendingGather`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.steps import Mapped, Pending, Position, ServerSteps, Steps, position_of
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.sharding.layout import Unit
from axon_ps.types import Array, DType, Hyper
from axon_ps.worker.steps.ticket import Ticket

_STORAGE_VIEW = {DType.F32: torch.float32, DType.BF16: torch.uint16, DType.F16: torch.float16}


def array_of(buffer: torch.Tensor, wire: DType) -> Array:
    """Return a host buffer as a numpy array (bf16 as uint16), without a copy."""
    array: Array = buffer.view(_STORAGE_VIEW[wire]).numpy()
    return array


def _window(tensor: torch.Tensor, wire: DType) -> Array:
    """Return a host tensor's memory as a numpy array that torch does not know of.

    See `flat_unit`, Note: [Memory that comes and goes]. The array has a reference to the tensor, since a model may be
    dropped during a gather into its memory.
    """
    raw = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    raw.tensor = tensor  # type: ignore[attr-defined]
    array: Array = np.frombuffer(memoryview(raw), dtype=wire.numpy)
    return array


@dataclass(eq=False)
class PendingGather:
    """Values of a unit that are on their way.

    Attributes:
        at: (epoch, version) of the values; for those of an undecided step, the version before it.
        work: the work to wait for; None = nothing.
        buffer: the buffer that they come into; None = `flat`, or memory of the source.
        in_place: True if they come into `flat`, so that its previous values are lost.
        speculative: True if it was begun before its step was decided.
        result: the result, if there is no work.
        flat_bytes: memory that will count as that of `flat`.
    """

    at: Position
    work: Pending | None = None
    buffer: torch.Tensor | None = None
    in_place: bool = False
    speculative: bool = False
    result: Any = None
    flat_bytes: int = 0


class GatheredUnit(Protocol):
    """The unit whose values are gathered; see `parallel.fsdp.flat_unit.FlatUnit`."""

    index: int
    unit: Unit
    source: ParameterSource
    wire: DType
    wire_bytes: int
    nbytes: int
    flat: torch.Tensor

    @property
    def trainable(self) -> bool:
        """True if the optimizer updates it."""

    def allocate(self) -> None:
        """Allocate the memory of `flat`."""

    def free_storage(self) -> None:
        """Free the memory of `flat`."""

    def fill(self, values: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy values into `flat`. They may have another dtype or device."""

    def use_memory(self, mapped: Mapped | None) -> None:
        """Let `flat` be this memory; None = memory of its own."""

    def abandon(self) -> None:
        """Stop the gather that is under way."""


class ParameterSource(ABC):
    """The way in which the values of a unit come.

    Args:
        steps: the model's steps, with the version that the values must have.

    Attributes:
        buffered: True if a gather takes memory beside `flat`.
        retains: True if that memory stays until the values of another version are gathered into it.
    """

    buffered = True
    retains = False

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def wanted(self, flat: GatheredUnit) -> Position:
        """Return the (epoch, version) that the values must have now."""
        return position_of(self._steps.view, trainable=flat.trainable)

    def is_remote(self, at: Position) -> bool:
        """Return True if the values of `at` must be requested from other processes."""
        return True

    def speculates(self, flat: GatheredUnit) -> bool:
        """Return True if values of an undecided step can be gathered, and this saves time."""
        return False

    def gather_bytes(self, flat: GatheredUnit) -> int:
        """Return the memory that a gather takes before the unit is unsharded."""
        return flat.wire_bytes

    def torn(self, flat: GatheredUnit) -> bool:
        """Return True if current values were changed since they were read: the job goes on without this worker."""
        return False

    @abstractmethod
    def start(self, flat: GatheredUnit, at: Position) -> PendingGather:
        """Request the values of `at`."""

    def start_speculative(self, flat: GatheredUnit, ticket: Ticket, hyper: Sequence[Hyper]) -> PendingGather:
        """Request the values that the step of `ticket` will give the unit if it commits unclipped with `hyper`."""
        raise NotImplementedError(f"{type(self).__name__} does not speculate")

    @abstractmethod
    def finish(self, flat: GatheredUnit, pending: PendingGather, result: Any) -> bool:
        """Put the values that have come into `flat`; return False if none have, and they must be requested again."""

    def cancel(self, pending: PendingGather) -> None:
        """Stop a gather, whose memory is not touched afterwards."""
        if pending.work is not None:
            pending.work.cancel()


class _GatheringSource(ParameterSource):
    """A source that gathers through the steps, into `flat` or into a buffer.

    Args:
        steps: gathers.
        pool: buffers.
        buffered: True if values come into a buffer, since `flat` has another dtype or kind of memory than they have
            when they are gathered.
    """

    def __init__(self, steps: Steps, pool: BufferPool, *, buffered: bool) -> None:
        super().__init__(steps)
        self._pool = pool
        self.buffered = buffered

    def start(self, flat: GatheredUnit, at: Position) -> PendingGather:
        buffer, out = self._target(flat)
        return PendingGather(at, self._steps.parameters.gather(flat.index, out), buffer, in_place=buffer is None)

    def finish(self, flat: GatheredUnit, pending: PendingGather, result: Any) -> bool:
        if pending.buffer is not None:
            flat.fill(pending.buffer, non_blocking=False)
            self._pool.give(pending.buffer)
        return True

    def cancel(self, pending: PendingGather) -> None:
        super().cancel(pending)
        if pending.buffer is not None:
            self._pool.give(pending.buffer)

    def _target(self, flat: GatheredUnit) -> tuple[torch.Tensor | None, Array | torch.Tensor]:
        """Return the buffer, if there is one, and the memory to gather into."""
        if not self.buffered:
            flat.allocate()
            return None, self._output(flat.flat, flat.wire)
        buffer = self._pool.take(flat.unit.numel, TORCH_DTYPES[flat.wire])
        return buffer, self._output(buffer, flat.wire)

    def _output(self, memory: torch.Tensor, wire: DType) -> Array | torch.Tensor:
        return array_of(memory, wire) if self.buffered else _window(memory, wire)


class RemoteSource(_GatheringSource):
    """The shard servers send the values. Servers of other hosts send those of an undecided step, too.

    From a server of this host, values are copied from memory once the step is decided. This takes less time than the
    server would take to make them twice.
    """

    def __init__(self, steps: ServerSteps, pool: BufferPool, *, buffered: bool) -> None:
        super().__init__(steps, pool, buffered=buffered)
        self._servers = steps.parameters

    def speculates(self, flat: GatheredUnit) -> bool:
        return not self._servers.is_near(flat.index)

    def start_speculative(self, flat: GatheredUnit, ticket: Ticket, hyper: Sequence[Hyper]) -> PendingGather:
        at = self.wanted(flat)
        buffer, out = self._target(flat)
        work = self._servers.gather_speculative(flat.index, out, ticket, hyper)
        return PendingGather(at, work, buffer, in_place=buffer is None, speculative=True)


class NodeSource(_GatheringSource):
    """The workers of the node send each other their shards. Each worker pulls its own shard, also speculatively.

    Args:
        steps, pool, buffered: as for `_GatheringSource`.
        on_device: True if the node's groups are of device memory.
    """

    def __init__(self, steps: Steps, pool: BufferPool, *, buffered: bool, on_device: bool) -> None:
        super().__init__(steps, pool, buffered=buffered)
        self._on_device = on_device

    def _output(self, memory: torch.Tensor, wire: DType) -> Array | torch.Tensor:
        return memory if self._on_device else super()._output(memory, wire)


class MappedSource(ParameterSource):
    """The values are read in the memory of the unit's server, if it is on this host. Each unit has its own source.

    Args:
        steps: maps.
        otherwise: the source that replaces this one if the values cannot be mapped.
    """

    buffered = False

    def __init__(self, steps: ServerSteps, otherwise: RemoteSource) -> None:
        super().__init__(steps)
        self._servers = steps.parameters
        self._otherwise = otherwise
        self._mapped: Mapped | None = None  # the memory of `flat`
        self._read_at: Position | None = None  # of the values that were unsharded last

    def start(self, flat: GatheredUnit, at: Position) -> PendingGather:
        mapped = self._servers.mapped(flat.index)
        work = self._servers.map(flat.index, flat.wire) if mapped is None else None
        return PendingGather(at, work, result=mapped, flat_bytes=flat.nbytes)

    def finish(self, flat: GatheredUnit, pending: PendingGather, result: Any) -> bool:
        if result is None:
            flat.abandon()
            flat.free_storage()
            flat.use_memory(None)
            flat.source = self._otherwise
            return False
        if result is not self._mapped:
            self._mapped = result
            flat.use_memory(result)
        flat.allocate()
        self._read_at = pending.at
        return True

    def torn(self, flat: GatheredUnit) -> bool:
        if self._mapped is None or self._read_at is None or self._read_at != self.wanted(flat):
            return False
        return not self._mapped.is_at(self._read_at[1])


class HostCopySource(ParameterSource):
    """The values of a version are gathered into host memory once, and copied from there. Each unit has its own source.

    Values of an undecided step overwrite those that backward has read.

    Args:
        steps: gathers.
        values: wire[unit_numel] in host memory.
    """

    retains = True

    def __init__(self, steps: ServerSteps, values: torch.Tensor) -> None:
        super().__init__(steps)
        self._servers = steps.parameters
        self._values = values
        self._at: Position | None = None  # of `values`

    def is_remote(self, at: Position) -> bool:
        return self._at != at

    def gather_bytes(self, flat: GatheredUnit) -> int:
        return flat.wire_bytes if self._at is None else 0

    def start(self, flat: GatheredUnit, at: Position) -> PendingGather:
        if self._at == at:
            return PendingGather(at)
        self._at = None
        return PendingGather(at, self._servers.gather(flat.index, array_of(self._values, flat.wire)))

    def speculates(self, flat: GatheredUnit) -> bool:
        return not self._servers.is_near(flat.index)

    def start_speculative(self, flat: GatheredUnit, ticket: Ticket, hyper: Sequence[Hyper]) -> PendingGather:
        at, self._at = self.wanted(flat), None
        out = array_of(self._values, flat.wire)
        work = self._servers.gather_speculative(flat.index, out, ticket, hyper)
        return PendingGather(at, work, speculative=True)

    def finish(self, flat: GatheredUnit, pending: PendingGather, result: Any) -> bool:
        self._at = pending.at
        flat.fill(self._values, non_blocking=True)
        return True
