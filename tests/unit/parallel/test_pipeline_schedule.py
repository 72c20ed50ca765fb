"""Tables of pipeline schedules: complete, free of deadlocks, PyTorch's own; their memory and their bubble."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from axon_ps.errors import InternalError, InvalidRequest
from axon_ps.parallel.pipeline import PipelineMemoryStats, PipelineSchedule, Timeline, ideal_bubble, simulate
from axon_ps.parallel.pipeline.memory import peak
from axon_ps.parallel.pipeline.schedule import Action, ActionKind, actions, check, owners
from axon_ps.parallel.pipeline.timeline import ActionSpan

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = PipelineSchedule
COST = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}


def tables(
    schedule: PipelineSchedule, ranks: int, microbatches: int, k: int = 1, *, training: bool = True
) -> list[tuple[Action, ...]]:
    owner = owners(schedule, [k] * ranks)
    return [actions(schedule, owner, rank, microbatches, training=training) for rank in range(ranks)]


def cases() -> list[tuple[PipelineSchedule, int, int, int]]:
    found = []
    for schedule, ranks, k, m in itertools.product(PipelineSchedule, range(1, 6), (1, 2, 3), range(1, 11)):
        if not schedule.loops or m % max(1, m // ranks) == 0:
            found.append((schedule, ranks, m, k))
    return found


def test_every_stage_does_every_microbatch_once_and_nothing_deadlocks() -> None:
    for schedule, ranks, m, k in cases():
        of_all = tables(schedule, ranks, m, k)
        backwards = (
            [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
            if schedule is ZERO_BUBBLE
            else [ActionKind.BACKWARD]
        )
        wanted = Counter(
            Action(*a) for a in itertools.product([ActionKind.FORWARD, *backwards], range(ranks * k), range(m))
        )
        assert Counter(itertools.chain(*of_all)) == wanted
        simulate(of_all, lambda a: COST[a.kind])
        simulate(tables(schedule, ranks, m, k, training=False), lambda a: 1.0)


def test_messages_are_used_in_the_order_they_are_made() -> None:
    def order(table: tuple[Action, ...], kinds: tuple[ActionKind, ...], stage: int) -> list[int]:
        return [a.microbatch for a in table if a.kind in kinds and a.stage == stage]

    for schedule, ranks, m, k in cases():
        of_all = tables(schedule, ranks, m, k)
        owner = owners(schedule, [k] * ranks)
        for stage in range(len(owner) - 1):
            for kinds in ((ActionKind.FORWARD,), (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)):
                assert order(of_all[owner[stage]], kinds, stage) == order(of_all[owner[stage + 1]], kinds, stage + 1)


def test_tables_are_those_of_pytorch() -> None:
    def compute(order: list[theirs._Action | None]) -> list[tuple[str, int, int | None]]:
        computed = [a for a in order if a is not None and a.is_compute_op]
        return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in computed]

    def ours(table: tuple[Action, ...]) -> list[tuple[str, int, int]]:
        return [(a.kind.value, a.stage, a.microbatch) for a in table]

    for schedule, ranks, m, k in cases():
        if schedule.loops:
            split = schedule is ZERO_BUBBLE
            cls = theirs.ScheduleInterleavedZeroBubble if split else theirs.ScheduleInterleaved1F1B
            width = m // max(1, m // ranks)
            fields = {
                "n_local_stages": k,
                "pp_group_size": ranks,
                "microbatches_per_round": width,
                "_n_microbatches": m,
            }
            order = [cls._calculate_single_rank_operations(SimpleNamespace(**fields), r) for r in range(ranks)]
        elif k == 1 and m >= ranks:  # theirs has no table for fewer microbatches
            cls = theirs.ScheduleGPipe if schedule is GPIPE else theirs.Schedule1F1B
            found = cls._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=m))
            order = [found[r] for r in range(ranks)]
        else:
            continue
        we, they = [ours(t) for t in tables(schedule, ranks, m, k)], [compute(o) for o in order]
        if schedule is ONE_F_ONE_B:  # which is for their pictures; it numbers the last rank's forwards from 1
            we, they = ([[a for a in table if a[0] != "F"] for table in side] for side in (we, they))
        assert we == they


def test_peaks_are_the_formulas() -> None:
    for schedule, ranks, m, k in cases():
        for rank, table in enumerate(tables(schedule, ranks, m, k)):
            if schedule is GPIPE:
                assert peak(table) == k * PipelineMemoryStats.gpipe_peak_activations(ranks, m)
            elif schedule is ONE_F_ONE_B:
                assert peak(table) == k * PipelineMemoryStats.one_f_one_b_peak_activations(ranks, m, rank)
            elif schedule is INTERLEAVED:
                assert peak(table) == PipelineMemoryStats.interleaved_peak_activations(ranks, k, m, rank)
    assert PipelineMemoryStats.one_f_one_b_peak_activations(4, 8) == 4
    with pytest.raises(InvalidRequest, match="rank 4 of 4"):
        PipelineMemoryStats.one_f_one_b_peak_activations(4, 8, 4)


def test_bubble_is_that_of_the_formula() -> None:
    for schedule, k in ((GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2)):
        timeline = simulate(tables(schedule, 4, 8, k), lambda a: COST[a.kind])
        assert timeline.bubble_fraction == pytest.approx(ideal_bubble(4, 8, k), rel=1e-9)
        slow = simulate(tables(schedule, 4, 8, k), lambda a: COST[a.kind], transfer_s=0.02)
        assert slow.bubble_fraction == pytest.approx(ideal_bubble(4, 8, k), rel=0.15)
    one_f_one_b = simulate(tables(ONE_F_ONE_B, 4, 8), lambda a: COST[a.kind]).bubble_fraction
    assert simulate(tables(ZERO_BUBBLE, 4, 8), lambda a: COST[a.kind]).bubble_fraction < 0.6 * one_f_one_b


def test_timeline_shows_who_computes_what() -> None:
    timeline = simulate(tables(ONE_F_ONE_B, 2, 2), lambda a: COST[a.kind])
    assert timeline.gantt(36).splitlines() == [
        "rank 0 |F0==F1==........B0######....B1######|",
        "rank 1 |....F0==B0######F1==B1######........|",
        "bubble 33.3% of 9000.00 ms x 2 ranks",
    ]
    rows = timeline.table().splitlines()
    assert len(rows) == 1 + 8
    assert rows[3].split() == ["1", "1", "F0", "1000.000", "2000.000"]


def test_replaying_gives_each_rank_a_core() -> None:
    recorded = simulate(tables(ONE_F_ONE_B, 4, 8), lambda a: COST[a.kind])
    one_after_the_other, now_s = [], 0.0
    for span in sorted(recorded.spans, key=lambda s: s.begin_s):  # what one core for all would record
        one_after_the_other.append(ActionSpan(span.rank, span.action, now_s, now_s + span.cpu_s, span.cpu_s))
        now_s += span.cpu_s
    timeline = Timeline(tuple(one_after_the_other), 4)
    assert timeline.bubble_fraction == pytest.approx(0.75)
    assert timeline.replayed().makespan_s == recorded.makespan_s
    sent = [ActionSpan.from_json(s.as_json(), 5.0) for s in timeline.spans]
    assert Timeline(tuple(sent), 4).makespan_s == timeline.makespan_s
    assert sent[0].begin_s == timeline.spans[0].begin_s - 5.0


def test_a_deadlock_is_told() -> None:
    early = [Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 0)]
    with pytest.raises(InternalError, match="deadlocks.*'B0'"):
        simulate([early], lambda a: 1.0)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "m", "message"),
    [
        (ONE_F_ONE_B, [1, 0], 4, "every rank needs one"),
        (INTERLEAVED, [2, 1], 4, "as many stages on every rank"),
        (INTERLEAVED, [1, 1, 1], 7, "multiple of 3"),
        (GPIPE, [1, 1], 0, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    schedule: PipelineSchedule, stages_per_rank: list[int], m: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        owners(schedule, stages_per_rank)
        check(schedule, len(stages_per_rank), m)
