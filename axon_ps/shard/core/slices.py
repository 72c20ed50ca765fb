"""One slice on one server: its master values, its gradient sum, its wire copy, and a prepared update. Pure.

Each of these is a separate module. A step, first values or a copy are passed through all of them here. The step, the
version and the order of calls are the engine's.

Note: [Memory of a slice]
    A slice of n elements has its master f32[n] and one wire copy of it, frames or mapped. A trainable slice adds the
    accumulator f32[n] (one per replica if replicas step asynchronously, of which all but the first are allocated with
    their first gradient) and the moments f32[n] each. It also adds the chunks that are queued while replicas are ahead
    of others (`shard.core.queued`). If parameters are compressed, it has a residual f32[n] (or `sent`) too. While an
    apply runs there are also the new frames of the unit, until they replace the old ones.

    A slice of raw parameters has its words alone: f32[n], four bytes each. Its frames are made for each gather, since a
    worker gathers it once.

    A backup has the same except for the wire copy, unless workers map it. It makes frames only on request, or if
    parameters are compressed, since the residual changes with them.

Note: [Primary and backup]
    Workers push to the primary alone, and it forwards each chunk of the sum to the backups. So all apply the same bits
    in the same loops, and stay equal. If replication is above 1 and gradients are bf16 or f16 on the wire, a complete
    sum is rounded to that dtype and forwarded so. That takes half of the bytes. It is as exact as the most exact of
    NCCL's bf16 reductions. Sums of several addends are not rounded again, and are forwarded as f32. A backup can answer
    a gather at any time. A server that is still `copying` has no values yet: it takes sums for the step under way, and
    cannot be `ready` before its values have come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest, Misuse, SliceMoved
from axon_ps.shard.core.accumulator import Accumulators, Allocate
from axon_ps.shard.core.arriving_values import ArrivingValues
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.digests import GRADIENT, Corruption, SliceDigests
from axon_ps.shard.core.master import Master, Update
from axon_ps.shard.core.slice_change import SliceChange
from axon_ps.shard.core.speculative import SpeculativeUpdate
from axon_ps.shard.core.wire_copy import MappedMemory, WireCopy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Unit
from axon_ps.sharding.placement import Placement
from axon_ps.sharding.plan import Slice
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType


class OwnedSlice:
    """A slice with its state.

    Args:
        number: number of the slice in the plan.
        plan_slice: its range and unit, from the plan.
        unit: that unit's parameters.
        first_parameter: number of the unit's first parameter in the layout.
        chunk_numel: elements of a chunk.
        precision: element types and compression of frames and pushed chunks; see `JobSpec.precision_of`.
        allocate: makes the memory of the first accumulator; None = ordinary memory, as for the others.

    Attributes:
        number, precision: as given.
        raw: whether its elements are words of raw parameters, which are never cast.
        primary: whether this server is its primary; else it is a backup.
        copying: whether this server is still receiving its values from the primary.
        chunks: its range, cut into chunks.
        master: its values and moments.
        accumulators: the sums of gradients; one, or one per replica if replicas step asynchronously.
        wire: its values in their form on the wire.
        speculative: its prepared update by the undecided step.
        trainable: whether optimizer steps change it.
        reached: the version this slice is at.
        changed: the version that last changed it; the version in its frames.
        copied: the version in which it last took another model's values since it was made or restored; 0 = none.
        change: the update or copy that is under way; None if there is none.
        arriving: the arrival of values, which `publish` ends.
        replicated: whether other servers hold it, too.
        digest: digest of values and moments after the last update; None before an update, or without copies.
        corruptions: corrupt blocks that were found and not yet taken by `take_corruptions`. Any thread adds to it.
        corrupt: whether the values are lost because of that, and a copy is to come. See `shard.core.digests`.
    """

    def __init__(
        self,
        number: int,
        plan_slice: Slice,
        unit: Unit,
        first_parameter: int,
        chunk_numel: int,
        precision: WirePrecision,
        allocate: Allocate | None = None,
    ) -> None:
        self.number = number
        self.primary = True
        self.copying = False
        self.chunks = Chunks(plan_slice, chunk_numel)
        self.trainable = unit.trainable
        self.master = Master(self.chunks, unit, first_parameter, precision.param)
        self.accumulators = Accumulators(self.chunks, precision, trainable=unit.trainable, allocate=allocate)
        self.wire = WireCopy(self.chunks, precision, trainable=unit.trainable)
        self.speculative = SpeculativeUpdate(self.chunks, self.master, self.wire)
        self.reached = 0
        self.changed = 0
        self.copied = 0
        self.change: SliceChange | None = None
        self.arriving = ArrivingValues(self.chunks)
        self.precision, self.raw = precision, unit.raw
        self.replicated = False
        self.digest: int | None = None
        self.corruptions: list[Corruption] = []
        self.corrupt = False
        if unit.trainable:
            assert self.accumulators[0].array is not None  # its memory is allocated now, not in the first step

    def set_role(self, *, primary: bool, replicated: bool, rounds: bool) -> None:
        """Make this the primary of the slice, or a backup.

        Args:
            primary: whether it is the primary.
            replicated: whether other servers hold it, too.
            rounds: whether sums are rounded to the gradients' wire dtype.
        """
        self.primary, self.replicated = primary, replicated
        self.accumulators.set_rounds(rounds=rounds)
        if not primary:
            self.speculative.discard()

    @property
    def applying(self) -> bool:
        """True while an update or a copy is under way."""
        return self.change is not None

    @property
    def lacking(self) -> int:
        """The number of chunks that lack values."""
        return self.arriving.lacking

    @property
    def serves(self) -> bool:
        """True if an update makes a wire copy: not of a backup or raw, unless it is mapped or compressed."""
        return (self.primary and not self.raw) or self.wire.mapped is not None or self.wire.compressed

    def memory(self) -> dict[str, int]:
        """Return the bytes by kind. See Note: [Memory of a slice]."""
        mapped, master_bytes = self.wire.mapped, self.master.values.nbytes
        return {
            "master_bytes": master_bytes,
            "accumulator_bytes": sum(a.nbytes for a in self.accumulators),
            "queued_bytes": sum(a.queued.nbytes for a in self.accumulators),
            "state_bytes": sum(s.nbytes for s in self.master.state.values()),
            "residual_bytes": sum(array.nbytes for array in self.wire.feedback.values()),
            "frame_bytes": sum(map(len, self.wire.frames)) + sum(map(len, self.speculative.frames)),
            "shared_bytes": 0 if mapped is None else mapped.nbytes - (0 if self.wire.is_cast else master_bytes),
        }

    # ------------------------------------------------------------------ gradients

    def restart(self, accumulator: int = 0) -> None:
        """Empty an accumulator, and discard the speculative frames made from it."""
        self.speculative.discard()
        self.accumulators[accumulator].restart()

    def set_accumulators(self, count: int) -> None:
        """Make `count` empty accumulators. The memory of surplus ones is freed."""
        self.speculative.discard()
        self.accumulators.set_count(count)

    def accepts(self, accumulator: int) -> bool:
        """Return True if an accumulator may be added to: it is not being applied."""
        return self.change is None or self.change.sums is not self.accumulators[accumulator]

    # ------------------------------------------------------------------ values that replace others

    def publish(self, version: int) -> int:
        """Serve the present values as those of `version`; returns the number of frames made. Any thread may call it."""
        self.changed = self.reached = version
        self.copied = 0
        self._replaced(self.master.digests_of(self.master.arrays()))
        frames = self.wire.replace(version, self.master.values) if self.serves else 0
        self._publish_mapped()
        self.arriving.end()
        return frames

    def digests_of_copy(self, arrays: Mapping[str, Array]) -> SliceDigests:
        """Compute the digests of copied values and moments, for `copied_from_primary`. Any thread may call it."""
        if self.wire.sent is not None:
            self.wire.sent.record()
        return self.master.digests_of(arrays)

    def copied_from_primary(
        self, reached: int, changed: int, copied: int, frames: Sequence[bytes], digests: SliceDigests
    ) -> None:
        """Take over the copied values of the primary, and its frames if parameters are compressed.

        Args:
            reached: the version of the values.
            changed: the version that last changed them.
            copied: the version in which they were last copied from another model.
            frames: the primary's frames.
            digests: digests of the received values and moments.
        """
        self.wire.copied(changed, frames)
        self.reached, self.changed, self.copied = reached, changed, copied
        self.arriving.end()
        self._replaced(digests)

    def _replaced(self, digests: SliceDigests) -> None:
        """Reset the state for other values and moments, with these digests."""
        self.master.digests = digests
        self.corruptions.clear()
        self.copying, self.corrupt, self.digest = False, False, None

    def withdraw(self) -> None:
        """Withdraw the values, which are being replaced."""
        self.wire.withdraw()
        self.arriving.begin()

    def close(self) -> list[Array | bytes]:
        """Release the mapped memory, which workers may go on reading; returns the rest, to be freed after it."""
        memory: list[Array | bytes] = [*self.wire.frames, *self.wire.feedback.values(), *self.master.arrays().values()]
        memory += [a.array for a in self.accumulators if a.nbytes]
        self.withdraw()
        self.accumulators.clear_queued()
        if self.wire.mapped is not None:
            self.wire.mapped.close()
        return memory

    # ------------------------------------------------------------------ what is served

    @property
    def lacks_frames(self) -> bool:
        """True if there are values without frames. Never for parameters sent as differences, which may have none."""
        return not (self.wire.frames or self.wire.differs or self.lacking or self.applying)

    def ensure_frames(self) -> int:
        """Encode the frames if they are lacking; returns their number. Any thread, while no step changes the values.

        Raises:
            SliceMoved: its values are corrupt.
        """
        if not self.lacks_frames:
            return 0
        self.check_values(0, len(self.chunks.bounds))
        return self.wire.encode_all(self.changed, self.master.values)

    def encode(self, index: int, dtype: DType) -> bytes:
        """Encode chunk `index` in a dtype that is not the job's.

        Raises:
            SliceMoved: its values are corrupt.
        """
        self.check_values(index, index + 1)
        return self.wire.encode_as(dtype, index, self.changed, self.master.values[self.chunks.ranges[index]])

    def full_frame(self, first: int, last: int, *, absent: bool) -> bytes:
        """Return a message with all values of chunks [first, last), or without values if `absent`; see `WireCopy`.

        Raises:
            SliceMoved: its values are corrupt.
        """
        if not absent:
            self.check_values(first, last)
        return self.wire.full_frame(first, last, self.changed, self.master.values, absent=absent)

    def fill(self, memory: MappedMemory) -> None:
        """Write the wire copy to `memory`. `map` follows. Any thread may call it while no step changes the values.

        Raises:
            SliceMoved: its values are corrupt.
        """
        self.check_values(0, len(self.chunks.bounds))
        if self.wire.is_cast:
            cast.encode(self.master.values, memory.values, self.precision.param)
        else:
            memory.values[:] = self.master.values

    def map(self, memory: MappedMemory) -> list[Array | bytes]:
        """Use `memory`, written by `fill`, as the wire copy from now on. The values must not have changed since.

        Returns:
            The memory that it replaces, to be freed.
        """
        assert not self.applying, "values that are being changed cannot move to other memory"
        replaced: list[Array | bytes] = list(self.wire.frames)
        if not self.wire.is_cast:
            replaced.append(self.master.values)
            self.master.values = memory.values
        self.wire.mapped = memory
        self.wire.drop_frames()
        self._publish_mapped()
        return replaced

    def _publish_mapped(self) -> None:
        if self.wire.mapped is not None:
            self.wire.mapped.publish(self.reached if self.trainable else self.copied)

    # ------------------------------------------------------------------ a step

    def unchanged(self, version: int) -> None:
        """Advance to `version`, by a step without a gradient for this slice."""
        self.reached = version
        self._publish_mapped()

    def begin_update(self, update: Update, version: int, *, as_expected: bool, accumulator: int) -> int:
        """Begin a `change` by the summed gradient, whose counters restart for the next step.

        Args:
            update: the optimizer's work.
            version: the version this leads to.
            as_expected: whether the prepared frames are those of this update.
            accumulator: index of the accumulator to apply.

        Returns:
            The number of frames to be made.
        """
        prepared: list[bytes] = []
        # readers may keep the committed frames; a mapped slice uses prepared frames only if all chunks have one
        if as_expected and (self.wire.mapped is None or all(self.speculative.frames)):
            prepared, self.speculative.frames = self.speculative.frames, prepared
        else:
            self.speculative.discard()
        self.accumulators[accumulator].freeze()
        return self._begin(accumulator, update, version, prepared)

    def begin_copy(self, version: int) -> int:
        """Prepare a copy of a slice of another model; returns the number of frames to be made."""
        for accumulator in range(len(self.accumulators)):
            self.restart(accumulator)
        return self._begin(0, None, version, [])

    def _begin(self, accumulator: int, update: Update | None, version: int, prepared: list[bytes]) -> int:
        wire = self.wire if self.serves else None
        self.change = SliceChange(self.chunks, self.master, wire, self.accumulators[accumulator], update, version)
        if wire is not None:
            return wire.begin_update(prepared, replacing=update is None)
        self.wire.drop_frames()
        return 0

    def finish(self) -> None:
        """Serve the new values, after every chunk has been updated or copied."""
        change, self.change = self.change, None
        assert change is not None
        self.wire.end_update(change.version)
        self.reached = self.changed = change.version
        self.digest = self.master.digests.total if self.replicated else None
        if change.update is None:
            self.copied = change.version
        change.end()
        self.corruptions += change.corruptions
        if self.corruptions:
            self.lose_values()
        else:
            self._publish_mapped()

    # ------------------------------------------------------------------ memory that fails

    def check(self, first: int, last: int) -> None:
        """Check values and moments of chunks [first, last), which no step changes now. Any thread may call it."""
        self.corruptions += self.master.check(first, last)

    def take_corruptions(self) -> list[Corruption]:
        """Return the corruptions found since the last call. If one is in values or moments, drop these."""
        found, self.corruptions = self.corruptions, []
        if any(c.array != GRADIENT for c in found):
            self.lose_values()
        return found

    def lose_values(self) -> None:
        """Drop corrupt values and moments. Nothing is served until a copy is here."""
        self.speculative.discard()
        if self.wire.mapped is not None:  # workers may still read it, at its version
            if not self.wire.is_cast:
                self.master.values = np.zeros(self.chunks.numel, np.float32)  # takes no memory yet
            self.wire.mapped.close()
            self.wire.mapped = None
        self.withdraw()
        self.corrupt, self.digest = True, None

    def check_values(self, first: int, last: int) -> None:
        """Check the values of chunks [first, last), which no step changes now. Any thread may call it.

        Raises:
            SliceMoved: they are corrupt.
        """
        self.corruptions += self.master.check(first, last, moments=False)
        self.refuse_corrupt()

    def refuse_corrupt(self) -> None:
        """Raise if corruption was found.

        Raises:
            SliceMoved: the values are corrupt.
        """
        if self.corruptions or self.corrupt:
            raise SliceMoved(
                f"the values of unit {self.chunks.unit} from element {self.chunks.begin} on are corrupt on this shard "
                "server; another one holds them"
            )


class OwnedSlices(dict[int, OwnedSlice]):
    """The slices of one model that a server holds, by number, in forward order.

    Attributes:
        num_units: number of units in the layout; None before `configure`.
        allocate: makes the memory of sums that are forwarded; None = ordinary memory. Set by the shell.
    """

    num_units: int | None = None
    allocate: Allocate | None = None

    def configure(self, spec: JobSpec, num_cuts: int) -> None:
        """Set the plan of the slices, over `num_cuts` servers."""
        self._plan = spec.plan(num_cuts)
        self.num_units = len(spec.layout.units)

    def check(self, placement: Placement) -> None:
        """Check that a placement is of this plan's slices.

        Raises:
            InvalidRequest: it has another number of slices.
        """
        placement.check(self._plan)

    def make(self, spec: JobSpec, placement: Placement, server: int) -> list[OwnedSlice]:
        """Make the slices that a placement gives to `server` and that are not here, for `set_placement`. Any thread."""
        plan, units = spec.plan(placement.num_cuts), spec.layout.units
        first_parameters = tuple(accumulate((len(u.parameters) for u in units), initial=0))
        made: list[OwnedSlice] = []
        for number in placement.slices_of(server):
            if number not in self:
                s, copies = plan.numbered[number], len(placement.holders[number].servers)
                allocate = self.allocate if copies > 1 else None
                numel, precision = spec.options.chunk_numel, spec.precision_of(units[s.unit])
                made.append(OwnedSlice(number, s, units[s.unit], first_parameters[s.unit], numel, precision, allocate))
        return made

    def set_placement(self, placement: Placement, server: int, added: list[OwnedSlice]) -> list[OwnedSlice]:
        """Hold the slices that a placement gives to `server`, of which `added` are new; returns the removed slices."""
        wanted = placement.slices_of(server)
        removed = [self.pop(number) for number in set(self).difference(wanted)]
        for owned in added:
            owned.copying = True
        if added:
            in_order = sorted([*self.values(), *added], key=lambda s: s.number)
            self.clear()
            self.update((s.number, s) for s in in_order)
        for number in wanted:
            owned, holders = self[number], placement.holders[number]
            owned.copying = (owned.copying or owned.corrupt) and server in holders.copying
            owned.set_role(
                primary=holders.primary == server,
                replicated=len(holders.servers) > 1,
                rounds=placement.replication > 1,
            )
        return removed

    def of(self, unit: int, offset: int) -> OwnedSlice:
        """Return the slice that element `offset` of `unit` is in.

        Raises:
            Misuse: the layout is not known yet.
            InvalidRequest: there is no such unit, or no such element in it.
            SliceMoved: that slice is not here.
        """
        if self.num_units is None:
            raise Misuse("this shard server has no layout yet; register the job's spec first")
        if not 0 <= unit < self.num_units:
            raise InvalidRequest(f"there is no unit {unit}; the layout has {self.num_units}")
        first, ends = self._plan.first_of[unit], self._plan.ends_of[unit]
        numel = ends[-1] if ends else 0
        if not 0 <= offset < numel:
            raise InvalidRequest(f"no chunk of unit {unit} begins at element {offset}; it has {numel} elements")
        owned = self.get(first + bisect_right(ends, offset))
        if owned is None:
            raise SliceMoved(
                f"this shard server does not hold the slice of unit {unit} with element {offset}; ask its primary"
            )
        return owned

    @property
    def primaries(self) -> list[OwnedSlice]:
        """The slices of which this server is the primary."""
        return [owned for owned in self.values() if owned.primary]

    def masters(self) -> list[Master]:
        """Return the masters of trainable slices."""
        return [owned.master for owned in self.values() if owned.trainable]
