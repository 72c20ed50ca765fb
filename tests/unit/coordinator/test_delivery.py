"""What a member remembers of its session: nothing twice, nothing lost."""

from __future__ import annotations

import dataclasses

import pytest

from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.messages import (
    copied_to_proto,
    corrupted_to_proto,
    initialized_to_proto,
    step_message_to_proto,
)
from axon_ps.errors import InternalError
from axon_ps.types import Decision, Membership, ModelProgress, Outcome
from axon_ps.wire.events import (
    Copied,
    Corrupted,
    JobState,
    Ready,
    RestoreOrder,
    SnapshotOrder,
    Vote,
    Welcome,
)
from axon_ps.wire.v1.session_pb2 import SessionRequest

WELCOME = Welcome(rank=0, lease_s=5.0, world_size=1, num_shards=1, state_id="a")
MEMBERS = Membership(
    generation=3, step=5, version=4, workers=(), shards=(), num_replicas=0, complete=False, waiting_for="everybody"
)
COMMIT = Decision(step=5, generation=3, outcome=Outcome.COMMIT, version=5)


def next_generation(membership: Membership = MEMBERS) -> Membership:
    return dataclasses.replace(membership, generation=membership.generation + 1, step=membership.step + 1)


def test_a_new_process_ignores_earlier_decisions() -> None:
    m = Delivery()
    assert m.receive(WELCOME) == []
    assert m.receive(COMMIT) == []
    assert m.receive(MEMBERS) == [MEMBERS]
    assert m.receive(COMMIT) == [COMMIT]


def test_decisions_from_before_it_joined_are_ignored_after_a_reconnect_too() -> None:
    """A coordinator that was started again sends what may have been missed; the version would go back by it."""
    m = Delivery()
    m.receive(MEMBERS)
    before = [dataclasses.replace(COMMIT, step=step, version=step, generation=2) for step in (2, 3, 4)]
    assert [m.receive(decision) for decision in before] == [[], [], []]
    assert m.receive(MEMBERS) == []
    assert m.receive(COMMIT) == [COMMIT]


def test_known_events_are_dropped() -> None:
    m = Delivery()
    snapshot, restore = SnapshotOrder(id=2, uri="u", version=4), RestoreOrder(epoch=1, uri="u", version=4)
    events = [JobState(), MEMBERS, COMMIT, snapshot, restore]
    for event in events:
        assert m.receive(event) == [event]
    for event in (*events, dataclasses.replace(COMMIT, step=4), SnapshotOrder(id=1, uri="old", version=3)):
        assert m.receive(event) == []
    changed = JobState(initialized=True)
    assert m.receive(changed) == [changed]
    assert (m.membership, m.job_state) == (MEMBERS, changed)


def test_our_message_is_resent_until_it_is_decided() -> None:
    m = Delivery()
    m.receive(MEMBERS)
    initialized = initialized_to_proto(0, 0)
    m.record_initialized(initialized)
    ready, vote = Ready(generation=3, step=5, sums_of_squares=(1.0,)), Vote(generation=3, step=5)
    assert m.record(ready) == []
    assert m.to_resend() == [initialized, step_message_to_proto(ready)]
    assert m.record(vote) == []
    assert m.to_resend() == [initialized, step_message_to_proto(vote)]
    m.receive(COMMIT)
    assert m.to_resend() == [initialized]


def test_each_model_has_its_own_decisions_orders_and_messages() -> None:
    m = Delivery()
    m.receive(MEMBERS)
    other = dataclasses.replace(COMMIT, step=1, version=1, model=2)
    assert m.receive(COMMIT) == [COMMIT]
    assert m.receive(other) == [other], "a lower step of another model is news"
    assert m.receive(other) == []
    orders = [RestoreOrder(epoch=1, uri="u", version=4, model=model) for model in (0, 2)]
    assert [m.receive(order) for order in orders] == [[order] for order in orders]
    votes = [Vote(generation=3, step=6), Vote(generation=3, step=2, model=2)]
    for vote in votes:
        assert m.record(vote) == []
    m.receive(dataclasses.replace(other, step=2, version=2))
    assert m.to_resend() == [step_message_to_proto(votes[0])]
    m.record(dataclasses.replace(votes[1], step=3))
    later = dataclasses.replace(next_generation(), models=(ModelProgress(model=2, step=4, version=2),))
    aborts = [e for e in m.receive(later) if isinstance(e, Decision)]
    assert [(a.model, a.step, a.version) for a in aborts] == [(0, 6, 4), (2, 3, 2)]


def test_a_model_that_was_released_meanwhile_is_reported_once_and_its_messages_are_dropped() -> None:
    m = Delivery()
    m.receive(MEMBERS)
    m.receive(JobState(model=2, name="critic"))
    m.record(Vote(generation=3, step=2, model=2))
    assert m.receive(dataclasses.replace(WELCOME, released=(2,))) == [JobState(model=2, released=True)]
    assert m.receive(JobState(model=2, name="critic", released=True)) == []
    assert m.to_resend() == []


def test_a_vote_whose_generation_ended_without_a_decision_is_an_abort() -> None:
    m = Delivery()
    m.receive(MEMBERS)
    m.record(Vote(generation=3, step=5))
    abort, members = m.receive(next_generation())
    assert isinstance(abort, Decision)
    assert (abort.step, abort.generation, abort.outcome) == (5, 3, Outcome.ABORT)
    assert members == next_generation()
    assert m.to_resend() == []
    assert m.receive(COMMIT) == [], "a step has one decision"


def test_a_vote_of_no_attempt_is_an_abort_that_uses_up_no_step() -> None:
    """While members are missing there is no attempt; the step of that number is made in the next generation."""
    m = Delivery()
    m.receive(MEMBERS)
    m.record(Vote(generation=3, step=5))
    (abort, _) = m.receive(dataclasses.replace(MEMBERS, generation=4))
    assert isinstance(abort, Decision)
    assert (abort.step, abort.outcome) == (5, Outcome.ABORT)
    assert m.record(Vote(generation=4, step=5)) == []
    decided = dataclasses.replace(COMMIT, generation=4)
    assert m.receive(decided) == [decided]


def test_a_vote_that_comes_after_its_generation_is_an_abort_at_once() -> None:
    m = Delivery()
    m.receive(next_generation())
    (abort,) = m.record(Vote(generation=3, step=5))
    assert isinstance(abort, Decision)
    assert abort.outcome is Outcome.ABORT
    assert m.to_resend() == []


def test_a_sum_whose_generation_is_over_is_dropped() -> None:
    m = Delivery()
    m.receive(MEMBERS)
    m.record(Ready(generation=3, step=5, sums_of_squares=(1.0,)))
    assert m.receive(next_generation()) == [next_generation()]
    assert m.to_resend() == []


def test_a_generation_that_is_over_is_not_announced_again() -> None:
    m = Delivery()
    m.receive(WELCOME)
    m.receive(MEMBERS)
    with pytest.raises(InternalError, match="generation 2 after 3"):
        m.receive(dataclasses.replace(MEMBERS, generation=2))


def test_that_a_sum_is_corrupt_is_resent_until_the_step_is_over() -> None:
    def corrupted(*, lost: bool) -> SessionRequest:
        return corrupted_to_proto(
            Corrupted(
                model=0, epoch=0, slice=7, placement=1, generation=3, lost=lost, version=4, blocks=(("gradient", 0, 8),)
            )
        )

    for over in (next_generation(), COMMIT):
        m = Delivery()
        m.receive(MEMBERS)
        m.record_corrupted(corrupted(lost=False))
        m.record_corrupted(corrupted(lost=True))
        assert m.to_resend() == [corrupted(lost=True), corrupted(lost=False)]
        m.receive(over)
        assert m.to_resend() == [corrupted(lost=True)], "the values are lost until they are copied"
        m.record_copied(copied_to_proto(Copied(model=0, epoch=0, slices=(7,), placement=2)))
        assert m.to_resend() == []
