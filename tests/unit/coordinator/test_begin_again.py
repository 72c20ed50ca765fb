"""A job that has lost everything before its first checkpoint: the next worker uploads first values, for version 0."""

from __future__ import annotations

from axon_ps.wire.events import FIRST_VALUES, RestoreOrder
from coordinator_driver import Driver, Peer


def reborn(d: Driver) -> tuple[Peer, Peer, Peer]:
    """The coordinator comes back with its state; nobody else with anything."""
    d.restart()
    d.advance(d.config.lease_s + 1)
    return d.shard(), d.worker(), d.worker()


def begin_again(d: Driver) -> None:
    d.perform(d.state.restores.begin_again(d.clock()))


def test_only_what_lost_everything_does() -> None:
    d = Driver()
    assert not d.state.assembly.lost_everything
    d.assembled()
    assert not d.state.assembly.lost_everything
    reborn(d)
    assert d.state.assembly.lost_everything


def test_a_worker_that_registers_uploads_and_the_job_is_at_version_0() -> None:
    d = Driver()
    d.assembled()
    shard, a, b = reborn(d)
    assert not d.register(a).upload, "it is not known yet that there is no checkpoint"
    begin_again(d)
    order = shard.last(RestoreOrder)
    assert (order.uri, order.version, order.epoch) == (FIRST_VALUES, 0, 1)
    assert not d.register(b).upload, "rank 0 waits, too"
    assert d.register(a).upload
    assert not d.state.assembly.lost_everything
    assert any("waits for first values" in text for text in d.state.status().pending)
    shard.initialized(version=0, epoch=1)
    status = d.state.status()
    assert (status.initialized, status.version) == (True, 0)
    assert not status.pending or not any("first values" in text for text in status.pending)


def test_when_the_uploader_dies_another_takes_over_also_after_a_restart() -> None:
    d = Driver()
    d.assembled()
    _, a, b = reborn(d)
    begin_again(d)
    assert d.register(a).upload
    a.lose()
    assert d.register(b).upload
    shard, c, _ = reborn(d)
    assert shard.last(RestoreOrder).uri == FIRST_VALUES
    assert d.register(c).upload
    shard.initialized(version=0, epoch=1)
    assert d.state.status().initialized


def test_it_may_happen_again() -> None:
    d = Driver()
    d.assembled()
    shard, a, _ = reborn(d)
    begin_again(d)
    d.register(a)
    shard.initialized(version=0, epoch=1)
    shard, b, _ = reborn(d)
    assert d.state.assembly.lost_everything
    begin_again(d)
    assert shard.last(RestoreOrder).epoch == 2
    assert d.register(b).upload
