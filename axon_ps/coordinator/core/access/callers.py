"""The callers of unary calls: members and operators. Their roles were checked before (`rpc.access`)."""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.errors import GenerationChanged, InvalidRequest, PermissionDenied
from axon_ps.types import Role


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The caller of a unary call: a member by its incarnation, or an operator without one."""

    job: str
    incarnation: str = ""


class Callers:
    """Checks callers.

    Args:
        job: the name of the job.
        assembly: its members.
    """

    def __init__(self, job: str, assembly: Assembly) -> None:
        self._job = job
        self._assembly = assembly

    def check(self, caller: Caller) -> None:
        """Refuse a caller of another job. An operator may leave the name out.

        Raises:
            PermissionDenied: it gives another job's name.
        """
        if caller.job != self._job and (caller.job or caller.incarnation):
            raise PermissionDenied(f"this coordinator runs job {self._job!r}, not {caller.job!r}")

    def check_member_or_operator(self, caller: Caller) -> None:
        """Refuse a caller that gives an incarnation and is not a member. An operator gives none.

        Raises:
            PermissionDenied: it gives another job's name.
            GenerationChanged: it is not a member.
        """
        self.check(caller)
        if caller.incarnation:
            self.member(caller)

    def check_takes_away(self, caller: Caller) -> None:
        """Refuse a destructive call as `check_member_or_operator` does, and also if its caller does not name the job.

        Raises:
            InvalidRequest: it does not name the job.
            PermissionDenied: it gives another job's name.
            GenerationChanged: it is not a member.
        """
        if not caller.job:
            raise InvalidRequest(
                f"this call takes something away, so it must name the job; this is {self._job!r} (job of the "
                "context; --job or AXON_PS_JOB of the command line)"
            )
        self.check_member_or_operator(caller)

    def member(self, caller: Caller, role: Role | None = None, does: str = "") -> RosterEntry:
        """Return the member that calls.

        Args:
            caller: the caller.
            role: the only role that may call; None = any.
            does: a verb phrase for the call, for the message.
        """
        self.check(caller)
        entry = self._assembly.roster.get(caller.incarnation)
        if entry is None:
            who = f"incarnation {caller.incarnation}" if caller.incarnation else "an operator"
            message = f"{who} is no member of generation {self._assembly.generation}; join with a session first"
            raise GenerationChanged(message, self._assembly.generation)
        if role is not None:
            check_role(entry, role, does)
        return entry


def check_role(entry: RosterEntry, role: Role, does: str) -> None:
    """Refuse a member of another role."""
    if entry.member.role is not role:
        raise InvalidRequest(f"{entry.name} {does}; only a {role.value} may")
