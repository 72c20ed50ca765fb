"""Worlds of threads, and groups of backend objects: what a job in this process offers, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

import axon_ps
from axon_ps import Backend, ProcessGroup, World
from axon_ps.collectives.backends.grpc import GrpcBackend
from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.group_calls import GroupCalls
from axon_ps.collectives.selection import NAMES
from axon_ps.errors import Closed, ConfigurationError, Disagreement, InvalidRequest, MemberLost, Misuse, Timeout
from axon_ps.testing import run_threads

T = TypeVar("T")


def on_threads(items: Sequence[Any], body: Callable[[Any], T]) -> list[T]:
    with ThreadPoolExecutor(len(items)) as pool:
        return [f.result(30) for f in [pool.submit(body, item) for item in items]]


def test_a_world_of_one_is_this_threads_world_until_it_is_closed() -> None:
    world = World.mock()
    assert (world.rank, world.world_size, world.num_shards, world.is_main_process) == (0, 1, 1, True)
    assert World.current() is world
    assert axon_ps.all_reduce_sum(np.ones(2)).tolist() == [1.0, 1.0]
    assert on_threads([None], lambda _: World.current()) == [None]
    world.close()
    world.close()
    assert World.current() is None
    with pytest.raises(Closed):
        world.kv_put("a", b"b")


def test_what_a_job_offers() -> None:
    def one(world: World) -> Any:
        assert World.current() is world
        assert world.agree("seed", world.rank + 7) in (7, 8, 9, 10)
        world.barrier()
        sums = world.kv_add("n", world.rank)
        assert 0 <= sums <= 6
        if world.rank == 0:
            world.kv_put("news", b"x")
        assert world.kv_wait("news", 20) == b"x"
        assert world.server_statistics(1)["pushes"] == 0
        nodes = [m.node for m in world.membership.workers]
        assert (world.num_shards, len(set(nodes)), nodes[0] == nodes[1]) == (2, 2, True)
        assert world.node_group().world_size == 2
        return world.gather_json([world.rank, world.agree("seed", 0)])

    found = run_threads(one, 4, shards=2, nodes=2)
    assert [rank for rank, _ in found[0]] == [0, 1, 2, 3]
    assert len({seed for _, seed in found[0]}) == 1
    assert found == [found[0]] * 4


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.MOCK, Backend.GRPC, "grpc"])
def test_groups_of_threads_by_backend(backend: str) -> None:
    def one(world: World) -> Any:
        group = world.new_group([2, 0], backend=backend if world.rank else str(backend))  # either, on any rank
        if world.rank == 1:
            return None
        return group.backend, group.all_reduce(np.arange(5) + group.rank).tolist()

    expected = "grpc" if backend == "grpc" else "mock"
    for result in run_threads(one, 3)[::2]:
        assert result == (expected, [1, 3, 5, 7, 9])


def test_backends_have_names() -> None:
    assert {b.value for b in Backend} == {*NAMES, "auto"}
    assert MockBackend.name.replace("mock", "gloo") == Backend.GLOO
    for name in Backend:
        assert Backend[name.name] is name


def test_the_ranks_of_processes_are_no_threads() -> None:
    with World.mock() as world:
        members = world.default_group.calls.members
        calls = GroupCalls(members, lambda context, _: MockBackend(context), timeout_s=1.0, recorder=world.recorder)
        calls.backends.store.inner = object()  # type: ignore[assignment]
        group = ProcessGroup(calls)
        with pytest.raises(InvalidRequest, match=r"for threads of one process.*use 'auto'"):
            group.barrier()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"world_size": 0}, InvalidRequest, "at least 1"),
        ({"world_size": 3, "nodes": 2}, InvalidRequest, "3 ranks cannot be on 2 nodes"),
        ({"world_size": 2, "nodes": 0}, InvalidRequest, "cannot be on 0 nodes"),
        ({"shards": 0}, ConfigurationError, "num_shards is 0"),
    ],
)
def test_worlds_that_cannot_be(arguments: dict[str, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        World.mock(**arguments)


def test_a_world_is_made_by_init_or_new() -> None:
    with pytest.raises(Misuse, match=r"World.init\(\).*World.mock\(\)"):
        World()
    assert World.new.__func__ is World.init.__func__  # type: ignore[attr-defined]


def test_who_leaves_is_missed() -> None:
    left = threading.Event()

    def one(world: World) -> None:
        group = world.default_group
        group.barrier()
        if world.rank == 1:
            world.close(finished=False)
            left.set()
            return
        assert left.wait(20)
        with pytest.raises(MemberLost, match=r"rank 1 \(node mock-0\) has left the job"):
            group.barrier()

    run_threads(one, 2)


def test_threads_that_do_not_end_are_reported() -> None:
    release = threading.Event()

    def one(world: World) -> None:
        if world.rank:
            release.wait(20)

    try:
        with pytest.raises(Timeout, match=r"rank (0, )?1 did not end within 0\.2 s"):
            run_threads(one, 2, timeout_s=0.2)
    finally:
        release.set()
        for thread in [t for t in threading.enumerate() if t.name.startswith("worker-")]:
            thread.join(20)  # they close their worlds, and with these what the test would leave behind


def test_a_world_nobody_has_any_more_ends_with_its_threads() -> None:
    before = set(threading.enumerate())
    worlds = World.mock(3)
    mine = [t for t in threading.enumerate() if t not in before]
    assert mine
    worlds[0].close()
    del worlds
    gc.collect()
    ends = time.monotonic() + 20
    for thread in mine:
        thread.join(max(0.0, ends - time.monotonic()))
        assert not thread.is_alive()


# ---------------------------------------------------------------------- groups of backends


def test_a_backend_is_a_group_and_its_sub_groups_have_siblings() -> None:
    def one(backend: MockBackend) -> Any:
        group = ProcessGroup.new(backend)
        pair = group.new_group([3, 1])
        assert pair.contains(group.rank) == (group.rank in (1, 3))
        inner = pair.all_reduce(np.full(2, group.rank)).tolist() if pair.contains(group.rank) else None
        with pytest.raises(ConfigurationError, match="made of a backend 'mock'"):
            group.named_group("other", [group.rank], backend="shm").barrier()
        total = group.all_reduce(np.full(2, group.rank)).tolist()
        group.close()
        return total, inner

    found = on_threads(MockBackend.create_world(4), one)
    assert [total for total, _ in found] == [[6, 6]] * 4
    assert [inner for _, inner in found] == [None, [4, 4], None, [4, 4]]


def test_a_group_of_ranks_is_of_the_current_world() -> None:
    with pytest.raises(Misuse, match=r"World.init\(\)"):
        ProcessGroup.new([0])
    with World.mock():
        assert ProcessGroup.new([0]).ranks == (0,)


@pytest.mark.parametrize("nodes", ["aabb", "aaab", "abab", "aaaa", "abcd"])
def test_a_hierarchical_backend_of_two_that_exist(nodes: str) -> None:
    whole = MockBackend.create_world(4, nodes=list(nodes))
    inside = {node: iter(MockBackend.create_world(nodes.count(node))) for node in nodes}
    pairs = [(next(inside[node]), whole[rank]) for rank, node in enumerate(nodes)]

    def one(pair: tuple[MockBackend, MockBackend]) -> Any:
        group = ProcessGroup(HierarchicalBackend(*pair, small_bytes=0))
        some = group.new_group([0, 3, 1])
        result = (
            group.all_reduce(np.arange(7.0) + group.rank).tolist(),
            group.all_gather(np.full(2, group.rank)).tolist(),
            some.all_reduce(np.full(3, group.rank)).tolist() if some.contains(group.rank) else None,
        )
        group.close()
        return result

    reduced, gathered = [4.0 * i + 6.0 for i in range(7)], [0, 0, 1, 1, 2, 2, 3, 3]
    for rank, found in enumerate(on_threads(pairs, one)):
        assert found == (reduced, gathered, None if rank == 2 else [4, 4, 4])


def test_a_backend_of_other_ranks_than_the_nodes_is_refused() -> None:
    whole, other = MockBackend.create_world(2, nodes=["a", "b"]), MockBackend.create_world(2)
    with pytest.raises(InvalidRequest, match="intra is rank 1 of 2; needed is rank 0 of 1.*node 'b'"):
        HierarchicalBackend(other[1], whole[1])


def test_a_sibling_through_the_servers() -> None:
    def one(world: World) -> Any:
        backend = world.new_group([0, 1], backend="grpc").backend_of()
        assert isinstance(backend, GrpcBackend)
        group = ProcessGroup(backend.sibling(world.default_group.calls.members.context))
        result = group.all_reduce(np.ones(3)).tolist()
        group.close()
        return result

    assert run_threads(one, 2) == [[2.0] * 3] * 2


# ---------------------------------------------------------------------- by position, and without out=


def test_the_others_do_not_wait_for_a_worker_that_gave_a_rank_too_many() -> None:
    def run(world: World) -> int:
        error = InvalidRequest if world.rank == 0 else Disagreement
        with pytest.raises(error, match="new_group was given rank 5; the workers are"):
            world.new_group([0, 5] if world.rank == 0 else [0, 1])
        return world.new_group([0, 1]).size

    assert run_threads(run, 2) == [2, 2]


def test_a_group_may_be_given_by_position() -> None:
    def one(world: World) -> Any:
        group, rank = world.default_group, world.rank
        data = np.full(2, float(rank))
        results = [
            axon_ps.all_reduce_sum(data.copy(), group),
            axon_ps.broadcast(data.copy(), group),
            axon_ps.broadcast_from(data.copy(), 1, group),
            axon_ps.all_gather(data, world),
            axon_ps.reduce_scatter_sum(data, group),
            axon_ps.gather_tensor(data, 0, group),
            axon_ps.scatter_tensor(data, 1, group),
            axon_ps.all_to_all(data, group),
            axon_ps.sync_gradient(data.copy(), group),
            *axon_ps.sync_gradients([data.copy()], group),
        ]
        axon_ps.barrier(group)
        if rank:
            axon_ps.send(data, 0, group)
        else:
            out = np.empty(2)
            assert axon_ps.recv(out, 1, group) == 1
        with pytest.raises(InvalidRequest, match="group is 1; give a ProcessGroup"):
            axon_ps.broadcast(data, 1)  # type: ignore[arg-type]
        return [None if r is None else r.tolist() for r in results]

    first, second = run_threads(one, 2)
    assert first == [[1, 1], [0, 0], [1, 1], [0, 0, 1, 1], [1], [0, 0, 1, 1], [1], [0, 1], [0.5, 0.5], [0.5, 0.5]]
    assert second == [[1, 1], [0, 0], [1, 1], [0, 0, 1, 1], [1], None, [1], [0, 1], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("async_op", [False, True])
def test_what_is_received_without_a_place_for_it_is_returned(async_op: bool) -> None:
    sent = np.arange(6, dtype=np.int64).reshape(2, 3)

    def one(world: World) -> None:
        if world.rank == 0:
            axon_ps.send(sent, 1)
            axon_ps.send(sent.astype(np.float32)[0], 1, tag=1)
        else:
            found = axon_ps.recv(src=0, shape=(2, 3), dtype=np.int64, async_op=async_op)
            np.testing.assert_array_equal(found.wait(20) if async_op else found, sent)
            found = world.default_group.recv(src=0, tag=1, shape=3)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, sent[0])
        world.barrier()

    run_threads(one, 2)


def test_the_error_of_a_receive_names_what_it_needs() -> None:
    group = ProcessGroup.mock()
    with pytest.raises(InvalidRequest, match="neither was given"):
        group.recv()
    with pytest.raises(InvalidRequest, match="both were given"):
        group.recv(np.empty(1), shape=1)
