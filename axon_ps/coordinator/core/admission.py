"""Where a process that joins is seated. Pure.

Workers: while the job assembles, ranks are those below its world size; later any number may join. A standby only fills
a gap below the world size, so it has no rank until the job has lost a worker. Shard servers: always
exactly `num_shards`, and whoever holds the parameters of a rank has a right to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.events import Hello
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import MAX_MEMBERS, Seat
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import Member, Role


@dataclass(frozen=True)
class Place:
    """Who the joiner becomes, and who has to go for it."""

    member: Member
    displaced: Seat | None = None


def find_place(
    config: CoordinatorConfig, assembly: Assembly, models: Models, role: Role, hello: Hello, now: float
) -> Place:
    """The place of a process that is no member.

    Raises:
        InvalidRequest: its rank is taken, or its world size is not the job's.
        Busy: there is no place, or it cannot be said yet.
    """
    displaced = None
    if role is Role.WORKER:
        _check_world_size(assembly, hello)
        if hello.standby and not assembly.was_complete:
            raise Busy("the job still assembles; a standby takes the place of a worker that it loses later")
        more = assembly.was_complete and not hello.standby
        ranks = MAX_MEMBERS if more else assembly.world_size or hello.world_size
        rank = assembly.roster.choose_rank(role, hello, ranks, now, config.lease_s)
    elif (home := models.home_of(hello.incarnation)) is not None:
        rank, displaced = home, assembly.roster.at(role, home)  # who sits there has none of its parameters
    else:
        rank = assembly.roster.choose_rank(role, hello, config.num_shards, now, config.lease_s)
    member = Member(role=role, rank=rank, incarnation=hello.incarnation, node=hello.node, address=hello.address)
    return Place(member, displaced)


def _check_world_size(assembly: Assembly, hello: Hello) -> None:
    if not assembly.world_size and not hello.world_size:
        raise InvalidRequest(
            "nobody has said how many workers the job starts with; give the coordinator or this worker a world size"
        )
    if not assembly.was_complete and hello.world_size and assembly.world_size not in (0, hello.world_size):
        raise InvalidRequest(
            f"a worker was started for {hello.world_size} workers; the job starts with {assembly.world_size}"
        )
