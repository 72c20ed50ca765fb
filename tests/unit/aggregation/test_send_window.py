"""The send window holds uploads back: within bounds, and never for ever, in whatever order messages come."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.aggregation.client.send_window import WINDOW_SEGMENTS, SendWindow
from axon_ps.aggregation.core.stripes import REDUCING, TSO_BYTES, StripePlan
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import DType, ReduceOp

MIB = 1 << 20


def plans_of(
    operation: Operation, counts: tuple[int, ...], world_size: int, stripes: int, owners: tuple[int, ...] = ()
) -> list[list[StripePlan]]:
    """By rank and stripe."""
    op = ReduceOp.SUM if operation in REDUCING else None
    call = Call(sequence=0, operation=operation, dtype=DType.F32, counts=counts, op=op)
    return [
        [
            StripePlan(call=call, rank=rank, world_size=world_size, stripe=stripe, stripes=stripes, owners=owners)
            for stripe in range(stripes)
        ]
        for rank in range(world_size)
    ]


def run(plans: list[list[StripePlan]], random: Random) -> int:
    """What ranks send and servers send on, in random order, until all is done; fails where nothing can go on.

    Returns:
        The most bytes that an upload was ahead of its own stripe's download.
    """
    ranks, stripes = range(len(plans)), range(len(plans[0]))
    reduces = plans[0][0].call.operation in REDUCING
    windows = [SendWindow(of_rank) for of_rank in plans]
    left = {(r, s): deque(plans[r][s].uploads()) for r in ranks for s in stripes}
    arrived = dict.fromkeys(left, 0)  # segments that the server has used
    under_way: dict[tuple[int, int, int], deque[int]] = {}  # bytes to rank, of stripe, from source
    sent, came, most = dict.fromkeys(left, 0), dict.fromkeys(left, 0), 0

    def nbytes(segment: object) -> int:
        return (segment.end - segment.begin) * 4  # type: ignore[attr-defined]

    while True:
        sends = [
            (r, s) for (r, s), segments in left.items() if segments and windows[r].may_send(s, nbytes(segments[0]))
        ]
        ready = [key for key, messages in under_way.items() if messages]
        if not sends and not ready:
            break
        if (choice := random.randrange(len(sends) + len(ready))) < len(sends):
            r, s = sends[choice]
            segment = left[r, s].popleft()
            windows[r].sent(s, nbytes(segment))
            sent[r, s] += nbytes(segment)
            most = max(most, sent[r, s] - came[r, s])
            arrived[r, s] += 1
            if not reduces:
                for to in plans[r][s].recipients(segment):
                    under_way.setdefault((to, s, r), deque()).append(nbytes(segment))
            elif min(arrived[other, s] for other in ranks) == arrived[r, s]:
                for to in ranks:
                    under_way.setdefault((to, s, -1), deque()).append(nbytes(segment))
        else:
            to, s, _ = key = ready[choice - len(sends)]
            size = under_way[key].popleft()
            came[to, s] += size
            windows[to].received(s, size)
    assert not any(left.values()), "uploads wait for ever"
    assert all(came[r, s] == plans[r][s].download_numel() * 4 for r in ranks for s in stripes)
    return most


@given(
    world_size=st.integers(2, 5),
    stripes=st.integers(1, 4),
    numel=st.integers(1, 2 * MIB),
    random=st.randoms(use_true_random=False),
)
def test_all_reduce_ends_and_stays_within_its_window(world_size: int, stripes: int, numel: int, random: Random) -> None:
    plans = plans_of(Operation.ALL_REDUCE, (numel,), world_size, stripes)
    segment = max(plan.segment_bytes() for plan in plans[0])
    assert run(plans, random) <= WINDOW_SEGMENTS[Operation.ALL_REDUCE] * segment


@given(
    counts=st.lists(st.integers(0, MIB), min_size=2, max_size=5),
    stripes=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_all_gather_ends_whatever_the_partitions(counts: list[int], stripes: int, random: Random) -> None:
    run(plans_of(Operation.ALL_GATHER, tuple(counts), len(counts), stripes), random)


@given(counts=st.lists(st.integers(0, MIB), min_size=2, max_size=4), random=st.randoms(use_true_random=False))
def test_all_gather_ends_where_one_stripe_has_all_of_a_partition(counts: list[int], random: Random) -> None:
    n = len(counts)
    run(plans_of(Operation.ALL_GATHER, tuple(counts), n, n, tuple(range(n))), random)


def test_a_stripe_waits_for_the_slowest_one() -> None:
    plans = plans_of(Operation.ALL_REDUCE, (4 * MIB,), 2, 2)[0]
    window, segment = SendWindow(plans), TSO_BYTES
    limit = WINDOW_SEGMENTS[Operation.ALL_REDUCE] * plans[0].segment_bytes()
    ahead = 0
    while window.may_send(0, segment):
        window.sent(0, segment)
        window.received(0, segment)
        ahead += segment
    assert ahead == limit
    window.received(1, segment)
    assert window.may_send(0, segment)


@pytest.mark.parametrize("operation", [Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL])
def test_other_operations_have_no_window(operation: Operation) -> None:
    n, counts = 2, (8 * MIB,) * 2
    op = ReduceOp.SUM if operation in REDUCING else None
    call = Call(sequence=0, operation=operation, dtype=DType.F32, counts=counts, op=op)
    plan = StripePlan(call=call, rank=0, world_size=n, stripe=0, stripes=1, input_counts=counts, output_counts=counts)
    window = SendWindow([plan])
    for _ in range(64):
        assert window.may_send(0, MIB)
        window.sent(0, MIB)


def test_nothing_to_send_or_to_get() -> None:
    receiver, sender = (rank[0] for rank in plans_of(Operation.ALL_GATHER, (0, MIB), 2, 1))
    assert SendWindow([receiver]).may_send(0, 0)
    window = SendWindow([sender])
    for _ in range(8):  # nothing comes down: there is nothing to wait for
        assert window.may_send(0, MIB // 2)
        window.sent(0, MIB // 2)
