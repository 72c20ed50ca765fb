"""The groups of a world: one default group per set of workers, and the membership changes for all of them.

Owns: the current default group, and notifying groups that a member is lost. It is called on the background loop's
thread (membership changes) and on users' threads (asking for the group).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from axon_ps.collectives.backends.base import GroupContext, GroupStore
from axon_ps.collectives.current_world import JobWorld
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.group_backends import MakeBackend
from axon_ps.collectives.group_calls import GroupCalls
from axon_ps.collectives.group_members import WORLD_PREFIX, GroupMembers
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, MemberLost
from axon_ps.types import EACH_NODE, Grouping, Member, Membership, replica_of

_NODE = "node"


class Groups:
    """The groups of one worker.

    Args:
        world: the world.
        make: makes backends.
        store: for the rendezvous of members.
        backend: name of the default group's backend.
        timeout_s: default time-out of collectives.
        recorder: the flight recorder.
        incarnation: returns this worker's incarnation, once it has joined.
    """

    def __init__(
        self,
        world: JobWorld,
        make: MakeBackend,
        store: GroupStore,
        *,
        backend: str,
        timeout_s: float,
        recorder: Recorder,
        incarnation: Callable[[], str],
    ) -> None:
        self._world = world
        self._make = make
        self._store = store
        self._backend = backend
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._workers: tuple[Member, ...] = ()
        self._made: dict[tuple[str, ...], ProcessGroup] = {}
        self._node_groups: Counter[tuple[str, ...]] = Counter()

    def set_members(self, membership: Membership) -> Sequence[Member]:
        """Set the current members, without waking any thread.

        Returns:
            The workers that left, to be passed to `end_with` once every part of this worker has the new membership.
        """
        with self._lock:
            now = {m.id for m in membership.workers}
            lost = [m for m in self._workers if m.id not in now]
            self._workers = membership.workers
        return lost

    def end_with(self, lost: Sequence[Member], membership: Membership) -> None:
        """End the groups of workers that are not members any more. Messages of finished workers stay."""
        ended = {m.id for m in membership.finished}
        finished, died = [m for m in lost if m.id in ended], [m for m in lost if m.id not in ended]
        with self._lock:
            groups = list(self._made.values())
        for group in groups:
            if finished:
                error = _gone(finished, "has finished", membership.generation)
                group.calls.member_finished({m.id for m in finished}, error)
            if died:
                group.calls.member_lost({m.id for m in died}, _gone(died, "has left the job", membership.generation))

    def abort(self, error: AxonError) -> None:
        """End all groups, since the session is over."""
        with self._lock:
            groups = list(self._made.values())
        for group in groups:
            group.abort(error)

    def default(self) -> ProcessGroup:
        """Return the group of all current workers: the same object while they are the same.

        Every worker must use it in the same generation for its calls to meet. A worker that was lost and came back is
        another member: the workers of its old group get a new group.

        Raises:
            MemberLost: the coordinator does not count this worker as a member.
        """
        self._release()
        with self._lock:
            key = _key(self._workers)
            if key not in self._made:
                positions = [i for i, m in enumerate(self._workers) if m.incarnation == self._incarnation()]
                if not positions:
                    raise MemberLost("the coordinator lost sight of this worker, which is in no group until it is back")
                self._made[key] = self._group(_name_of(self._workers), positions[0], self._workers)
            return self._made[key]

    def _release(self) -> None:
        """Free the groups of earlier workers, if there are others now.

        It blocks until calls that are ending have ended. It does so without the lock, which the loop's thread takes to
        end them.
        """
        with self._lock:
            earlier = {k: g for k, g in self._made.items() if k != _key(self._workers)}
        over = {key for key, group in earlier.items() if group.calls.release()}
        with self._lock:
            self._made = {k: g for k, g in self._made.items() if k not in over}

    def node(self, grouping: Grouping = EACH_NODE) -> ProcessGroup:
        """Make a group of the workers that are on this worker's node now. Only these take part in the collective call.

        All of them must make the same number of such groups, in the same order.

        Args:
            grouping: the workers of this worker's replica by this are taken.

        Raises:
            MemberLost: the coordinator does not count this worker as a member.
        """
        with self._lock:
            me = next((m for m in self._workers if m.incarnation == self._incarnation()), None)
            if me is None:
                raise MemberLost("the coordinator lost sight of this worker, which is in no group until it is back")
            members = replica_of(me, self._workers, grouping)
            self._node_groups[_key(members)] += 1  # it never decreases: a name is not used again
            number = str(self._node_groups[_key(members)])
            name = f"node-{_digest_of(members)}/{number}"
            group = self._group(name, members.index(me), members)
            self._made[_NODE, number, *_key(members)] = group
            return group

    def close(self, linger_s: float = 0.0) -> None:
        """Free every group, after at most `linger_s` seconds in all for messages sent in the background."""
        deadline = time.monotonic() + linger_s
        with self._lock:
            groups, self._made = list(self._made.values()), {}
        for group in groups:
            group.close(max(0.0, deadline - time.monotonic()))

    def _group(self, name: str, position: int, members: tuple[Member, ...]) -> ProcessGroup:
        context = GroupContext(
            name=name,
            rank=position,
            ranks=tuple(m.rank for m in members),
            members=members,
            store=self._store,
            timeout_s=self._timeout_s,
        )
        calls = GroupCalls(
            GroupMembers(context, world=self._world),
            self._make,
            timeout_s=self._timeout_s,
            recorder=self._recorder,
            backend=self._backend,
        )
        return ProcessGroup(calls)


def _name_of(workers: tuple[Member, ...]) -> str:
    """Return the name of the default group of these workers: the same on all of them, and no other group's."""
    return f"{WORLD_PREFIX}{max(m.joined for m in workers)}-{_digest_of(workers)}"


def _gone(members: Sequence[Member], how: str, generation: int) -> MemberLost:
    who = ", ".join(f"rank {m.rank} (node {m.node})" for m in members)
    return MemberLost(f"{who} {how}; a group with it is over (generation {generation})")


def _digest_of(workers: tuple[Member, ...]) -> str:
    return hashlib.sha256(" ".join(_key(workers)).encode()).hexdigest()[:16]


def _key(workers: tuple[Member, ...]) -> tuple[str, ...]:
    return tuple(m.id for m in workers)
