"""Which rank a joining process gets. Pure.

Workers: while the job assembles, ranks are those below its world size; later any number may join. A standby only takes
a free rank below the world size, so it has none until the job has lost a worker. Shard servers: always exactly
`num_shards`; the process that holds the parameters of a rank has a right to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.events import JoinRequest
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import MAX_MEMBERS, RosterEntry
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import Member, Role


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
