"""A server reports the memory that it has left, and refuses slices beyond it. Tests of `shard/server/capacity.py`."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import Busy
from axon_ps.observe.work import resident_bytes
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.server.capacity import Capacity
from axon_ps.sharding.memory import slice_sizes
from axon_ps.sharding.placement import Holders, Placement
from engine_driver import Servers, job_of, layout_of, one_group

LAYOUT = layout_of([1000], [3000])
SPEC, ADAM = job_of(LAYOUT), one_group(LAYOUT, "adamw", lr=0.1)
SIZES = slice_sizes(SPEC, ADAM, 1, 1)
BOTH = Placement((Holders((0,)), Holders((0, 1))), num_cuts=1)


def check(capacity: Capacity, rank: int = 0, engine: ShardEngine | None = None) -> None:
    capacity.check(engine or ShardEngine(), rank, BOTH, SPEC, ADAM, 1)


def test_the_free_memory_of_the_machine_is_reported_with_the_pool_that_servers_share() -> None:
    report = Capacity(available=lambda: 5 << 30).report()
    assert report is not None
    assert (report.available_bytes, bool(report.pool)) == (5 << 30, True)
    assert 0 < report.resident_bytes <= 2 * resident_bytes()


def test_a_limit_is_this_servers_own() -> None:
    limit = Capacity(1 << 40, available=lambda: 7)
    report = limit.report()
    assert report is not None
    assert (1 << 40) - 2 * resident_bytes() < report.available_bytes < 1 << 40
    assert report.pool == ""
    assert Capacity(1).free_bytes() == 1, "a limit that is passed already is not an unknown one"


def test_memory_that_is_not_known_is_not_reported_and_refuses_nothing() -> None:
    unknown = Capacity(available=lambda: 0)
    assert unknown.report() is None
    check(unknown)


def test_a_server_needs_memory_for_the_slices_that_are_placed_on_it() -> None:
    check(Capacity(available=lambda: sum(SIZES)))
    with pytest.raises(Busy, match="are needed for it, and .* can be had"):
        check(Capacity(available=lambda: sum(SIZES) - 1))
    check(Capacity(available=lambda: SIZES[1]), rank=1)
    with pytest.raises(Busy):
        check(Capacity(available=lambda: SIZES[1] - 1), rank=1)


def test_slices_that_a_server_has_need_no_more_memory() -> None:
    servers = Servers(SPEC, optimizer=ADAM)
    servers.upload([np.zeros(1000, np.float32), np.zeros(3000, np.float32)])
    check(Capacity(available=lambda: 1), engine=servers.engines[0])
