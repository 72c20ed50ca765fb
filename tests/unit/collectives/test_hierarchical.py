"""HierarchicalBackend: which backends it is made of, what goes through which, device memory, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation, Request
from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend
from axon_ps.collectives.backends.mock import MockBackend, mock_contexts
from axon_ps.errors import Disagreement, MemberLost, Timeout, Unreachable
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.device import DeviceArray, StandIn, asarray, stand_in


class HostOnly(MockBackend):
    """Refuses device memory, as backends between hosts do."""

    def run(self, request: Request, timeout_s: float) -> None:
        assert not isinstance(request.data, DeviceArray)
        assert not isinstance(request.output, DeviceArray)
        super().run(request, timeout_s)


@pytest.fixture
def gpus() -> Iterator[StandIn]:
    with stand_in() as device:
        yield device


@pytest.fixture
def closing() -> Iterator[list[Backend]]:
    backends: list[Backend] = []
    yield backends
    for backend in backends:
        backend.close()


def on_every_rank(contexts: list[GroupContext], act: Callable[[GroupContext], object]) -> list[object]:
    results: list[object] = [None] * len(contexts)

    def run(context: GroupContext) -> None:
        try:
            results[context.rank] = act(context)
        except Exception as error:
            results[context.rank] = error

    threads = [threading.Thread(target=run, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return results


def make(context: GroupContext) -> HierarchicalBackend:
    return HierarchicalBackend.create(context, intra=MockBackend, inter=HostOnly, small_bytes=0)


def all_reduce(numel: int, op: ReduceOp = ReduceOp.SUM, dtype: DType = DType.F32) -> Call:
    return Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=dtype, counts=(numel,), op=op)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("aa", ["node"]),
        ("ab", ["flat"]),
        ("aabb", ["node0", "flat", "rail1"]),
        ("aab", ["node0", "flat"]),  # rank 1 is in no rail
    ],
)
def test_what_it_is_made_of(nodes: str, names: list[str]) -> None:
    made: list[GroupContext] = []

    def note(context: GroupContext) -> Backend:
        made.append(context)
        return MockBackend(context)

    context = mock_contexts(len(nodes), nodes=list(nodes), ranks=range(3, 3 + len(nodes)))[1]
    HierarchicalBackend.create(context, intra=note, inter=note).close()
    assert [c.name.removeprefix("mock/") for c in made] == names
    assert all(c.ranks[c.rank] == 4 for c in made)
    assert all(m.rank == r for c in made for m, r in zip(c.members, c.ranks, strict=True))


def test_long_names_stay_short_enough() -> None:
    made: list[str] = []

    def note(context: GroupContext) -> Backend:
        made.append(context.name)
        return MockBackend(context)

    HierarchicalBackend.create(mock_contexts(4, nodes=list("aabb"), name="x" * 200)[0], intra=note, inter=note)
    assert len(set(made)) == 3
    assert max(map(len, made)) <= 200


def test_what_was_made_is_closed_when_the_rest_cannot_be() -> None:
    closed: list[str] = []

    class Noting(MockBackend):
        def close(self) -> None:
            closed.append(self.context.name)

    def fail(context: GroupContext) -> Backend:
        raise Unreachable("no server")

    with pytest.raises(Unreachable):
        HierarchicalBackend.create(mock_contexts(4, nodes=list("aabb"))[0], intra=Noting, inter=fail)
    assert closed == ["mock/node0"]


@pytest.mark.parametrize("nodes", ["aabb", "abbb", "aabbb"])
def test_averages_count_every_rank_once_and_do_not_overflow(nodes: str) -> None:
    def act(context: GroupContext) -> list[float]:
        data = np.full(3, 60_000 - 10_000 * context.rank, np.float16)
        make(context).run(Request(call=all_reduce(3, ReduceOp.AVERAGE, DType.F16), data=data), 10.0)
        return [float(x) for x in data]

    n = len(nodes)
    want = sum(60_000 - 10_000 * r for r in range(n)) / n
    results = on_every_rank(mock_contexts(n, nodes=list(nodes)), act)
    assert all(r == results[0] for r in results)
    np.testing.assert_allclose(results[0], want, rtol=2e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", ["aabb", "abb", "ab"])
def test_device_memory_crosses_nodes_through_the_host(nodes: str, gpus: StandIn) -> None:
    def act(context: GroupContext) -> Array:
        backend = make(context)
        data = asarray(np.arange(5, dtype=np.float32) * (context.rank + 1))
        backend.run(Request(call=all_reduce(5), data=data), 10.0)
        counts = (5,) * len(nodes)
        everything = asarray(np.zeros(5 * len(nodes), np.float32))
        gather = Call(sequence=1, operation=Operation.ALL_GATHER, dtype=DType.F32, counts=counts)
        backend.run(Request(call=gather, output=everything, data=data), 10.0)
        if context.rank == 0:
            backend.send(data, DType.F32, 1, 0, 10.0)
        elif context.rank == 1:
            data[:] = 0
            assert backend.recv(data, DType.F32, 0, 0, 10.0) == 0
        return np.concatenate([data.get(), everything.get()])

    n = len(nodes)
    reduced = np.arange(5) * sum(range(1, n + 1))
    for result in on_every_rank(mock_contexts(n, nodes=list(nodes)), act):
        np.testing.assert_array_equal(result, np.tile(reduced, n + 1))  # type: ignore[arg-type]


def test_two_nodes_that_each_agree_on_another_call_are_told_by_world_ranks() -> None:
    def act(context: GroupContext) -> object:
        backend = make(context)
        numel = 4 if context.rank < 2 else 100_000
        backend.run(Request(call=all_reduce(numel), data=np.zeros(numel, np.float32)), 10.0)
        return None

    contexts = mock_contexts(4, nodes=list("aabb"), ranks=(10, 11, 12, 13))
    for error in on_every_rank(contexts, act):
        assert isinstance(error, Disagreement)
        assert "rank 10, 11: all_reduce(sum) of 4 f32; rank 12, 13: all_reduce(sum) of 100000 f32" in str(error)


def test_who_is_missing_is_named_on_every_node() -> None:
    def act(context: GroupContext) -> object:
        if context.rank != 1:
            make(context).run(Request(call=all_reduce(4), data=np.zeros(4, np.float32)), 0.2)
        return None

    errors = on_every_rank(mock_contexts(4, nodes=list("aabb"), ranks=(10, 11, 12, 13)), act)
    assert errors.pop(1) is None
    assert all(isinstance(e, Timeout) and "rank 11 did not come" in str(e) for e in errors)


def test_the_first_abort_counts_for_all_of_its_parts(closing: list[Backend]) -> None:
    backend = make(mock_contexts(4, nodes=list("aabb"))[0])
    closing.append(backend)
    backend.abort(MemberLost("rank 3 has left"))
    backend.abort(MemberLost("rank 2 has left"))
    with pytest.raises(MemberLost, match="rank 3"):
        backend.run(Request(call=all_reduce(4), data=np.zeros(4, np.float32)), 1.0)
    with pytest.raises(MemberLost, match="rank 3"):
        backend.send(np.zeros(4, np.float32), DType.F32, 1, 0, 1.0)
    assert set(backend.statistics().values()) == {0.0}
