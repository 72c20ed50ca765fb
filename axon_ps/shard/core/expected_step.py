"""The undecided step as workers expect it to be decided, and what it will make of chunks. Pure.

See `shard.core.speculative`, Note: [Speculative update].
"""

from __future__ import annotations

from collections import Counter

from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.shard.core.gradients import GradientSums
from axon_ps.shard.core.master import Update
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.core.updater import ModelOptimizer
from axon_ps.types import Array, Decision, Hyper


class ExpectedStep:
    """The expected hyperparameters of the step, equal for all workers, and the update with them.

    Args:
        optimizer: the model's optimizer.
        gradients: the sums of the step.
        counters: counters of encodings.
    """

    def __init__(self, optimizer: ModelOptimizer, gradients: GradientSums, counters: Counter[str]) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._counters = counters
        self._expected: tuple[tuple[Hyper, ...], Update] | None = None
        self._last: Decision | None = None

    def forget(self) -> None:
        """Expect nothing: the step has ended, or its sums are dropped."""
        self._expected = None

    def committed(self, decision: Decision) -> None:
        """Take the decision that commits the step."""
        self._expected, self._last = None, decision

    def is_met_by(self, decision: Decision) -> bool:
        """Return True if a step that commits so is as expected."""
        return self._expected is not None and decision.applies(self._expected[0])

    def prepare_chunk(
        self, step: int, owned: OwnedSlice, index: int, hypers: tuple[Hyper, ...], scratch: Array, addend: int = 0
    ) -> bytes | None:
        """Return the frame of a chunk if `step` commits unclipped with `hypers`; None = not known yet, wait.

        Args:
            step: an undecided step attempt, or the last committed step.
            owned: the slice.
            index: number of the chunk in it.
            hypers: per parameter group.
            scratch: from `ShardEngine.scratch()`.
            addend: the last one of the step, as its worker expects.

        Raises:
            Misuse: there is no optimizer, the unit is frozen, or replicas step asynchronously.
            InvalidRequest: `hypers` are not valid, or another worker expects other ones.
            StepAborted: the step ended in another way, or its result cannot be known before the decision.
            SliceMoved: the values are corrupt.
        """
        unit, updater, gradients = owned.chunks.unit, self._optimizer.updater, self._gradients
        if updater is None or not owned.trainable:
            raise Misuse(f"unit {unit} is frozen or there is no optimizer yet; no step will change it")
        if gradients.asynchronous:
            raise Misuse("replicas step asynchronously: the next version is not known before it is decided")
        attempt, sums = gradients.attempts[0], owned.accumulators[0]
        if step > attempt.step or owned.applying:
            return None
        if step < attempt.step:
            return self._made(step, owned, index, hypers)
        if addend < attempt.addend:
            raise StepAborted(f"another backward was made for step {step}; its result is another one")
        if addend > attempt.addend or not sums.is_complete(index, attempt.count):
            return None
        if not sums.present[index]:
            raise StepAborted(f"no replica has a gradient for a chunk of unit {unit}; its update cannot be prepared")
        if self._expected is None:
            self._expected = hypers, updater.expected(hypers)
        elif self._expected[0] != hypers:
            raise InvalidRequest(f"workers expect different hyperparameters for step {step}")
        self._counters["encodings"] += not owned.speculative.has(index)
        frame, found = owned.speculative.prepare(index, sums, self._expected[1], owned.reached + 1, scratch)
        if found:
            owned.corruptions += found
            raise StepAborted(f"a chunk of unit {unit} is corrupt; its update cannot be prepared")
        return frame

    def _made(self, step: int, owned: OwnedSlice, index: int, hypers: tuple[Hyper, ...]) -> bytes:
        """Return the frame of a chunk that a decided step has made, if that was as expected."""
        last = self._last
        as_expected = last is not None and last.step == step and last.applies(hypers)
        if last is None or not as_expected or owned.master.leaves(last.untouched):
            raise StepAborted(f"step {step} did not commit as expected")
        self._counters["encodings"] += owned.ensure_frames()
        if not owned.wire.frames:
            raise StepAborted(
                f"unit {owned.chunks.unit} was replaced after step {step}; what the step made of it is gone"
            )
        return owned.wire.frames[index]
