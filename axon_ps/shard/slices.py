"""One owned slice: its arrays, its chunk counters and its encoded frames.

Everything a shard server knows about one slice of one unit, and the arithmetic on one chunk of it. Which step or
version it is, and who may do what when, is the engine's business.

    shape legend: n = slice_numel, c = numel of one chunk

Invariants:
- `summed[i]` is how many replicas have been added to chunk i, in replica order. It is bitmap and order in one: replica
  r may be added exactly when `summed[i] == r`.
- `frames` is replaced as a whole, never changed, so whoever holds the tuple reads one version to its end.
- While a slice is `applying`, only `apply_chunk` touches its arrays, each chunk from one thread.

Note: [Memory of a slice]
    master f32[n] and one wire copy of it, the frames. A trainable slice adds the accumulator f32[n] and the moments
    f32[n] each. While an apply runs there are also the new frames of the unit, until they replace the old ones.

Note: [Frames ahead of the decision]
    When a worker asks what an undecided step will make of this slice, each completed chunk is updated in copies and
    encoded into `ahead`. Once every chunk is there the frames of the version that still counts are dropped (they are
    encoded again should anybody want them), so there is one wire copy still. If the step commits as assumed, `ahead`
    becomes the new frames; if not, it is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.optim.base import ServerOptimizer
from axon_ps.shard.segments import Segment, cut, unit_segments
from axon_ps.sharding.layout import Unit
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2


class OwnedSlice:
    """A slice with its state.

    Args:
        piece: which range of which unit.
        unit: that unit's parameters.
        first_parameter: number of the unit's first parameter in the layout.
        chunk_numel: elements of a chunk.
        param_dtype: what frames hold.
        grad_dtype: what pushed chunks hold.

    Attributes:
        bounds: per chunk, its (begin, end) in the unit.
        master: f32[n].
        accumulator: f32[n], the gradient being summed; None when frozen.
        state: optimizer moments by name, f32[n] each.
        frames: per chunk, its encoded message; empty when they have to be encoded first.
        ahead: per chunk, its frame if the undecided step commits as assumed; b"" where not made, empty when none is.
        reached: the version this slice is at.
        changed: the version that last changed it; what its frames say.
        updates: optimizer updates since it was made or restored.
        applying: whether an update is under way.
        missing: chunks that lack a replica's gradient.
        lacking: chunks that lack first values.
    """

    def __init__(
        self, piece: Slice, unit: Unit, first_parameter: int, chunk_numel: int, param_dtype: DType, grad_dtype: DType
    ) -> None:
        self.unit = piece.unit
        self.begin = piece.begin
        self.end = piece.end
        self.chunk_numel = chunk_numel
        self.bounds = tuple(piece.chunks(chunk_numel))
        self.trainable = unit.trainable
        self.master: Array = np.zeros(piece.numel, np.float32)
        self.accumulator: Array | None = np.zeros(piece.numel, np.float32) if unit.trainable else None
        self.state: dict[str, Array] = {}
        self.frames: tuple[bytes, ...] = ()
        self.ahead: list[bytes] = []
        self.reached = 0
        self.changed = 0
        self.updates = 0
        self.applying = False
        self._layout = unit
        self._first_parameter = first_parameter
        self._param_dtype = param_dtype
        self._grad_dtype = grad_dtype
        self._updates_before = [0] * len(unit.parameters)
        self._segments: tuple[tuple[Segment, ...], ...] = ()
        self._next_frames: list[bytes] = []
        self._stored = bytearray(len(self.bounds))
        self.lacking = len(self.bounds)
        self.restart()

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

    def restart(self) -> None:
        """Forget the gradients summed so far, and what they would have led to."""
        self.ahead = []
        count = len(self.bounds) if self.trainable else 0
        self.summed = [0] * count
        self.present = bytearray(count)
        self.squares = [0.0] * count
        self.missing = count

    def add(self, index: int, grad: Array | None, last: bool) -> None:
        """Add the next replica's gradient to chunk `index`.

        Args:
            index: which chunk.
            grad: wire[c]; None when this replica has no gradient for the unit.
            last: whether it is the last replica.

        Raises:
            InvalidRequest: `grad` is of the wrong length.
        """
        begin, end = self.bounds[index]
        first = not self.present[index]
        assert self.accumulator is not None
        if grad is not None:
            if grad.size != end - begin:
                raise InvalidRequest(
                    f"a gradient chunk at element {begin} of unit {self.unit} has {grad.size} elements; it must have "
                    f"{end - begin}"
                )
            total = self.accumulator[begin - self.begin : end - self.begin]
            if last:
                self.squares[index] = cast.accumulate_last(total, grad, self._grad_dtype, first)
            else:
                cast.accumulate(total, grad, self._grad_dtype, first)
            self.present[index] = 1
        elif last and not first:
            self.squares[index] = cast.sum_of_squares(self.accumulator[begin - self.begin : end - self.begin])
        self.summed[index] += 1
        if last:
            self.missing -= 1

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
        """Encode the frames of the present values, which are those of `version`; says how many frames."""
        scratch = np.empty(self.chunk_numel, self._param_dtype.numpy)
        self.changed = self.reached = version
        self.frames = tuple(self._encode(i, version, self._param_dtype, scratch) for i in range(len(self.bounds)))
        self.lacking = 0
        return len(self.frames)

    def ensure_frames(self) -> int:
        """Encode the frames if there are none, though there are values; says how many were encoded."""
        if self.frames or self.lacking or self.applying:
            return 0
        scratch = np.empty(self.chunk_numel, self._param_dtype.numpy)
        self.frames = tuple(self._encode(i, self.changed, self._param_dtype, scratch) for i in range(len(self.bounds)))
        return len(self.frames)

    def withdraw(self) -> None:
        """There are no values any more: they are being replaced."""
        self.frames = ()
        self._stored = bytearray(len(self.bounds))
        self.lacking = len(self.bounds)

    def encode(self, index: int, dtype: DType) -> bytes:
        """A frame of chunk `index` in a dtype that the job does not send by itself."""
        return self._encode(index, self.changed, dtype, np.empty(self.chunk_numel, dtype.numpy))

    def _encode(self, index: int, version: int, dtype: DType, scratch: Array) -> bytes:
        begin, end = self.bounds[index]
        values = self.master[begin - self.begin : end - self.begin]
        if dtype is DType.F32:
            return self._frame(index, version, dtype, values)
        cast.encode(values, scratch[: end - begin], dtype)
        return self._frame(index, version, dtype, scratch[: end - begin])

    def _frame(self, index: int, version: int, dtype: DType, values: Array) -> bytes:
        begin, end = self.bounds[index]
        header = common_pb2.Chunk(
            version=version, unit=self.unit, offset=begin, numel=end - begin, dtype=dtype_to_proto(dtype)
        )
        return encode_chunk(header, values)

    # ------------------------------------------------------------------ the optimizer

    def set_groups(self, group_of: Sequence[int]) -> None:
        """Say which parameter is in which group; `group_of` covers the whole layout."""
        count = len(self._layout.parameters)
        groups = group_of[self._first_parameter : self._first_parameter + count]
        segments = unit_segments(self._layout, groups, self._updates_before)
        self._segments = tuple(cut(segments, begin, end) for begin, end in self.bounds)

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

    def foresee_chunk(
        self, index: int, optimizer: ServerOptimizer, hypers: Sequence[Hyper], version: int, scratch: Array
    ) -> bytes:
        """The frame of chunk `index` as an unclipped update will make it, without making it.

        See Note: [Frames ahead of the decision]. Every replica must have been added to the chunk.

        Args:
            index: which chunk.
            optimizer: its kernels.
            hypers: per parameter group, validated hyperparameters.
            version: the version the update would lead to.
            scratch: wire[chunk_numel].
        """
        self.ahead = self.ahead or [b""] * len(self.bounds)
        if not self.ahead[index]:
            begin, end = (bound - self.begin for bound in self.bounds[index])
            master = self.master[begin:end].copy()
            states = tuple(state[begin:end].copy() for state in self.state.values())
            self.ahead[index] = self._update(index, optimizer, hypers, 1.0, version, scratch, master, states)
            if all(self.ahead):
                self.frames = ()
        return self.ahead[index]

    def begin_update(self, *, foreseen: bool = False) -> None:
        """Freeze the summed gradient for `apply_chunk`; the counters start again for the next step.

        Args:
            foreseen: the frames in `ahead` are those of this update.
        """
        assert self.accumulator is not None
        ahead = self.ahead if foreseen else []
        for (begin, end), there in zip(self.bounds, self.present, strict=True):
            if not there:  # some ranges of a unit had gradients and this one had none
                self.accumulator[begin - self.begin : end - self.begin] = 0
        self.restart()
        self.applying = True
        self._next_frames = list(ahead) or [b""] * len(self.bounds)

    def apply_chunk(
        self,
        index: int,
        optimizer: ServerOptimizer,
        hypers: Sequence[Hyper],
        scale: float,
        version: int,
        scratch: Array,
    ) -> None:
        """Update chunk `index` and encode its frame, in one pass. Any thread; one at a time per chunk.

        Args:
            index: which chunk.
            optimizer: its kernels.
            hypers: per parameter group, validated hyperparameters.
            scale: what the gradient is multiplied by.
            version: the version this leads to.
            scratch: wire[chunk_numel] of the calling thread.
        """
        begin, end = (bound - self.begin for bound in self.bounds[index])
        states = tuple(state[begin:end] for state in self.state.values())
        frame = self._update(index, optimizer, hypers, scale, version, scratch, self.master[begin:end], states)
        self._next_frames[index] = self._next_frames[index] or frame

    def _update(
        self,
        index: int,
        optimizer: ServerOptimizer,
        hypers: Sequence[Hyper],
        scale: float,
        version: int,
        scratch: Array,
        master: Array,
        states: tuple[Array, ...],
    ) -> bytes:
        """Update a chunk's values and moments, f32[c] each, by its summed gradient; the frame of what comes out."""
        assert self.accumulator is not None
        chunk_begin, chunk_end = self.bounds[index]
        grad = self.accumulator[chunk_begin - self.begin : chunk_end - self.begin]
        wire = None if self._param_dtype is DType.F32 else scratch[: chunk_end - chunk_begin]
        for s in self._segments[index]:
            part = slice(s.begin - chunk_begin, s.end - chunk_begin)
            out = None if wire is None else wire[part]
            if s.group < 0:
                if out is not None:
                    cast.encode(master[part], out, self._param_dtype)
                continue
            optimizer.apply(
                master[part],
                grad[part],
                tuple(state[part] for state in states),
                out,
                self._param_dtype,
                hypers[s.group],
                s.updates + self.updates + 1,
                scale,
            )
        return self._frame(index, version, self._param_dtype, master if wire is None else wire)

    def end_update(self, version: int) -> None:
        """Every chunk has been applied: serve the new frames."""
        self.frames = tuple(self._next_frames)
        self._next_frames = []
        self.updates += 1
        self.reached = self.changed = version
        self.applying = False

    # ------------------------------------------------------------------ memory

    def memory(self) -> dict[str, int]:
        """Bytes by kind. See Note: [Memory of a slice]."""
        return {
            "master_bytes": self.master.nbytes,
            "accumulator_bytes": 0 if self.accumulator is None else self.accumulator.nbytes,
            "state_bytes": sum(s.nbytes for s in self.state.values()),
            "frame_bytes": sum(map(len, self.frames)) + sum(map(len, self.ahead)),
        }
