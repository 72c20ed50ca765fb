"""The gRPC backend over real shard servers: every collective at several sizes, failures, and what is left behind.

Tests of `aggregation/server/servicer.py`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.grpc import GrpcBackend
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, MemberLost, Timeout
from axon_ps.reduction import ops
from axon_ps.testing import LocalCluster
from axon_ps.types import NUMBERS, Array, DType, ReduceOp, Role
from axon_ps.worker.environment import worker_config
from axon_ps_lab.conformance import oracle
from deadlines import HANG_S
from grpc_ranks import Rank, Ranks

N = 4
TIMEOUT_S = HANG_S
SUM = ReduceOp.SUM
_names = itertools.count()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with LocalCluster(shards=3, world_size=N) as cluster:
        ranks = Ranks(cluster.address, cluster.job, cluster.security, N)
        yield ranks
        ranks.close()


class Group:
    """A new group's backends, and calls made by all of them at once."""

    def __init__(self, ranks: Ranks, positions: Sequence[int] | None = None) -> None:
        self._ranks = ranks
        self._sequence = itertools.count()
        self.name = f"group-{next(_names)}"
        self.backends: list[GrpcBackend] = ranks.group(self.name, positions)

    def call(self, operation: Operation, **fields: Any) -> Call:
        return Call(sequence=next(self._sequence), operation=operation, **fields)

    def each(self, call: Call, **arrays: Sequence[Any]) -> list[BaseException | None]:
        """What the call raised on every rank; `arrays` are fields of its request, by rank."""

        def one(backend: GrpcBackend) -> BaseException | None:
            mine = {name: of_ranks[backend.rank] for name, of_ranks in arrays.items()}
            try:
                backend.run(Request(call=call, **mine), TIMEOUT_S)
            except AxonError as error:
                return error
            return None

        return self._ranks.each(one, self.backends)

    def all(self, call: Call, **arrays: Sequence[Any]) -> None:
        """As `each`; everybody succeeds."""
        assert self.each(call, **arrays) == [None] * len(self.backends)


def values_of(numel: int, dtype: DType, n: int = N) -> list[Array]:
    rng = np.random.default_rng(numel)
    return [(rng.integers(0, 2 if dtype is DType.BOOL else 50, numel)).astype(dtype.numpy) for _ in range(n)]


def total_of(values: Sequence[Array], op: ReduceOp, dtype: DType) -> Array:
    out = np.empty_like(values[0])
    ops.reduce_into(out, [v.copy() for v in values], op, dtype)
    return out


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 700_001])
def test_all_reduce(ranks: Ranks, numel: int, dtype: DType) -> None:
    group = Group(ranks)
    op = ReduceOp.AVERAGE if dtype.is_float else SUM
    values = values_of(numel, dtype)
    expected = total_of(values, op, dtype)
    group.all(group.call(Operation.ALL_REDUCE, dtype=dtype, counts=(numel,), op=op), data=values)
    for value in values:
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("op", [SUM, ReduceOp.AVERAGE])
@pytest.mark.parametrize("numel", [0, 1, 1000, 10_007])
def test_blocks_are_added_up_to_the_bits_that_they_would_have_elsewhere(ranks: Ranks, numel: int, op: ReduceOp) -> None:
    group, dtype = Group(ranks), DType.INT8_BLOCK
    values = [oracle.values(dtype, numel, rank) for rank in range(N)]
    expected = total_of(values, op, dtype)
    group.all(group.call(Operation.ALL_REDUCE, dtype=dtype, counts=(numel,), op=op), data=values)
    for value in values:
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("positions", [(0,), (2, 0), (3, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("scale", [0, 1, 40_000])
def test_every_operation_with_uneven_parts(ranks: Ranks, positions: Sequence[int], scale: int) -> None:
    group, n = Group(ranks, positions), len(positions)
    counts = tuple(scale * (3 * r + 1) % 7 * (scale + 1) for r in range(n))
    starts, total = [0, *itertools.accumulate(counts)][:-1], sum(counts)
    values = values_of(total, DType.F32, n)
    expected = total_of(values, SUM, DType.F32)
    f32 = {"dtype": DType.F32}
    root = n - 1

    outputs = [np.zeros(c, np.float32) for c in counts]
    group.all(group.call(Operation.REDUCE_SCATTER, counts=counts, op=SUM, **f32), output=outputs, data=values)
    np.testing.assert_array_equal(np.concatenate(outputs), expected)

    wholes = [np.zeros(total, np.float32) for _ in range(n)]
    group.all(group.call(Operation.ALL_GATHER, counts=counts, **f32), output=wholes, data=outputs)
    for whole in wholes:
        np.testing.assert_array_equal(whole, expected)

    in_place = [np.zeros(total, np.float32) for _ in range(n)]
    own = [a[s : s + c] for a, s, c in zip(in_place, starts, counts, strict=True)]
    for part, output in zip(own, outputs, strict=True):
        part[:] = output
    group.all(group.call(Operation.ALL_GATHER, counts=counts, **f32), output=in_place, data=own)
    np.testing.assert_array_equal(in_place[0], expected)

    gathered = [np.zeros(total, np.float32) if r == root else None for r in range(n)]
    group.all(group.call(Operation.GATHER, counts=counts, root=root, **f32), output=gathered, data=outputs)
    np.testing.assert_array_equal(gathered[root], expected)  # type: ignore[arg-type]

    scattered = [np.zeros(c, np.float32) for c in counts]
    group.all(group.call(Operation.SCATTER, counts=counts, root=root, **f32), output=scattered, data=gathered)
    np.testing.assert_array_equal(np.concatenate(scattered), expected)

    copies = [v.copy() for v in values]
    group.all(group.call(Operation.BROADCAST, counts=(total,), root=root, **f32), data=copies)
    for copy in copies:
        np.testing.assert_array_equal(copy, values[root])

    copies = [v.copy() for v in values]
    group.all(group.call(Operation.REDUCE, counts=(total,), op=SUM, root=root, **f32), data=copies)
    np.testing.assert_array_equal(copies[root], expected)
    np.testing.assert_array_equal(copies[0], values[0] if root else expected)

    matrix = [tuple((i + 2 * j) % 3 * scale for j in range(n)) for i in range(n)]
    sent = [np.arange(sum(row), dtype=np.float64) + 1000 * i for i, row in enumerate(matrix)]
    received = [np.zeros(sum(row[j] for row in matrix)) for j in range(n)]
    columns = [tuple(row[j] for row in matrix) for j in range(n)]
    call = group.call(Operation.ALL_TO_ALL, dtype=DType.F64)
    group.all(call, output=received, data=sent, output_counts=columns, input_counts=matrix)
    for j in range(n):
        parts = [np.split(sent[i], np.cumsum(matrix[i])[:-1])[j] for i in range(n)]
        np.testing.assert_array_equal(received[j], np.concatenate(parts))

    group.all(group.call(Operation.BARRIER))


@pytest.mark.parametrize("numel", [0, 5, 16384, 16385, 600_000])
def test_send_and_recv(ranks: Ranks, numel: int) -> None:
    group = Group(ranks)
    data, got = np.arange(numel, dtype=np.int64), np.zeros(numel, np.int64)
    receiving = ranks.submit(group.backends[1].recv, got, DType.I64, -1, 3, TIMEOUT_S)
    group.backends[2].send(data, DType.I64, 1, 3, TIMEOUT_S)
    assert receiving.result() == 2
    np.testing.assert_array_equal(got, data)


def test_messages_keep_their_order_and_go_around_a_ring(ranks: Ranks) -> None:
    group = Group(ranks)

    def ring(backend: GrpcBackend) -> list[int]:
        to, source, got = (backend.rank + 1) % N, (backend.rank - 1) % N, []
        for i in range(10):
            backend.send(np.array([i]), DType.I64, to, 0, TIMEOUT_S)
        for _ in range(10):
            out = np.zeros(1, np.int64)
            assert backend.recv(out, DType.I64, source, 0, TIMEOUT_S) == source
            got.append(int(out[0]))
        return got

    assert ranks.each(ring, group.backends) == [list(range(10))] * N


def test_a_message_of_another_size_is_a_disagreement(ranks: Ranks) -> None:
    group = Group(ranks)
    group.backends[0].send(np.zeros(3), DType.F64, 1, 0, TIMEOUT_S)
    with pytest.raises(Disagreement, match="rank 0 sends 3 f64 with tag 0 to rank 1"):
        group.backends[1].recv(np.zeros(4), DType.F64, 0, 0, TIMEOUT_S)


def test_disagreement_reaches_everybody_changes_nothing_and_the_group_goes_on(ranks: Ranks) -> None:
    group = Group(ranks)
    values = [np.full(9 if r == 2 else 900_000, r, np.float32) for r in range(N)]
    sequence = group.call(Operation.BARRIER).sequence

    def one(backend: GrpcBackend, value: Array) -> str:
        call = Call(
            sequence=sequence, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(value.size,), op=ReduceOp.MAX
        )
        with pytest.raises(Disagreement) as info:
            backend.run(Request(call=call, data=value), TIMEOUT_S)
        return str(info.value)

    for message in ranks.each(one, group.backends, values):
        assert "rank 0, 1, 3: all_reduce(max) of 900000 f32; rank 2: all_reduce(max) of 9 f32" in message
    assert all((value == r).all() for r, value in enumerate(values))
    group.all(group.call(Operation.BARRIER))


def test_a_timeout_names_who_did_not_come(ranks: Ranks) -> None:
    group = Group(ranks)
    begin_s = time.monotonic()
    with pytest.raises(Timeout, match="ranks 0, 2, 3 did not come"):
        group.backends[1].run(Request(call=group.call(Operation.BARRIER)), 0.3)
    assert 0.2 < time.monotonic() - begin_s < HANG_S / 2


def test_arrays_that_do_not_fit_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    backend = Group(ranks).backends[0]
    call = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(4,), op=SUM)
    with pytest.raises(InvalidRequest, match="has 5 elements; needed are 4"):
        backend.run(Request(call=call, data=np.zeros(5, np.float32)), TIMEOUT_S)
    for array in (np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]):
        with pytest.raises(InvalidRequest, match="data has shape"):
            backend.run(Request(call=call, data=array), TIMEOUT_S)
    average = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.I32, counts=(1,), op=ReduceOp.AVERAGE)
    with pytest.raises(InvalidRequest, match="average"):
        backend.run(Request(call=average, data=np.zeros(1, np.int32)), TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="there is no rank 4"):
        backend.send(np.zeros(1, np.int32), DType.I32, N, 0, TIMEOUT_S)


def test_abort_ends_what_is_pending_with_the_error_given(ranks: Ranks) -> None:
    group = Group(ranks)
    backend = group.backends[0]
    pending = ranks.submit(backend.run, Request(call=group.call(Operation.BARRIER)), TIMEOUT_S)
    receiving = ranks.submit(backend.recv, np.zeros(1), DType.F64, 1, 0, TIMEOUT_S)
    while ranks.stats("collective_streams") < 2:
        pass
    error = MemberLost("rank 3 is gone")
    backend.abort(error)
    for future in (pending, receiving):
        ended = future.exception(5.0)
        assert (type(ended), str(ended)) == (MemberLost, str(error))
    with pytest.raises(MemberLost, match="rank 3"):
        backend.run(Request(call=group.call(Operation.BARRIER)), TIMEOUT_S)
    backend.close()


def test_who_breaks_off_is_named_to_the_others(ranks: Ranks) -> None:
    group = Group(ranks)
    call = group.call(Operation.ALL_REDUCE, dtype=DType.F32, counts=(1 << 20,), op=SUM)
    pending = [
        ranks.submit(b.run, Request(call=call, data=np.zeros(1 << 20, np.float32)), TIMEOUT_S)
        for b in group.backends[:3]
    ]
    while ranks.stats("collective_streams") < 9:  # three ranks on three servers
        pass
    group.backends[1].abort(Closed("rank 1 has had enough"))
    assert isinstance(pending[1].exception(5.0), Closed)
    for future in (pending[0], pending[2]):
        error = future.exception(5.0)
        assert isinstance(error, Broken)
        assert "rank 1 broke off" in str(error)


def test_overlapping_groups_are_used_at_the_same_time(ranks: Ranks) -> None:
    groups = [Group(ranks, p) for p in ((0, 1, 2), (2, 1, 3), (3, 0))]
    calls = [
        group.call(Operation.ALL_REDUCE, dtype=DType.I64, counts=(3,), op=SUM) for group in groups for _ in range(20)
    ]

    def many(group: int, backend: GrpcBackend) -> None:
        for call in calls[20 * group : 20 * group + 20]:
            data = np.full(3, backend.rank + 1)
            backend.run(Request(call=call, data=data), TIMEOUT_S)
            n = backend.world_size
            assert (data == n * (n + 1) // 2).all()

    futures = [ranks.submit(many, i, b) for i, group in enumerate(groups) for b in group.backends]
    for future in futures:
        future.result(TIMEOUT_S)


def test_closing_empties_the_mailbox_and_no_memory_is_in_use_on_the_servers(ranks: Ranks) -> None:
    group = Group(ranks)
    for peer in (1, 2):
        group.backends[0].send(np.zeros(3), DType.F64, peer, 0, TIMEOUT_S)
    assert group.backends[1].recv(np.zeros(3), DType.F64, 0, 0, TIMEOUT_S) == 0
    group.backends[0].send(np.zeros(3), DType.F64, 1, 0, TIMEOUT_S)
    assert group.backends[2].recv(np.zeros(3), DType.F64, -1, 0, TIMEOUT_S) == 0
    assert ranks.stats("collective_mailbox_bytes") > 0
    for backend in group.backends:
        backend.close()
        backend.close()
    with pytest.raises(Closed, match="is closed"):
        group.backends[0].run(Request(call=group.call(Operation.BARRIER)), TIMEOUT_S)
    for name in ("mailbox", "pending", "sums", "queued"):
        assert ranks.stats(f"collective_{name}_bytes") == 0.0
    assert ranks.stats("collective_streams") == 0.0


# ---------------------------------------------------------------------- deaths


def reduce_until_killed(name: str) -> None:
    """A worker process: rank 3 of the group, all-reducing until somebody kills it."""
    config = worker_config(os.environ)
    rank = Rank(config.coordinator, config.job, config.security, config.rank)
    members = rank.members(N)
    backend = rank.backend(name, members, 3)
    print("in the group", flush=True)
    reduce_forever(backend, lambda: None)


def reduce_forever(backend: GrpcBackend, done: Any) -> None:
    data = np.ones(4 << 20, np.float32)
    for sequence in itertools.count():
        call = Call(
            sequence=sequence, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(data.size,), op=ReduceOp.MAX
        )
        backend.run(Request(call=call, data=data), TIMEOUT_S)
        done()


def test_kill_9_in_the_middle_of_an_all_reduce_is_named_to_the_others_long_before_its_lease_ends() -> None:
    with LocalCluster(shards=2, world_size=N, min_workers=1, lease_s=HANG_S) as cluster:
        cluster.start_workers(reduce_until_killed, args=("g",), ranks=[3])
        ranks = Ranks(cluster.address, cluster.job, cluster.security, N - 1, members=N)
        backends = ranks.group("g")
        some_done = threading.Semaphore(0)
        futures = [ranks.submit(reduce_forever, b, some_done.release) for b in backends]
        for _ in range(6):
            assert some_done.acquire(timeout=TIMEOUT_S)
        begin_s = time.monotonic()
        cluster.kill(Role.WORKER, 0)
        for future in futures:
            error = future.exception(TIMEOUT_S)
            assert isinstance(error, MemberLost), error
            assert "rank 3 has left the job" in str(error)
        assert time.monotonic() - begin_s < HANG_S / 2
        ranks.close()
