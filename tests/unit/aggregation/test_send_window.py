"""Uploads held back: within bounds, and never for ever, in whatever order things come."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.aggregation.client.send_window import AHEAD_BYTES, SharesInStep
from axon_ps.aggregation.core.stripes import REDUCING, Exchange
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import DType, ReduceOp

MIB = 1 << 20


def exchanges_of(
    operation: Operation, counts: tuple[int, ...], world_size: int, shares: int, owners: tuple[int, ...] = ()
) -> list[list[Exchange]]:
    """By rank and share."""
    op = ReduceOp.SUM if operation in REDUCING else None
    call = Call(sequence=0, operation=operation, dtype=DType.F32, counts=counts, op=op)
    return [
        [
            Exchange(call=call, rank=rank, world_size=world_size, share=share, shares=shares, owners=owners)
            for share in range(shares)
        ]
        for rank in range(world_size)
    ]


def run(exchanges: list[list[Exchange]], random: Random) -> int:
    """What ranks send and servers pass on, in random order, until all is done; fails where nothing can go on.

    Returns:
        The most bytes that an upload was ahead of its own share's download.
    """
    ranks, shares = range(len(exchanges)), range(len(exchanges[0]))
    reduces = exchanges[0][0].call.operation in REDUCING
    steps = [SharesInStep(of_rank) for of_rank in exchanges]
    left = {(r, s): deque(exchanges[r][s].uploads()) for r in ranks for s in shares}
    arrived = dict.fromkeys(left, 0)  # pieces that the server has used
    under_way: dict[tuple[int, int, int], deque[int]] = {}  # bytes to rank, of share, from source
    sent, came, most = dict.fromkeys(left, 0), dict.fromkeys(left, 0), 0

    def nbytes(piece: object) -> int:
        return (piece.end - piece.begin) * 4  # type: ignore[attr-defined]

    while True:
        sends = [(r, s) for (r, s), pieces in left.items() if pieces and steps[r].may_send(s, nbytes(pieces[0]))]
        ready = [key for key, messages in under_way.items() if messages]
        if not sends and not ready:
            break
        if (choice := random.randrange(len(sends) + len(ready))) < len(sends):
            r, s = sends[choice]
            piece = left[r, s].popleft()
            steps[r].sent(s, nbytes(piece))
            sent[r, s] += nbytes(piece)
            most = max(most, sent[r, s] - came[r, s])
            arrived[r, s] += 1
            if not reduces:
                for to in exchanges[r][s].recipients(piece):
                    under_way.setdefault((to, s, r), deque()).append(nbytes(piece))
            elif min(arrived[other, s] for other in ranks) == arrived[r, s]:
                for to in ranks:
                    under_way.setdefault((to, s, -1), deque()).append(nbytes(piece))
        else:
            to, s, _ = key = ready[choice - len(sends)]
            size = under_way[key].popleft()
            came[to, s] += size
            steps[to].came(s, size)
    assert not any(left.values()), "uploads wait for ever"
    assert all(came[r, s] == exchanges[r][s].download_numel() * 4 for r in ranks for s in shares)
    return most


@given(
    world_size=st.integers(2, 5),
    shares=st.integers(1, 4),
    numel=st.integers(1, 2 * MIB),
    random=st.randoms(use_true_random=False),
)
def test_all_reduce_ends_and_keeps_within_its_bound(world_size: int, shares: int, numel: int, random: Random) -> None:
    most = run(exchanges_of(Operation.ALL_REDUCE, (numel,), world_size, shares), random)
    assert most <= AHEAD_BYTES[Operation.ALL_REDUCE]


@given(
    counts=st.lists(st.integers(0, MIB), min_size=2, max_size=5),
    shares=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_all_gather_ends_whatever_the_parts(counts: list[int], shares: int, random: Random) -> None:
    run(exchanges_of(Operation.ALL_GATHER, tuple(counts), len(counts), shares), random)


@given(counts=st.lists(st.integers(0, MIB), min_size=2, max_size=4), random=st.randoms(use_true_random=False))
def test_all_gather_ends_where_a_part_is_whole_on_one_share(counts: list[int], random: Random) -> None:
    n = len(counts)
    run(exchanges_of(Operation.ALL_GATHER, tuple(counts), n, n, tuple(range(n))), random)


def test_a_share_waits_for_the_slowest_one() -> None:
    steps = SharesInStep(exchanges_of(Operation.ALL_REDUCE, (4 * MIB,), 2, 2)[0])
    piece, limit = 1 << 16, AHEAD_BYTES[Operation.ALL_REDUCE]
    ahead = 0
    while steps.may_send(0, piece):
        steps.sent(0, piece)
        steps.came(0, piece)
        ahead += piece
    assert ahead == limit
    steps.came(1, piece)
    assert steps.may_send(0, piece)


@pytest.mark.parametrize("operation", [Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL])
def test_others_are_not_held_back(operation: Operation) -> None:
    n, counts = 2, (8 * MIB,) * 2
    op = ReduceOp.SUM if operation in REDUCING else None
    call = Call(sequence=0, operation=operation, dtype=DType.F32, counts=counts, op=op)
    exchange = Exchange(call=call, rank=0, world_size=n, share=0, shares=1, input_counts=counts, output_counts=counts)
    steps = SharesInStep([exchange])
    for _ in range(64):
        assert steps.may_send(0, MIB)
        steps.sent(0, MIB)


def test_nothing_to_send_or_to_get() -> None:
    receiver, sender = (rank[0] for rank in exchanges_of(Operation.ALL_GATHER, (0, MIB), 2, 1))
    assert SharesInStep([receiver]).may_send(0, 0)
    steps = SharesInStep([sender])
    for _ in range(8):  # nothing comes down: there is nothing to wait for
        assert steps.may_send(0, MIB // 2)
        steps.sent(0, MIB // 2)
