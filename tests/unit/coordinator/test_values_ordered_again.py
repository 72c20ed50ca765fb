"""A shard server dies before the job's values are everywhere: those that are there get them, the job does not wait."""

from __future__ import annotations

from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.wire.events import FIRST_VALUES, CheckpointReply, RestoreOrder, ServerMemory
from coordinator_driver import Driver, Peer

RESUME = Resume(uri="file:///x", version=0, model="model 0")


def forming(**config: object) -> tuple[Driver, list[Peer], Peer]:
    """A job whose coordinator is started again while it waits for first values."""
    d = Driver(num_shards=2, replication=2, **config)
    shards, workers = [d.shard(), d.shard()], [d.worker(), d.worker()]
    for w in workers:
        d.register(w)
    d.restart()
    shards[0].join()
    for w in workers:
        w.join()
    return d, shards, workers[0]


def replaced(d: Driver) -> Peer:
    """Another server comes while the dead one's rank is still kept, and so gets another one."""
    newcomer = d.shard()
    d.advance(d.config.lease_s + 1, beat=True)
    return newcomer


def test_first_values_are_awaited_from_the_servers_that_are_there() -> None:
    d, shards, worker = forming()
    newcomer = replaced(d)
    assert newcomer.given_rank == 2
    assert shards[0].placements[0].servers == {0, 2}
    assert [s.last(RestoreOrder).uri for s in (shards[0], newcomer)] == [FIRST_VALUES, FIRST_VALUES]
    assert d.register(worker).upload
    shards[0].initialized(epoch=0)  # a report from before: it has other slices now
    for server in (shards[0], newcomer):
        assert not d.state.status().initialized
        server.initialized(epoch=1)
    assert d.state.status().initialized
    assert not d.state.models.values_replaced


def test_a_server_that_comes_back_gets_the_order() -> None:
    d, shards, worker = forming()
    newcomer = replaced(d)
    shards[0].lose()
    d.advance(d.config.lease_s + 1, beat=True)
    third = d.shard()
    assert third.last(RestoreOrder) == newcomer.last(RestoreOrder)
    assert d.register(worker).upload


def test_fewer_servers_than_the_job_needs_are_waited_for() -> None:
    d, shards, _ = forming()
    d.advance(d.config.lease_s + 1, beat=True)
    assert not shards[0].received(RestoreOrder)
    assert "shard server 1" in " ".join(d.state.status().pending)


def test_a_checkpoint_is_loaded_by_the_servers_that_are_there_and_the_caller_gets_its_answer() -> None:
    d = Driver(num_shards=2, replication=2)
    _, (first, second) = d.assembled(shards=2)
    call = d.call(lambda call: d.state.restores.restore(call, [RESUME], d.clock()))
    d.restart()
    first.join()
    again = d.call(lambda call: d.state.restores.restore(call, [RESUME], d.clock()))
    newcomer = replaced(d)
    order = newcomer.last(RestoreOrder)
    assert (order.uri, order.version, order.epoch) == ("file:///x", 0, 3)
    for server in (first, newcomer):
        server.initialized(epoch=3)
    assert isinstance(d.replies[again], CheckpointReply)
    assert d.state.models.values_replaced
    assert not second.open
    assert call not in d.replies


def test_without_memory_for_it_the_job_says_so_and_waits() -> None:
    d, shards, _ = forming()
    small = d.shard(memory=ServerMemory(available_bytes=1))
    d.advance(d.config.lease_s + 1, beat=True)
    assert small.open
    assert not shards[0].received(RestoreOrder)
    assert "shard server 1" in " ".join(d.state.status().pending)
