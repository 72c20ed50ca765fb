"""What is committed with a step: written with the decision, told to all, and gone back with a restore."""

from __future__ import annotations

import math
from typing import Any

import pytest

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Persist
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.records import load
from axon_ps.coordinator.messages import step_message_to_proto, vote_from_proto
from axon_ps.errors import InvalidRequest
from axon_ps.types import Decision, Outcome
from axon_ps.wire.committed import MAX_BYTES, checked
from axon_ps.wire.events import UPLOADED, JobState, Vote
from coordinator_driver import Driver, Peer

OPERATOR = Caller(job="job")


def stored(d: Driver) -> dict[str, str]:
    durable = load(d.store.load())
    assert durable is not None
    return dict(durable.models[0].committed)


def step(workers: list[Peer], shards: list[Peer], *commits: dict[str, str], total: float = 4.0) -> Decision:
    """A step in which each worker commits something, or all the same."""
    for shard in shards:
        shard.ready(total)
    for w, commit in zip(workers, commits if len(commits) > 1 else commits * len(workers), strict=True):
        w.vote(commit=commit)
    return workers[0].last(Decision)


def test_it_is_written_in_the_transaction_of_the_decision() -> None:
    d = Driver()
    workers, shards = d.assembled()
    d.performed.clear()
    decision = step(workers, shards, {"used": "1", "mine": "a"})
    assert (decision.outcome, decision.commit) == (Outcome.COMMIT, {"used": "1", "mine": "a"})
    (written,) = (action for action in d.performed if isinstance(action, Persist))
    assert {"committed", "progress"} < {record.key for record in written.records}
    assert stored(d) == {"used": "1", "mine": "a"}


def test_a_value_stays_until_a_later_step_commits_another() -> None:
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards, {"used": "1", "mine": "a"})
    step(workers, shards, {"used": "2"})
    step(workers, shards, {})
    assert stored(d) == {"used": "2", "mine": "a"}
    assert d.worker(rank=2).last(JobState).committed == {"used": "2", "mine": "a"}


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_a_step_that_is_skipped_commits_it(total: float) -> None:
    d = Driver()
    workers, shards = d.assembled()
    decision = step(workers, shards, {"used": "1"}, total=total)
    assert (decision.outcome, decision.version, decision.commit) == (Outcome.SKIP, 0, {"used": "1"})
    assert stored(d) == {"used": "1"}


def test_a_step_that_is_aborted_does_not() -> None:
    d = Driver(min_workers=1)
    workers, shards = d.assembled()
    step(workers, shards, {"used": "1"})
    workers[0].vote(commit={"used": "2"})
    workers[1].lose()
    decision = workers[0].last(Decision)
    assert (decision.outcome, decision.commit) == (Outcome.ABORT, {})
    assert stored(d) == {"used": "1"}
    assert step(workers[:1], shards, {"used": "2"}).commit == {"used": "2"}


@pytest.mark.parametrize("commits", [({"used": "1"}, {"used": "2"}), ({"used": "1"}, {}), ({"used": "1"}, {"u": "1"})])
def test_votes_that_disagree_are_named(commits: Any) -> None:
    d = Driver()
    workers, shards = d.assembled()
    decision = step(workers, shards, *commits)
    assert (decision.outcome, decision.commit) == (Outcome.ABORT, {})
    assert "'used', which is committed with the step: rank 0: 1; rank 1:" in decision.reason or "'u'" in decision.reason
    assert stored(d) == {}


def test_it_survives_the_coordinator() -> None:
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards, {"used": "1"})
    d.restart()
    for peer in (*shards, *workers):
        peer.join()
    assert workers[0].last(JobState).committed == {"used": "1"}
    step(workers, shards, {"mine": "a"})
    assert stored(d) == {"used": "1", "mine": "a"}


def test_a_restore_brings_back_that_of_the_checkpoint() -> None:
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards, {"used": "1"})
    resume = Resume(uri="/there", version=9, committed={"used": "9"})
    d.call(lambda call: d.state.restores.restore(call, [resume], d.clock()))
    event = workers[0].last(JobState)
    assert (event.epoch, event.version, event.committed) == (1, 9, {"used": "9"})
    assert stored(d) == {"used": "9"}


def test_values_that_a_worker_uploads_leave_it_as_it_is() -> None:
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards, {"used": "1"})
    d.call(lambda call: d.state.restores.restore(call, [Resume(uri=UPLOADED, version=1)], d.clock()))
    assert (workers[0].last(JobState).epoch, workers[0].last(JobState).committed) == (1, {"used": "1"})


def test_it_is_the_model_s_and_is_deleted_with_it() -> None:
    d = Driver()
    workers, shards = d.assembled()
    for w in workers:
        d.register(w, name="critic")
    shards[0].initialized(model=1)
    shards[0].ready(4.0, model=1)
    for w in workers:
        w.vote(model=1, commit={"used": "5"})
    assert "model/1/committed" in d.store.load()
    assert {e.model: e.committed for e in d.worker(rank=2).received(JobState)} == {0: {}, 1: {"used": "5"}}
    d.call(lambda call: d.state.registrations.release(call, workers[0].caller, 1, "critic"))
    assert not [key for key in d.store.load() if key.startswith("model/1/")]


def test_too_much_of_it_is_refused_by_name() -> None:
    fitting = {"n": "x" * (MAX_BYTES - 1)}
    assert checked(fitting) == fitting
    for wrong in ({"n": "x" * MAX_BYTES}, {"n": "é" * (MAX_BYTES // 2)}, {"": "x"}, {"a\nb": "x"}):
        with pytest.raises(InvalidRequest):
            vote_from_proto(step_message_to_proto(Vote(generation=1, step=1, commit=wrong)).vote)
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards, {"one": "x" * 3000})
    decision = step(workers, shards, {"two": "x" * 3000})
    assert decision.outcome is Outcome.ABORT
    assert decision.reason == "the values committed with the steps of a model (one, two) have 6006 bytes; at most 4096"
    assert (stored(d), d.state.status().version) == ({"one": "x" * 3000}, 1)
