"""Nodes and rails of a group, and blocks in another order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.collectives.backends.hierarchical.topology import Topology, rearranged
from axon_ps.collectives.backends.mock import mock_contexts


def topology(nodes: str) -> Topology:
    return Topology.of(mock_contexts(len(nodes), nodes=list(nodes))[0].members)


def test_nodes_of_equal_size_have_a_rail_for_each_local_rank() -> None:
    t = topology("abab")
    assert t.nodes == ((0, 2), (1, 3))
    assert (t.num_rails, t.even) == (2, True)
    assert [t.rail(0), t.rail(1)] == [(0, 1), (2, 3)]
    assert [t.local_rank(p) for p in range(4)] == [0, 0, 1, 1]
    assert t.rail_order == (0, 1, 2, 3)


def test_ranks_beyond_the_smallest_node_go_through_the_rails_there_are() -> None:
    t = topology("aabbbbb")
    assert (t.num_rails, t.even) == (2, False)
    assert [t.rail_of(p) for p in range(7)] == [0, 1, 0, 1, 0, 1, 0]
    assert [t.served(1, 0), t.served(1, 1)] == [(2, 4, 6), (3, 5)]
    assert t.rail_order == (0, 2, 4, 6, 1, 3, 5)


@given(st.text("abcd", min_size=1, max_size=16))
def test_every_rank_is_in_one_place(nodes: str) -> None:
    t = topology(nodes)
    assert sorted(t.rail_order) == list(range(len(nodes)))
    for position in range(len(nodes)):
        assert position in t.served(t.node_of(position), t.rail_of(position))
    assert all(len({t.node_of(p) for p in t.rail(rail)}) == len(t.nodes) for rail in range(t.num_rails))


def test_blocks_in_another_order() -> None:
    data = np.arange(6)
    counts = {"a": 1, "b": 2, "c": 3, "d": 0}
    assert rearranged(data, counts, "abcd", "cdab").tolist() == [3, 4, 5, 0, 1, 2]
    assert rearranged(data, counts, "abcd", "b").tolist() == [1, 2]
    assert rearranged(data, counts, "abcd", "abcd") is data
    assert rearranged(data, counts, "abcd", "d").tolist() == []
    with pytest.raises(KeyError):
        rearranged(data, counts, "abcd", "x")
