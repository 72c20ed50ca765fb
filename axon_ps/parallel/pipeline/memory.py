"""The number of microbatches whose activations a rank holds at once: formulas, and measurements.

The unit is one microbatch at one stage, from the beginning of its forward to the end of its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.pipeline.schedule import Action, ActionKind, PipelineSchedule, check


@dataclass(frozen=True, kw_only=True)
class PipelineMemoryStats:
    """Microbatches that were in memory at once during the last step of a rank.

    Attributes:
        peak_activations: at all stages of the rank together.
        peak_by_stage: at each of them, by stage.
        expected: the number that follows from the rank's table of actions.
    """

    peak_activations: int
    peak_by_stage: dict[int, int]
    expected: int

    @staticmethod
    def gpipe_peak_activations(stages: int, microbatches: int) -> int:
        """Return m, at every stage: backward starts when all forwards are done."""
        _check(stages, microbatches, 0)
        return microbatches

    @staticmethod
    def one_f_one_b_peak_activations(stages: int, microbatches: int, rank: int = 0) -> int:
        """Return min(p - rank, m): the microbatches between a stage and the end. The first stage holds most.

        Raises:
            InvalidRequest: there is no such rank.
        """
        _check(stages, microbatches, rank)
        return min(stages - rank, microbatches)

    @staticmethod
    def interleaved_peak_activations(ranks: int, stages_per_rank: int, microbatches: int, rank: int = 0) -> int:
        """Return min((k - 1)·w + 2·(p - 1 - rank) + 1, k·m), with w = m / max(1, m // p) microbatches in a round.

        Raises:
            InvalidRequest: there is no such rank, or the microbatches do not divide into rounds.
        """
        _check(ranks, microbatches, rank)
        check(PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, ranks, microbatches)
        width = microbatches // max(1, microbatches // ranks)
        warmup = (stages_per_rank - 1) * width + 2 * (ranks - 1 - rank)
        return min(warmup + 1, stages_per_rank * microbatches)


def peak(table: Iterable[Action]) -> int:
    """Return the most microbatches that a rank with these actions holds at once. One is freed by B or W, not by I."""
    live = most = 0
    for action in table:
        if action.kind is ActionKind.FORWARD:
            live += 1
            most = max(most, live)
        elif action.kind is not ActionKind.BACKWARD_INPUT:
            live -= 1
    return most


def _check(ranks: int, microbatches: int, rank: int) -> None:
    if microbatches < 1 or not 0 <= rank < ranks:
        raise InvalidRequest(
            f"asked for rank {rank} of {ranks} with {microbatches} microbatches; there is no such rank"
        )
