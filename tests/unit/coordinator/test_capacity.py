"""Nothing is registered, restored or copied that the shard servers have no memory for.

Tests of `coordinator/core/placement/capacity.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.errors import Busy, MemberLost
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.memory import CHUNK_BYTES, format_bytes, placed_bytes, slice_bytes
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType
from axon_ps.wire.events import JobState, RestoreOrder, ServerMemory
from coordinator_driver import OPTIMIZER, SPEC, Driver, Peer

GIB = 1 << 30
OPERATOR = Caller(job="job")


def memory(gib: float, pool: str = "", resident: float = 0.0) -> ServerMemory:
    return ServerMemory(available_bytes=int(gib * GIB), resident_bytes=int(resident * GIB), pool=pool)


def spec_of(numel: int, name: str = "weight") -> JobSpec:
    """A trainable model of `numel` f32 parameters: 12 bytes each without an optimizer, 20 with AdamW."""
    return JobSpec(layout=Layout(units=(build_unit(name, [(name, (numel,), DType.F32)]),)))


ADAMW = dataclasses.replace(OPTIMIZER, group_of=(0,))


def assembled(*memories: ServerMemory | None, replication: int = 1) -> tuple[Driver, Peer, list[Peer]]:
    d = Driver(world_size=1, num_shards=len(memories), replication=replication)
    servers = [d.shard(memory=m, node=f"n{i}") for i, m in enumerate(memories)]
    return d, d.worker(), servers


# ---------------------------------------------------------------------- the formula


def test_bytes_of_a_slice_are_those_of_the_memory_formula() -> None:
    numel = 1 << 20
    chunks = 4 * CHUNK_BYTES
    for spec, moments, per_element in (
        (spec_of(numel), 0, 4 + 4 + 4),
        (spec_of(numel), 2, 4 + 4 + 8 + 4),
        (dataclasses.replace(spec_of(numel), precision=WirePrecision(param=DType.BF16)), 2, 4 + 4 + 8 + 2),
        (dataclasses.replace(spec_of(numel), policy=Asynchronous()), 2, 4 + 3 * 4 + 8 + 4),
    ):
        assert slice_bytes(spec, moments, 1, replicas=3) == (numel * per_element + chunks,)
    assert slice_bytes(SPEC, 2, 1)[1] == 64 * 256 * (4 + 4) + CHUNK_BYTES, "a frozen unit has values and frames"


def test_small_chunks_are_counted() -> None:
    spec = dataclasses.replace(spec_of(1 << 20), options=PlanOptions(chunk_numel=1))
    assert slice_bytes(spec, 0, 1) == ((1 << 20) * (12 + CHUNK_BYTES),)


def test_every_copy_counts() -> None:
    spec = spec_of(1 << 20)
    sizes = slice_bytes(spec, 0, 2)
    held = placed_bytes(new_placement(spec.plan(2), [Server(0), Server(1)], 2), sizes)
    assert held == Counter({0: sum(sizes), 1: sum(sizes)})


def test_sizes_in_words() -> None:
    assert [format_bytes(n) for n in (100, 2048, 5 << 20, 3 << 29, 1 << 42)] == [
        "100 bytes",
        "2.0 KiB",
        "5.0 MiB",
        "1.5 GiB",
        "4.0 TiB",
    ]


# ---------------------------------------------------------------------- registration


def test_a_layout_that_no_server_can_hold_is_refused_with_the_figures_and_not_durable() -> None:
    d, worker, servers = assembled(memory(24), memory(24))
    with pytest.raises(
        Busy,
        match=r"registration of model 'model 0' is refused, nothing has changed: shard server 0 would need 6\.0 TiB "
        r"and can have 24\.0 GiB; shard server 1 would .*; start more shard servers .*--memory-gb",
    ):
        d.register(worker, spec_of(1 << 40), None)
    assert not d.state.status().registered
    assert not [key for key in d.store.load() if "spec" in key]
    assert not any(state.spec for state in servers[0].received(JobState)), "no server is asked to hold it"
    d.restart()
    for s in servers:
        s.join()
    worker.join()
    assert d.register(worker, spec_of(1000), ADAMW).first, "the job goes on"


def test_the_optimizers_state_counts_when_it_comes() -> None:
    d, worker, _ = assembled(memory(14))
    assert d.register(worker, spec_of(1 << 30), None).first
    with pytest.raises(Busy, match=r"would need 20\.0 GiB and can have 14\.0 GiB"):
        d.register(worker, None, ADAMW)
    sgd = dataclasses.replace(ADAMW, name="sgd", groups=({"lr": 0.1},))
    assert d.register(worker, None, sgd).first, "one with less state can be had"


def test_replication_doubles_what_is_needed() -> None:
    for replication, fits in ((1, True), (2, False)):
        d, worker, _ = assembled(memory(8), memory(8), replication=replication)
        if fits:
            assert d.register(worker, spec_of(1 << 30), None).first
        else:
            with pytest.raises(Busy, match=r"shard server 0 would need 12\.0 GiB"):
                d.register(worker, spec_of(1 << 30), None)


def test_other_models_count_and_go_on() -> None:
    d, worker, (server,) = assembled(memory(20))
    d.register(worker, spec_of(1 << 30), None, name="a")
    server.initialized()
    with pytest.raises(Busy, match=r"needs? 12\.0 GiB beside the 12\.0 GiB of other models and can have 20\.0 GiB"):
        d.register(worker, spec_of(1 << 30), None, name="b")
    assert [m.name for m in d.state.status().models] == ["a"]
    d.call(lambda call: d.state.registrations.release(call, worker.caller, 0, "a"))
    assert d.register(worker, spec_of(1 << 30), None, name="b").first


def test_servers_of_one_machine_share_its_memory() -> None:
    d, worker, _ = assembled(memory(10, "machine"), memory(10, "machine"))
    with pytest.raises(Busy, match=r"can have 10\.0 GiB, which 2 servers of its machine share"):
        d.register(worker, spec_of(1 << 30), None)
    d, worker, _ = assembled(memory(10, "one"), memory(10, "another"))
    assert d.register(worker, spec_of(1 << 30), None).first


def test_what_a_heartbeat_says_counts() -> None:
    d, worker, (server,) = assembled(memory(1))
    with pytest.raises(Busy):
        d.register(worker, spec_of(1 << 30), None)
    measures = {"available_bytes": 11.0 * GIB, "memory_bytes": 2.0 * GIB}
    d.perform(d.state.heartbeat(server.session, measures, d.clock()))
    assert d.register(worker, spec_of(1 << 30), None).first


def test_a_registration_waits_for_servers_that_are_not_there() -> None:
    d = Driver(world_size=1, num_shards=2)
    worker = d.worker()
    d.shard(memory=memory(1))
    with pytest.raises(MemberLost, match="shard server 1 is not there to say whether it can hold it"):
        d.register(worker)
    assert not d.state.status().registered


# ---------------------------------------------------------------------- servers that cannot all the same


def out_of_memory(d: Driver, server: Peer, model: int = 0) -> None:
    number = server.placement_number(model)
    d.perform(d.state.out_of_memory(server.session, model, number, Busy("4 GiB needed, 1 GiB there"), d.clock()))


def test_a_server_that_cannot_hold_a_model_is_a_reason_for_it_alone() -> None:
    d, worker, (server,) = assembled(None)
    d.register(worker, name="good")
    server.initialized()
    d.register(worker, spec_of(1 << 40), ADAMW, name="huge")
    out_of_memory(d, server, 1)
    status = d.state.status()
    assert status.membership.complete, "the other model's steps go on"
    assert any(
        "model 'huge' is not held: shard server 0 cannot" in p and "axon-ps release 'huge'" in p for p in status.pending
    )
    with pytest.raises(Busy, match="4 GiB needed, 1 GiB there; release it"):
        d.register(worker, spec_of(1 << 40), name="huge")
    assert "is not held" in worker.last(JobState).out_of_memory
    d.state.snapshots.save(1, "memory://x")
    worker.vote()
    server.ready()
    assert d.state.status().version == 1


def test_a_restarted_coordinator_with_a_poisoned_state_says_so_and_lets_it_be_released() -> None:
    d, worker, (server,) = assembled(None)
    d.register(worker, spec_of(1 << 40), ADAMW)
    d.restart()
    server.join()
    worker.join()
    out_of_memory(d, server)
    assert any("is not held" in p for p in d.state.status().pending)
    d.call(lambda call: d.state.registrations.release(call, OPERATOR, 0, "model 0"))
    assert d.state.status().pending == ()
    assert d.register(worker, SPEC).first


def test_released_memory_is_offered_to_a_model_that_was_not_held() -> None:
    d, worker, (server,) = assembled(None)
    d.register(worker, name="a")
    d.register(worker, spec_of(1 << 20), ADAMW, name="b")
    out_of_memory(d, server, 1)
    d.call(lambda call: d.state.registrations.release(call, worker.caller, 0, "a"))
    assert server.last(JobState).spec is not None
    assert not any("is not held" in p for p in d.state.status().pending)


def test_a_restore_without_memory_on_the_servers_is_refused() -> None:
    d, worker, servers = assembled(memory(20), memory(20))
    d.register(worker, spec_of(1 << 30), ADAMW)
    for s in servers:
        s.initialized()
    measures = {"available_bytes": 1.0 * GIB, "memory_bytes": 1.0 * GIB}
    d.perform(d.state.heartbeat(servers[0].session, measures, d.clock()))
    with pytest.raises(Busy, match="the restore of /c is refused, nothing has changed: shard server 0 would need"):
        d.state.restores.restore(1, [Resume(uri="/c", version=3)], d.clock())
    assert not servers[0].received(RestoreOrder)


def test_copies_go_only_to_servers_with_memory() -> None:
    d, worker, servers = assembled(memory(30), memory(30), memory(30), replication=2)
    d.register(worker, spec_of(1 << 28), ADAMW)
    for s in servers:
        s.initialized()
    small = {"available_bytes": 0.1 * GIB, "memory_bytes": 0.1 * GIB}
    for s in servers[:2]:
        d.perform(d.state.heartbeat(s.session, small, d.clock()))
    servers[2].lose()
    assert not servers[0].copying()
    assert not servers[1].copying()
    assert any("too few copies, and shard server 0, 1 has no memory for more" in p for p in d.state.status().pending)
    assert d.state.status().membership.complete, "the job goes on with one copy"


def test_a_server_that_cannot_take_a_copy_is_not_asked_again_at_once() -> None:
    d, worker, servers = assembled(None, None, None, replication=2)
    d.register(worker)
    for s in servers:
        s.initialized()
    servers[2].lose()
    asked = next(s for s in servers[:2] if s.copying())
    out_of_memory(d, asked)
    assert not asked.copying()
    assert d.state.status().membership.complete
