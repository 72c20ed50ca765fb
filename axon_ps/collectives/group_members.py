"""`GroupMembers`: the members of a group of workers, and their job.

Owns: this worker's rank, checks of ranks, and the members of sub-groups. Refuses: to communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.errors import InvalidRequest, Misuse

if TYPE_CHECKING:
    from axon_ps.collectives.current_world import JobWorld

WORLD_PREFIX = "world@"
"""The begin of the name of a group of all workers; the last generation with a new worker, and a digest, follow."""


class GroupMembers:
    """The members of one group, as one worker sees them.

    Attributes:
        context: the group, as its backends get it.
        name: name of the group.
        ranks: the members' world ranks, by position.
        world_size: number of members.
        joined: True = this worker is a member.

    Args:
        context: the group and its members.
        joined: see the attribute.
        world: the world they belong to; None = there is none, or `start_world` starts it.
        start_world: starts the world when it is first asked for; it ends with `end_world`.
        parent: the members of the group that this is a sub-group of; its world is theirs.
    """

    def __init__(
        self,
        context: GroupContext,
        *,
        joined: bool = True,
        world: JobWorld | None = None,
        start_world: Callable[[], JobWorld] | None = None,
        parent: GroupMembers | None = None,
    ) -> None:
        self.context = context
        self.name = context.name
        self.ranks = context.ranks
        self.world_size = len(context.ranks)
        self.joined = joined
        self._world = world
        self._start_world = start_world
        self._parent = parent

    @property
    def rank(self) -> int:
        """This worker's position.

        Raises:
            Misuse: this worker is not a member.
        """
        self.check_joined()
        return self.context.rank

    def check_joined(self) -> None:
        """Check that this worker is a member.

        Raises:
            Misuse: it is not.
        """
        if not self.joined:
            raise Misuse(f"this worker is not a member of group {self.name!r}, which has the world ranks {self.ranks}")

    def checked_rank(self, rank: int, what: str) -> int:
        """Return `rank` if it is a position in the group.

        Raises:
            InvalidRequest: it is not; `what` names it in the message.
            Misuse: this worker is not a member.
        """
        self.check_joined()
        if not 0 <= rank < self.world_size:
            raise InvalidRequest(f"{what} is {rank}; ranks of group {self.name!r} go from 0 to {self.world_size - 1}")
        return rank

    @property
    def is_world(self) -> bool:
        """True if they are all workers of the job."""
        return self.name.startswith(WORLD_PREFIX) and "/" not in self.name  # sub-groups have a "/" in their names

    def have(self, ids: Collection[str]) -> bool:
        """Return True if one of these members, given by their ids, is in the group."""
        return any(m.id in ids for m in self.context.members)

    def subset(self, name: str, positions: Sequence[int], timeout_s: float) -> GroupMembers:
        """Return the members of a sub-group; this worker need not be one of them.

        Args:
            name: name of the sub-group, below ours.
            positions: its members' positions in this group, in their new order.
            timeout_s: seconds that making its backend may take.
        """
        joined = self.rank in positions
        context = GroupContext(
            name=f"{self.name}/{name}",
            rank=positions.index(self.rank) if joined else -1,
            ranks=tuple(self.ranks[p] for p in positions),
            members=tuple(self.context.members[p] for p in positions),
            store=self.context.store,
            timeout_s=min(self.context.timeout_s, timeout_s),
        )
        return GroupMembers(context, joined=joined, parent=self)

    # ------------------------------------------------------------------ their job

    @property
    def world(self) -> JobWorld:
        """The world that they belong to.

        Raises:
            Misuse: there is none, since the group was made of a backend.
        """
        if (world := self._found_world()) is None:
            raise Misuse(
                f"group {self.name!r} was made of a backend and is in no job: what needs shard servers (FSDP, "
                "optimizers, checkpoints) needs a group of World.init() or of World.mock()"
            )
        return world

    def end_world(self) -> None:
        """Leave the job, if it was started for this group."""
        if self._start_world is not None and self._world is not None:
            self._world.close()

    def _found_world(self) -> JobWorld | None:
        if self._parent is not None:
            return self._parent._found_world()
        if self._world is None and self._start_world is not None:
            self._world = self._start_world()
        return self._world
