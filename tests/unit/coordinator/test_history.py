"""The history of a job: what happened, how long steps took and for whom they waited, in bounded memory."""

from __future__ import annotations

import json

from axon_ps.coordinator.core.history.curves import MAX_CURVES, MAX_POINTS, Curves
from axon_ps.coordinator.core.history.history import MAX_EVENTS, MAX_STEPS, History
from axon_ps.coordinator.core.history.loads import Loads
from axon_ps.coordinator.core.history.timing import Timing
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.types import Decision, Outcome, Role
from axon_ps.wire.events import JobState
from axon_ps.wire.report import REPORT_KEY
from axon_ps.wire.v1 import common_pb2
from coordinator_driver import Peer, Recording


def step(d: Recording, workers: list[Peer], server: Peer, *pauses_s: float) -> None:
    """A step whose workers vote so many seconds after one another, and whose server is ready 0.5 s later."""
    for worker, pause_s in zip(workers, pauses_s, strict=True):
        d.clock.advance(pause_s)
        worker.vote()
    d.clock.advance(0.5)
    server.ready()


def test_a_step_says_for_whom_it_waited_and_for_how_long() -> None:
    d = Recording(world_size=3)
    workers, (server,) = d.assembled(workers=3)
    step(d, workers, server, 0.0, 0.0, 0.0)
    step(d, [workers[2], workers[0], workers[1]], server, 1.0, 0.25, 2.0)
    record = d.everything().steps[-1]
    assert (record.version, record.outcome, record.waited_for) == (2, "commit", workers[1].given_rank)
    assert (record.computing_s, record.waiting_s, record.summing_s) == (1.0, 2.25, 0.5)
    assert record.marginal_s == 2.0
    assert record.duration_s == 3.75


def test_a_worker_that_the_others_wait_for_again_and_again_is_scored() -> None:
    d = Recording()
    (a, b), (server,) = d.assembled()
    for _ in range(10):
        step(d, [a, b], server, 0.125, 2.0)
    d.state.history.take_new(d.clock())
    loads = {m.rank: m for m in d.everything().members if m.role == common_pb2.ROLE_WORKER}
    slow = loads[b.given_rank]
    assert (slow.last_in, slow.cost_s) == (10, 20.0)
    assert slow.lag_s == 2.0
    assert (loads[a.given_rank].last_in, loads[a.given_rank].lag_s) == (0, 0.0)


def test_joins_losses_and_aborted_steps_are_told_in_words() -> None:
    d = Recording(min_workers=1)
    (a, b), (server,) = d.assembled()
    step(d, [a, b], server, 0.0, 0.0)
    b.lose()
    a.leave(finished=True)
    told = [(e.kind, e.text) for e in d.everything().events]
    assert ("joined", "worker 0 (node a) joined") in told
    assert ("lost", "worker 1 (node a) was lost: its connection broke") in told
    assert ("aborted", "the step to version 2 was aborted: worker 1 (node a) was lost: its connection broke") in told
    assert (
        told[-1][1] == "the step to version 2 was aborted: worker 0 (node a) has finished" or told[-1][0] == "finished"
    )
    numbers = [e.number for e in d.everything().events]
    assert numbers == sorted(set(numbers))


def test_a_lost_shard_servers_slices_are_promoted_and_copied() -> None:
    d = Recording(num_shards=3)
    workers, servers = d.assembled(shards=3)
    step_votes(workers)
    servers[0].lose()
    kinds = [e.kind for e in d.everything().events]
    assert "promoted" in kinds
    history = History(0.0, {})
    before = Placement(holders=(Holders((0,), (1,)), Holders((1, 0))), num_cuts=2, number=1)
    after = Placement(holders=(Holders((0, 1)), Holders((0,))), num_cuts=2, number=2)
    history.published(JobState(placement=before), 1.0)
    history.published(JobState(placement=after), 2.0)
    history.published(JobState(placement=after), 3.0)
    assert [(e.kind, e.text) for e in history.everything(3.0).events] == [
        ("promoted", "shard server 0 is now the primary of 1 slice more"),
        ("copied", "shard server 1 is now a backup of 1 slice more"),
    ]


def step_votes(workers: list[Peer]) -> None:
    for worker in workers:
        worker.vote()


def test_what_is_repeated_for_a_member_that_came_back_is_not_recorded_again() -> None:
    history = History(0.0, {0: 5})
    for number in (4, 5, 5, 6):
        history.published(decision(number), 1.0)
    assert [record.step for record in history.everything(1.0).steps] == [5, 6]


def decision(number: int) -> Decision:
    return Decision(step=number, generation=1, outcome=Outcome.COMMIT, version=number)


def test_everything_is_bounded_however_long_the_job() -> None:
    history = History(0.0, {})
    for number in range(5000):
        history.published(decision(number), float(number))
        history.happened("changed", "x" * 10_000, float(number))
        history.tick(float(number))
    event = history.everything(5000.0)
    assert len(event.steps) == MAX_STEPS
    assert len(event.events) == MAX_EVENTS
    assert all(len(curve.value) <= MAX_POINTS for curve in event.curves)
    assert len(history.take_new(5000.0).SerializeToString()) < 1 << 20


def test_curves_have_means_of_what_is_old_and_the_newest_point() -> None:
    curves = Curves()
    for t in range(10 * MAX_POINTS):
        curves.add(float(t), float(t), {"loss": float(t)})
    (loss,) = curves.everything()
    assert len(loss.value) <= MAX_POINTS
    assert list(loss.at_s) == sorted(loss.at_s)
    assert abs(loss.value[-1] - 10 * MAX_POINTS) < 16
    curves.add(9000.0, 9000.0, {"loss": 9000.0})
    assert curves.everything()[0].value[-1] == 9000.0
    assert abs(loss.value[10] - loss.at_s[10]) < 16
    for n in range(100):
        curves.add(0.0, 0.0, {f"value{n}": 1.0, "bad": float("nan"), "n" * 1000: 1.0})
    assert len(curves.everything()) == MAX_CURVES


def test_reports_of_the_script_are_curves_and_nonsense_is_ignored() -> None:
    history = History(0.0, {})
    history.stored(REPORT_KEY, json.dumps({"step": 3, "loss": 2.5, "values": {"tokens_per_s": 10}}).encode(), 1.0)
    for nonsense in (b"\xff", b"[]", b'{"step": "x"}', b'{"loss": []}', b'{"values": 3}'):
        history.stored(REPORT_KEY, nonsense, 2.0)
    history.stored("other", b"{}", 2.0)
    new = history.take_new(2.0)
    assert {c.name: (list(c.step), list(c.value)) for c in new.curves} == {
        "loss": ([3.0], [2.5]),
        "tokens_per_s": ([3.0], [10.0]),
    }
    assert not history.take_new(2.0).curves


def test_rates_are_taken_of_a_members_totals() -> None:
    loads = Loads()
    member = (Role.SHARD, 1)
    loads.measured(member, {"sent_bytes": 100.0, "memory_bytes": 7.0, "cpu_s": 1.0}, 10.0)
    loads.measured(member, {"sent_bytes": 300.0, "memory_bytes": 8.0, "cpu_s": 2.0}, 12.0)
    (load,) = loads.take_new()
    assert (load.sent_bytes_per_s, load.memory_bytes, load.cpu) == (100.0, 8.0, 0.5)
    assert not loads.take_new()
    loads.only(set())
    assert not loads.everything()


def test_a_step_that_does_not_commit_scores_nobody() -> None:
    timing = Timing()
    timing.arrived([0], 0, 1, 1.0)
    timing.arrived([1], 0, 1, 5.0)
    assert timing.decided(0, 1, 0.0, 6.0, commits=False).waited_for == -1
    assert not timing.scores()
    assert timing.decided(0, 2, 0.0, 6.0, commits=True).waited_for == -1
