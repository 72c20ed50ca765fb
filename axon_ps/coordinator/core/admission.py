"""Admission: the processes that may join, and the number of ranks. The roster chooses the rank. Pure.

While the job assembles, workers have ranks below its world size. Later any number may join, except if replicas are rows
of ranks. A standby only takes a free
rank below the world size, so it has none until the job has lost a worker. Shard servers have ranks below `num_shards`
until a model is registered. Later more may join. The process that holds the parameters of a rank has a right to it.

Note: [Workers that join in vain]
    A worker that joins a training job and leaves before a step has counted costs the others two steps. After many such
    joins, further ones are refused for a while, with the reason. A worker that took part in a step does not count, as
    on a preemptible machine, nor a worker that leaves while the others do not train. A job that can make no step
    without another worker accepts it, independent of how often connections have broken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import MAX_MEMBERS, RosterEntry
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import Member, Role
from axon_ps.wire.events import JoinRequest

WINDOW_S: Final = 60.0
"""Seconds for which such a worker counts."""

MAX_OF_NODE: Final = 16
"""Such workers of one node within `WINDOW_S`. Further workers of the node are refused."""

MAX_OF_JOB: Final = 128
"""Such workers of the job within `WINDOW_S`: a limit of its own, since workers name their nodes themselves."""


Displaced: TypeAlias = tuple[tuple[RosterEntry, str], ...]


@dataclass(frozen=True)
class Admission:
    """The joiner as a member, and the members that it displaces, with the reasons."""

    member: Member
    displaced: Displaced


def admit(
    config: CoordinatorConfig, assembly: Assembly, models: Models, role: Role, request: JoinRequest, now: float
) -> Admission:
    """Admit a process that is not a member."""
    displaced: Displaced = ()
    if role is Role.WORKER:
        rank = _rank_of_worker(config, assembly, models, request, now)
    else:
        rank, displaced = _rank_of_shard(config, assembly, models, request, now)
    member = Member(role=role, rank=rank, incarnation=request.incarnation, node=request.node, address=request.address)
    return Admission(member, displaced)


def _rank_of_worker(
    config: CoordinatorConfig, assembly: Assembly, models: Models, request: JoinRequest, now: float
) -> int:
    _check_world_size(assembly, request)
    if request.standby and not assembly.was_complete:
        raise Busy("the job still assembles; a standby replaces a worker that it loses later")
    more = assembly.was_complete and not request.standby and not models.grouping.rows
    ranks = MAX_MEMBERS if more else assembly.world_size or request.world_size
    return assembly.roster.choose_rank(Role.WORKER, request, ranks, now, config.lease_s)


def _rank_of_shard(
    config: CoordinatorConfig, assembly: Assembly, models: Models, request: JoinRequest, now: float
) -> tuple[int, Displaced]:
    """Return the rank of a joining shard server, and the members that it displaces."""
    displaced = []
    if (before := _at_address(assembly, request, config.lease_s)) is not None:
        displaced.append((before, f"another shard server is at {request.address} now"))
    if (held := models.rank_held_by(request.incarnation)) is not None:
        present = assembly.roster.at(Role.SHARD, held)
        if present is not None and present is not before:  # it has none of the parameters of the rank
            displaced.append((present, f"the shard server that holds the parameters of rank {held} is back"))
        return held, tuple(displaced)
    if models.still_held_by(request.incarnation) and assembly.roster.at(Role.SHARD, request.requested_rank) is not None:
        request = replace(request, requested_rank=-1)  # its rank was given to another; its slices are wanted
    ranks = MAX_MEMBERS if models.registered else config.num_shards
    return assembly.roster.choose_rank(Role.SHARD, request, ranks, now, config.lease_s, before), tuple(displaced)


def _at_address(assembly: Assembly, request: JoinRequest, lease_s: float) -> RosterEntry | None:
    """Return the shard server at a joiner's address, if any. Without a session it must be dead."""
    before = assembly.roster.at_address(request.address)
    if before is not None and before.session is not None:
        raise Busy(
            f"{before.name} is at {request.address} already; if it is dead, that shows within {lease_s:g} s, and else "
            "one of the two needs another address (--advertise)"
        )
    return before


def _check_world_size(assembly: Assembly, request: JoinRequest) -> None:
    if not assembly.world_size and not request.world_size:
        raise InvalidRequest(
            "it is not known how many workers the job starts with; give the coordinator or this worker a world size"
        )
    if not assembly.was_complete and request.world_size and assembly.world_size not in (0, request.world_size):
        raise InvalidRequest(
            f"a worker was started for {request.world_size} workers; the job starts with {assembly.world_size}"
        )


class FailedJoins:
    """The workers that have joined and left in vain lately; see Note: [Workers that join in vain]."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, str]] = deque(maxlen=MAX_OF_JOB)

    def left(self, node: str, now: float) -> None:
        """Count a worker of a node that has left before a step counted with it."""
        self._left.append((now, node))

    def check(self, node: str, now: float) -> None:
        """Refuse a joiner after too many have left in vain. The message has the time to wait."""
        while self._left and self._left[0][0] <= now - WINDOW_S:
            self._left.popleft()
        of_node = [left_s for left_s, of in self._left if of == node]
        of_job = [left_s for left_s, _ in self._left]
        for left, most, whose in ((of_node, MAX_OF_NODE, f"node {node}"), (of_job, MAX_OF_JOB, "the job")):
            if len(left) >= most:
                raise Busy(
                    f"{len(left)} workers of {whose} have joined and left within {WINDOW_S:g} s without taking part in "
                    f"a step, which aborts the others' steps; another may join in {left[0] + WINDOW_S - now:.0f} s"
                )
