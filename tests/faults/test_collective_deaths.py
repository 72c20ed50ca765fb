"""Ranks that die, freeze or disagree in the middle of a collective: every other rank is told who it was."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, MemberLost
from axon_ps.testing import LocalCluster
from axon_ps.types import ReduceOp
from deadlines import HANG_S

LARGE = 16 << 20  # elements: no rank can be done before the victim is gone
BACKENDS = ["shm", "grpc"]


def lose_one(backend: str, victim: int, number: int) -> str:
    """Rank `victim` signals itself while its all-reduce is under way; what the others are told."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        group = world.default_group
        assert group.backend == backend
        pending = None if world.rank == victim else group.recv(np.empty(1), victim, async_op=True)
        assert group.all_reduce(np.ones(1)).item() == world.world_size
        data = np.ones(LARGE, np.float32)
        if pending is None:
            group.all_reduce(data, async_op=True)
            os.kill(os.getpid(), number)
            raise AssertionError("it goes on after its end")
        try:
            while True:
                group.all_reduce(data)
        except MemberLost as error:
            with pytest.raises(MemberLost):
                pending.wait(20)
            with pytest.raises(MemberLost):
                group.barrier()
            world.kv_put(f"told/{world.rank}", b"yes")  # whoever leaves earlier is one more lost rank to the others
            for rank in {0, 1, 2, 3} - {victim}:
                world.kv_wait(f"told/{rank}")
            return str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_a_rank_ends_what_is_pending_everywhere(backend: str, number: signal.Signals) -> None:
    environment = {"AXON_PS_BACKEND": backend}
    with LocalCluster(shards=2, world_size=4, min_workers=1, lease_s=2.0, environment=environment) as cluster:
        workers = cluster.start_workers(lose_one, args=(backend, 2, int(number)))
        told = [w.result() for i, w in enumerate(workers) if i != 2]
        workers[2].kill()
    assert [t.error for t in told] == [""] * 3
    assert all("rank 2" in t.value for t in told), told


def two_groups(calls: int) -> tuple[int, int]:
    """Two overlapping groups, each used by a thread of its own, small operations without end; how many were right."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        groups = [world.new_group([0, 1, 2]), world.new_group([2, 1])]
        right = [0, 0]

        def use(index: int, group: ProcessGroup) -> None:
            for i in range(calls):
                rank, n = group.rank, group.world_size
                total = group.all_reduce(np.array([rank + i])).item()
                gathered = group.all_gather(np.array([rank], np.uint8)).tolist()
                best = group.all_reduce(np.full(3, rank, np.int32), ReduceOp.MAX).tolist()
                expected = (sum(range(n)) + n * i, list(range(n)), [n - 1] * 3)
                right[index] += (total, gathered, best) == expected

        threads = [
            threading.Thread(target=use, args=(i, group))
            for i, group in enumerate(groups)
            if group.contains(world.rank)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        world.barrier("done")
        return right[0], right[1]


@pytest.mark.parametrize(("backend", "calls"), [("shm", 200), ("grpc", 20)])
def test_overlapping_groups_in_several_threads_do_not_disturb_each_other(backend: str, calls: int) -> None:
    with LocalCluster(shards=2, world_size=3, environment={"AXON_PS_BACKEND": backend}) as cluster:
        results = cluster.run_workers(two_groups, args=(calls,))
    assert [r.value for r in results] == [(calls, 0), (calls, calls), (calls, calls)]


def disagree() -> list[str]:
    """Rank 1 asks for something else, in every way; what this rank is told each time."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        group, odd = world.default_group, world.rank == 1
        wrong = [
            lambda: group.broadcast(np.zeros(4)) if odd else group.all_reduce(np.zeros(4)),
            lambda: group.all_reduce(np.zeros(5 if odd else 4)),
            lambda: group.all_reduce(np.zeros(4, np.float32 if odd else np.int32)),
            lambda: group.all_reduce(np.zeros(4), ReduceOp.MAX if odd else ReduceOp.SUM),
            lambda: group.broadcast(np.zeros(4), src=1 if odd else 0),
            lambda: group.barrier() if odd else group.all_gather(np.zeros(1 << 20, np.float32)),
        ]
        told = []
        for call in wrong:
            with pytest.raises(Disagreement) as error:
                call()
            told.append(str(error.value))
            assert group.all_reduce(np.ones(1)).item() == group.world_size
        return told


@pytest.mark.parametrize("backend", [*BACKENDS, "gloo"])
def test_a_rank_that_disagrees_is_named_on_every_rank(backend: str) -> None:
    with LocalCluster(shards=2, world_size=3, environment={"AXON_PS_BACKEND": backend}) as cluster:
        told = [r.value for r in cluster.run_workers(disagree)]
    assert told[0] == told[1] == told[2]
    for text in told[0]:
        assert "rank 0, 2: " in text
        assert "rank 1: " in text
