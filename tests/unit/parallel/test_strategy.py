"""The workers that share a unit under HYBRID_SHARD. Tests of `parallel/fsdp/strategy.py`."""

from __future__ import annotations

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.strategy import ShardingStrategy, checked_node_size, grouping_of
from axon_ps.types import EACH_NODE, EACH_WORKER, Grouping, Member, Role

HYBRID, FULL = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD


def on(nodes: str) -> list[Member]:
    """Workers by rank, on these nodes."""
    return [Member(role=Role.WORKER, rank=r, incarnation=f"{r:032x}", node=n) for r, n in enumerate(nodes)]


@pytest.mark.parametrize(
    ("size", "nodes", "found", "grouping"),
    [
        (None, "aabb", 2, EACH_NODE),
        (2, "abab", 2, EACH_NODE),
        (4, "aaaabbbb", 4, EACH_NODE),
        (2, "aaaabbbb", 2, Grouping(by_node=True, size=2)),
        (2, "aaaabb", 2, Grouping(by_node=True, size=2)),
        (1, "aab", 1, Grouping(by_node=True, size=1)),
    ],
)
def test_workers_of_a_host_or_a_part_of_them(size: int | None, nodes: str, found: int, grouping: Grouping) -> None:
    members = on(nodes)
    assert checked_node_size(size, HYBRID, members) == found
    assert grouping_of(HYBRID, found, members) == grouping
    assert checked_node_size(None, FULL, members) == 1
    assert grouping_of(FULL, 1, members) == EACH_WORKER


@pytest.mark.parametrize(
    ("size", "nodes", "error"),
    [
        (3, "aaaa", "the world has 4 workers; the world must be a multiple of it"),
        (2, "aaab", "node 'a' has 3 workers; every node must have 2, or a multiple"),
        (4, "aabb", "node 'a' has 2 workers; every node must have 4, or a multiple"),
        (None, "aaab", "the world has 4 workers; the world must be a multiple of it"),
        (
            2,
            "abaabbab",
            r"node '[ab]' has ranks \[.*\]; 2 workers of a host are a node if their ranks follow each other",
        ),
    ],
)
def test_workers_that_cannot_be_divided(size: int | None, nodes: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        checked_node_size(size, HYBRID, on(nodes))
