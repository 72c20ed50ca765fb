"""The collective engine: every order of arrival gives the same result, failures reach everybody, nothing is left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.aggregation.core import stripes
from axon_ps.aggregation.core.dataflow import MAX_PARTIAL_SUMS
from axon_ps.aggregation.core.mailbox import MAX_MAILBOX_BYTES, Envelope
from axon_ps.aggregation.core.operations import GRACE_S, TOMBSTONE_S
from axon_ps.aggregation.core.participants import MAX_QUEUED_SEGMENTS
from axon_ps.aggregation.core.stripes import (
    LARGE_SEGMENT_BYTES,
    SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    TSO_BYTES,
    StripePlan,
    home_of,
    owners_of,
    stripes_of,
)
from axon_ps.errors import AxonError, Broken, Disagreement, InvalidRequest, MemberLost, Timeout
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType, ReduceOp
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk
from axon_ps_lab.conformance import oracle
from collective_driver import RankStream, Servers, members, placed

SUM = ReduceOp.SUM


def call_of(operation: Operation, **fields: Any) -> Call:
    return Call(**{"sequence": 0, "operation": operation, "dtype": DType.F32, **fields})


def starts_of(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of four f32, so that small arrays have many."""
    monkeypatch.setattr(stripes, "SEGMENT_BYTES", 16)
    monkeypatch.setattr(stripes, "LARGE_SEGMENT_BYTES", 16)
    monkeypatch.setattr(stripes, "SMALL_SEGMENT_BYTES", 8)


def reduce_all(values: Sequence[Array], op: ReduceOp, dtype: DType) -> Array:
    out = np.empty_like(values[0])
    ops.reduce_into(out, values, op, dtype)
    return out


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sum_is_in_rank_order_whatever_the_order_of_arrival(order: Sequence[int]) -> None:
    # in f32, (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1
    values = [np.full(5, x, np.float32) for x in (1e8, 1.0, -1e8)]
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(5,), op=SUM)
    streams = {rank: servers.join(rank, call, values[rank]) for rank in order}
    servers.run([(streams[rank], 0) for rank in order])
    for stream in streams.values():
        assert stream.error is None
        np.testing.assert_array_equal(stream.received[0][1], np.zeros(5, np.float32))
    servers.assert_nothing_left()


@given(data=st.data())
@settings(max_examples=40)
def test_every_interleaving_of_every_operation_gives_the_oracles_result(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "SEGMENT_BYTES", 16)
        patch.setattr(stripes, "LARGE_SEGMENT_BYTES", 16)
        patch.setattr(stripes, "SMALL_SEGMENT_BYTES", 8)
        one_operation(data)


def one_operation(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4), "ranks")
    num_stripes = data.draw(st.integers(1, 3), "stripes")
    operation = data.draw(st.sampled_from(list(Operation)), "operation")
    root = data.draw(st.integers(0, n - 1), "root")
    rooted = operation in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
    whole = operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
    none = operation in (Operation.ALL_TO_ALL, Operation.BARRIER)
    counts = tuple(data.draw(st.integers(0, 40)) for _ in range(0 if none else 1 if whole else n))
    op = SUM if operation in stripes.REDUCING else None
    call = call_of(operation, counts=counts, op=op, root=root if rooted else -1)
    matrix = [[data.draw(st.integers(0, 12)) for _ in range(n)] for _ in range(n)]
    rng = np.random.default_rng(0)
    servers = Servers(n, num_stripes)
    streams: list[tuple[RankStream, int]] = []
    values, sent = [], []
    for rank in range(n):
        numel, starts = source_of(call, rank, matrix)
        values.append(rng.standard_normal(numel).astype(np.float32))
        sent.append(starts)
    places = [(rank, stripe) for rank in range(n) for stripe in range(num_stripes)]
    whole = st.just(()) | st.tuples(*[st.integers(0, num_stripes - 1)] * n)
    owners = data.draw(whole, "owners") if operation is Operation.ALL_GATHER else ()
    for rank, stripe in data.draw(st.permutations(places)):
        ins, outs = tuple(matrix[rank]), tuple(row[rank] for row in matrix)
        extra = {"input_counts": ins, "output_counts": outs} if operation is Operation.ALL_TO_ALL else {}
        extra |= {"owners": owners}
        streams.append((servers.join(rank, call, values[rank], sent[rank], stripe, **extra), stripe))
        for stream in streams:
            if data.draw(st.booleans()):
                servers.step(*stream)
    choices = data.draw(st.lists(st.integers(0, 63), max_size=60))
    servers.run(streams, lambda _: choices.pop() if choices else 0)
    assert all(stream.over and stream.error is None for stream, _ in streams)
    for rank in range(n):
        target, starts, expected = expected_of(call, rank, values, matrix)
        for stream, _ in streams:
            if stream.participant.rank == rank:
                placed(target, stream, starts)
        np.testing.assert_array_equal(target, expected)
    servers.assert_nothing_left()


def source_of(call: Call, rank: int, matrix: list[list[int]]) -> tuple[int, list[int]]:
    """How many elements a rank has, and where partitions begin in them."""
    match call.operation:
        case Operation.ALL_TO_ALL:
            return sum(matrix[rank]), starts_of(matrix[rank])
        case Operation.BARRIER:
            return 0, [0]
        case Operation.ALL_GATHER | Operation.GATHER:
            return call.counts[rank], [0] * len(call.counts)
        case Operation.REDUCE_SCATTER | Operation.SCATTER:
            return sum(call.counts), starts_of(call.counts)
    return call.counts[0], [0]


def expected_of(call: Call, rank: int, values: list[Array], matrix: list[list[int]]) -> tuple[Array, list[int], Array]:
    """A rank's target, with what it has from itself, where sources go in it, and what it shall be."""
    n, empty = len(values), np.empty(0, np.float32)
    match call.operation:
        case Operation.ALL_REDUCE:
            return values[rank].copy(), [0], reduce_all(values, SUM, call.dtype)
        case Operation.REDUCE:
            at_root = rank == call.root
            return values[rank].copy(), [0], reduce_all(values, SUM, call.dtype) if at_root else values[rank]
        case Operation.BROADCAST:
            return values[rank].copy(), [0] * n, values[call.root]
        case Operation.REDUCE_SCATTER:
            begin = starts_of(call.counts)[rank]
            total = reduce_all(values, SUM, call.dtype)[begin : begin + call.counts[rank]]
            return np.zeros_like(total), [0], total
        case Operation.SCATTER:
            begin = starts_of(call.counts)[rank]
            mine = values[call.root][begin : begin + call.counts[rank]]
            return mine.copy() if rank == call.root else np.zeros_like(mine), [0] * n, mine
        case Operation.ALL_GATHER | Operation.GATHER:
            if call.operation is Operation.GATHER and rank != call.root:
                return empty, [], empty
            starts, whole = starts_of(call.counts), np.concatenate(values)
            target = np.zeros_like(whole)
            target[starts[rank] : starts[rank] + call.counts[rank]] = values[rank]
            return target, starts, whole
        case Operation.ALL_TO_ALL:
            counts = [row[rank] for row in matrix]
            begins = [starts_of(row)[rank] for row in matrix]
            expected = np.concatenate([v[b : b + c] for v, b, c in zip(values, begins, counts, strict=True)])
            target, starts = np.zeros_like(expected), starts_of(counts)
            own = starts[rank]
            target[own : own + counts[rank]] = expected[own : own + counts[rank]]
            return target, starts, expected
    return empty, [], empty


@pytest.mark.parametrize("dtype", COLLECTIVE_DTYPES)
def test_all_dtypes_are_reduced_as_the_oracle_does(dtype: DType) -> None:
    values = [oracle.values(dtype, 9, rank) for rank in range(3)]
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(9,), op=SUM, dtype=dtype)
    streams = [(servers.join(rank, call, values[rank]), 0) for rank in range(3)]
    servers.run(streams)
    for stream, _ in streams:
        np.testing.assert_array_equal(stream.received[0][1], reduce_all(values, SUM, dtype))


def test_an_average_is_rounded_once() -> None:
    values = [np.full(3, x, np.float32) for x in (1.0, 2.0, 6.0)]
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(3,), op=ReduceOp.AVERAGE)
    streams = [(servers.join(rank, call, values[rank]), 0) for rank in range(3)]
    servers.run(streams)
    np.testing.assert_array_equal(streams[1][0].received[0][1], np.full(3, 3.0, np.float32))


# ---------------------------------------------------------------------- segments


@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.REDUCE_SCATTER])
@pytest.mark.parametrize("counts", [(3 << 20,), (0,), (1,), (10_000_019,)])
def test_segments_of_all_stripes_cover_everything_once(operation: Operation, counts: tuple[int, ...]) -> None:
    counts = counts * (2 if operation is Operation.REDUCE_SCATTER else 1)
    call = call_of(operation, counts=counts, op=SUM)
    plans = [StripePlan(call=call, rank=1, world_size=2, stripe=stripe, stripes=3) for stripe in range(3)]
    seen = [segment for plan in plans for segment in plan.uploads()]
    for partition, count in enumerate(counts):
        ranges = sorted((p.begin, p.end) for p in seen if p.partition == partition)
        assert sum(end - begin for begin, end in ranges) == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(0 < (s.end - s.begin) * 4 <= plan.segment_bytes() for plan in plans for s in plan.uploads())
    largest = SEGMENT_BYTES if operation is Operation.ALL_REDUCE else LARGE_SEGMENT_BYTES
    assert all(p.segment_bytes() <= largest and p.segment_bytes() % TSO_BYTES == 0 for p in plans)


@pytest.mark.parametrize("size", [SMALL_SEGMENT_BYTES, SEGMENT_BYTES, LARGE_SEGMENT_BYTES])
def test_a_message_fills_whole_kernel_segments(size: int) -> None:
    message = encode_chunk(CollectiveChunk(source=4095, partition=4095, offset=1 << 40), bytes(size))
    before_it = 5 + 9  # gRPC's header, HTTP/2's
    assert len(message) + before_it <= size // TSO_BYTES * 45 * 1448
    assert size % 64 == 0


def test_the_partitions_of_an_all_gather_go_to_servers_of_their_own_hosts() -> None:
    def owners(nodes: str, servers: str, counts: Sequence[int], home: int = 0) -> tuple[int, ...]:
        return owners_of(call_of(Operation.ALL_GATHER, counts=tuple(counts)), home, len(servers), nodes, servers)

    even = [1 << 20] * 3
    assert owners("abc", "cab", even) == (1, 2, 0)
    assert owners("abc", "cab", even, home=2) == (2, 0, 1)  # stripes are counted from the server of stripe 0
    assert owners("aab", "aba", even) == (0, 2, 1)  # servers of a host take turns
    assert owners("abc", "abd", even) == ()  # c has none
    assert owners("abc", "abc", [1 << 20, 1 << 20, 1 << 21]) == ()  # the last card would be waited for
    gather = call_of(Operation.GATHER, counts=tuple(even))
    assert owners_of(gather, 0, 3, "abc", "abc") == ()
    assert owners_of(call_of(Operation.ALL_GATHER, counts=tuple(even)), 0, 2, "abc", "abc") == ()


def test_ranks_that_see_other_servers_get_an_error() -> None:
    servers, call = Servers(2, 2), call_of(Operation.ALL_GATHER, counts=(4, 4))
    data = np.zeros(4, np.float32)
    streams = [servers.join(rank, call, data, (0, 0), owners=(0, 1 - rank)) for rank in range(2)]
    servers.run([(stream, 0) for stream in streams])
    assert all(isinstance(stream.error, Broken) for stream in streams)
    assert all("while shard servers came or went" in str(stream.error) for stream in streams)
    with pytest.raises(InvalidRequest, match="owners"):
        servers.join(0, call_of(Operation.ALL_GATHER, counts=(4, 4)), data, (0, 0), owners=(0, 2))


def test_small_operations_stay_on_one_server_and_homes_are_spread() -> None:
    small, large = (call_of(Operation.ALL_REDUCE, counts=(n,), op=SUM) for n in (100, 1 << 20))
    assert (stripes_of(small, 4), stripes_of(large, 4), stripes_of(large, 1)) == (1, 4, 1)
    assert stripes_of(call_of(Operation.ALL_TO_ALL), 4) == 4
    assert {home_of("g", sequence, 4) for sequence in range(4)} == {0, 1, 2, 3}


# ---------------------------------------------------------------------- memory


@pytest.mark.usefixtures("small_segments")
def test_a_rank_that_is_ahead_is_not_read_further() -> None:
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(400,), op=SUM)
    values = np.ones(400, np.float32)
    streams = [servers.join(rank, call, values) for rank in range(3)]
    while servers.write(streams[0]):  # rank 0 goes on alone
        pass
    # the first segment is complete: every rank sent it with its request
    assert streams[0].participant.consumed == MAX_PARTIAL_SUMS + 1
    assert streams[0].participant.pending is not None
    segment_bytes = 16
    assert servers.engines[0].memory.peak_bytes <= (3 + MAX_PARTIAL_SUMS) * segment_bytes
    servers.run([(stream, 0) for stream in streams])
    assert all(stream.error is None and stream.over for stream in streams)
    servers.assert_nothing_left()


@pytest.mark.usefixtures("small_segments")
def test_a_rank_that_does_not_read_stops_the_others() -> None:
    servers = Servers(2)
    call = call_of(Operation.ALL_REDUCE, counts=(400,), op=SUM)
    values = np.ones(400, np.float32)
    slow, fast = servers.join(0, call, values), servers.join(1, call, values)
    while servers.write(slow) or servers.write(fast) or servers.read(fast):
        pass
    assert len(slow.participant.outgoing) == MAX_QUEUED_SEGMENTS
    assert slow.participant.pending is not None
    assert fast.participant.pending is not None
    frame_bytes = 16 + 16  # payload and header
    bound = 2 * 16 + MAX_PARTIAL_SUMS * 16 + 2 * MAX_QUEUED_SEGMENTS * frame_bytes
    assert servers.engines[0].memory.peak_bytes <= bound
    servers.run([(slow, 0), (fast, 0)])
    assert slow.over
    assert fast.over
    servers.assert_nothing_left()


# ---------------------------------------------------------------------- disagreement


@pytest.mark.parametrize(
    "other",
    [
        call_of(Operation.ALL_REDUCE, counts=(5,), op=SUM),
        call_of(Operation.ALL_REDUCE, counts=(4,), op=SUM, dtype=DType.I32),
        call_of(Operation.ALL_REDUCE, counts=(4,), op=ReduceOp.MAX),
        call_of(Operation.BARRIER),
        call_of(Operation.BROADCAST, counts=(4,), root=1),
    ],
)
def test_a_disagreement_is_an_error_for_everybody_before_any_data(other: Call) -> None:
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(4,), op=SUM)
    streams = [
        servers.join(rank, c, np.ones(c.counts[0] if c.counts else 0, c.dtype.numpy), stripe=0, stripes=1)
        for rank, c in enumerate((call, call, other))
    ]
    servers.run([(stream, 0) for stream in streams])
    for stream in streams:
        assert isinstance(stream.error, Disagreement)
        assert stream.received == []
        assert f"rank 0, 1: {call}; rank 2: {other}" in str(stream.error)
    servers.assert_nothing_left()


def test_ranks_that_spread_a_call_differently_still_meet_at_stripe_0() -> None:
    servers = Servers(2, stripes=2)
    small, large = (call_of(Operation.ALL_REDUCE, counts=(n,), op=SUM) for n in (4, 8))
    values = np.ones(8, np.float32)
    streams = [
        (servers.join(0, small, values, stripe=0, stripes=1), 0),
        (servers.join(1, large, values, stripe=0), 0),
        (servers.join(1, large, values, stripe=1), 1),
    ]
    servers.run(streams)
    assert isinstance(streams[0][0].error, Disagreement)
    assert isinstance(streams[1][0].error, Disagreement)
    assert not streams[2][0].over  # stripe 0 has the error; its client cancels this one
    servers.leave(streams[2][0], 1)
    servers.assert_nothing_left()


def test_another_stripe_stays_silent_when_ranks_disagree() -> None:
    servers = Servers(2, stripes=2)
    calls = [call_of(Operation.ALL_REDUCE, counts=(n,), op=SUM) for n in (6, 8)]
    streams = [servers.join(rank, c, np.ones(8, np.float32), stripe=1) for rank, c in enumerate(calls)]
    servers.run([(stream, 1) for stream in streams])
    assert not any(stream.over for stream in streams)
    servers.tick(60.0)
    assert all(stream.participant.error is None for stream in streams)
    for stream in streams:
        servers.leave(stream, 1)
    servers.assert_nothing_left()


def test_an_all_to_all_whose_counts_do_not_match_names_the_pair() -> None:
    servers = Servers(2)
    call = call_of(Operation.ALL_TO_ALL)
    values = np.ones(4, np.float32)
    streams = [
        servers.join(0, call, values, (0, 1), input_counts=(1, 3), output_counts=(1, 2)),
        servers.join(1, call, values, (0, 2), input_counts=(2, 2), output_counts=(2, 2)),
    ]
    servers.run([(stream, 0) for stream in streams])
    for stream in streams:
        assert isinstance(stream.error, Disagreement)
        assert "rank 0 sends 3 elements to rank 1, which expects 2" in str(stream.error)
    servers.assert_nothing_left()


# ---------------------------------------------------------------------- losses and time


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_lost_member_ends_everything_of_its_groups_at_once(moment: str) -> None:
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(1 << 20,), op=SUM)
    values = np.ones(1 << 20, np.float32)
    joined = [0, 2] if moment == "before" else [0, 1, 2]
    streams = {rank: servers.join(rank, call, values) for rank in joined}
    for stream in streams.values():
        servers.write(stream)
    receiver = servers.enqueue(0, Envelope(receive=True, rank=0, peer=2, tag=0, dtype=DType.F32, numel=3))
    if 1 in streams:
        servers.leave(streams.pop(1))
    servers.engines[0].set_workers(["worker-0", "worker-2", "worker-7"])
    for stream in (*streams.values(), receiver):
        while servers.read(stream):
            pass
        assert isinstance(stream.error, MemberLost)
        assert "rank 1 has left" in str(stream.error)
    servers.assert_nothing_left()
    with pytest.raises(MemberLost, match="rank 1 has left"):
        servers.join(2, call_of(Operation.BARRIER, sequence=1))
    servers.assert_nothing_left()


def test_who_did_its_part_and_leaves_the_job_takes_nothing_from_the_others() -> None:
    servers = Servers(2)
    call = call_of(Operation.ALL_REDUCE, counts=(4,), op=SUM)
    streams = [servers.join(rank, call, np.ones(4, np.float32)) for rank in range(2)]
    while servers.read(streams[0]):
        pass
    assert streams[0].over
    servers.engines[0].set_workers(["worker-1"])
    while servers.read(streams[1]):
        pass
    assert streams[1].error is None
    np.testing.assert_array_equal(streams[1].received[0][1], np.full(4, 2.0, np.float32))
    servers.assert_nothing_left()
    with pytest.raises(MemberLost):
        servers.join(1, call_of(Operation.BARRIER, sequence=1))


def test_what_a_member_that_has_finished_sent_is_received() -> None:
    servers = Servers(3)
    barrier = servers.join(0, call_of(Operation.BARRIER))
    sent = servers.enqueue(2, envelope(2, 0, 1), np.array([7], np.float32))
    servers.enqueue(1, envelope(1, 2, 1), np.array([8], np.float32))
    waits, waits_for_any = (servers.enqueue(1, envelope(1, peer, 1, receive=True)) for peer in (2, -1))
    assert servers.read(sent)
    servers.engines[0].set_workers(["worker-0", "worker-1"], finished=["worker-2"])
    for stream in (barrier, waits):
        while servers.read(stream):
            pass
        assert isinstance(stream.error, MemberLost)
    assert not servers.read(waits_for_any), "rank 0 may still send"
    receiver = servers.enqueue(0, envelope(0, 2, 1, receive=True))
    servers.run([(receiver, 0)])
    assert float(receiver.received[0][1][0]) == 7.0
    second = servers.enqueue(0, envelope(0, 2, 1, receive=True))
    servers.run([(second, 0)])
    assert isinstance(second.error, MemberLost)
    with pytest.raises(MemberLost, match="rank 2 has left"):
        servers.enqueue(0, envelope(0, 2, 1), np.zeros(1, np.float32))
    with pytest.raises(MemberLost, match="rank 2 has left"):
        servers.join(1, call_of(Operation.BARRIER, sequence=1))
    between = servers.enqueue(0, envelope(0, 1, 1), np.array([9], np.float32))
    servers.run([(between, 0), (waits_for_any, 0)])
    assert float(waits_for_any.received[0][1][0]) == 9.0
    servers.engines[0].set_workers(["worker-1"], finished=["worker-2", "worker-0"])
    last = servers.enqueue(1, envelope(1, -1, 1, receive=True))
    servers.run([(last, 0)])
    assert isinstance(last.error, MemberLost), "nobody is left who could send"


def test_messages_of_the_finished_go_with_a_member_that_dies() -> None:
    servers = Servers(3)
    sent = servers.enqueue(2, envelope(2, 0, 1), np.array([7], np.float32))
    assert servers.read(sent)
    servers.engines[0].set_workers(["worker-0", "worker-1"], finished=["worker-2"])
    servers.engines[0].set_workers(["worker-0"], finished=["worker-2"])
    servers.assert_nothing_left()
    with pytest.raises(MemberLost):
        servers.enqueue(0, envelope(0, 2, 1, receive=True))


def test_workers_outside_the_group_do_not_disturb_it() -> None:
    servers = Servers(2)
    call = call_of(Operation.BARRIER)
    first = servers.join(0, call)
    servers.engines[0].set_workers([*members(2), "joiner"])
    second = servers.join(1, call)
    servers.run([(first, 0), (second, 0)])
    assert first.error is second.error is None
    assert first.over
    servers.assert_nothing_left()


def test_a_broken_stream_fails_the_call_for_all_after_a_moment_of_grace() -> None:
    servers = Servers(3)
    call = call_of(Operation.ALL_REDUCE, counts=(4,), op=SUM)
    streams = [servers.join(rank, call, np.ones(4, np.float32)) for rank in (0, 1)]
    servers.leave(streams[1])
    assert servers.engines[0].next_s() == pytest.approx(GRACE_S)
    servers.tick(GRACE_S / 2)
    assert streams[0].participant.error is None
    servers.tick(GRACE_S)
    servers.read(streams[0])
    assert isinstance(streams[0].error, Broken)
    assert not isinstance(streams[0].error, MemberLost)
    assert "rank 1 broke off call 0 of group 'g' (all_reduce(sum) of 4 f32)" in str(streams[0].error)
    with pytest.raises(Broken, match="rank 1 broke off"):  # so does a rank that comes later
        servers.join(2, call, np.ones(4, np.float32))
    servers.assert_nothing_left()


def test_a_timeout_names_the_ranks_that_did_not_come() -> None:
    servers = Servers(4)
    call = call_of(Operation.BARRIER)
    streams = [servers.join(0, call, timeout_s=5.0), servers.join(2, call, timeout_s=500.0)]
    servers.tick(4.9)
    assert not any(servers.read(stream) for stream in streams)
    servers.tick(0.2)
    for stream in streams:
        servers.read(stream)
        assert isinstance(stream.error, Timeout)
        assert "ranks 1, 3 did not come" in str(stream.error)
    assert servers.engines[0].statistics()["collective_groups"] == 1  # 1 and 3 may still come
    servers.tick(TOMBSTONE_S)
    servers.assert_nothing_left()


def test_a_timeout_names_the_ranks_that_came_and_did_not_send() -> None:
    servers = Servers(2)
    call = call_of(Operation.ALL_REDUCE, counts=(1 << 20,), op=SUM)
    values = np.ones(1 << 20, np.float32)
    streams = [servers.join(0, call, values), servers.join(1, call, values, timeout_s=100.0)]
    while servers.write(streams[0]):
        pass
    servers.tick(20.0)
    servers.read(streams[0])
    assert "rank 1 came, but did not send all data in time" in str(streams[0].error)


def test_what_cannot_be_is_refused() -> None:
    servers = Servers(2)
    call = call_of(Operation.ALL_REDUCE, counts=(4,), op=SUM)
    stream = servers.join(0, call, np.ones(4, np.float32))
    with pytest.raises(InvalidRequest, match="more segments"):
        servers.engines[0].receive(stream.participant, b"", *_chunk(0, np.ones(4, np.float32)))
    with pytest.raises(InvalidRequest, match="already"):
        servers.join(0, call, np.ones(4, np.float32))
    for changes in ({"rank": 2}, {"stripe": 1, "stripes": 1}, {"timeout_s": float("nan")}, {"ranks": (0, 5)}):
        with pytest.raises(InvalidRequest):
            request = servers.request(**{"rank": 1, "what": call, **changes})
            servers.engines[0].open(request, b"", *_chunk(1), 0.0)


def _chunk(source: int, data: Array | None = None) -> tuple[Any, memoryview]:
    from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

    return CollectiveChunk(source=source), memoryview(b"" if data is None else data.tobytes())


# ---------------------------------------------------------------------- messages between two ranks


def envelope(
    rank: int, peer: int, numel: int, *, receive: bool = False, tag: int = 0, dtype: DType = DType.F32
) -> Envelope:
    return Envelope(receive=receive, rank=rank, peer=peer, tag=tag, dtype=dtype, numel=numel)


@pytest.mark.parametrize("numel", [0, 3, 1 << 14, 300_000])
@pytest.mark.parametrize("sender_first", [True, False])
def test_a_message_arrives(numel: int, sender_first: bool) -> None:
    servers = Servers(2)
    values = np.arange(numel, dtype=np.float32)
    if sender_first:
        sender = servers.enqueue(1, envelope(1, 0, numel), values)
        receiver = servers.enqueue(0, envelope(0, -1, numel, receive=True))
    else:
        receiver = servers.enqueue(0, envelope(0, -1, numel, receive=True))
        sender = servers.enqueue(1, envelope(1, 0, numel), values)
    servers.run([(sender, 0), (receiver, 0)])
    assert sender.over
    assert receiver.over
    assert receiver.received[0][0].matched
    assert receiver.received[0][0].source == 1
    np.testing.assert_array_equal(np.concatenate([data for _, data in receiver.received]), values)
    servers.assert_nothing_left()


def test_small_messages_do_not_wait_for_their_receiver_and_keep_their_order() -> None:
    servers = Servers(3)
    for rank, value in ((1, 10), (2, 20), (1, 11)):
        sender = servers.enqueue(rank, envelope(rank, 0, 1), np.array([value], np.float32))
        assert servers.read(sender)
        assert sender.over
    got = []
    for peer in (-1, 1, -1):
        receiver = servers.enqueue(0, envelope(0, peer, 1, receive=True))
        servers.run([(receiver, 0)])
        got.append((receiver.received[0][0].source, float(receiver.received[0][1][0])))
    assert got == [(1, 10.0), (1, 11.0), (2, 20.0)]
    servers.assert_nothing_left()


def test_a_full_mailbox_makes_senders_wait() -> None:
    servers = Servers(2)
    values = np.zeros(1 << 14, np.float32)
    room = MAX_MAILBOX_BYTES // values.nbytes
    senders = [servers.enqueue(1, envelope(1, 0, values.size), values) for _ in range(room + 1)]
    assert [servers.read(sender) for sender in senders] == [True] * room + [False]
    assert servers.engines[0].memory.bytes["mailbox"] == MAX_MAILBOX_BYTES
    for _ in range(room + 1):
        receiver = servers.enqueue(0, envelope(0, 1, values.size, receive=True))
        servers.run([(receiver, 0)])
    assert servers.read(senders[-1])
    servers.assert_nothing_left()


@pytest.mark.parametrize("numel", [4, 300_000])
def test_a_message_that_does_not_fit_is_dropped(numel: int) -> None:
    servers = Servers(2)
    sender = servers.enqueue(1, envelope(1, 0, numel), np.zeros(numel, np.float32))
    servers.read(sender)
    receiver = servers.enqueue(0, envelope(0, 1, 5, receive=True))
    for stream in (sender, receiver):
        servers.read(stream)
    assert isinstance(receiver.error, Disagreement)
    assert f"rank 1 sends {numel} f32 with tag 0 to rank 0" in str(receiver.error)
    assert isinstance(sender.error, Disagreement if numel > 100 else type(None))
    servers.assert_nothing_left()


def test_messages_of_other_tags_wait() -> None:
    servers = Servers(2)
    servers.read(servers.enqueue(1, envelope(1, 0, 1, tag=7), np.ones(1, np.float32)))
    receiver = servers.enqueue(0, envelope(0, 1, 1, receive=True, tag=8))
    assert not servers.read(receiver)
    servers.tick(11.0)
    servers.read(receiver)
    assert isinstance(receiver.error, Timeout)
    assert "received nothing from rank 1" in str(receiver.error)
    closing = servers.enqueue(0, Envelope(receive=True, closes=True, rank=0, peer=-1, tag=0, dtype=DType.U8, numel=0))
    servers.read(closing)
    servers.assert_nothing_left()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_message_that_breaks_off_is_an_error_on_the_other_side(who: str) -> None:
    servers = Servers(2)
    numel = 1 << 20
    sender = servers.enqueue(1, envelope(1, 0, numel), np.zeros(numel, np.float32))
    receiver = servers.enqueue(0, envelope(0, 1, numel, receive=True))
    servers.write(sender)
    gone, other = (sender, receiver) if who == "sender" else (receiver, sender)
    servers.leave(gone)
    servers.tick(GRACE_S)
    error: AxonError | None = None
    while servers.read(other):
        error = other.error
    assert isinstance(error, Broken)
    assert f"rank {1 if who == 'sender' else 0} broke off" in str(error)
    servers.assert_nothing_left()
