"""The caller of a call on a shared stream, as verified by the stream's client, which has the job's secret."""

from __future__ import annotations

from axon_ps.errors import InvalidRequest
from axon_ps.rpc.auth.credentials import Credentials
from axon_ps.rpc.auth.identity import Principal
from axon_ps.wire.v1 import multiplex_pb2


def caller_to_proto(caller: Credentials) -> multiplex_pb2.FrameCaller:
    """Convert credentials to a message."""
    return multiplex_pb2.FrameCaller(
        roles=sorted(role.value for role in caller.roles),
        rank=caller.rank,
        names=caller.names,
        has_secret=caller.has_secret,
        expires_s=caller.expires_s,
        text=caller.text,
    )


def caller_from_proto(message: multiplex_pb2.FrameCaller) -> Credentials:
    """Convert a message to credentials.

    Raises:
        InvalidRequest: there is no such role.
    """
    try:
        roles = frozenset(Principal(role) for role in message.roles)
    except ValueError as error:
        raise InvalidRequest(f"a call names a role that there is not: {error}") from None
    return Credentials(
        roles,
        message.rank if message.HasField("rank") else None,
        tuple(message.names),
        message.has_secret,
        message.expires_s,
        message.text,
    )
