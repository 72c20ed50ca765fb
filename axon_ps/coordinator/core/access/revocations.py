"""Revoked credentials. The members that had them are lost at once. Pure.

Every member gets the revoked names, since every process with a server refuses them; see `rpc.auth.credentials`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller, Callers
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import Busy, InvalidRequest, PermissionDenied
from axon_ps.types import Role
from axon_ps.wire.events import RevokedNames, RevokeReply

MAX_REVOKED: Final = 10_000
"""Most names that are revoked in a job."""

MAX_REASON: Final = 200

_MEMBER: Final = re.compile(r"(worker|shard)/(\d{1,5})")
_NAME: Final = re.compile(r"[0-9A-Za-z._-]{4,128}")


class RevocationList:
    """The revoked credentials of one job.

    Args:
        callers: finds the members among callers.
        assembly: the members.
        members: removes them.
        out: gets the events to send.
    """

    def __init__(self, callers: Callers, assembly: Assembly, members: Members, out: Outbox) -> None:
        self._callers = callers
        self._assembly = assembly
        self._members = members
        self._out = out

    @property
    def reasons(self) -> Mapping[str, str]:
        """The names that are revoked, with reasons."""
        return self._assembly.revoked

    def revoke(self, call: int, caller: Caller, target: str, reason: str, now: float) -> list[Action]:
        """Revoke a name, or all credentials of a member. The members that had them are lost.

        `call` gets a `RevokeReply`.

        Raises:
            InvalidRequest: there is no such member, it has no credentials of its own, or name or reason is malformed.
            Busy: too many names are revoked.
        """
        self._callers.check_takes_away(caller)
        if len(reason) > MAX_REASON or not reason.isprintable():
            raise InvalidRequest(f"the reason must be printable, and at most {MAX_REASON} characters")
        names = self._names(target)
        if len(self._assembly.revoked) + len(names) > MAX_REVOKED:
            raise Busy(f"{MAX_REVOKED} names are revoked already; rotate the job's secret instead")
        self._assembly.revoked.update(dict.fromkeys(names, reason))
        self._out.persist([records.revocations_record(self._assembly.revoked)])
        lost = [entry for entry in self._assembly.roster if set(entry.credentials) & set(names)]
        why = f": {reason}" if reason else ""
        for entry in lost:
            self._out.close(entry.session, PermissionDenied(f"the credentials of {entry.name} were revoked{why}"))
        if lost:
            named = " and ".join(entry.name for entry in lost)
            self._members.lose(lost, f"{named} was revoked{why}", now, kind="revoked")
        self._out.push(self._assembly.roster.sessions(), RevokedNames(reasons=dict(self._assembly.revoked)))
        members, has_secret = tuple(entry.name for entry in lost), any(entry.makes_itself for entry in lost)
        self._out.reply(call, RevokeReply(names=tuple(names), members=members, has_secret=has_secret))
        return self._out.take()

    def _names(self, target: str) -> list[str]:
        if (match := _MEMBER.fullmatch(target)) is None:
            if not _NAME.fullmatch(target):
                raise InvalidRequest(
                    f"{target[:140]!r} is no id of a token, no serial number of a certificate, and no member such as "
                    "worker/3 or shard/0"
                )
            return [target]
        entry = self._entry(Role(match[1]), int(match[2]))
        if not entry.credentials:
            raise InvalidRequest(
                f"{entry.name} has shown nothing of its own that could be revoked, but the job's secret (or nothing): "
                "rotate the secret, and end the process"
            )
        return list(entry.credentials)

    def _entry(self, role: Role, rank: int) -> RosterEntry:
        roster = self._assembly.roster
        if (entry := roster.at(role, rank)) is None:
            there = format_ranks(s.member.rank for s in roster.of_role(role)) or "none"
            raise InvalidRequest(f"the job has no {role.value} {rank}; it has {there}")
        return entry
