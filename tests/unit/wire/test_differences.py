"""A membership sent as what has changed arrives as itself."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.types import EACH_WORKER, Grouping, Member, Membership, Role, numbered
from axon_ps.wire import codec
from axon_ps.wire.differences import announced, difference_to_proto, membership_from_difference
from axon_ps.wire.v1 import membership_pb2

MESH = Grouping(rows=((0, 2), (1, 3), (5, 4)))
NODES, HALF_NODES = Grouping(by_node=True), Grouping(by_node=True, size=2)
GROUPINGS = (HALF_NODES, Grouping(), NODES, Grouping(), MESH, MESH)


def member(role: Role, rank: int, life: int) -> Member:
    return Member(role=role, rank=rank, incarnation=f"{role.value}{rank}.{life}", node=f"n{rank % 3}", joined=life)


def membership(generation: int, workers: dict[int, int], shards: dict[int, int], finished: list[Member]) -> Membership:
    """Of ranks with the life that each has."""
    grouping = GROUPINGS[generation % len(GROUPINGS)]
    mine, replicas = numbered([member(Role.WORKER, r, w) for r, w in sorted(workers.items())], grouping)
    return Membership(
        generation=generation,
        step=generation * 3,
        version=generation,
        workers=mine,
        shards=tuple(member(Role.SHARD, r, s) for r, s in sorted(shards.items())),
        num_replicas=replicas,
        complete=generation % 3 == 0,
        waiting_for="" if generation % 3 == 0 else "somebody",
        finished=tuple(finished),
        grouping=grouping,
        state_id="s",
    )


def sent(before: Membership, now: Membership) -> Membership | None:
    """What arrives; None where the whole membership is sent instead."""
    message = difference_to_proto(before, now)
    if message is None:
        return None
    again = membership_pb2.MembershipDifference.FromString(message.SerializeToString())
    return membership_from_difference(before, again)


@given(st.integers(0, 1 << 32))
def test_whoever_comes_goes_finishes_or_is_replaced(seed: int) -> None:
    choice = random.Random(seed)
    workers = dict.fromkeys(range(choice.randrange(1, 20)), 1)
    shards = dict.fromkeys(range(choice.randrange(1, 6)), 1)
    finished: list[Member] = []
    before = membership(1, workers, shards, finished)
    as_difference = 0
    for generation in range(2, 20):
        for there in (workers, shards):
            for rank in choice.sample(range(24), choice.randrange(3)):
                if choice.random() < 0.5:
                    there[rank] = generation
                elif rank in there and len(there) > 1:
                    del there[rank]
        if choice.random() < 0.3 and len(workers) > 1:
            rank = choice.choice(sorted(workers))
            finished.append(member(Role.WORKER, rank, workers.pop(rank)))
        if choice.random() < 0.2:
            finished = finished[choice.randrange(len(finished) + 1) :]
        now = membership(generation, workers, shards, finished)
        arrived = sent(before, now)
        assert arrived in (None, now)
        as_difference += arrived is not None
        before = now
    assert as_difference


def test_one_that_leaves_costs_the_same_whatever_the_numbers_of_the_others() -> None:
    workers = dict.fromkeys(range(1000), 1)
    before = membership(1, workers, {0: 1}, [])
    del workers[0]
    message = difference_to_proto(before, membership(2, workers, {0: 1}, []))
    assert message is not None
    assert message.ByteSize() < 100
    assert membership_from_difference(before, message) == membership(2, workers, {0: 1}, [])


def test_rows_that_stay_are_not_sent_again() -> None:
    rows = tuple((rank, rank + 500) for rank in range(500))
    there = dataclasses.replace(membership(1, dict.fromkeys(range(1000), 1), {0: 1}, []), grouping=EACH_WORKER)
    before = there.numbered(Grouping(rows=rows))
    now = dataclasses.replace(there, generation=2, workers=there.workers[1:]).numbered(before.grouping)
    message = difference_to_proto(before, now)
    assert message is not None
    assert message.ByteSize() < 100
    arrived = membership_from_difference(before, message)
    assert arrived == now
    assert (arrived.num_replicas, arrived.workers[499].rank, arrived.workers[499].replica) == (499, 500, -1)


def test_what_is_mostly_new_is_sent_whole() -> None:
    assert sent(membership(1, {0: 1}, {0: 1}, []), membership(2, {0: 2, 1: 2}, {0: 1}, [])) is None


def test_a_difference_that_does_not_fit_is_refused() -> None:
    before = membership(1, dict.fromkeys(range(8), 1), {0: 1}, [])
    now = membership(3, dict.fromkeys(range(9), 1), {0: 1}, [])
    message = difference_to_proto(before, now)
    assert message is not None
    for base in (None, now):
        with pytest.raises(InvalidRequest, match="differs from that of generation 1; known is"):
            membership_from_difference(base, message)
    for changes, what in (
        ({"workers_gone": [30]}, "member 30 is there no more, and was not there before"),
        ({"shards_gone": [1]}, "member 1 is there no more"),
        ({"finished_gone": 1}, "1 of 0 finished workers"),
        ({"workers_gone": [3]}, "has 9 replicas, and 8"),
    ):
        wrong = membership_pb2.MembershipDifference(since=1, now=message.now, **changes)
        with pytest.raises(InvalidRequest, match=what):
            membership_from_difference(before, wrong)
    held = membership_pb2.MembershipDifference(since=1, now=message.now)
    held.now.workers[0].rank = 3
    with pytest.raises(InvalidRequest, match="worker 3 is new, and another one has the rank"):
        membership_from_difference(before, held)


def test_numbers_follow_from_ranks_and_nodes() -> None:
    there = [member(Role.WORKER, rank, 1) for rank in (0, 1, 3, 4)]  # nodes n0, n1, n0, n1
    by_worker, replicas = numbered(there, Grouping())
    assert [(m.replica, m.local_rank) for m in by_worker] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert replicas == 4
    by_node, replicas = numbered(by_worker, Grouping(by_node=True))
    assert [(m.replica, m.local_rank) for m in by_node] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert replicas == 2
    assert numbered(by_node, Grouping())[0] == by_worker
    assert dataclasses.replace(by_node[0], replica=-1) != by_node[0]


def test_members_of_one_process_that_are_told_the_same_have_the_same_object() -> None:
    before = membership(1, dict.fromkeys(range(8), 1), {0: 1}, [])
    now = membership(3, dict.fromkeys(range(9), 1), {0: 1}, [])
    whole = codec.membership_to_proto(before)
    first, second = (
        announced(membership_pb2.MembershipEvent.FromString(whole.SerializeToString()), None) for _ in "ab"
    )
    assert first == before
    assert first is second
    difference = difference_to_proto(before, now)
    assert difference is not None
    told = [announced(difference, known) for known in (first, second)]
    assert told[0] == now
    assert told[0] is told[1]
    of_another_job = dataclasses.replace(before, state_id="another")
    assert announced(codec.membership_to_proto(of_another_job), None) == of_another_job
    with pytest.raises(InvalidRequest):
        announced(difference, told[0])
