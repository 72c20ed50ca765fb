"""The ranks of a group that share a node, and the rails between nodes. It is pure.

    node         the ranks (positions in the group) on one host, in the group's order
    local rank   a rank's position in its node
    rail         one rank of every node, those of equal local rank. There are as many rails as the smallest node has
                 ranks; a rank beyond them is in no rail, and its data goes through rail `local_rank % num_rails`.

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
    """The nodes of a group's ranks.

    Attributes:
        nodes: positions by node.
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> Topology:
        """Return the topology of a group's members, by position."""
        nodes: dict[str, list[int]] = {}
        for position, member in enumerate(members):
            nodes.setdefault(member.node, []).append(position)
        return cls(tuple(map(tuple, nodes.values())))

    @property
    def num_rails(self) -> int:
        """Number of rails."""
        return min(map(len, self.nodes))

    @property
    def even(self) -> bool:
        """True if all nodes have the same number of ranks."""
        return len(set(map(len, self.nodes))) == 1

    def node_of(self, position: int) -> int:
        """Return the index of a rank's node."""
        return next(i for i, node in enumerate(self.nodes) if position in node)

    def local_rank(self, position: int) -> int:
        """Return a rank's position in its node."""
        return self.nodes[self.node_of(position)].index(position)

    def rail_of(self, position: int) -> int:
        """Return the rail that a rank's data goes through."""
        return self.local_rank(position) % self.num_rails

    def rail(self, rail: int) -> tuple[int, ...]:
        """Return the ranks in a rail, by node."""
        return tuple(node[rail] for node in self.nodes)

    def served(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes through a rail."""
        return self.nodes[node][rail :: self.num_rails]

    def served_everywhere(self, rail: int) -> tuple[int, ...]:
        """Return the ranks of all nodes whose data goes through a rail, by node."""
        return tuple(p for node in range(len(self.nodes)) for p in self.served(node, rail))

    @property
    def rail_order(self) -> tuple[int, ...]:
        """All ranks: by rail, then by node."""
        return tuple(p for rail in range(self.num_rails) for p in self.served_everywhere(rail))


def rearranged(data: Array, counts: Mapping[Key, int], source: Sequence[Key], target: Sequence[Key]) -> Array:
    """Return the blocks of an array in another order.

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
