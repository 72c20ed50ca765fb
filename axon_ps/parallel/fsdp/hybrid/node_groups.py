"""The groups of a node's workers under HYBRID_SHARD, and making them again after one of them was lost.

A part of a host may count as a node (`Grouping.size`).

Invariant: a node has groups of exactly `size` workers, all of them members now or when the groups were made. A group of
another set of members is never used again once `form` has been called.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, MemberLost, Timeout
from axon_ps.types import EACH_NODE, Grouping, Member, replica_of
from axon_ps.worker.world import World

GRACE_S: Final = 2.0
"""Seconds, beyond its lease, in which a worker may come back to its node while the job could go on without it."""


class NodeGroups(Protocol):
    """The groups that `NodeSteps` works with.

    Attributes:
        data: the workers of the node.
        control: another group of the same, whose calls are not delayed by data.
    """

    data: ProcessGroup
    control: ProcessGroup

    def form(self, error: AxonError | None = None) -> None:
        """Make both groups of the node's workers, once all are there. `error` is the error of the groups before."""


class WorldNodeGroups:
    """The groups of the workers of a world that are on this worker's node.

    Args:
        world: the world.
        size: number of workers of the node.
        grouping: the workers that count as a node.

    Raises:
        MemberLost, Timeout: see `form`.
    """

    data: ProcessGroup
    control: ProcessGroup

    def __init__(self, world: World, size: int, grouping: Grouping = EACH_NODE) -> None:
        self._world = world
        self._size = size
        self._grouping = grouping
        self._grace_s = world.lease_s + GRACE_S
        self._ids: tuple[str, ...] = ()
        self.form()

    def form(self, error: AxonError | None = None) -> None:
        """See `NodeGroups.form`.

        Raises:
            MemberLost: a worker of the node does not come back, and the job is complete without it: this node cannot
                go on, so the worker should end and the node be started again.
            Timeout: the job is not complete; the message says what is missing.
            AxonError: `error`, if no worker of the node was lost: it has another cause, which would come back.
        """
        if error is not None:
            self._wait_for_a_loss(error)
        while True:
            self._world.view.wait_complete()
            self._wait_for_all(error)
            ids = tuple(m.id for m in self._present())
            with contextlib.suppress(MemberLost):  # this worker itself, which is notified soon
                data, control = (self._world.node_group(self._grouping) for _ in range(2))
                if ids == _ids(data) == _ids(control):
                    self._ids, self.data, self.control = ids, data, control
                    return
            self._wait_for_change(ids)

    def _wait_for_a_loss(self, error: AxonError) -> None:
        try:
            self._wait_for_change(self._ids)
        except Timeout:
            raise error from None

    def _wait_for_change(self, ids: tuple[str, ...]) -> None:
        self._world.view.wait_members(
            lambda _: tuple(m.id for m in self._present()) != ids, self._grace_s, "the workers of this node changed"
        )

    def _wait_for_all(self, error: AxonError | None) -> None:
        try:
            self._world.view.wait_members(
                lambda _: len(self._present()) == self._size, self._grace_s, "the node had all its workers"
            )
        except Timeout:
            if not self._world.membership.complete:
                return
            here = ", ".join(str(m.rank) for m in self._present()) or "none"
            why = f"; {error}" if error is not None else ""
            raise MemberLost(
                f"of the {self._size} workers of this node only rank {here} is there, and the job goes on without the "
                f"node; end this worker too, and start all of the node again{why}"
            ) from error

    def _present(self) -> tuple[Member, ...]:
        """Return the workers of this worker's node; none while it is not a member itself."""
        try:
            me = self._world.view.me()
        except MemberLost:
            return ()
        return replica_of(me, self._world.membership.workers, self._grouping)


def _ids(group: ProcessGroup) -> tuple[str, ...]:
    return tuple(m.id for m in group.members)
