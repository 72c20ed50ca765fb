"""`FlatUnit`: one unit's parameters as views of one flat tensor whose memory comes and goes.

Note: [Memory that comes and goes]
    While a unit is unsharded its parameters are views of `flat`. Resharding resizes flat's *storage* to zero bytes;
    gathering resizes it back and fills it. What autograd saved in forward is either the parameter itself or a view of
    the same storage, so it is unsharded again when backward reads it, without autograd knowing that it was away. (FSDP2
    resizes storages for the same reason.)

    While a unit is resharded, its parameters are NaN expanded to their shape (a view of the emptied storage would
    crash), and of a class that raises when values are read or written; see `sharded_parameter`. So they are between
    uses also where the values stay in memory (SHARD_GRAD_OP): they may be those of an older version.

    `tensor.numpy()` would forbid resizing for ever, so the loop's thread writes through `_window`, a raw view of the
    memory that lives only while a gather is under way and the storage cannot be resized.

Note: [Mapped units]
    Where the unit's server is on this host, `flat` is the server's own wire copy, mapped: gathering waits until it is
    at the version wanted, and resharding makes it unreadable. Nothing is allocated or copied, and what autograd saved
    stays valid. Another mapping comes only with another server, which has the same values at the same version.

A unit gathers *directly* into `flat` when the wire dtype is the compute dtype, the memory is of the same kind, and the
old values are not needed meanwhile; else into a buffer that `unshard` copies (and casts) from. It comes in host
memory, but under HYBRID_SHARD on GPUs (`gather_on_device`).

Shapes: flat: param_dtype[unit_numel]; buffer: wire[unit_numel].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.errors import AxonError, StepAborted
from axon_ps.parallel.dtypes import TORCH_DTYPES
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.sharded_parameter import become, own_grad, set_own_grad, states_of
from axon_ps.parallel.fsdp.steps import Mapped, Mapping, Pending, Speculation, Steps
from axon_ps.sharding.layout import Unit
from axon_ps.types import Array, DType, Hyper
from axon_ps.worker.steps.ticket import Ticket

_STORAGE_VIEW = {DType.F32: torch.float32, DType.BF16: torch.uint16, DType.F16: torch.float16}


def array_of(buffer: torch.Tensor, wire: DType) -> Array:
    """A host buffer as numpy sees it (bf16 as uint16), without a copy."""
    array: Array = buffer.view(_STORAGE_VIEW[wire]).numpy()
    return array


def _window(tensor: torch.Tensor, wire: DType) -> Array:
    """The memory of a host tensor as numpy, without torch knowing; see Note: [Memory that comes and goes]."""
    raw = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    array: Array = np.frombuffer(memoryview(raw), dtype=wire.numpy)
    return array


class FlatUnit:
    """One unit of the layout in this worker's memory.

    Args:
        index: number of the unit in the layout.
        unit: its layout.
        params: its parameters, in layout order; their `data` is set from now on.
        device: where they compute.
        dtype: what they compute in.
        wire: what travels.
        resident: retain the values between uses (SHARD_GRAD_OP).
        meter: counts the bytes of parameters.
        host_copy: wire[unit_numel] in host memory for what was gathered (CPUOffload.PARAMS); None = there is none.
    """

    sharded = True
    """Whether values and gradients are elsewhere between uses."""

    def __init__(
        self,
        index: int,
        unit: Unit,
        params: Sequence[nn.Parameter],
        *,
        device: torch.device,
        dtype: torch.dtype,
        wire: DType,
        resident: bool,
        meter: Meter,
        host_copy: torch.Tensor | None = None,
    ) -> None:
        self.index = index
        self.unit = unit
        self.params = tuple(params)
        self.wire = wire
        self.resident = resident
        self._meter = meter
        self._states = [states_of(type(p)) for p in self.params] if self.sharded else []
        self._unsharded: bool | None = None
        self._nan = torch.empty((), dtype=dtype, device=device)
        self._set_flat(torch.empty(unit.numel, dtype=dtype, device=device))
        self._nbytes = self.flat.nbytes
        self._maps: Mapping | None = None  # who maps the unit; None = it is gathered
        self._mapped: Mapped | None = None  # what `flat` is
        self._next_mapped: Mapped | None = None  # what it will be; None = the result of `_work`
        self._sharded_data = [self._nan.expand(p.shape) for p in unit.parameters]
        self._free_flat()  # their own values are dropped
        self._host_copy = host_copy
        self._copied: tuple[int, int] | None = None  # (epoch, version) of the values in `host_copy`
        self._on_device = False  # whether what is gathered comes in device memory
        self._may_be_direct = TORCH_DTYPES[wire] == dtype and not resident and host_copy is None
        self._direct = self._may_be_direct and not cuda.memory().is_device(device)
        self.stage_device = torch.device("cpu")
        self._staged: list[torch.Tensor | None] = [None] * len(self.params)
        self._work: Pending | None = None
        self._buffer: torch.Tensor | None = None
        self._values_at: tuple[int, int] | None = None  # (epoch, version) of the values in `flat`
        self._last_values_at: tuple[int, int] | None = None  # of the values that were in `flat` last
        self._gathering_at: tuple[int, int] | None = None  # of the values that are being gathered
        # of an undecided step: the gather, and the buffer that it fills; None = it fills `flat`
        self._speculative: tuple[Pending, torch.Tensor | None] | None = None
        self._was_speculative = False  # whether what is under way was begun before its step's decision
        self.repeated = 0  # gathers that were begun again, since what was under way was of no use

    @property
    def trainable(self) -> bool:
        """Whether the optimizer moves it."""
        return self.unit.trainable

    @property
    def gather_bytes(self) -> int:
        """Memory that a gather needs before `unshard`; a copy from host memory needs none."""
        if self._host_copy is not None:
            return 0 if self._copied is not None else self._host_copy.nbytes
        return self._nbytes if self._direct else self.unit.numel * self.wire.itemsize

    @property
    def nbytes(self) -> int:
        """Memory of the gathered unit."""
        return self._nbytes

    def may_map(self, steps: Mapping) -> None:
        """From now on, map the unit where that is possible. See Note: [Mapped units]."""
        self._maps = steps if self._direct else None

    def gather_on_device(self) -> None:
        """From now on, what is gathered comes in device memory."""
        self._on_device = True
        self._direct = self._may_be_direct

    @property
    def vacant(self) -> bool:
        """Whether it has memory of its own with no values in it, and no gather is under way."""
        return self._direct and self._maps is None and not self._storage.nbytes() and self._work is None

    @property
    def has_speculative(self) -> bool:
        """Whether the values of an undecided step are on their way."""
        return self._speculative is not None

    @property
    def _speculative_in_place(self) -> bool:
        """Whether the values of an undecided step are on their way into `flat`."""
        return self._speculative is not None and self._speculative[1] is None

    @property
    def unsharded_bytes(self) -> int:
        """Memory while it is unsharded: `flat`, and the buffer of the gather where there is one."""
        return self._nbytes + (0 if self._direct else self.unit.numel * self.wire.itemsize)

    @property
    def reshardable_bytes(self) -> int:
        """Memory that resharding frees: of `flat` (0 when resident), and of a gather that is under way."""
        in_use = 0 if self.resident else self._flat_bytes
        if self._maps is not None and self._gathering_at is not None:
            in_use = self._nbytes
        return in_use + (self._buffer.nbytes if self._buffer is not None else 0)

    def remote(self, steps: Steps) -> bool:
        """Whether the next gather requests the values from servers, instead of copying them from host memory."""
        return self._copied is None or self._copied != self.wanted(steps)

    def wanted(self, steps: Steps) -> tuple[int, int]:
        """(epoch, version) that the values must have now; no step changes a frozen unit but one that copies."""
        return steps.view.epoch, steps.view.version if self.trainable else steps.view.copied

    def is_current(self, steps: Steps) -> bool:
        """Whether the values in `flat` are current."""
        return self._values_at == self.wanted(steps)

    def torn(self, steps: Steps) -> bool:
        """Whether a mapped unit's server has changed it since it was read: the job goes on without this worker."""
        if self._mapped is None or self._last_values_at is None or self._last_values_at != self.wanted(steps):
            return False
        return not self._mapped.is_at(self._last_values_at[1])

    def is_gathering(self, steps: Steps) -> bool:
        """Whether current values are being gathered."""
        return self._gathering_at is not None and self._gathering_at == self.wanted(steps)

    def start_gather(self, steps: Steps, pool: BufferPool) -> None:
        """Begin to gather, unless the values are here or being gathered."""
        if self.is_current(steps) or self.is_gathering(steps):
            return
        if self._speculative_in_place:
            self.discard_speculative(pool)
        self.abandon(pool)
        self._gathering_at = self.wanted(steps)
        self._was_speculative = False
        if self._host_copy is not None:
            if not self.remote(steps):
                return  # `unshard` copies
            self._copied = None
            out: Array | torch.Tensor = array_of(self._host_copy, self.wire)
        elif self._maps is not None:
            self._next_mapped = self._maps.mapped(self.index)
            if self._next_mapped is None:
                self._work = self._maps.map(self.index, self.wire)
            return
        elif self._direct:
            self._allocate()
            out = self.flat if self._on_device else _window(self.flat, self.wire)
        else:
            self._buffer = pool.take(self.unit.numel, TORCH_DTYPES[self.wire])
            out = self._buffer if self._on_device else array_of(self._buffer, self.wire)
        self._work = steps.parameters.gather(self.index, out)

    def start_speculative(self, steps: Speculation, pool: BufferPool, ticket: Ticket, hyper: Sequence[Hyper]) -> None:
        """Begin to gather the expected result of this step: into `flat` if it is free, else into a buffer beside it."""
        self.discard_speculative(pool)
        if self._direct:
            assert self.vacant, "current values are never overwritten"
            self._allocate()
            buffer, out = None, _window(self.flat, self.wire)
        else:
            buffer = pool.take(self.unit.numel, TORCH_DTYPES[self.wire])
            out = array_of(buffer, self.wire)
        self._speculative = steps.gather_speculative(self.index, out, ticket, hyper), buffer

    def commit_speculative(self, steps: Steps, pool: BufferPool) -> None:
        """The step committed as expected: the speculative gather becomes the ordinary one."""
        if self._speculative is not None:
            self.abandon(pool)
            (self._work, self._buffer), self._speculative = self._speculative, None
            self._was_speculative = True
            self._gathering_at = self.wanted(steps)

    def discard_speculative(self, pool: BufferPool) -> None:
        """The step was not decided as expected: cancel the speculative gather and free its memory."""
        if self._speculative is not None:
            (work, buffer), self._speculative = self._speculative, None
            work.cancel()
            if buffer is not None:
                pool.give(buffer)
            else:
                self.free_storage()

    def unshard(self, steps: Steps, pool: BufferPool) -> None:
        """Block until the parameters have current values."""
        while not self.is_current(steps):
            self.start_gather(steps, pool)
            try:
                if self._work is not None:
                    found = self._work.wait()
                    if self._maps is not None:
                        self._next_mapped = found
            except AxonError as error:
                # restored to an older version meanwhile: gather that; it was speculative: gather in the ordinary way
                again = self._was_speculative or (
                    isinstance(error, StepAborted) and self._gathering_at != self.wanted(steps)
                )
                self.abandon(pool)
                if not again:
                    raise
                self.repeated += 1
                continue
            except BaseException:
                self.abandon(pool)
                raise
            self._work = None
            if self._maps is not None:
                if not self._set_mapped():
                    continue
            elif self._host_copy is not None:
                self._copied = self._gathering_at
                self._allocate()
                with torch.no_grad():
                    self.flat.copy_(self._host_copy, non_blocking=True)
            elif self._buffer is not None:
                self._allocate()
                with torch.no_grad():
                    self.flat.copy_(self._buffer, non_blocking=False)
                pool.give(self._buffer)
                self._buffer = None
            self._set_data(self._views)
            self._values_at = self._last_values_at = self._gathering_at
            self._gathering_at = None
        self._set_readable(unsharded=True)

    def reshard(self, pool: BufferPool) -> None:
        """Free the memory, unless the unit is resident; values cannot be read until the next `unshard`."""
        self.abandon(pool)
        if not self.resident and not self._speculative_in_place:
            self.free_storage()
        self._set_readable(unsharded=False)

    def free_storage(self) -> None:
        """Free the memory, resident or not."""
        storage_bytes, self._values_at = self._flat_bytes, None
        if storage_bytes:
            self._free_flat()
            self._meter.add(-self._nbytes)

    def stage_grads(self) -> None:
        """Move the gradients of the parameters to f32 on the host, adding to those there (CPUOffload.FULL)."""
        for i, param in enumerate(self.params):
            if (grad := own_grad(param)) is not None:
                set_own_grad(param, None)
                staged = self._staged[i]
                if staged is None:
                    self._staged[i] = grad.to(self.stage_device, torch.float32, copy=True)
                else:
                    staged.add_(grad.to(self.stage_device))

    def pop_grads(self) -> list[torch.Tensor | None]:
        """Take the gradients from the parameters, with those staged on the host added."""
        grads: list[torch.Tensor | None] = []
        for i, param in enumerate(self.params):
            grad = own_grad(param)
            set_own_grad(param, None)
            staged, self._staged[i] = self._staged[i], None
            if staged is not None and grad is not None:
                staged.add_(grad.to(self.stage_device))
            grads.append(grad if staged is None else staged)
        return grads

    @property
    def has_grads(self) -> bool:
        """Whether any parameter has a gradient, here or on the host."""
        return any(own_grad(p) is not None for p in self.params) or any(s is not None for s in self._staged)

    @property
    def staged_bytes(self) -> int:
        """Memory of the gradients that are staged on the host."""
        return sum(s.nbytes for s in self._staged if s is not None)

    def abandon(self, pool: BufferPool) -> None:
        """Stop a gather under way; its memory is not touched afterwards."""
        self._gathering_at = self._next_mapped = None
        if self._work is None:
            return
        self._work.cancel()
        self._work = None
        if self._buffer is not None:
            pool.give(self._buffer)
            self._buffer = None
        elif self._direct and self._maps is None:
            self.free_storage()

    @property
    def _flat_bytes(self) -> int:
        """Memory of `flat`, mapped or our own."""
        if self._mapped is not None:
            return 0 if self._values_at is None else self._nbytes
        return self._storage.nbytes()

    def _set_flat(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._storage = flat.untyped_storage()
        self._views = [flat[p.offset : p.end].view(p.shape) for p in self.unit.parameters]

    def _set_mapped(self) -> bool:
        """Set `flat` to the mapping; False, and never again, if there is none."""
        mapped, self._next_mapped = self._next_mapped, None
        if mapped is None:
            self.free_storage()
            self._gathering_at = self._maps = self._mapped = None
            self._set_flat(torch.empty(self.unit.numel, dtype=self._nan.dtype))
            self._storage.resize_(0)
            return False
        if mapped is not self._mapped:
            self._mapped = mapped
            self._set_flat(torch.from_numpy(mapped.values).view(self._nan.dtype))
        self._meter.add(self._nbytes if self._values_at is None else 0)
        return True

    def _allocate(self) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
            self._meter.add(self._nbytes)

    def _free_flat(self) -> None:
        self._nan.fill_(float("nan"))  # somebody may have written to it
        self._set_data(self._sharded_data)
        self._set_readable(unsharded=False)
        if self._mapped is not None:
            self._mapped.discard_writes()
        else:
            self._storage.resize_(0)

    def _set_data(self, values: Sequence[torch.Tensor]) -> None:
        """Set `data` of the parameters."""
        self._set_readable(unsharded=True)
        for param, value in zip(self.params, values, strict=True):
            param.data = value

    def _set_readable(self, *, unsharded: bool) -> None:
        """Make the values of the parameters readable, or not; see `sharded_parameter`."""
        if self._unsharded is not unsharded:
            self._unsharded = unsharded
            for param, states in zip(self.params, self._states, strict=False):
                become(param, states[unsharded])
