"""Exchanges that cannot deadlock: everything is under way before anything is waited for.

Tests of `collectives/p2p.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import axon_ps
from axon_ps import P2POp, batch_isend_irecv, irecv, isend, sendrecv
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest


def on_ranks(world_size: int, body: Callable[[ProcessGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(30) for f in [pool.submit(body, group) for group in ProcessGroup.mock(world_size)]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_and_exchanges_of_two(ranks: int) -> None:
    def body(group: ProcessGroup) -> None:
        me, right, left = group.rank, (group.rank + 1) % ranks, (group.rank - 1) % ranks
        found = sendrecv(np.full((2, 3), me), right, left, group)
        assert found.tolist() == np.full((2, 3), left).tolist()
        tensor = torch.arange(4.0)[::2] + me  # not contiguous
        assert torch.equal(sendrecv(tensor, right, left, group), torch.tensor([0.0, 2.0]) + left)
        shorter = np.empty(left + 1)
        assert sendrecv(np.full(me + 1, float(me)), right, left, group, out=shorter, tag=7) is shorter
        assert shorter.tolist() == [float(left)] * (left + 1)
        if ranks % 2 == 0:
            assert sendrecv(np.array([me]), me ^ 1, group=group).tolist() == [me ^ 1]

    on_ranks(ranks, body)


def test_a_batch_in_any_order() -> None:
    def body(group: ProcessGroup) -> None:
        others = [r for r in range(3) if r != group.rank]
        into = {r: np.zeros(2) for r in others}
        ops = [P2POp(irecv, into[r], r, group, tag=1) for r in others]
        ops += [P2POp(isend, np.full(2, 10.0 * group.rank + r), r, group, tag=1) for r in reversed(others)]
        if group.rank == 1:
            ops.reverse()
        for work in batch_isend_irecv(ops):
            work.wait(20.0)
        assert {r: v.tolist() for r, v in into.items()} == {r: [10.0 * r + group.rank] * 2 for r in others}

    on_ranks(3, body)


def test_what_cannot_be_exchanged() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match=r"from itself, only if both"):
            sendrecv(np.ones(1), group.rank, 1 - group.rank, group)
        with pytest.raises(InvalidRequest, match=r"give axon_ps\.isend or axon_ps\.irecv"):
            P2POp(axon_ps.send, np.ones(1), 0, group)
        with pytest.raises(InvalidRequest, match="at least one P2POp"):
            batch_isend_irecv([])
        with pytest.raises(InvalidRequest, match="needed is f"):
            sendrecv(np.ones(2), group.rank, group.rank, group, out=np.ones(3))
        with pytest.raises(Disagreement, match=r"send of 1 f64.*recv of 2 f64|recv of 2 f64.*send of 1 f64"):
            sendrecv(np.ones(1), 1 - group.rank, group=group, out=np.ones(2))
        assert sendrecv(np.ones(1), 1 - group.rank, group=group).tolist() == [1.0]

    on_ranks(2, body)
