"""Which rank a joining process gets. Pure.

Workers: while the job assembles, ranks are those below its world size; later any number may join. A standby only takes
a free rank below the world size, so it has none until the job has lost a worker. Shard servers: always exactly
`num_shards`; the process that holds the parameters of a rank has a right to it.

Note: [Workers that join in vain]
    A worker that joins a job that trains and leaves before a step has counted costs the others two steps. Whoever does
    that often is made to wait before it joins again, with the reason. A worker that took part in a step, as one on a
    preemptible machine has, is not counted, nor one that leaves while the others train nothing. And nobody waits who is
    needed: a job that makes no step without another worker takes it, however often connections have broken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.events import JoinRequest
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import MAX_MEMBERS, RosterEntry
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import Member, Role

WINDOW_S: Final = 60.0
"""How long such a worker counts."""

MAX_OF_NODE: Final = 16
"""Such workers of one node in that time, after which further ones of it wait."""

MAX_OF_JOB: Final = 128
"""Likewise of the job, since a node is called what its worker says."""


@dataclass(frozen=True)
class Admission:
    """The member that the joiner becomes, and the one that it displaces, if any."""

    member: Member
    displaced: RosterEntry | None = None


def admit(
    config: CoordinatorConfig, assembly: Assembly, models: Models, role: Role, request: JoinRequest, now: float
) -> Admission:
    """Admit a process that is no member.

    Raises:
        InvalidRequest: its rank is taken, or its world size is not the job's.
        Busy: there is no free rank, or it is not known yet whether there is one.
    """
    displaced = None
    if role is Role.WORKER:
        _check_world_size(assembly, request)
        if request.standby and not assembly.was_complete:
            raise Busy("the job still assembles; a standby replaces a worker that it loses later")
        more = assembly.was_complete and not request.standby
        ranks = MAX_MEMBERS if more else assembly.world_size or request.world_size
        rank = assembly.roster.choose_rank(role, request, ranks, now, config.lease_s)
    elif (held := models.rank_held_by(request.incarnation)) is not None:
        rank, displaced = held, assembly.roster.at(role, held)  # the present holder has none of its parameters
    else:
        if models.still_held_by(request.incarnation) and assembly.roster.at(role, request.requested_rank) is not None:
            request = replace(request, requested_rank=-1)  # its rank was given to another; what it holds is wanted
        ranks = MAX_MEMBERS if models.registered else config.num_shards
        rank = assembly.roster.choose_rank(role, request, ranks, now, config.lease_s)
    member = Member(role=role, rank=rank, incarnation=request.incarnation, node=request.node, address=request.address)
    return Admission(member, displaced)


def _check_world_size(assembly: Assembly, request: JoinRequest) -> None:
    if not assembly.world_size and not request.world_size:
        raise InvalidRequest(
            "nobody has said how many workers the job starts with; give the coordinator or this worker a world size"
        )
    if not assembly.was_complete and request.world_size and assembly.world_size not in (0, request.world_size):
        raise InvalidRequest(
            f"a worker was started for {request.world_size} workers; the job starts with {assembly.world_size}"
        )


class Churn:
    """The workers that have joined and left in vain lately; see Note: [Workers that join in vain]."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, str]] = deque(maxlen=MAX_OF_JOB)

    def left(self, node: str, now: float) -> None:
        """A worker of a node has left without having taken part in a step that counted."""
        self._left.append((now, node))

    def check(self, node: str, now: float) -> None:
        """Refuse a joiner for the present.

        Raises:
            Busy: too many have joined and left in vain; the message says until when.
        """
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
