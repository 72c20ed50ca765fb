"""Who may call what: the one table of RPCs and principals.

A caller is known by its token. Whoever has the job's may call everything; every other principal only what the table
gives it. An RPC that is not in the table is denied to all of these, so a new one is closed until somebody opens it
(`tests/unit/rpc/test_access.py` holds the table complete). Health checks need no token at all.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"


class Principal(enum.Enum):
    """What a token makes of its holder."""

    JOB = "job"
    OBSERVER = "observer"


_JOB: Final = frozenset({Principal.JOB})
_READERS: Final = frozenset({Principal.JOB, Principal.OBSERVER})

MAY_CALL: Final[Mapping[str, frozenset[Principal]]] = {
    "/axon_ps.wire.v1.Coordinator/Session": _JOB,
    "/axon_ps.wire.v1.Coordinator/Barrier": _JOB,
    "/axon_ps.wire.v1.Coordinator/KV": _JOB,
    "/axon_ps.wire.v1.Coordinator/Register": _JOB,
    "/axon_ps.wire.v1.Coordinator/Release": _JOB,
    "/axon_ps.wire.v1.Coordinator/SaveCheckpoint": _JOB,
    "/axon_ps.wire.v1.Coordinator/RestoreCheckpoint": _JOB,
    "/axon_ps.wire.v1.Coordinator/Drain": _JOB,
    "/axon_ps.wire.v1.Coordinator/Describe": _READERS,
    "/axon_ps.wire.v1.Coordinator/Status": _READERS,
    "/axon_ps.wire.v1.Coordinator/Watch": _READERS,
    "/axon_ps.wire.v1.Coordinator/Logs": _READERS,  # no process logs a secret, and what looks like one is taken out
    "/axon_ps.wire.v1.Coordinator/Trace": _READERS,
    "/axon_ps.wire.v1.Shard/AllGather": _JOB,  # its waits and its same-host leases are for members
    "/axon_ps.wire.v1.Shard/ReduceScatter": _JOB,
    "/axon_ps.wire.v1.Shard/Upload": _JOB,
    "/axon_ps.wire.v1.Shard/Collective": _JOB,
    "/axon_ps.wire.v1.Shard/Replicate": _JOB,
    "/axon_ps.wire.v1.Shard/Copy": _JOB,
    "/axon_ps.wire.v1.Shard/Handshake": _JOB,
    "/axon_ps.wire.v1.Shard/Subscribe": _READERS,
    "/axon_ps.wire.v1.Shard/Stats": _READERS,
    _REFLECTION: _READERS,
}
"""The principals that may call an RPC, by its path."""


def needs_no_token(method: str) -> bool:
    """Whether anybody may call `method`: health checks."""
    return method.startswith(_HEALTH_PREFIX)


def may_call(principal: Principal, method: str) -> bool:
    """Whether `principal` may call the RPC with the path `method`."""
    return principal is Principal.JOB or principal in MAY_CALL.get(method, _JOB)


def refusal(principal: Principal, method: str) -> str:
    """Why `principal` may not call `method`, with what it may call."""
    allowed = ", ".join(_short(path) for path, principals in MAY_CALL.items() if principal in principals)
    return f"the {principal.value}'s token is read-only: it may call {allowed}; {_short(method)} needs the job's token"


def _short(path: str) -> str:
    """ "/axon_ps.wire.v1.Shard/Stats" -> "Shard.Stats"."""
    service, _, method = path.removeprefix("/").rpartition("/")
    return f"{service.rpartition('.')[2]}.{method}"
