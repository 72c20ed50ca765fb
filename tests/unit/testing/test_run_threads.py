"""`run_threads`: who is a member, and until when. Tests of `testing/threads.py`."""

from __future__ import annotations

import threading

import pytest

from axon_ps.errors import Broken, MemberLost
from axon_ps.testing import run_threads
from axon_ps.worker.world import World


def test_a_worker_that_returns_stays_until_all_have() -> None:
    def size(world: World) -> int:
        if world.rank == 1:
            first = next(thread for thread in threading.enumerate() if thread.name == "worker-0")
            first.join(0.5)  # it returns at once, and has ended by then if it does not wait
            assert first.is_alive()
        return world.world_size

    assert run_threads(size, 2) == [2, 2]


def test_a_worker_that_fails_or_closes_its_world_leaves_at_once() -> None:
    def wait_for_all(world: World) -> int:
        if world.rank == 0:
            raise KeyError("its own")
        world.default_group.barrier(timeout_s=20.0)
        return 0

    with pytest.raises(KeyError, match="its own"):
        run_threads(wait_for_all, 2)

    def leave(world: World) -> bool:
        try:
            world.default_group.barrier(timeout_s=20.0)  # a group of both: one that begins later is without rank 0
            if world.rank == 0:
                world.close()
                return True
            world.default_group.barrier(timeout_s=20.0)
        except (MemberLost, Broken):  # by what is noticed first: that it left, or that it has closed the group
            return world.rank == 1
        return False

    assert run_threads(leave, 2) == [True, True]
