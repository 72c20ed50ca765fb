"""Pipeline schedules: the computations of each rank, in order.

Owns: the tables. Refuses: time, tensors, communication. The messages follow from the table, because each stage's output
goes to the next stage's rank and its input's gradient to the previous one's.

Vocabulary: p ranks, each with k stages (p·k stages in all), and m microbatches. Actions: F forward, B backward; where
backward is split, I is the gradient of the input and W that of the weights (B = I + W).

Invariants, tested for every small p, k and m:
- every stage does every microbatch once, forward before backward;
- if sends do not block, there is no deadlock, in whatever order the ranks progress;
- messages between two stages are used in the order they are produced, so a first-in-first-out edge each is enough.

Sources: GPipe (https://arxiv.org/abs/1811.06965); 1F1B (PipeDream-Flush, https://arxiv.org/abs/2006.09503); interleaved
1F1B (https://arxiv.org/abs/2104.04473, with any m that divides into m // p rounds, as `torch.distributed.pipelining`);
zero bubble ZB1P (https://arxiv.org/abs/2401.10241). The tests compare the tables with torch's.
torch's tables need stages with a process group. torch has none for fewer microbatches than ranks, or for several
neighbouring stages on a rank. Its 1F1B numbers the forwards of the last rank from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from axon_ps.errors import InvalidRequest


class PipelineSchedule(StrEnum):
    """The order in which a rank does the forwards and backwards of its stages.

    Attributes:
        GPIPE: all forwards, then all backwards. A stage holds all m microbatches.
        ONE_F_ONE_B: forwards until the first backward can start, then one of each alternately. The bubble is that of
            GPIPE. Stage s of p holds p - s microbatches at most.
        INTERLEAVED_ONE_F_ONE_B: the same with k > 1 stages per rank, p stages apart: 1/k of the bubble, k times the
            messages.
        ZERO_BUBBLE: 1F1B with backward split, so that gradients of weights fill the bubble.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"

    @property
    def loops(self) -> bool:
        """True if rank r has the stages r, r + p, r + 2p, ...; else each rank has neighbouring ones."""
        return self in (PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE)


class ActionKind(StrEnum):
    """The computation of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One stage's work on one microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"

    @property
    def description(self) -> str:
        """The action's name in messages."""
        name = self.kind.name.lower().replace("_", " of ")
        return f"{name} of microbatch {self.microbatch}"


def owners(schedule: PipelineSchedule, stages_per_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        schedule: see `PipelineSchedule.loops`.
        stages_per_rank: number of stages of each rank.

    Raises:
        InvalidRequest: a rank has none, or the schedule needs as many on every rank.
    """
    if not stages_per_rank or min(stages_per_rank) < 1:
        raise InvalidRequest(f"the ranks have {list(stages_per_rank)} stages; every rank needs one at least")
    if not schedule.loops:
        return tuple(rank for rank, count in enumerate(stages_per_rank) for _ in range(count))
    if len(set(stages_per_rank)) > 1:
        raise InvalidRequest(f"{schedule.name} needs as many stages on every rank; they have {list(stages_per_rank)}")
    return tuple(range(len(stages_per_rank))) * stages_per_rank[0]


def check(schedule: PipelineSchedule, ranks: int, microbatches: int) -> None:
    """Check that there is such a table.

    Raises:
        InvalidRequest: there is no microbatch, or a looping schedule would have rounds of different sizes.
    """
    if microbatches < 1:
        raise InvalidRequest(f"num_microbatches is {microbatches}; it must be at least 1")
    rounds = max(1, microbatches // ranks)
    if schedule.loops and microbatches % rounds:
        raise InvalidRequest(
            f"{schedule.name} does {rounds} rounds of microbatches on {ranks} ranks, and {microbatches} do not divide "
            f"into those; take a multiple of {ranks}"
        )


def actions(
    schedule: PipelineSchedule, owner: Sequence[int], rank: int, microbatches: int, *, training: bool = True
) -> tuple[Action, ...]:
    """Return the computations of a rank, in order.

    Args:
        schedule: the order of work.
        owner: the rank of each stage, from `owners`.
        rank: the rank whose actions are returned.
        microbatches: m.
        training: True = with backwards.
    """
    ranks = max(owner) + 1
    check(schedule, ranks, microbatches)
    local = [stage for stage, o in enumerate(owner) if o == rank]
    if schedule.loops:
        split = schedule is PipelineSchedule.ZERO_BUBBLE
        table = tuple(_looped(local, rank, ranks, microbatches, split=split))
    else:
        warmup = microbatches if schedule is PipelineSchedule.GPIPE else min(ranks - 1 - rank, microbatches)
        table = tuple(_neighbouring(local, warmup, microbatches))
    return table if training else tuple(a for a in table if a.kind is ActionKind.FORWARD)


def _neighbouring(local: Sequence[int], warmup: int, microbatches: int) -> Iterator[Action]:
    """Yield `warmup` forwards, then a forward and a backward alternately, then the backwards that are left."""
    forward = backward = 0
    while backward < microbatches:
        if forward < microbatches:
            yield from (Action(ActionKind.FORWARD, stage, forward) for stage in local)
            forward += 1
        if forward > warmup or forward == microbatches:
            yield from (Action(ActionKind.BACKWARD, stage, backward) for stage in reversed(local))
            backward += 1


def _looped(local: Sequence[int], rank: int, ranks: int, microbatches: int, *, split: bool) -> Iterator[Action]:
    """Yield the same over k stages: a round's microbatches go through the first of them, then the second, and so on.

    With `split`, the gradients of weights come as many actions after those of inputs as the rank's number.
    """
    k, total = len(local), len(local) * microbatches
    width = microbatches // max(1, microbatches // ranks)  # microbatches of a round
    warmup = min((k - 1) * width + (1 if split else 2) * (ranks - 1 - rank), total)

    def at(n: int) -> tuple[int, int]:
        """Return the local stage and the microbatch of the n-th action."""
        return n // width % k, n // (width * k) * width + n % width

    def backward(kind: ActionKind, n: int) -> Action:
        index, microbatch = at(n)
        return Action(kind, local[k - 1 - index], microbatch)

    weights = 0
    for n in range(total + warmup):
        if n < total:
            index, microbatch = at(n)
            yield Action(ActionKind.FORWARD, local[index], microbatch)
        done = n - warmup
        if done >= 0:
            yield backward(ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD, done)
            if split and done >= rank:
                yield backward(ActionKind.BACKWARD_WEIGHT, weights)
                weights += 1
    if split:
        yield from (backward(ActionKind.BACKWARD_WEIGHT, n) for n in range(weights, total))


def needs(action: Action, stages: int) -> tuple[tuple[ActionKind, int], ...]:
    """Return the actions for the same microbatch that must come before: kind (any backward counts as B) and stage."""
    kind, stage, _ = action
    if kind is ActionKind.FORWARD:
        return ((ActionKind.FORWARD, stage - 1),) if stage else ()
    if kind is ActionKind.BACKWARD_WEIGHT:
        return ((ActionKind.BACKWARD, stage),)
    after = ((ActionKind.BACKWARD, stage + 1),) if stage + 1 < stages else ()
    return ((ActionKind.FORWARD, stage), *after)


def gives(action: Action) -> tuple[ActionKind, int]:
    """Return the event that an action completes for others, in the terms of `needs`."""
    kind = ActionKind.BACKWARD if action.kind is ActionKind.BACKWARD_INPUT else action.kind
    return kind, action.stage
