"""The servers that hold a model's slices: lost ones, those that come back, failed memory, and values ordered anew."""

from __future__ import annotations

import pytest

from axon_ps.coordinator.core.placement.holders import SliceHolders
from axon_ps.coordinator.core.records import ParameterState
from axon_ps.coordinator.core.registration import Registration
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.placement import Server
from axon_ps.types import Member, Role
from axon_ps.wire.events import FIRST_VALUES, Copied, Corrupted
from coordinator_driver import SPEC

SHARDS = [Member(role=Role.SHARD, rank=rank, incarnation=f"server {rank}", node="s", address="") for rank in range(3)]


def placed(replication: int = 2) -> SliceHolders:
    """The slices of `SPEC` on three servers, none of which has its values yet."""
    registration = Registration(SPEC, None, number=0, name="m")
    holders = SliceHolders(registration, ParameterState(), 3)
    servers = [Server(shard.rank, shard.node) for shard in SHARDS]
    holders.set_placement(holders.new_placement(SPEC, servers, replication))
    return holders


def held(replication: int = 2) -> SliceHolders:
    """The same, of servers that have their values at version 1."""
    holders = placed(replication)
    for shard in SHARDS:
        assert holders.initialized_by(shard, 1, 0, 1)
    holders.parameters.initialized = True
    return holders


def corrupted(holders: SliceHolders, rank: int, placement: int = 99) -> Corrupted:
    index = next(i for i, h in enumerate(holders.placement.holders) if rank in h.complete)
    return Corrupted(model=0, epoch=0, slice=index, placement=placement, generation=1, lost=True, blocks=(), version=1)


def test_values_are_there_when_every_server_has_its_slices() -> None:
    holders = placed()
    assert (holders.awaits_values, holders.missing(SHARDS[:2])) == (True, [2])
    holders.initialized_by(SHARDS[0], 0, 0, 0)
    assert (holders.all_loaded(SHARDS), holders.is_holder(SHARDS[0]), holders.is_holder(SHARDS[1])) == (
        False,
        True,
        False,
    )
    assert not holders.initialized_by(SHARDS[1], 0, 7, 0), "a report of another epoch says nothing"
    with pytest.raises(InvalidRequest, match=r"shard server 1 holds version 3 of epoch 0 of 'm'; the job is at 0"):
        holders.initialized_by(SHARDS[1], 3, 0, 0)


def test_only_servers_of_trainable_slices_are_owners() -> None:
    holders, units = placed(replication=1), SPEC.layout.units
    trainable = [units[s.unit].trainable for s in SPEC.plan(3).numbered]
    ranks = {h.primary for h, steps in zip(holders.placement.holders, trainable, strict=True) if steps}
    assert holders.owners == tuple(sorted(ranks))


def test_other_holders_go_on_with_the_slices_of_a_lost_server() -> None:
    holders = held()
    number = holders.placement_number
    holders.lose(0, 1)
    assert (holders.placement.servers, holders.placement_number) == ({1, 2}, number + 1)
    assert (holders.missing(SHARDS[1:]), holders.loss(SHARDS[1:])) == ([], "")
    assert holders.rank_held_by("server 0") is None


def test_without_another_copy_the_lost_server_stays_the_holder() -> None:
    holders = held(replication=1)
    holders.lose(0, 1)
    assert (holders.rank_held_by("server 0"), holders.missing(SHARDS[1:])) == (0, [0])
    assert holders.loss(SHARDS[1:]) == "", "it may come back"
    stranger = Member(role=Role.SHARD, rank=0, incarnation="another", node="s", address="")
    assert holders.loss([stranger, *SHARDS[1:]]) == "shard server 0 was lost with its parameters"
    assert "restore a checkpoint" in holders.trouble([stranger, *SHARDS[1:]])


@pytest.mark.parametrize(("version", "holds"), [(1, True), (2, False)])
def test_a_server_that_is_back_holds_its_slices_until_another_step(version: int, holds: bool) -> None:
    holders = held()
    holders.lose(0, 1)
    assert bool(holders.still_held_by("server 0", version)) == holds
    holders.take_back(SHARDS[0], SHARDS[1:], version)
    assert (0 in holders.placement.servers) == holds
    assert not holders.still_held_by("server 0", version), "it is a member again"


def test_a_slice_with_failed_memory_is_received_again() -> None:
    holders = held()
    report = corrupted(holders, 0)
    assert holders.is_holding(SHARDS[0], report)
    assert holders.corrupted(0, report.slice)
    assert 0 in holders.placement.holders[report.slice].copying
    assert not holders.is_holding(SHARDS[0], report)
    assert not holders.copied(SHARDS[0], Copied(model=0, epoch=0, slices=(report.slice,), placement=1), SHARDS), "older"
    now = holders.placement_number
    assert holders.copied(SHARDS[0], Copied(model=0, epoch=0, slices=(report.slice,), placement=now), SHARDS)
    assert 0 in holders.placement.holders[report.slice].complete
    assert not holders.is_holding(SHARDS[0], corrupted(holders, 0, placement=now - 1)), "it was about the earlier copy"


def test_the_only_copy_with_failed_memory_may_have_another_that_comes_back() -> None:
    holders = held()
    report = corrupted(holders, 0)
    (other,) = set(holders.placement.holders[report.slice].complete) - {0}
    holders.lose(other, 1)
    assert not holders.corrupted(0, report.slice)
    holders.parameters.failure = "memory failed"
    holders.take_back(SHARDS[other], [s for s in SHARDS if s.rank != other], 1)
    assert holders.parameters.failure == ""
    assert holders.placement.holders[report.slice].complete == (other,)
    assert holders.placement.holders[report.slice].copying == (0,)


@pytest.mark.parametrize(("uri", "replaced"), [(FIRST_VALUES, False), ("/checkpoint", True)])
def test_a_restore_forgets_all_holders(uri: str, replaced: bool) -> None:
    holders = held()
    holders.out_of_memory[1] = "shard server 1 cannot hold it"
    assert holders.out_of_memory_reason.startswith("model 'm' is not held: shard server 1 cannot hold it;")
    order = holders.begin_restore(uri, 5, holders.new_placement(SPEC, [Server(0, "s")], 1))
    assert (order.epoch, order.version, holders.parameters.run_began, holders.parameters.replaced) == (
        1,
        5,
        5,
        replaced,
    )
    assert (holders.out_of_memory_reason, holders.awaits_values, holders.is_loaded(SHARDS[0])) == ("", True, False)
    holders.parameters.failure = "no such file"
    assert (holders.awaits_values, holders.loss(SHARDS)) == (False, "no such file")
