"""Memberships as differences to the previous one, since a job of n members sends n of them at every change. Pure.

Owns: the contents of a `MembershipDifference`. Refuses: to record the memberships that were sent.

The replicas and local ranks of members that stay are not in it, since they follow from ranks and nodes: with one worker
fewer, those of all later ones change.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from axon_ps.errors import InvalidRequest
from axon_ps.types import EACH_WORKER, Member, Membership, numbered
from axon_ps.wire import codec
from axon_ps.wire.v1 import membership_pb2

_newest: deque[tuple[Membership | None, Message, Membership]] = deque(maxlen=4)


def difference_to_proto(before: Membership, now: Membership) -> membership_pb2.MembershipDifference | None:
    """Return the changes between two memberships of a job; None if they are more than half of it."""
    workers, workers_gone = _changes(before.workers, now.workers)
    shards, shards_gone = _changes(before.shards, now.shards)
    finished, finished_gone = _ends(before.finished, now.finished)
    if 2 * (len(workers) + len(shards) + len(finished)) > len(now.workers) + len(now.shards) + len(now.finished):
        return None
    changed = dataclasses.replace(now, workers=tuple(workers), shards=tuple(shards), finished=tuple(finished))
    same_grouping = bool(now.grouping.rows) and now.grouping == before.grouping
    if same_grouping:
        changed = dataclasses.replace(changed, grouping=EACH_WORKER)
    return membership_pb2.MembershipDifference(
        since=before.generation,
        now=codec.membership_to_proto(changed),
        workers_gone=workers_gone,
        shards_gone=shards_gone,
        finished_gone=finished_gone,
        same_grouping=same_grouping,
    )


def announced(
    message: membership_pb2.MembershipEvent | membership_pb2.MembershipDifference, before: Membership | None
) -> Membership:
    """Return the membership that an event announces, in full or as a difference to the previous one.

    The newest few are cached: other members of this process get the same events, and share the objects.

    Raises:
        InvalidRequest: see `codec.membership_from_proto` and `membership_from_difference`.
    """
    base = before if isinstance(message, membership_pb2.MembershipDifference) else None
    for known, same, found in tuple(_newest):
        if known is base and type(same) is type(message) and same == message:
            return found
    if isinstance(message, membership_pb2.MembershipDifference):
        found = membership_from_difference(base, message)
    else:
        found = codec.membership_from_proto(message)
    _newest.append((base, message, found))
    return found


def membership_from_difference(before: Membership | None, message: membership_pb2.MembershipDifference) -> Membership:
    """Return the membership that a difference leads to.

    Raises:
        InvalidRequest: it is not a difference to `before`, or does not fit it: its members, its number of replicas.
    """
    if before is None or before.generation != message.since:
        known = "none" if before is None else f"that of generation {before.generation}"
        raise InvalidRequest(f"a membership differs from that of generation {message.since}; known is {known}")
    changed = codec.membership_from_proto(message.now)
    workers = _changed(before.workers, message.workers_gone, changed.workers)
    shards = _changed(before.shards, message.shards_gone, changed.shards)
    if message.finished_gone > len(before.finished):
        raise InvalidRequest(f"{message.finished_gone} of {len(before.finished)} finished workers are named no more")
    finished = (*before.finished[message.finished_gone :], *changed.finished)
    grouping = before.grouping if message.same_grouping else changed.grouping
    numbers, replicas = numbered(workers, grouping)
    if replicas != changed.num_replicas:
        raise InvalidRequest(f"a membership has {changed.num_replicas} replicas, and {replicas} with what has changed")
    return dataclasses.replace(changed, workers=numbers, shards=shards, finished=finished, grouping=grouping)


def _changes(before: Sequence[Member], now: Sequence[Member]) -> tuple[list[Member], list[int]]:
    """Return the new members, by rank, and the ranks of members that are gone or are another process."""
    there = {m.id: m for m in before}
    new = [m for m in now if there.pop(m.id, None) is None]
    return new, sorted(m.rank for m in there.values())


def _ends(before: Sequence[Member], now: Sequence[Member]) -> tuple[Sequence[Member], int]:
    """Return the items that were added at the end, and the number of items removed at the beginning."""
    first = now[0] if now else None
    gone = next((i for i, m in enumerate(before) if m == first), len(before))
    retained = before[gone:]
    if tuple(now[: len(retained)]) != tuple(retained):
        return now, len(before)
    return now[len(retained) :], gone


def _changed(before: Sequence[Member], gone: Iterable[int], new: Sequence[Member]) -> tuple[Member, ...]:
    members = {m.rank: m for m in before}
    for rank in gone:
        if members.pop(rank, None) is None:
            raise InvalidRequest(f"member {rank} is there no more, and was not there before")
    for m in new:
        if m.rank in members:
            raise InvalidRequest(f"{m.role.value} {m.rank} is new, and another one has the rank")
        members[m.rank] = m
    return tuple(m for _, m in sorted(members.items())) if new else tuple(members.values())
