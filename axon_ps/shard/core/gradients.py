"""The step attempts under way on a shard server, one of all replicas or one of each, and their sums. Pure.

Invariants:
- Chunks are summed in order of addend and replica, whatever the order of arrival, so a step's result does not depend on
  timing. A chunk that arrives out of order is queued if there is memory for it. Otherwise `push` returns `WAIT`.
- Only chunks of the step under way are summed. A chunk of a decided step is a duplicate, or `push` raises
  `StepAborted`. For a chunk of a later step it returns `WAIT`.

Note: [Addends]
    A program may make several backwards before a step. Each backward whose gradients are sent makes another *addend* of
    the step's gradient, numbered from 0. Every replica contributes to each addend, so a chunk has `replicas` gradients
    an addend. Addends use one accumulator. Servers do not know how many there will be: the first chunk of a later
    addend makes every sum incomplete again, and discards the values prepared from it. Votes name the last addend, and a
    step commits only when every server has reported the sum up to it.

Note: [Asynchronous replicas]
    If replicas step asynchronously (`sharding.policy`), each has its own attempt and accumulator, so all may push at
    the same time. An attempt is named by the replica's clock: the number of its steps that were decided in this
    generation. The coordinator decides attempts one by one. Every decision has a step number and, if it commits, a
    version, so the order of updates is the same on all servers. A server that applies one step while the next ones are
    decided takes them in that order (`shard.server.model_shell`, Note: [In order]).
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InvalidRequest, Misuse, SliceMoved, StepAborted
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.core.slices import OwnedSlice, OwnedSlices
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType

PushedAt = tuple[int, int, int, int]
"""The position of a gradient chunk: step, unit, offset in the unit, and replica."""


class Push(enum.Enum):
    """The fate of a gradient chunk."""

    SUMMED = "summed"
    QUEUED = "queued"  # it will be summed in replica order; acknowledge it
    DUPLICATE = "duplicate"  # it was summed or queued before; acknowledge and drop it
    WAIT = "wait"  # an earlier replica, the decision, or the unit's apply must come first; ask again


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        step: the number that chunks must name: the step, or the replica's clock if replicas step asynchronously.
        replicas: number of replicas to sum.
        addend: the last addend that has begun; see Note: [Addends].
        missing: chunks that lack a replica's gradient.
        last_committable: step of the last attempt here that ended with all gradients summed.
    """

    step: int = 0
    replicas: int = 0
    addend: int = 0
    missing: int = 0
    last_committable: int = -1

    @property
    def count(self) -> int:
        """The number of gradients in a complete sum."""
        return self.replicas * (self.addend + 1)


class GradientSums:
    """The attempts of one model.

    Args:
        slices: of the model. Their accumulators are used.
        counters: counters of duplicates, waits and queued chunks.
        limit: limit of the memory for chunks that arrive out of order; None = they wait.

    Attributes:
        asynchronous: whether each replica's gradient is a separate step.
        dtype: the element type of received gradients; U8 if they are compressed.
        compressor: their compressor; None if they are not compressed.
        num_replicas: of the generation.
        attempts: by the index of their accumulator: 0 if replicas step together, else the replica's number.
        on_addend: called when a later addend begins, before sums change that were complete.
    """

    def __init__(self, slices: OwnedSlices, counters: Counter[str], limit: QueueLimit | None = None) -> None:
        self.asynchronous = False
        self.dtype = DType.F32
        self.compressor: Compressor | None = None
        self.num_replicas = 0
        self.attempts = [Attempt()]
        self.on_addend: Callable[[], None] = lambda: None
        self._slices = slices
        self._counters = counters
        self._limit = limit or QueueLimit()
        self._generation = 0

    def configure(self, spec: JobSpec) -> None:
        """Set the form of gradients. `begin` must follow."""
        self.asynchronous = spec.policy.asynchronous
        self.dtype = spec.precision.grad
        if spec.precision.grad_compression is not None:
            self.dtype, self.compressor = DType.U8, spec.precision.grad_compression

    def begin(self, generation: int, step: int, num_replicas: int) -> None:
        """Begin the attempts of a generation, with empty accumulators.

        Args:
            generation: number of the generation.
            step: the step that all replicas make together.
            num_replicas: of the generation.
        """
        self._generation, self.num_replicas = generation, num_replicas
        if self.asynchronous:
            self.attempts = [Attempt(replicas=1) for _ in range(max(1, num_replicas))]
        else:
            last = self.attempts[0].last_committable
            self.attempts = [Attempt(step=step, replicas=num_replicas, last_committable=last)]
        for owned in self._slices.values():
            owned.set_accumulators(len(self.attempts))
        for accumulator, attempt in enumerate(self.attempts):
            attempt.missing = self._count_missing(accumulator)

    # ------------------------------------------------------------------ chunks

    def push(
        self,
        step: int,
        unit: int,
        offset: int,
        replica: int,
        dtype: DType,
        grad: Array | None,
        *,
        addend: int = 0,
        borrowed: bool = False,
    ) -> Push:
        """Add one replica's gradient chunk to the step's sum if it is next in order, and the chunks queued behind it.

        Args:
            step: the step attempt it belongs to.
            unit: number of the unit.
            offset: first element of the chunk in the unit.
            replica: number of the replica.
            dtype: of `grad`.
            grad: wire[c], u8 if compressed; None if this replica has no gradient for the unit. It must not change,
                unless it is `borrowed`.
            addend: the addend that it is part of.
            borrowed: `grad` is in the caller's memory, and may change once this has returned.

        Raises:
            Misuse: the layout is not known, or the unit is frozen.
            InvalidRequest: unit, offset, replica, dtype or length is wrong, or `grad` was not written by the
                compressor.
            SliceMoved: this server is not, or no longer, its primary.
            StepAborted: the step ended without a commit.
        """
        owned = self._slices.of(unit, offset)
        if not owned.trainable:
            raise Misuse(f"unit {unit} is frozen; it takes no gradients")
        if not 0 <= replica < self.num_replicas:
            raise InvalidRequest(
                f"there is no replica {replica}; generation {self._generation} has {self.num_replicas}"
            )
        if grad is not None and dtype is not self.dtype:
            raise InvalidRequest(f"a gradient chunk travels as {dtype.value}; the job's is {self.dtype.value}")
        index = owned.chunks.index_of(offset)
        number, order = self._order_of(replica, addend)
        attempt, accumulator = self.attempts[number], owned.accumulators[number]
        if step != attempt.step:
            return self._other_step(step, attempt)
        if not owned.primary:
            raise SliceMoved(
                f"this shard server is a backup of unit {unit} from element {owned.chunks.begin} on; push to the "
                "primary"
            )
        self._begin_addend(number, addend)
        summed = accumulator.summed[index]
        if summed > order or (index, order) in accumulator.queued:
            self._counters["duplicates"] += 1
            return Push.DUPLICATE
        if not owned.accepts(number):
            self._counters["waits"] += 1
            return Push.WAIT
        if order and accumulator.spoiled:
            return Push.WAIT  # until the next generation, which sums all gradients again
        if summed < order:
            done = accumulator.queue(index, order, grad, self._limit, borrowed=borrowed)
            self._counters["queued" if done else "waits"] += 1
            return Push.QUEUED if done else Push.WAIT
        found = accumulator.add(index, grad, attempt.replicas)
        owned.corruptions += found or accumulator.add_queued(index, attempt.replicas)
        if found:
            return Push.WAIT
        attempt.missing -= accumulator.is_complete(index, attempt.count)
        return Push.SUMMED

    def _begin_addend(self, number: int, addend: int) -> None:
        """Begin an addend of an attempt, if it has not begun: every sum is incomplete from now on."""
        attempt = self.attempts[number]
        if addend <= attempt.addend:
            return
        self.on_addend()
        attempt.addend = addend
        for owned in self._slices.values():
            owned.speculative.discard()
        attempt.missing = self._count_missing(number)

    def push_sum(
        self,
        step: int,
        unit: int,
        offset: int,
        number: int,
        total: Array | None,
        digest: int | None = None,
        *,
        addend: int = 0,
    ) -> Push:
        """Take one chunk of an attempt's sum from the primary.

        Args:
            step: the step attempt.
            unit: number of the unit.
            offset: first element of the chunk in the unit.
            number: of the attempt's accumulator.
            total: f32[c]; None when no replica had a gradient for the unit.
            digest: the primary's digest of it; None = not known.
            addend: the last addend in it. It replaces the sum of fewer addends.

        Raises:
            Broken: it differs from the message of the primary.
            Misuse: the layout is not known.
            InvalidRequest: unit, offset, number or length is wrong, or the unit is frozen.
            SliceMoved: this server is not a backup of it.
            StepAborted: the step ended without a commit.
        """
        owned = self._slices.of(unit, offset)
        index = owned.chunks.index_of(offset)
        if not 0 <= number < len(self.attempts):
            raise InvalidRequest(f"a sum of attempt {number} was forwarded; there are {len(self.attempts)} here")
        attempt, accumulator = self.attempts[number], owned.accumulators[number]
        if step != attempt.step:
            return self._other_step(step, attempt)
        if not owned.trainable:
            raise InvalidRequest(f"a sum of unit {unit} was forwarded, which is frozen")
        if owned.primary:
            raise SliceMoved(f"a sum of unit {unit} was forwarded to the primary of its slice")
        self._begin_addend(number, addend)
        count = attempt.replicas * (addend + 1)
        if accumulator.summed[index] >= count:
            self._counters["duplicates"] += 1
            return Push.DUPLICATE
        if not owned.accepts(number):
            self._counters["waits"] += 1
            return Push.WAIT
        accumulator.set(index, total, count, digest)
        attempt.missing -= accumulator.is_complete(index, attempt.count)
        return Push.SUMMED

    def sums_of(self, number: int, owned: OwnedSlice) -> Iterator[int]:
        """Yield the indexes of a slice's chunks whose sum of an attempt is complete."""
        accumulator, count = owned.accumulators[number], self.attempts[number].count
        if owned.trainable and owned.accepts(number):
            for index in range(len(owned.chunks.bounds)):
                if accumulator.is_complete(index, count):
                    yield index

    def recount(self) -> None:
        """Count the chunks that accumulators lack, after the set of slices has changed."""
        for owned in self._slices.values():
            if len(owned.accumulators) != len(self.attempts):
                owned.set_accumulators(len(self.attempts))
        for number, attempt in enumerate(self.attempts):
            attempt.missing = self._count_missing(number)

    def _order_of(self, replica: int, addend: int) -> tuple[int, int]:
        """Return the index of the accumulator that a replica's gradient is added to, and of the gradients before it."""
        return (replica, addend) if self.asynchronous else (0, addend * self.num_replicas + replica)

    def _other_step(self, step: int, attempt: Attempt) -> Push:
        if step > attempt.step:  # the caller knows a decision that has not arrived here yet
            self._counters["waits"] += 1
            return Push.WAIT
        if step == attempt.last_committable:
            self._counters["duplicates"] += 1
            return Push.DUPLICATE
        raise StepAborted(f"step {step} is over and did not commit; the current step is {attempt.step}")

    def resume_offset(self, step: int, unit: int, begin: int, replica: int, addend: int = 0) -> int:
        """Return the first element from which a replica's chunks of this slice are missing; the slice's end if none is.

        Args:
            step: the step attempt.
            unit: number of the unit.
            begin: first element of the replica's stream, in the unit.
            replica: number of the replica.
            addend: the addend that its chunks are part of.

        Raises:
            Misuse: the layout is not known.
            InvalidRequest: no chunk begins there.
            SliceMoved: that slice is not here.
        """
        owned = self._slices.of(unit, begin)
        first = owned.chunks.index_of(begin)
        number, order = self._order_of(replica, addend)
        if not 0 <= number < len(self.attempts) or step != self.attempts[number].step:
            return begin  # the fate of its chunks is that of `push`
        accumulator = owned.accumulators[number]
        for index, (offset, _) in enumerate(owned.chunks.bounds[first:], first):
            if accumulator.summed[index] <= order and (index, order) not in accumulator.queued:
                return offset
        return owned.chunks.end

    # ------------------------------------------------------------------ attempts

    def accumulator_of(self, replica: int) -> int:
        """Return the index of the accumulator that a replica's gradients are added to."""
        return replica if self.asynchronous else 0

    def order_of(self, replica: int, addend: int) -> int:
        """Return the number of gradients that are added before that of a replica for an addend."""
        return self._order_of(replica, addend)[1]

    def next_in_order(self, unit: int, offset: int, replica: int) -> tuple[OwnedSlice, int, bool]:
        """Return (slice, order of the next gradient, whether all were added) of a chunk in a replica's accumulator."""
        owned, number = self._slices.of(unit, offset), self.accumulator_of(replica)
        order = owned.accumulators[number].summed[owned.chunks.index_of(offset)]
        return owned, order, order == self.attempts[number].count

    def complete(self) -> Iterator[tuple[int, int]]:
        """Yield every attempt that has all its gradients, as (replica, step). Replica is 0 if all step together.

        Another addend may follow.
        """
        for number, attempt in enumerate(self.attempts):
            if not attempt.missing:
                yield number, attempt.step

    def ready(self, replica: int = 0) -> tuple[float, ...] | None:
        """Return the sum of squares of each primary slice here, in order; None until every chunk has every replica.

        It is also None while a slice is copied, corrupt or applied, and on a server without trainable slices.

        Args:
            replica: the replica of the attempt, if replicas step asynchronously.
        """
        number = self.accumulator_of(replica)
        if self.attempts[number].missing or self.num_replicas == 0:
            return None
        trainable = [s for s in self._slices.values() if s.trainable]
        if not trainable or not all(s.accepts(number) and not (s.copying or s.corrupt) for s in trainable):
            return None
        if any(s.accumulators[number].spoiled for s in trainable):
            return None
        squares = [s.accumulators[number].squares for s in trainable if s.primary]
        return tuple(math.fsum(x) if all(map(math.isfinite, x)) else math.nan for x in squares)

    def decided(self, decision: Decision) -> tuple[int, bool]:
        """Return the accumulator that a decision is about, and whether it names the attempt under way there."""
        number, step = self._name(decision)
        return number, step == self.attempts[number].step

    def end(self, decision: Decision, *, summed: bool = True) -> None:
        """End an attempt that is decided. Its accumulator is used by the next one.

        Args:
            decision: the decision on the attempt.
            summed: whether every gradient was added.
        """
        number, step = self._name(decision)
        attempt = self.attempts[number]
        if summed:
            attempt.last_committable = attempt.step
        attempt.step, attempt.addend = step + 1, 0
        attempt.missing = self._count_missing(number)

    def drop(self, decision: Decision, *, summed: bool) -> None:
        """End an attempt that is skipped or aborted, and empty its accumulators."""
        for owned in self._slices.values():
            owned.restart(self._name(decision)[0])
        self.end(decision, summed=summed)

    def _count_missing(self, number: int) -> int:
        count = self.attempts[number].count
        return sum(s.accumulators[number].missing(count) for s in self._slices.values())

    def _name(self, decision: Decision) -> tuple[int, int]:
        """Return (accumulator, step) of the attempt that a decision is about."""
        of = decision.replica_clock
        number, step = (0, decision.step) if of is None else (of.replica, of.clock)
        if number >= len(self.attempts):
            raise InvalidRequest(f"a decision is on replica {number}'s attempt; there are {len(self.attempts)} here")
        return number, step
