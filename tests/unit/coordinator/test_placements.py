"""Slices keep their copies while shard servers die, come and go: the coordinator's part of "nothing is lost".

Tests of `coordinator/core/members.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.placement.placements import REST
from axon_ps.errors import Broken, Drained, InvalidRequest, Misuse
from axon_ps.sharding.placement import Placement
from axon_ps.types import CopyFrom, Decision, Membership, Outcome
from axon_ps.wire.events import JobState, Welcome
from coordinator_driver import Driver, Peer
from test_models import several


def job(shards: int = 2, **config: Any) -> tuple[Driver, list[Peer], list[Peer]]:
    """A job of two workers that has made a step."""
    d = Driver(num_shards=shards, **config)
    workers, servers = d.assembled(shards=shards)
    assert step(workers, servers).version == 1
    return d, workers, servers


def step(workers: list[Peer], servers: list[Peer], model: int = 0, **ready: Any) -> Decision:
    """Everybody reports and votes; the newest decision."""
    for s in servers:
        s.ready(model=model, **ready)
    for w in workers:
        w.vote(model=model)
    return workers[0].last(Decision)


def outcomes(peer: Peer) -> list[Outcome]:
    return [x.outcome for x in peer.received(Decision)]


def placement(d: Driver, model: int = 0) -> Placement:
    """The present one; all members know it."""
    known = {
        p.placement_number(model): p.placements[model] for p in d.peers.values() if p.open and model in p.placements
    }
    assert len(known) == 1
    return next(iter(known.values()))


def primary_of(d: Driver, number: int) -> int:
    return placement(d).holders[number].primary


def drain(d: Driver, rank: int) -> Any:
    return d.call(lambda call: d.state.drain(call, Caller(job="job"), rank, d.clock()))


def replaced(shards: int = 2, **config: Any) -> tuple[Driver, list[Peer], list[Peer], Peer]:
    """A job that has lost its last server; a new one has joined with the step after, and is given copies."""
    d, workers, servers = job(shards, **config)
    servers.pop().lose()
    reborn = d.shard()
    step(workers, servers)
    assert reborn.copying()
    return d, workers, servers, reborn


# ---------------------------------------------------------------------- a server is lost


def test_slices_are_on_two_servers_and_the_status_says_so() -> None:
    d, _, _ = job(3)
    assert all(len(set(h.complete)) == 2 and not h.copying for h in placement(d).holders)
    assert {h.primary for h in placement(d).holders} == {0, 1, 2}
    status = d.state.status()
    assert (status.replication, status.models[0].slices, status.models[0].lacking) == (2, len(placement(d).holders), 0)
    alone, _, _ = job(1)
    assert alone.state.status().replication == 1


def test_a_job_that_loses_a_server_goes_on_with_the_others_and_aborts_one_step() -> None:
    d, workers, servers = job(2)
    before = placement(d)
    lost, stays = servers[1], servers[0]
    workers[0].vote()
    stays.ready()
    workers[1].inbox.clear()
    lost.lose()
    assert [type(e) for e in workers[1].inbox] == [Decision, JobState, Membership]
    assert workers[1].membership.complete
    assert workers[1].last(JobState).initialized
    assert outcomes(workers[1]) == [Outcome.ABORT]
    after = placement(d)
    assert after.number > before.number
    assert after.servers == {0}
    assert [h.complete for h in after.holders] == [(0,)] * len(before.holders)
    assert d.state.status().models[0].lacking == len(after.holders)
    assert step(workers, [stays]).version == 2
    assert outcomes(workers[1]) == [Outcome.ABORT, Outcome.COMMIT]


def test_a_report_of_an_older_placement_does_not_count() -> None:
    _d, workers, servers = job(2)
    old = servers[0].placement_number()
    servers[1].lose()
    for w in workers:
        w.vote()
    servers[0].ready(placement=old)
    assert outcomes(workers[0]) == [Outcome.COMMIT, Outcome.ABORT]
    servers[0].ready()
    assert outcomes(workers[0])[2:] == [Outcome.COMMIT]


def test_a_server_that_was_not_needed_comes_back_as_one_that_has_nothing() -> None:
    """Others have gone on: what it has is old."""
    _d, workers, servers = job(2)
    lost = servers[1]
    lost.lose()
    assert step(workers, servers[:1]).version == 2
    lost.inbox.clear()
    lost.join()
    assert not lost.inbox, "it waits for the end of a step"
    assert step(workers, servers[:1]).next_generation
    assert lost.last(Welcome).rank == 1
    assert not lost.received(Decision), "those of steps without it are nothing to it"
    assert lost.copying() == tuple(range(len(lost.placements[0].holders)))
    assert workers[0].membership.complete


def test_the_last_holder_of_a_slice_is_waited_for_and_goes_on_with_what_it_has() -> None:
    _d, workers, servers = job(2)
    servers[1].lose()
    assert step(workers, servers[:1]).version == 2
    servers[0].lose()
    assert workers[0].membership.waiting_for == "shard server 0 of 2"
    assert workers[0].last(JobState).initialized, "it may come back"
    servers[1].join()
    assert "shard server 0" in workers[0].membership.waiting_for, "what the other one has is of version 1"
    servers[0].inbox.clear()
    servers[0].join()
    assert workers[0].membership.complete
    assert servers[0].received(Decision)
    assert workers[0].last(JobState).initialized
    assert isinstance(servers[1].error, Broken), "it had the rank of the one that came back"
    servers[1].join()
    assert step(workers, servers[:1]).version == 3
    assert servers[1].copying() == tuple(range(len(servers[1].placements[0].holders)))
    servers[1].copied()
    assert step(workers, servers).version == 4


def test_when_the_last_holder_of_a_slice_comes_back_empty_its_parameters_are_lost() -> None:
    d, workers, servers = job(2)
    servers[1].lose()
    servers[0].lose()
    reborn = [d.shard(), d.shard()]
    assert reborn[0].last(Welcome).rank == 0
    assert "shard server 0 was lost with its parameters; restore a checkpoint" in workers[0].membership.waiting_for
    assert not workers[0].last(JobState).initialized


def test_without_replication_nobody_goes_on_without_a_server() -> None:
    _d, workers, servers = job(2, replication=1)
    servers[1].lose()
    assert workers[0].membership.waiting_for == "shard server 1 of 2"
    servers[1].join()
    assert workers[0].membership.complete
    assert step(workers, servers).version == 2


# ---------------------------------------------------------------------- another one comes


def test_a_server_joins_between_two_steps_and_nothing_is_aborted() -> None:
    d, workers, servers = job(2)
    servers[1].lose()
    generation = workers[0].membership.generation
    reborn = d.shard()
    assert not reborn.inbox
    assert d.state.status().membership.generation == generation
    assert any("joins after this step" in p for p in d.state.status().pending)
    decision = step(workers, servers[:1])
    assert (decision.outcome, decision.next_generation) == (Outcome.COMMIT, generation + 1)
    assert reborn.last(Welcome).rank == 1
    assert workers[0].membership.generation == generation + 1
    assert workers[0].membership.complete
    assert [m.rank for m in workers[0].membership.shards] == [0, 1]
    assert outcomes(workers[0]) == [Outcome.COMMIT, Outcome.ABORT, Outcome.COMMIT], "one abort, for the loss"
    assert step(workers, servers[:1]) == decision, "the new one is not ready"


def test_a_server_that_waits_to_join_and_connects_again_joins_once() -> None:
    d, workers, servers = job(2)
    servers[1].lose()
    reborn = d.shard()
    old = reborn.session
    reborn.join()
    assert old not in d.peers, "its first stream was closed"
    step(workers, servers[:1])
    assert [m.incarnation for m in workers[0].membership.shards] == [servers[0].incarnation, reborn.incarnation]
    assert reborn.open
    reborn.lose()
    again = d.shard()
    again.lose()
    step(workers, servers[:1])
    assert [m.rank for m in workers[0].membership.shards] == [0], "who has gone does not join"


def test_a_report_of_values_before_there_is_a_layout_is_ignored() -> None:
    d = Driver(num_shards=2)
    servers, workers = [d.shard(), d.shard()], [d.worker(), d.worker()]
    for s in servers:
        s.initialized()
    d.register(workers[0])
    assert not workers[0].last(JobState).initialized
    for s in servers:
        s.initialized()
    assert workers[0].last(JobState).initialized


def test_a_step_waits_for_the_copies_that_were_begun_in_it() -> None:
    d, workers, servers, reborn = replaced()
    count = len(placement(d).holders)
    assert f"{count} of {count} slices have too few copies" in d.state.status().pending
    assert reborn.copying() == tuple(range(count))
    decided = len(workers[0].received(Decision))
    step(workers, servers)
    assert len(workers[0].received(Decision)) == decided
    reborn.copied()
    assert all(h.complete == (0, 1) and not h.copying for h in placement(d).holders)
    assert d.state.status().counters["slices_copied"] == count
    assert d.state.status().models[0].lacking == 0
    assert len(workers[0].received(Decision)) == decided, "everybody reports anew, under the new placement"
    servers[0].ready()
    reborn.ready()
    assert len(workers[0].received(Decision)) == decided + 1
    assert workers[0].last(Decision).outcome is Outcome.COMMIT


def test_copies_are_complete_one_by_one() -> None:
    d, _, _, reborn = replaced()
    first, *others = reborn.copying()
    reborn.copied(first)
    assert placement(d).holders[first].complete == (0, 1)
    assert reborn.copying() == tuple(others)
    number = placement(d).number
    reborn.copied(first)
    assert placement(d).number == number, "a second report changes nothing"
    reborn.copied(*others, epoch=1)
    assert reborn.copying() == tuple(others), "that was of a restore that this job has not had"
    reborn.copied(*others)
    assert not reborn.copying()


def test_primaries_are_swapped_just_before_a_decision() -> None:
    d, workers, servers, reborn = replaced()
    reborn.copied()
    members = [*workers, servers[0], reborn]
    before = placement(d)
    assert {h.primary for h in before.holders} == {0}
    for p in members:
        p.inbox.clear()
    step(workers, [servers[0], reborn])
    after = placement(d)
    assert {h.primary for h in after.holders} == {0, 1}
    assert [set(h.complete) for h in after.holders] == [{0, 1}] * len(after.holders)
    for p in members:
        kinds = [type(e) for e in p.inbox]
        assert kinds.index(JobState) < kinds.index(Decision), "everybody sees it at the same place"
        assert outcomes(p) == [Outcome.COMMIT]
    version = workers[0].last(Decision).version
    assert step(workers, [servers[0], reborn]).version == version + 1
    assert placement(d) == after, "there is nothing left to do"


def test_primaries_are_not_swapped_while_a_checkpoint_is_written() -> None:
    d, workers, servers, reborn = replaced()
    reborn.copied()
    d.call(lambda call: d.state.snapshots.save(call, "/ckpt"))
    before = placement(d)
    step(workers, [servers[0], reborn])
    assert placement(d) == before


def test_a_server_that_is_lost_while_it_gets_copies_is_given_up() -> None:
    d, workers, servers, reborn = replaced()
    reborn.lose()
    assert all((h.complete, h.copying) == ((0,), ()) for h in placement(d).holders)
    assert workers[0].membership.complete
    assert step(workers, servers).outcome is Outcome.COMMIT


def test_the_source_of_copies_is_lost_and_waited_for() -> None:
    _d, workers, servers, reborn = replaced()
    servers[0].lose()
    assert workers[0].membership.waiting_for == "shard server 0 of 2"
    servers[0].join()
    assert workers[0].membership.complete
    assert reborn.copying()
    reborn.copied()
    assert step(workers, [servers[0], reborn]).outcome is Outcome.COMMIT


def test_copies_to_a_session_that_was_replaced_begin_anew() -> None:
    d, workers, servers, reborn = replaced()
    number = placement(d).number
    reborn.inbox.clear()
    reborn.join()
    d.advance(0.5, beat=True)
    assert placement(d).number > number
    assert reborn.copying(), "they are begun again"
    reborn.copied(placement=number)
    assert reborn.copying(), "a report that was made before is of copies that may lack a sum"
    reborn.copied()
    assert not reborn.copying()
    assert step(workers, [servers[0], reborn]).outcome is Outcome.COMMIT


def test_no_copies_are_begun_for_a_while_after_others() -> None:
    d, workers, servers, reborn = replaced()
    d.advance(2.0, beat=True)
    reborn.copied()
    members = [*servers, reborn]
    step(workers, members)
    members.pop().lose()
    other = d.shard()
    step(workers, members)
    assert not other.copying()
    d.advance(2.0 * REST - 0.5, beat=True)
    assert not other.copying()
    d.advance(1.0, beat=True)
    assert other.copying()


def test_how_long_copies_took_that_were_given_up_does_not_count() -> None:
    d, workers, servers, reborn = replaced()
    reborn.lose()
    d.advance(900.0, beat=True)
    another = d.shard()
    step(workers, servers)
    d.advance(1.0, beat=True)
    another.copied()
    step(workers, [*servers, another])
    another.lose()
    third = d.shard()
    step(workers, servers)
    d.advance(REST + 1.0, beat=True)
    assert third.copying(), "the last copies took a second"


@pytest.mark.parametrize("another", [False, True])
def test_a_copy_that_is_complete_when_its_source_is_dead_takes_its_place(another: bool) -> None:
    d, workers, servers = job(2)
    source = servers[primary_of(d, 0)]
    servers[1 - primary_of(d, 0)].lose()
    copy = d.shard()
    step(workers, [source])  # then it is let in
    assert copy.copying()
    source.lose()
    others = [d.shard()] if another else []  # of the same rank, with nothing
    assert not workers[0].membership.complete
    copy.copied()
    assert workers[0].membership.complete
    assert {h.primary for h in placement(d).holders} == {copy.given_rank}
    for other in others:
        other.copied()
    assert step(workers, [copy, *others]).outcome is Outcome.COMMIT


# ---------------------------------------------------------------------- the coordinator restarts


def test_a_restarted_coordinator_begins_the_copies_under_way_anew() -> None:
    d, workers, servers, reborn = replaced()
    before = placement(d)
    d.restart()
    assert d.state.status().models[0].lacking == len(before.holders)
    for p in (*workers, *servers, reborn):
        p.join()
    d.advance(1.0, beat=True)
    assert placement(d).number > before.number
    assert reborn.copying() == tuple(range(len(before.holders)))
    reborn.copied()
    assert step(workers, [*servers, reborn]).outcome is Outcome.COMMIT
    placed = placement(d)
    d.restart()
    for p in (*workers, *servers, reborn):
        p.join()
    assert placement(d) == placed
    assert step(workers, [*servers, reborn]).outcome is Outcome.COMMIT


def test_a_server_with_nothing_gets_the_decision_that_it_missed() -> None:
    """It is a member still, and at the version before: it follows the job like any other."""
    d, workers, servers = job(2)
    empty = [d.shard()]
    assert step(workers, servers).next_generation
    assert empty[0].last(Welcome).rank == 2
    for s in servers:
        s.ready()
    workers[0].vote()
    perform, d.perform = d.perform, d.store_only  # the decision is written, and nobody gets it
    owners = {h for held in placement(d).holders for h in held.servers}
    for s in empty:
        if s.rank in owners:
            s.ready()
    workers[1].vote()
    d.perform = perform
    version = d.state.status().version
    d.restart()
    assert d.state.status().version == version
    empty[0].inbox.clear()
    for s in (*servers, *empty):
        s.join()
    assert [x.version for x in empty[0].received(Decision)][-1:] == [version]


def test_what_a_lost_server_holds_is_known_after_a_restart() -> None:
    d, workers, servers = job(2)
    for server in servers:
        server.lose()  # its connection broke
    d.restart()
    for p in (*workers, *servers):
        p.join()
    assert all(set(h.complete) == {0, 1} for h in placement(d).holders)
    assert step(workers, servers).outcome is Outcome.COMMIT


# ---------------------------------------------------------------------- drained


def trained_until_empty(d: Driver, workers: list[Peer], servers: list[Peer], leaver: Peer) -> int:
    """Steps and copies until a server has left; returns how many steps."""
    members = list(servers)
    for steps in range(40):
        if not leaver.open:
            return steps
        d.advance(1.0, beat=True)
        for s in members:
            if s.open and s.copying():
                s.copied()
        decision = step(workers, [s for s in members if s.open])
        assert decision.outcome is Outcome.COMMIT
    raise AssertionError("it has not left")


def test_a_server_is_drained_while_the_job_trains_and_nothing_is_aborted() -> None:
    d, workers, servers = job(3)
    holds = len(placement(d).slices_of(1))
    assert holds
    assert drain(d, 1) == holds
    assert drain(d, 1) <= holds, "asked again, it says how far it is"
    assert d.state.status().draining == (1,)
    assert trained_until_empty(d, workers, servers, servers[1])
    assert isinstance(servers[1].error, Drained)
    assert set(outcomes(workers[0])) == {Outcome.COMMIT}
    assert placement(d).servers == {0, 2}
    assert all(len(h.complete) == 2 and not h.copying for h in placement(d).holders)
    assert workers[0].membership.complete
    assert d.state.status().draining == ()
    d.restart()
    for p in (*workers, servers[0], servers[2]):
        p.join()
    assert workers[0].membership.complete, "the job needs one server less"
    assert step(workers, [servers[0], servers[2]]).outcome is Outcome.COMMIT


def test_without_replication_a_server_is_drained_all_the_same() -> None:
    d, workers, servers = job(2, replication=1)
    drain(d, 0)
    assert trained_until_empty(d, workers, servers, servers[0])
    assert set(outcomes(workers[0])) == {Outcome.COMMIT}
    assert placement(d).servers == {1}


def test_a_restarted_coordinator_goes_on_draining() -> None:
    d, workers, servers = job(3)
    drain(d, 2)
    d.restart()
    for p in (*workers, *servers):
        p.join()
    assert d.state.status().draining == (2,)
    assert trained_until_empty(d, workers, servers, servers[2])
    assert placement(d).servers == {0, 1}


def test_what_cannot_be_drained_is_refused() -> None:
    d = Driver(num_shards=2)
    d.shard(), d.shard()
    worker, _ = d.worker(), d.worker()
    d.register(worker)
    with pytest.raises(Misuse, match="parameters are being set or restored"):
        drain(d, 0)
    d, _, _ = job(2)
    with pytest.raises(InvalidRequest, match="the job has no shard server 7; it has 0, 1"):
        drain(d, 7)
    drain(d, 0)
    with pytest.raises(InvalidRequest, match=r"shard server 1 .* is the last shard server; add another"):
        drain(d, 1)


def test_a_drained_server_that_dies_is_lost_like_any_other() -> None:
    d, workers, servers = job(3)
    drain(d, 1)
    servers[1].lose()
    assert d.state.status().draining == ()
    assert 1 not in placement(d).servers
    for s in (servers[0], servers[2]):
        if s.copying():
            s.copied()
    assert step(workers, [servers[0], servers[2]]).outcome is Outcome.COMMIT


# ---------------------------------------------------------------------- several models


def test_a_model_follows_the_one_that_is_cut_alike_whenever_that_changes() -> None:
    d = Driver(num_shards=2)
    servers = [d.shard(), d.shard()]
    workers = [d.worker(), d.worker()]
    for w in workers:
        for name in ("policy", "twin"):
            d.register(w, name=name)
    for model in (0, 1):
        for s in servers:
            s.initialized(model=model)
        step(workers, servers, model)
    servers.pop().lose()
    servers.append(d.shard())
    for model in (1, 0):
        step(workers, servers[:1], model)
    for model in (0, 1):
        servers[1].copied(model=model)
    assert {h.primary for m in (0, 1) for h in placement(d, m).holders} == {0}
    step(workers, servers, 1)
    assert {h.primary for m in (0, 1) for h in placement(d, m).holders} == {0}, "the first is the one that is followed"
    step(workers, servers, 0)
    assert {h.primary for h in placement(d, 0).holders} == {0, 1}
    step(workers, servers, 1)
    assert placement(d, 1).holders == placement(d, 0).holders


def test_models_that_are_cut_alike_are_placed_alike_and_a_copy_waits_until_they_are() -> None:
    d, workers, servers = several(shards=2)
    assert placement(d, 0).holders == placement(d, 2).holders
    for model in (0, 1):
        assert step(workers, servers, model).version == 1
    servers.pop().lose()
    reborn = d.shard()
    for model in (0, 1):
        step(workers, servers, model)
    assert reborn.copying(0) == reborn.copying(2) == tuple(range(len(placement(d, 0).holders)))
    assert reborn.copying(1)
    reborn.copied(model=2)
    for w in workers:
        w.vote(model=2, copy=CopyFrom(source=0, weight=0.5))
    made = [x for x in workers[0].received(Decision) if x.model == 2 and x.outcome is Outcome.COMMIT]
    assert not made, "the new server has a slice of the target and not of its source"
    reborn.copied(model=0)
    made = [x for x in workers[0].received(Decision) if x.model == 2 and x.outcome is Outcome.COMMIT]
    assert [(x.copy, x.version) for x in made] == [
        (CopyFrom(source=0, weight=0.5, version=d.state.status().models[0].version), 1)
    ]
    reborn.copied(model=1)
    for _ in range(3):
        for model in (0, 1):
            assert step(workers, [*servers, reborn], model).outcome is Outcome.COMMIT
    assert [set(h.complete) for h in placement(d, 0).holders] == [set(h.complete) for h in placement(d, 2).holders]
