"""Which ranks of a group share a node, and the lanes between nodes. Pure.

    node   the ranks (positions in the group) on one host, in the group's order
    local  a rank's position in its node
    lane   one rank of every node: those of equal local position. There are as many lanes as the smallest node has
           ranks; a rank beyond them has no place in a lane, and its data goes through lane `local % lanes`.

Invariant: nodes are in the order of their first ranks, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np

from axon_ps.types import Array, Member

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group are.

    Attributes:
        nodes: positions by node.
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> Topology:
        """The topology of a group's members, by position."""
        nodes: dict[str, list[int]] = {}
        for position, member in enumerate(members):
            nodes.setdefault(member.node, []).append(position)
        return cls(tuple(map(tuple, nodes.values())))

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return min(map(len, self.nodes))

    @property
    def even(self) -> bool:
        """Whether every node has as many ranks."""
        return len(set(map(len, self.nodes))) == 1

    def node_of(self, position: int) -> int:
        """Index of a rank's node."""
        return next(i for i, node in enumerate(self.nodes) if position in node)

    def local(self, position: int) -> int:
        """A rank's position in its node."""
        return self.nodes[self.node_of(position)].index(position)

    def lane_of(self, position: int) -> int:
        """The lane that a rank's data goes through."""
        return self.local(position) % self.lanes

    def lane(self, lane: int) -> tuple[int, ...]:
        """The ranks in a lane, by node."""
        return tuple(node[lane] for node in self.nodes)

    def served(self, node: int, lane: int) -> tuple[int, ...]:
        """The ranks of a node whose data goes through a lane."""
        return self.nodes[node][lane :: self.lanes]

    def served_everywhere(self, lane: int) -> tuple[int, ...]:
        """The ranks of all nodes whose data goes through a lane, by node."""
        return tuple(p for node in range(len(self.nodes)) for p in self.served(node, lane))

    @property
    def lane_order(self) -> tuple[int, ...]:
        """All ranks: by lane, then by node."""
        return tuple(p for lane in range(self.lanes) for p in self.served_everywhere(lane))


def rearranged(data: Array, counts: Mapping[Key, int], source: Sequence[Key], target: Sequence[Key]) -> Array:
    """Blocks of an array in another order.

    Args:
        data: T[m]: blocks in the order `source`.
        counts: elements of each block.
        source: the blocks in `data`.
        target: the blocks wanted, some or all of them.

    Returns:
        The array with the blocks of `target`; `data` itself if nothing changes. numpy or cupy, as `data`.
    """
    if list(source) == list(target):
        return data
    ends = dict(zip(source, accumulate(counts[key] for key in source), strict=True))
    blocks = [data[ends[key] - counts[key] : ends[key]] for key in target if counts[key]]
    return np.concatenate(blocks) if blocks else data[:0]
