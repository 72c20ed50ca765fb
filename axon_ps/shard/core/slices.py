"""One owned slice: its arrays, its chunk counters and its encoded frames.

Everything a shard server knows about one slice of one unit, and the arithmetic on one chunk of it. Which step or
version it is, and who may do what when, is the engine's business.

    shape legend: n = slice_numel, c = numel of one chunk

Invariants:
- A gradient is summed in one of the slice's `accumulators`: in the first where all replicas step together, in that of
  its replica where they step asynchronously.
- The tuple `frames` is replaced, never changed, so whoever has it reads one version to its end.
- While a slice is `applying`, only `apply` touches its arrays and the accumulator that is applied, each chunk from one
  thread. Other accumulators may be added to meanwhile.

Note: [Memory of a slice]
    master f32[n] and one wire copy of it, the frames or the shared copy. A trainable slice adds the accumulator f32[n]
    (one per replica where replicas step asynchronously, each from its first gradient on) and the moments f32[n] each;
    if parameters travel compressed, a residual f32[n] too. While an apply runs there are also the new frames of the
    unit, until they replace the old ones.

Note: [Compressed parameters]
    The error of compressing a trainable slice for version v goes into `residual` and is added to the values before
    those of v+1 are compressed (`compress.compressor`, Note: [Error feedback]). So each frame is within one quantum of
    the master, a worker needs nothing but the frame, and the average over versions of what workers compute with is that
    of the masters, also where a step moves a parameter by less than a quantum. The residual belongs to the frames that
    are served: it starts at zero with first values and after a restore, moves only with a commit, and is not saved. A
    frozen slice has none; its frames are made once. Frames are never dropped, since making them again would need the
    residual of before.

Note: [Speculative update]
    A worker may ask for the result of a step before the step is decided, naming the hyperparameters it expects. Each
    chunk that has every replica's gradient is then updated in a copy and encoded into `speculative`. Once all chunks
    are there the frames of the current version are dropped, so that there is still one wire copy (they are encoded
    again if anybody asks; compressed ones are small and stay). If the step commits as expected, `speculative` becomes
    the new frames; if not, it is discarded.

Note: [Mapped slices]
    Where workers of this host map the slice (`same_host.shared_copy`), its wire copy is the shared one, and an update
    makes no frames; they are encoded when somebody else asks, and are another wire copy then. What travels as f32 is
    the master itself: the memory that workers map is the master's, and there is no copy at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host.leases import ReadLeases
from axon_ps.optim.base import ServerOptimizer
from axon_ps.shard.core.accumulator import Accumulator
from axon_ps.shard.core.kernel_ranges import KernelRange, cut, kernel_ranges
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.sharding.layout import Unit
from axon_ps.sharding.plan import Slice
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2


class OwnedSlice:
    """A slice with its state.

    Args:
        plan_slice: which range of which unit, from the plan.
        unit: that unit's parameters.
        first_parameter: number of the unit's first parameter in the layout.
        chunk_numel: elements of a chunk.
        precision: what frames and pushed chunks hold.

    Attributes:
        bounds: per chunk, its (begin, end) in the unit.
        master: f32[n].
        accumulators: where gradients are summed; one, or one per replica where replicas step asynchronously.
        state: optimizer moments by name, f32[n] each.
        residual: f32[n], the compression error of `frames`; None when parameters are not compressed, or frozen.
        frames: per chunk, its encoded message; empty when they have to be encoded first.
        speculative: per chunk, its frame if the undecided step commits as expected; b"" where not made, empty when
            none is. See Note: [Speculative update].
        shared: the wire copy that workers of this host map; None while nobody does.
        leases: on `frames`, for processes of this host; revoked when those are dropped.
        speculative_leases: on `speculative`; they stay valid when those become the frames.
        reached: the version this slice is at.
        changed: the version that last changed it; the version in its frames.
        copied: the version in which it last took another model's values since it was made or restored; 0 = none.
        updates: optimizer updates since it was made or restored.
        applying: whether an update is under way.
        lacking: chunks that lack first values.
    """

    def __init__(
        self, plan_slice: Slice, unit: Unit, first_parameter: int, chunk_numel: int, precision: WirePrecision
    ) -> None:
        self.unit = plan_slice.unit
        self.begin = plan_slice.begin
        self.end = plan_slice.end
        self.chunk_numel = chunk_numel
        self.bounds = tuple(plan_slice.chunks(chunk_numel))
        self.trainable = unit.trainable
        self.master: Array = np.zeros(plan_slice.numel, np.float32)
        self.accumulators = [Accumulator(plan_slice.numel, len(self.bounds) if unit.trainable else 0)]
        self.state: dict[str, Array] = {}
        self.frames: tuple[bytes, ...] = ()
        self.speculative: list[bytes] = []
        self.shared: SharedCopy | None = None
        self.leases = ReadLeases()
        self.speculative_leases = ReadLeases()
        self.reached = 0
        self.changed = 0
        self.copied = 0
        self.updates = 0
        self.applying = False
        self._layout = unit
        self._first_parameter = first_parameter
        self._param_dtype = precision.param
        self._grad_dtype = precision.grad
        self._param_compressor, self._grad_compressor = precision.param_compression, precision.grad_compression
        has_residual = self._param_compressor is not None and unit.trainable
        self.residual: Array | None = np.zeros(plan_slice.numel, np.float32) if has_residual else None
        self._updates_before = [0] * len(unit.parameters)
        self._ranges: tuple[KernelRange, ...] = ()
        self._next_frames: list[bytes] = []
        self._stored = bytearray(len(self.bounds))
        self.lacking = len(self.bounds)
        self._applied = self.accumulators[0]
        if unit.trainable:
            assert self.gradient_sum is not None  # its memory is allocated now, not in the first step

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return self.end - self.begin

    def index_of(self, offset: int) -> int:
        """The number of the chunk that begins at `offset` of the unit.

        Raises:
            InvalidRequest: no chunk of this slice begins there.
        """
        index, rest = divmod(offset - self.begin, self.chunk_numel)
        if rest or not 0 <= index < len(self.bounds):
            raise InvalidRequest(
                f"no chunk of unit {self.unit} begins at element {offset} here: this server owns elements {self.begin} "
                f"to {self.end}, in chunks of {self.chunk_numel}"
            )
        return index

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """The numbers (first, one past the last) of the chunks that are elements [begin, end) of the unit.

        Raises:
            InvalidRequest: the range is empty or does not begin and end where chunks do.
        """
        first = self.index_of(begin)
        last = len(self.bounds) if end == self.end else self.index_of(end)
        if last <= first:
            raise InvalidRequest(f"elements {begin} to {end} of unit {self.unit} are an empty range")
        return first, last

    # ------------------------------------------------------------------ gradients

    @property
    def gradient_sum(self) -> Array | None:
        """f32[n], the sum in the first accumulator; None when frozen."""
        return self.accumulators[0].array if self.trainable else None

    @property
    def summed(self) -> list[int]:
        """Per chunk, how many replicas were added to the first accumulator."""
        return self.accumulators[0].summed

    def restart(self, accumulator: int = 0) -> None:
        """Empty an accumulator, and discard the speculative frames made from it."""
        self._discard_speculative()
        self.accumulators[accumulator].restart()

    def set_accumulators(self, count: int) -> None:
        """Have `count` empty accumulators; the memory of those that are too many is freed."""
        chunks = len(self.bounds) if self.trainable else 0
        more = count - len(self.accumulators)
        self.accumulators = self.accumulators[:count] + [Accumulator(self.numel, chunks) for _ in range(more)]
        self._discard_speculative()
        for a in self.accumulators:
            a.restart()

    def _discard_speculative(self) -> None:
        self.speculative_leases.revoke()
        self.speculative = []

    def accepts(self, accumulator: int) -> bool:
        """Whether an accumulator may be added to: it is not being applied."""
        return not (self.applying and self._applied is self.accumulators[accumulator])

    def add(self, index: int, grad: Array | None, last: bool, accumulator: int = 0) -> None:
        """Add the next replica's gradient to chunk `index`.

        Args:
            index: which chunk.
            grad: wire[c], or u8[compressed_bytes(c)]; None when this replica has no gradient for the unit.
            last: whether it is the last replica.
            accumulator: index of the accumulator.

        Raises:
            InvalidRequest: `grad` is of the wrong length, or nothing that a compressor writes.
        """
        begin, end = self.bounds[index]
        target = self.accumulators[accumulator]
        first = not target.present[index]
        if grad is not None:
            compressor = self._grad_compressor
            needed = end - begin if compressor is None else compressor.compressed_bytes(end - begin)
            if grad.size != needed:
                raise InvalidRequest(
                    f"a gradient chunk at element {begin} of unit {self.unit} has {grad.size} "
                    f"{'elements' if compressor is None else 'bytes'}; it must have {needed}"
                )
            total = target.array[begin - self.begin : end - self.begin]
            if compressor is not None:
                (compressor.decompress if first else compressor.accumulate)(grad, total)
                if last:
                    target.squares[index] = cast.sum_of_squares(total)
            elif last:
                target.squares[index] = cast.accumulate_last(total, grad, self._grad_dtype, first)
            else:
                cast.accumulate(total, grad, self._grad_dtype, first)
            target.present[index] = 1
        elif last and not first:
            target.squares[index] = cast.sum_of_squares(target.array[begin - self.begin : end - self.begin])
        target.summed[index] += 1
        if last:
            target.missing -= 1

    # ------------------------------------------------------------------ first values

    def store(self, index: int, values: Array) -> None:
        """Take the first values of chunk `index`: f32[c].

        Raises:
            InvalidRequest: they are of the wrong length.
        """
        begin, end = self.bounds[index]
        if values.size != end - begin:
            raise InvalidRequest(
                f"first values at element {begin} of unit {self.unit} have {values.size} elements; they must have "
                f"{end - begin}"
            )
        self.master[begin - self.begin : end - self.begin] = values
        if not self._stored[index]:
            self._stored[index] = 1
            self.lacking -= 1

    def publish(self, version: int) -> int:
        """Encode the frames of the present values, which are those of `version`; returns how many frames."""
        self.changed = self.reached = version
        self.copied = 0
        if self.residual is not None:
            self.residual.fill(0.0)
        self.lacking = 0
        if self.shared is not None:
            self._fill(self.shared)
            return 0
        self.frames = self._encode_all()
        return len(self.frames)

    def ensure_frames(self) -> int:
        """Encode the frames if there are none, though there are values; returns how many."""
        if self.frames or self.lacking or self.applying:
            return 0
        self.frames = self._encode_all()
        return len(self.frames)

    def share_memory(self) -> SharedCopy | None:
        """The present values in memory that workers of this host can map; None where that cannot be had.

        Only while the slice has values and is not `applying`.
        """
        assert not self.applying, "values that are being changed cannot move to other memory"
        if self.shared is None and self._param_compressor is None:
            try:
                shared = SharedCopy(self.numel, self._param_dtype)
            except Busy:
                return None
            if not self._copies:
                shared.values[:] = self.master
                self.master = shared.values
            self.shared = shared
            self._fill(shared)
            self.leases.revoke()
            self.frames = ()
        return self.shared

    def _fill(self, shared: SharedCopy) -> None:
        if self._copies:
            cast.encode(self.master, shared.values, self._param_dtype)
        self._publish()

    def _publish(self) -> None:
        if self.shared is not None:
            self.shared.publish(self.reached if self.trainable else self.copied)

    def unchanged(self, version: int) -> None:
        """A step led to `version`, and had no gradient for this slice."""
        self.reached = version
        self._publish()

    def withdraw(self) -> None:
        """There are no values any more: they are being replaced."""
        self.leases.revoke()
        if self.shared is not None:
            self.shared.withdraw()
        self.frames = ()
        self._stored = bytearray(len(self.bounds))
        self.lacking = len(self.bounds)

    def scratch(self, chunks: int = 1) -> Array:
        """A buffer in which a thread makes the frames of so many chunks: wire[chunks · chunk_numel].

        Compressed frames are made one by one, in u8[compressed_bytes(chunk_numel)].
        """
        if self._param_compressor is not None:
            return np.empty(self._param_compressor.compressed_bytes(self.chunk_numel), np.uint8)
        return np.empty(chunks * self.chunk_numel, self._param_dtype.numpy)

    def encode(self, index: int, dtype: DType) -> bytes:
        """A frame of chunk `index` in a dtype that the job does not send by itself."""
        return self._encode(index, self.changed, dtype, np.empty(self.chunk_numel, dtype.numpy))

    def _encode_all(self) -> tuple[bytes, ...]:
        """The frames of the present values; `changed` is their version. Compressed, they move the residual."""
        scratch = self.scratch()
        if self._param_compressor is None:
            return tuple(self._encode(i, self.changed, self._param_dtype, scratch) for i in range(len(self.bounds)))
        cuts = [slice(begin - self.begin, end - self.begin) for begin, end in self.bounds]
        residual = self.residual
        return tuple(
            self._compress(i, self.changed, scratch, self.master[cut], None if residual is None else residual[cut])
            for i, cut in enumerate(cuts)
        )

    def _compress(self, index: int, version: int, scratch: Array, values: Array, residual: Array | None) -> bytes:
        """The frame of a chunk's values, f32[c], compressed; `residual`, f32[c], becomes the error."""
        assert self._param_compressor is not None
        payload = scratch[: self._param_compressor.compressed_bytes(values.size)]
        self._param_compressor.compress(values, payload, residual)
        return self._frame(index, version, DType.F32, payload, compressed=True)

    def _encode(self, index: int, version: int, dtype: DType, scratch: Array) -> bytes:
        begin, end = self.bounds[index]
        values = self.master[begin - self.begin : end - self.begin]
        if dtype is DType.F32:
            return self._frame(index, version, dtype, values)
        cast.encode(values, scratch[: end - begin], dtype)
        return self._frame(index, version, dtype, scratch[: end - begin])

    def _frame(self, index: int, version: int, dtype: DType, values: Array, *, compressed: bool = False) -> bytes:
        begin, end = self.bounds[index]
        header = common_pb2.Chunk(
            version=version,
            unit=self.unit,
            offset=begin,
            numel=end - begin,
            dtype=dtype_to_proto(dtype),
            compressed=compressed,
        )
        return encode_chunk(header, values)

    # ------------------------------------------------------------------ the optimizer

    def set_groups(self, group_of: Sequence[int]) -> None:
        """Set the group of each parameter; `group_of` covers the whole layout."""
        count = len(self._layout.parameters)
        groups = group_of[self._first_parameter : self._first_parameter + count]
        self._ranges = kernel_ranges(self._layout, groups, self._updates_before)

    def set_updates(self, updates: Sequence[int]) -> None:
        """Set how many updates each parameter of the unit has had; `set_groups` must follow."""
        self._updates_before = list(updates)
        self.updates = 0

    def forget_moments(self) -> None:
        """Start the optimizer anew: no moments, no updates counted; `set_groups` must follow."""
        self.state = {}
        self.set_updates([0] * len(self._layout.parameters))

    def parameter_updates(self) -> tuple[int, ...]:
        """Per parameter of the unit, how many updates it has had (torch's `step`)."""
        return tuple(before + self.updates for before in self._updates_before)

    def prepare_chunk(
        self, index: int, optimizer: ServerOptimizer, hypers: Sequence[Hyper], version: int, scratch: Array
    ) -> bytes:
        """The frame of chunk `index` as an unclipped update would make it; masters and moments stay as they are.

        See Note: [Speculative update]. Every replica must have been added to the chunk.

        Args:
            index: which chunk.
            optimizer: its kernels.
            hypers: per parameter group, validated hyperparameters.
            version: the version the update would lead to.
            scratch: from `scratch()`.
        """
        self.speculative = self.speculative or [b""] * len(self.bounds)
        if not self.speculative[index]:
            begin, end = (bound - self.begin for bound in self.bounds[index])
            master = self.master[begin:end].copy()
            states = tuple(state[begin:end].copy() for state in self.state.values())
            residual = None if self.residual is None else self.residual[begin:end].copy()
            self._update(begin, optimizer, hypers, 1.0, self._wire(scratch, end - begin), master, states)
            self.speculative[index] = self._updated_frame(index, version, scratch, scratch, master, residual)
            if all(self.speculative) and self._param_compressor is None and self.frames:
                self.leases.revoke()
                self.frames = ()
        return self.speculative[index]

    def leases_of(self, index: int, frame: bytes) -> ReadLeases:
        """The leases for this frame of chunk `index`, which is one of `frames` or of `speculative`."""
        return self.speculative_leases if self.speculative and self.speculative[index] is frame else self.leases

    def begin_update(self, *, as_expected: bool = False, accumulator: int = 0) -> int:
        """Freeze the summed gradient for `apply`; the counters start again for the next step.

        Args:
            as_expected: the frames in `speculative` are those of this update.
            accumulator: index of the accumulator to apply.

        Returns:
            How many frames are yet to be made.
        """
        prepared: list[bytes] = []
        if as_expected:
            prepared, self.speculative = self.speculative, []  # they live on, and whoever is reading them may go on
        else:
            self._discard_speculative()
        self._applied = target = self.accumulators[accumulator]
        for (begin, end), there in zip(self.bounds, target.present, strict=True):
            if not there:  # some ranges of a unit had gradients and this one had none
                target.array[begin - self.begin : end - self.begin] = 0
        target.restart()
        self.applying = True
        if self.shared is not None:
            self.shared.withdraw()
            self._next_frames = list(prepared)
            return 0
        self._next_frames = list(prepared) or [b""] * len(self.bounds)
        return self._next_frames.count(b"")

    def apply(
        self,
        first: int,
        last: int,
        optimizer: ServerOptimizer,
        hypers: Sequence[Hyper],
        scale: float,
        version: int,
        scratch: Array,
    ) -> None:
        """Update chunks [first, last) in one pass, and make their frames. Any thread; each chunk once.

        Args:
            first: number of the first chunk.
            last: one past the last.
            optimizer: its kernels.
            hypers: per parameter group, validated hyperparameters.
            scale: what the gradient is multiplied by.
            version: the version this leads to.
            scratch: from `scratch(last - first)`, of the calling thread.
        """
        begin, end = self.bounds[first][0] - self.begin, self.bounds[last - 1][1] - self.begin
        master = self.master[begin:end]
        states = tuple(state[begin:end] for state in self.state.values())
        if self.shared is not None:
            out = self.shared.values[begin:end] if self._copies else None
            self._update(begin, optimizer, hypers, scale, out, master, states)
            return
        prepared = all(self._next_frames[first:last])
        wire = None if prepared else self._wire(scratch, end - begin)
        self._update(begin, optimizer, hypers, scale, wire, master, states)
        if prepared and self.residual is None:
            return
        for index in range(first, last):
            chunk = slice(*(bound - self.begin for bound in self.bounds[index]))
            copied = scratch[chunk.start - begin : chunk.stop - begin]
            residual = None if self.residual is None else self.residual[chunk]
            frame = self._updated_frame(index, version, scratch, copied, self.master[chunk], residual)
            self._next_frames[index] = self._next_frames[index] or frame

    def _wire(self, scratch: Array, numel: int) -> Array | None:
        """Where in `scratch` the optimizer writes its copy of so many elements; None where it makes none."""
        return scratch[:numel] if self._copies else None

    @property
    def _copies(self) -> bool:
        """Whether the optimizer makes a wire copy: what travels is neither the master as it is nor compressed."""
        return self._param_compressor is None and self._param_dtype is not DType.F32

    def _update(
        self,
        start: int,
        optimizer: ServerOptimizer,
        hypers: Sequence[Hyper],
        scale: float,
        wire: Array | None,
        master: Array,
        states: tuple[Array, ...],
    ) -> None:
        """Update values and moments, f32[m] each, of the elements from `start` of the slice on; wire[m] gets a copy."""
        # a speculative update is of the first accumulator: there is none where replicas step asynchronously
        source = self._applied if self.applying else self.accumulators[0]
        grad = source.array[start : start + master.size]
        begin = self.begin + start
        for s in cut(self._ranges, begin, begin + master.size):
            elements = slice(s.begin - begin, s.end - begin)
            out = None if wire is None else wire[elements]
            if s.group < 0:
                if out is not None:
                    cast.encode(master[elements], out, self._param_dtype)
                continue
            optimizer.apply(
                master[elements],
                grad[elements],
                tuple(state[elements] for state in states),
                out,
                self._param_dtype,
                hypers[s.group],
                s.updates + self.updates + 1,
                scale,
            )

    def _updated_frame(
        self, index: int, version: int, scratch: Array, copied: Array, values: Array, residual: Array | None
    ) -> bytes:
        """The frame of a chunk that was updated.

        Args:
            index: which chunk.
            version: the version it is of.
            scratch: from `scratch()`; what is compressed is compressed there.
            copied: the wire copy, if the optimizer made one; may be longer.
            values: f32[c], the new values.
            residual: f32[c]; becomes the compression error.
        """
        if self._param_compressor is not None:
            return self._compress(index, version, scratch, values, residual)
        payload = values if self._param_dtype is DType.F32 else copied[: values.size]
        return self._frame(index, version, self._param_dtype, payload)

    # ------------------------------------------------------------------ another model's values

    def begin_copy(self) -> None:
        """Values are about to come from a slice of another model, for `copy`."""
        self._discard_speculative()
        for a in self.accumulators:
            a.restart()
        self.applying = True
        if self.shared is not None:
            self.shared.withdraw()
        self._next_frames = [] if self.shared is not None else [b""] * len(self.bounds)

    def copy(self, first: int, last: int, source: OwnedSlice, weight: float, version: int, scratch: Array) -> None:
        """Chunks [first, last) become (1 - weight) * their values + weight * those of `source`. Any thread; each once.

        Args:
            first: number of the first chunk.
            last: one past the last.
            source: the same elements of another model, which do not change meanwhile.
            weight: above 0, at most 1.
            version: the version this leads to.
            scratch: from `scratch(last - first)`, of the calling thread.
        """
        begin, end = self.bounds[first][0] - self.begin, self.bounds[last - 1][1] - self.begin
        master, other = self.master[begin:end], source.master[begin:end]
        if weight == 1.0:
            master[:] = other
        else:
            master *= np.float32(1.0 - weight)
            master += other * np.float32(weight)
        if self.shared is not None:
            if self._copies:
                cast.encode(master, self.shared.values[begin:end], self._param_dtype)
            return
        for index in range(first, last):
            cut = slice(*(bound - self.begin for bound in self.bounds[index]))
            if self._param_compressor is not None:
                residual = None if self.residual is None else self.residual[cut]
                self._next_frames[index] = self._compress(index, version, scratch, self.master[cut], residual)
            else:
                self._next_frames[index] = self._encode(index, version, self._param_dtype, scratch)

    def end_copy(self, version: int) -> None:
        """Every chunk has been copied: serve the new frames."""
        self.updates -= 1  # `end_update` counts one, and a copy is no update of the optimizer
        self.copied = version
        self.end_update(version)

    def end_update(self, version: int) -> None:
        """Every chunk has been applied: serve the new frames."""
        self.leases.revoke()
        self.leases, self.speculative_leases = self.speculative_leases, self.leases
        self.frames = tuple(self._next_frames)
        self._next_frames = []
        self.updates += 1
        self.reached = self.changed = version
        self.applying = False
        self._publish()

    # ------------------------------------------------------------------ memory

    def close(self) -> None:
        """Revoke the leases and release the shared copy; workers that have mapped it may go on reading it."""
        self.withdraw()
        if self.shared is not None:
            self.shared.close()

    def _shared_bytes(self) -> int:
        """Memory of the shared copy, beside the master's."""
        if self.shared is None:
            return 0
        return self.shared.nbytes - (0 if self._copies else self.master.nbytes)

    def memory(self) -> dict[str, int]:
        """Bytes by kind. See Note: [Memory of a slice]."""
        return {
            "master_bytes": self.master.nbytes,
            "accumulator_bytes": sum(s.nbytes for s in self.accumulators),
            "state_bytes": sum(s.nbytes for s in self.state.values()),
            "residual_bytes": 0 if self.residual is None else self.residual.nbytes,
            "frame_bytes": sum(map(len, self.frames)) + sum(map(len, self.speculative)),
            "shared_bytes": self._shared_bytes(),
        }
