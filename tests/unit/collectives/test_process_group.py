"""`ProcessGroup` over threads: kinds of arrays, shapes, handles, errors, sub-groups. Bytes are the backends' tests'."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import axon_ps
from axon_ps.collectives import functional
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.store import AbortableStore, MemoryStore
from axon_ps.errors import Closed, Disagreement, InvalidRequest, MemberLost, Misuse, Timeout
from axon_ps.types import ReduceOp

Rank = Callable[[ProcessGroup], Any]


def on_ranks(world_size: int, body: Rank) -> list[Any]:
    """What `body(group)` returns on each of `world_size` threads; the first error otherwise."""
    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(30) for f in [pool.submit(body, group) for group in ProcessGroup.mock(world_size)]]


def array(rank: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(rank).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_in_place_and_out_of_place(world_size: int) -> None:
    def body(group: ProcessGroup) -> None:
        expected = sum((array(r, 3, 5) for r in range(1, world_size)), array(0, 3, 5))
        data = array(group.rank, 3, 5)
        assert group.all_reduce(data) is data
        np.testing.assert_array_equal(data, expected)
        source, out = array(group.rank, 3, 5), np.empty((3, 5), np.float32)
        assert group.all_reduce(source, ReduceOp.AVERAGE, out=out) is out
        np.testing.assert_array_equal(source, array(group.rank, 3, 5))
        np.testing.assert_array_equal(out, expected / np.float32(world_size))

    on_ranks(world_size, body)


def test_functions_change_what_they_are_given_and_a_copy_keeps_it() -> None:
    def body(group: ProcessGroup) -> None:
        mine = np.full(2, 1.0 + group.rank)
        assert axon_ps.all_reduce_sum(mine.copy(), group=group).tolist() == [3.0, 3.0]
        assert mine.tolist() == [1.0 + group.rank] * 2
        assert axon_ps.all_reduce_sum(mine, group=group) is mine
        assert axon_ps.all_reduce_sum(mine, group=group).tolist() == [6.0, 6.0], "of the first one's result"
        mine[:] = group.rank
        assert axon_ps.all_reduce_mean(mine, group=group) is mine
        mine += group.rank
        assert axon_ps.broadcast(mine, group=group) is mine
        assert mine.tolist() == [0.5, 0.5]

    on_ranks(2, body)


def test_arrays_of_all_kinds_and_layouts() -> None:
    def body(group: ProcessGroup) -> None:
        expected = array(0, 4, 6) + array(1, 4, 6)
        strided = np.zeros((8, 6), np.float32)[::2]
        strided[:] = array(group.rank, 4, 6)
        np.testing.assert_array_equal(group.all_reduce(strided), expected)
        transposed = array(group.rank, 4, 6).T
        np.testing.assert_array_equal(group.all_reduce(transposed), expected.T)
        tensor = torch.from_numpy(array(group.rank, 4, 6))
        parameter = torch.nn.Parameter(tensor.clone())
        assert group.all_reduce(tensor) is tensor
        assert torch.equal(tensor, torch.from_numpy(expected))
        assert torch.equal(group.all_reduce(parameter), torch.from_numpy(expected))
        column = torch.from_numpy(array(group.rank, 4, 6)).t()
        assert torch.equal(group.all_reduce(column), torch.from_numpy(expected).t())
        half = torch.full((3,), 1.5 + group.rank, dtype=torch.bfloat16)
        assert group.all_reduce(half).tolist() == [4.0] * 3
        np.testing.assert_array_equal(group.all_reduce(np.full(3, group.rank + 0.5, ml_dtypes.bfloat16)), [2.0] * 3)
        assert group.all_reduce(torch.tensor(group.rank + 1)).item() == 3
        assert group.all_reduce(np.array(group.rank == 0), ReduceOp.MAX).item() is True
        assert group.all_reduce(np.empty((0, 7))).shape == (0, 7)

    on_ranks(2, body)


def test_gathering_rows() -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank
        whole = np.concatenate([array(r, 2, 3) for r in range(3)])
        np.testing.assert_array_equal(group.all_gather(array(rank, 2, 3)), whole)
        out = np.empty((6, 3), np.float32)
        out[2 * rank : 2 * rank + 2] = array(rank, 2, 3)
        assert group.all_gather(out[2 * rank : 2 * rank + 2], out=out) is out
        np.testing.assert_array_equal(out, whole)
        uneven = np.concatenate([array(r, r, 2) for r in range(3)])
        np.testing.assert_array_equal(group.all_gather(array(rank, rank, 2), counts=[0, 1, 2]), uneven)
        assert group.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2]
        gathered = group.gather(array(rank, 2, 3), dst=1)
        assert (gathered is None) is (rank != 1)
        if rank == 1:
            np.testing.assert_array_equal(gathered, whole)

    on_ranks(3, body)


def test_scattering_rows() -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank
        reduced = array(0, 8, 2) + array(1, 8, 2) + array(2, 8, 2)
        parts = np.array_split(reduced, 3)
        np.testing.assert_array_equal(group.reduce_scatter(array(rank, 8, 2)), parts[rank])
        data = array(rank, 8, 2)
        out = data[[0, 3, 6][rank] :][: len(parts[rank])]
        assert group.reduce_scatter(data, out=out) is out
        np.testing.assert_array_equal(out, parts[rank])
        mine = group.reduce_scatter(array(rank, 8, 2), ReduceOp.MAX, counts=[8, 0, 0])
        assert mine.shape == ((8, 2) if rank == 0 else (0, 2))
        out = np.empty((2, 5), np.float32)
        group.scatter(array(7, 6, 5) if rank == 2 else None, src=2, out=out)
        np.testing.assert_array_equal(out, np.split(array(7, 6, 5), 3)[rank])
        swapped = group.all_to_all(np.arange(6).reshape(3, 2) + 10 * rank)
        np.testing.assert_array_equal(swapped, [[2 * rank + 10 * r, 2 * rank + 1 + 10 * r] for r in range(3)])

    on_ranks(3, body)


def test_handles_run_in_order_and_concurrently_with_sends() -> None:
    def body(group: ProcessGroup) -> None:
        other = 1 - group.rank
        data = [np.full(4, float(i + group.rank)) for i in range(20)]
        works = [group.all_reduce(d, async_op=True) for d in data]
        sent = group.send(np.array([group.rank]), other, tag=5, async_op=True)
        incoming = np.empty(1, np.int64)
        got = group.recv(incoming, tag=5, async_op=True)
        blocking = group.all_reduce(np.ones(1))  # comes after the twenty
        assert all(w.is_completed() for w in works)
        assert blocking.item() == 2
        assert got.wait(10) == other
        assert incoming.item() == other
        sent.wait(10)
        for i, (work, d) in enumerate(zip(works, data, strict=True)):
            assert work.wait() is d
            assert d.tolist() == [2.0 * i + 1] * 4
        called = threading.Event()
        works[0].add_done_callback(lambda w: called.set())
        assert called.wait(10)

    on_ranks(2, body)


def test_disagreement_tells_everybody_and_the_group_goes_on() -> None:
    def body(group: ProcessGroup) -> str:
        with pytest.raises(Disagreement) as error:
            group.all_reduce(np.zeros(3 + group.rank // 2, np.float32))
        assert group.all_reduce(np.ones(1)).item() == 3
        return str(error.value)

    said = set(on_ranks(3, body))
    assert len(said) == 1
    assert "rank 0, 1: all_reduce(sum) of 3 f32; rank 2: all_reduce(sum) of 4 f32" in said.pop()


def test_a_mistake_of_one_rank_is_told_to_all_and_the_group_goes_on() -> None:
    def body(group: ProcessGroup) -> None:
        for wrong, words in (
            (lambda: group.all_reduce(np.zeros(2), ReduceOp.BAND), "bitwise"),
            (lambda: group.all_reduce(np.zeros(2, ">f4")), "byte order"),
            (lambda: group.new_group([0, 0]), "new_group was given the ranks"),
        ):
            with pytest.raises(InvalidRequest, match=words) as error:
                if group.rank == 0:
                    wrong()
                else:
                    group.all_reduce(np.zeros(2))
            assert (type(error.value) is InvalidRequest) is (group.rank == 0)
        assert group.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]

    on_ranks(2, body)


def test_a_mistake_in_an_async_call_is_told_without_waiting_and_to_the_others_in_its_turn() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(InvalidRequest, match="a list"):  # rank 1 comes to it later
                group.all_reduce([1.0], async_op=True)
        else:
            with pytest.raises(Disagreement, match="rank 0: refused all_reduce: data is a list"):
                group.all_reduce(np.ones(1))
        assert group.all_reduce(np.ones(1)).item() == 2

    on_ranks(2, body)


def test_a_message_that_cannot_be_sent_was_not_and_can_be_made_good() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(InvalidRequest, match="itself"):
                group.send(np.ones(1), dst=0)
            with pytest.raises(InvalidRequest, match="a list"):
                group.send([1.0], dst=1)
            group.send(np.ones(1), dst=1)
        else:
            got = np.zeros(1)
            assert group.recv(got, 0) == 0
            assert got.item() == 1

    on_ranks(2, body)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_bad_arguments_of_one_rank_are_told_to_all(n: int) -> None:
    from axon_ps_lab.conformance import check_arguments

    def body(group: ProcessGroup) -> None:
        assert check_arguments(group) == []

    on_ranks(n, body)


def test_scatter_takes_data_on_every_rank_and_uses_the_roots() -> None:
    def body(group: ProcessGroup) -> None:
        data = np.arange(6.0).reshape(6, 1) + 100 * group.rank
        for root in range(3):
            mine = group.scatter(data.copy(), root)
            assert mine.tolist() == [[100.0 * root + 2 * group.rank], [100.0 * root + 2 * group.rank + 1]]
        out = np.zeros((2, 1))
        group.scatter(data if group.rank < 2 else None, 0, out=out)
        assert out.tolist() == [[2.0 * group.rank], [2.0 * group.rank + 1]]
        with pytest.raises(Disagreement, match=r"scatter of 3 x 3 f64"):
            group.scatter(data if group.rank else np.zeros((9, 1)), 0)

    on_ranks(3, body)


def test_a_group_is_over_after_a_timeout() -> None:
    seen = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            assert seen.wait(20)  # who leaves is a member no more
        else:
            with pytest.raises(Timeout, match="rank 0"):
                group.barrier(timeout_s=0.05)
            with pytest.raises(Timeout):
                group.all_reduce(np.ones(1))
            with pytest.raises(Timeout):
                group.all_reduce(np.ones(1), async_op=True).wait(10)
            seen.set()

    on_ranks(2, body)


def test_the_loss_of_a_member_ends_its_groups_only() -> None:
    def body(group: ProcessGroup) -> None:
        pair, rest = group.new_group([0, 1]), group.new_group([2])
        lost = {group.members[1].id}
        if group.rank == 0:
            pending = pair.all_reduce(np.ones(1), async_op=True)
            group.calls.member_lost(lost, MemberLost("rank 1 has left"))
            with pytest.raises(MemberLost, match="rank 1 has left"):
                pending.wait(10)
            with pytest.raises(MemberLost):
                pair.barrier()
            with pytest.raises(MemberLost):
                group.barrier()
        if group.rank == 2:
            group.calls.member_lost(lost, MemberLost("rank 1 has left"))
            assert rest.all_reduce(np.ones(1)).item() == 1

    on_ranks(3, body)


def test_sub_groups_of_sub_groups_renumber_their_ranks() -> None:
    def body(group: ProcessGroup) -> tuple[str, ...]:
        group3 = group.new_group([3, 1, 0])
        assert group3.ranks == (3, 1, 0)
        assert group3.contains(group.rank) is (group.rank != 2)
        if group.rank == 2:
            with pytest.raises(Misuse, match="not a member of group"):
                group3.barrier()
            return ()
        assert group3.rank == {3: 0, 1: 1, 0: 2}[group.rank]
        np.testing.assert_array_equal(group3.all_gather(np.array([group.rank])), [3, 1, 0])
        pair = group3.new_group([2, 0])
        if group.rank != 1:
            assert pair.ranks == (0, 3)
            assert pair.all_reduce(np.array([group.rank])).item() == 3
        return group3.name, pair.name

    names = on_ranks(4, body)
    assert names[0] == names[1] == names[3]


def test_members_that_ask_for_different_sub_groups_are_told() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(Disagreement, match=r"rank 0: new_group\(\[0\].*rank 1: new_group\(\[1\]"):
            group.new_group([group.rank])

    on_ranks(2, body)


def test_sub_groups_that_differ_behind_their_first_ranks_are_told_too() -> None:
    def body(group: ProcessGroup) -> None:
        group._agree(f"new_group({list(range(100))})")
        with pytest.raises(Disagreement, match=r"rank 0: new_group\(\[0, 1,.*\.\.\. #.*rank 1: new_group\(\[0, 1,"):
            group._agree(f"new_group({[*range(100), group.rank]})")

    on_ranks(2, body)


def test_a_closed_group_says_so() -> None:
    world = axon_ps.World.mock()
    group = world.default_group
    assert group.backend == "mock"
    world.close()
    world.close()
    with pytest.raises(Closed, match="was closed"):
        group.barrier()
    with pytest.raises(Closed):
        group.barrier(async_op=True).wait(5)


def test_the_recorder_keeps_what_happened() -> None:
    def body(group: ProcessGroup) -> None:
        group.all_reduce(np.ones(3, np.float32))
        with pytest.raises(Disagreement):
            group.broadcast(np.ones(1), src=group.rank)
        done, failed = group.calls.recorder.entries()
        assert (str(done.call), done.outcome, done.call.sequence) == ("all_reduce(sum) of 3 f32", "done", 0)
        assert failed.outcome.startswith("Disagreement: the ranks disagree on")
        assert done.ended >= done.started
        assert group.calls.recorder.pending() == []
        assert group.calls.recorder.statistics()["all_reduce_calls"] == 1.0

    on_ranks(2, body)


def test_functions_take_a_group() -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank
        assert (functional.rank(group), functional.world_size(group), functional.is_main_process(group)) == (
            rank,
            2,
            rank == 0,
        )
        ones = np.full(2, 1.0 + rank)
        assert axon_ps.all_reduce_sum(ones.copy(), group=group).tolist() == [3.0, 3.0]
        assert axon_ps.all_reduce_mean(ones.copy(), group=group).tolist() == [1.5, 1.5]
        assert axon_ps.all_reduce_min(ones.copy(), group=group).tolist() == [1.0, 1.0]
        assert axon_ps.all_reduce_max(ones.copy(), group=group, async_op=True).wait(5).tolist() == [2.0, 2.0]
        assert axon_ps.all_reduce_product(ones.copy(), group=group).tolist() == [2.0, 2.0]
        assert axon_ps.broadcast(ones.copy(), group=group).tolist() == [1.0, 1.0]
        assert axon_ps.broadcast_from(ones.copy(), 1, group=group).tolist() == [2.0, 2.0]
        assert axon_ps.all_gather(ones, group=group).tolist() == [1.0, 1.0, 2.0, 2.0]
        assert axon_ps.reduce_scatter_sum(ones, group=group).tolist() == [3.0]
        assert axon_ps.reduce_scatter_mean(ones, group=group).tolist() == [1.5]
        assert axon_ps.all_to_all(ones, group=group).tolist() == [1.0, 2.0]
        gathered = axon_ps.gather_tensor(ones, 1, group=group)
        assert gathered is None if rank == 0 else gathered.tolist() == [1.0, 1.0, 2.0, 2.0]
        mine = np.empty(1)
        axon_ps.scatter_tensor(ones if rank == 0 else None, out=mine, group=group)
        assert mine.item() == 1.0
        if rank == 0:
            axon_ps.send(ones, 1, group=group)
        else:
            assert axon_ps.recv(ones, group=group) == 0
        axon_ps.barrier(group=group)

    on_ranks(2, body)


@pytest.mark.parametrize("async_op", [False, True])
def test_gradients_are_averaged_in_buckets(async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "BUCKET_BYTES", 40)

    def body(group: ProcessGroup) -> None:
        model = torch.nn.Linear(3, 4).to(torch.float32)
        unused = torch.nn.Parameter(torch.ones(2))
        frozen = torch.nn.Parameter(torch.full((2,), float(group.rank)), requires_grad=False)
        half = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        for i, p in enumerate([*model.parameters(), half]):
            p.grad = torch.full_like(p, float(i + 2 * group.rank))
        plain = np.full((2, 3), 4.0 * group.rank, np.float32)[:, ::2]
        given = [*model.parameters(), unused, frozen, half, plain, None]
        done = axon_ps.sync_gradients(given, group=group, async_op=async_op)
        assert len(done.wait(10) if async_op else done) == 4
        assert [p.grad.unique().tolist() for p in [*model.parameters(), half]] == [[1.0], [2.0], [3.0]]
        assert unused.grad is None
        assert frozen.tolist() == [group.rank] * 2
        assert plain.tolist() == [[2.0, 2.0]] * 2
        assert axon_ps.sync_gradient(np.array([2.0 * group.rank]), group=group).item() == 1.0
        assert axon_ps.sync_gradients([], group=group) == []

    on_ranks(2, body)


def test_without_a_world_functions_say_what_to_do() -> None:
    with pytest.raises(Misuse, match=r"World.init\(\)"):
        axon_ps.all_reduce_sum(np.ones(1))


def test_shared_arrays_are_ordinary_where_there_is_no_shared_memory() -> None:
    world = axon_ps.World.mock()
    with world:
        array_ = axon_ps.empty_shared((2, 3), np.float64, group=world.default_group)
        assert (array_.shape, array_.dtype) == ((2, 3), np.float64)


def test_a_member_that_dies_before_the_first_call_ends_the_wait_for_it() -> None:
    inner = MemoryStore()
    store = AbortableStore(inner)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, "offer", 30.0)
        store.abort(MemberLost("rank 1 has left"))
        with pytest.raises(MemberLost):
            waiting.result(10)
    with pytest.raises(MemberLost):
        store.wait("offer", 30.0)
    with pytest.raises(Timeout, match="within 0"):
        AbortableStore(inner).wait("offer", 0.0)
    inner.put("offer", b"here")
    assert AbortableStore(inner).wait("offer", 0.0) == b"here"


def test_a_group_of_threads_needs_no_world() -> None:
    groups = ProcessGroup.mock(3)
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda group: group.all_reduce(np.full(2, group.rank, np.int64)).tolist(), groups))
    assert sums == [[3, 3]] * 3
    assert ProcessGroup.mock().world_size == 1
    for group in groups:
        group.close()


def test_ranks_have_their_old_names_for_one_release_and_torchs_others() -> None:
    old: Any = ProcessGroup.mock()
    for method, name, now in (("broadcast", "root", "src"), ("gather", "root", "dst"), ("reduce", "root", "dst")):
        with pytest.warns(DeprecationWarning, match=f"{name}= of {method} is called {now}= now"):
            getattr(old, method)(np.ones(2), **{name: 0})
    assert old.broadcast(np.ones(2), group_src=0).tolist() == [1.0, 1.0]
    with pytest.raises(InvalidRequest, match=r"send was not given dst=, a position in the group"):
        old.send(np.ones(2))


def test_the_ends_of_a_message_have_their_old_names_for_one_release() -> None:
    first: Any
    first, second = ProcessGroup.mock(2)
    with pytest.warns(DeprecationWarning, match="to= of send is called dst= now"):
        sending = first.send(np.ones(2), to=1, async_op=True)
    receive: Any = second.recv
    with pytest.warns(DeprecationWarning, match="source= of recv is called src= now"):
        assert receive(np.empty(2), source=0) == 0
    sending.wait()
