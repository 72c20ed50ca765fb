"""The table of RPCs, HTTP paths and the roles that may call them. `axon-ps auth table` prints it.

A path that is not in the table is denied to every caller, so a new RPC is closed until it is added
(`tests/unit/rpc/test_access.py` checks that the table is complete). A token that is the job's secret has every role. A
certificate that names a role has only that one, also beside the secret. Health checks need no role.

Operators and observers are not members: they do not join the job, and no member waits for them. A worker trains: it
registers models, steps, stores values and writes and restores checkpoints, as a training script does. It does not move
shard servers or revoke rights; an operator does.

This table is about roles only. The coordinator's core (`access.callers`) checks for each call that the caller is a
member of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from axon_ps.rpc.auth.identity import EVERY_ROLE, Principal

HEALTH: Final = "/grpc.health.v1.Health/"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PAGE: Final = "GET /"
"""The page's own files, which have no data of the job."""

_C: Final = "/axon_ps.wire.v1.Coordinator/"
_S: Final = "/axon_ps.wire.v1.Shard/"

ANYBODY: Final[frozenset[Principal] | None] = None
_WORKER: Final = frozenset({Principal.WORKER})
_SHARD: Final = frozenset({Principal.SHARD})
_OPERATOR: Final = frozenset({Principal.OPERATOR})
_MEMBERS: Final = _WORKER | _SHARD
_USERS: Final = _WORKER | _OPERATOR
_READERS: Final = EVERY_ROLE

MAY_CALL: Final[Mapping[str, frozenset[Principal] | None]] = {
    _C + "Session": _MEMBERS,  # a role joins only as itself; see `credentials.may_join`
    _C + "HostSession": _MEMBERS,  # each call on it is looked up in this table
    _C + "Barrier": _WORKER,
    _C + "KV": _USERS | _SHARD,  # an operator: torchrun's agents; a shard server: to detect another leader
    _C + "Register": _WORKER,
    _C + "Release": _WORKER,
    _C + "SaveCheckpoint": _USERS,
    _C + "RestoreCheckpoint": _USERS,
    _C + "Drain": _OPERATOR | _SHARD,  # a shard server drains itself when it is stopped
    _C + "Revoke": _OPERATOR,
    _C + "Describe": _READERS,
    _C + "Status": _READERS,
    _C + "Watch": _READERS,
    _C + "Logs": _READERS,  # no process logs a secret, and text that looks like a secret is removed
    _C + "Trace": _READERS,
    _S + "AllGather": _WORKER,  # its waits and its same-host leases are for members
    _S + "ReduceScatter": _WORKER,
    _S + "Upload": _WORKER,
    _S + "Collective": _WORKER,
    _S + "Replicate": _SHARD,
    _S + "Copy": _SHARD,
    _S + "Handshake": _MEMBERS,
    _S + "Echo": _MEMBERS,
    _S + "Subscribe": _READERS,
    _S + "Stats": _READERS,
    "/axon_ps.wire.v1.Bulk/Open": _MEMBERS,  # each call on it is looked up in this table
    REFLECTION: _READERS,
    HEALTH + "Check": ANYBODY,
    HEALTH + "Watch": ANYBODY,
    "GET /healthz": ANYBODY,
    PAGE: ANYBODY,
    "GET /metrics": _READERS,
    "GET /api/feed": _READERS,
    "GET /api/logs": _READERS,
    "GET /api/operator": _OPERATOR,
    "POST /api/servers/RANK/drain": _OPERATOR,
}
"""The roles that may call an RPC, by its path, or an HTTP path, by "METHOD PATH"; None = no role is needed."""

CHANGES_A_JOB: Final = frozenset(
    {_C + name for name in ("Register", "Release", "SaveCheckpoint", "RestoreCheckpoint", "Drain", "Revoke", "Session")}
    | {"POST /api/servers/RANK/drain"}
)
"""Paths whose refused calls are recorded in the audit log."""


def needs_nothing(path: str) -> bool:
    """Return True if `path` may be called without credentials: health checks, and the page's files."""
    return MAY_CALL.get(path, frozenset()) is ANYBODY


def may_call(roles: frozenset[Principal], path: str) -> bool:
    """Return True if a caller with `roles` may call `path`."""
    allowed = MAY_CALL.get(path, frozenset())
    return allowed is None or bool(allowed & roles)


def refusal(roles: frozenset[Principal], path: str) -> str:
    """Return the message that refuses `path` to a caller with `roles`, and lists the paths that it may call."""
    allowed = MAY_CALL.get(path) or frozenset()
    who = _names(roles) or "nobody (the certificate and the token are of different roles)"
    may = ", ".join(short(other) for other in MAY_CALL if may_call(roles, other) and not needs_nothing(other))
    needed = f"needs the role {_names(allowed, 'or')}" if allowed else "is nobody's"
    return f"the role of these credentials is {who}, which may call {may or 'nothing'}; {short(path)} {needed}"


def short(path: str) -> str:
    """Shorten "/axon_ps.wire.v1.Shard/Stats" to "Shard.Stats"; an HTTP path does not change."""
    service, _, method = path.removeprefix("/").rpartition("/")
    return path if " " in path else f"{service.rpartition('.')[2]}.{method}"


def _names(roles: frozenset[Principal], last: str = "and") -> str:
    names = [role.value for role in Principal if role in roles]
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
