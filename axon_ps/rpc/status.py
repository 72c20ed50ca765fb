"""The map between our errors and gRPC statuses.

An `AxonError` is sent as a status code, its message (shortened), and an `ErrorDetail` in the trailing metadata
`axon-ps-error-bin`, which has the class and `GenerationChanged.generation`. When a status is received, its detail has
precedence. A status without a detail was made by gRPC itself (no server listens, the deadline passed, the connection
broke) or by another program, and is translated by its code.

Note: [Unreachable or Broken]
    `Unreachable` means that the call was never sent, so nothing was done and it may be repeated safely.
    gRPC gives the same code, UNAVAILABLE, for "could not connect" and for "the connection broke under the call"; only
    the text differs. We raise `Unreachable` when the text is about connecting and nothing was received on the call
    (`PermissionDenied` if it is about TLS), and `Broken` in every other case: when in doubt, the peer may have done
    something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from axon_ps import errors
from axon_ps.errors import AxonError, GenerationChanged, InternalError, PermissionDenied, Unreachable
from axon_ps.rpc.calls.status import ERROR_KEY, CallStatus
from axon_ps.rpc.limits import no_more_files
from axon_ps.texts import printable
from axon_ps.wire.v1 import common_pb2

MAX_MESSAGE_BYTES: Final = 4096
"""A longer message is cut before it is sent: metadata is bounded by both ends (`channels.OPTIONS`)."""

MAX_DETAILS_CHARS: Final = 400
"""A longer message is cut in the plain status details, where each byte may take three."""

_Code = grpc.StatusCode

STATUS_OF: Final[Mapping[type[AxonError], grpc.StatusCode]] = {
    AxonError: _Code.UNKNOWN,
    errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    errors.LayoutMismatch: _Code.FAILED_PRECONDITION,
    errors.ConfigurationError: _Code.INVALID_ARGUMENT,
    errors.Disagreement: _Code.INVALID_ARGUMENT,
    errors.Misuse: _Code.FAILED_PRECONDITION,
    errors.Closed: _Code.FAILED_PRECONDITION,
    errors.Drained: _Code.FAILED_PRECONDITION,
    errors.PermissionDenied: _Code.PERMISSION_DENIED,
    errors.Broken: _Code.UNAVAILABLE,
    errors.Unreachable: _Code.UNAVAILABLE,
    errors.NotLeader: _Code.UNAVAILABLE,
    errors.MemberLost: _Code.UNAVAILABLE,
    errors.NcclError: _Code.UNAVAILABLE,
    errors.Timeout: _Code.DEADLINE_EXCEEDED,
    errors.Busy: _Code.RESOURCE_EXHAUSTED,
    errors.GenerationChanged: _Code.ABORTED,
    errors.SliceMoved: _Code.ABORTED,
    errors.StepAborted: _Code.ABORTED,
    errors.CheckpointError: _Code.UNKNOWN,
    errors.CheckpointNotFound: _Code.NOT_FOUND,
    errors.CheckpointCorrupt: _Code.DATA_LOSS,
    errors.StorageFull: _Code.RESOURCE_EXHAUSTED,
    errors.InternalError: _Code.INTERNAL,
}
"""The status with which an error is sent."""

ERROR_OF: Final[Mapping[grpc.StatusCode, type[AxonError]]] = {
    _Code.CANCELLED: errors.Broken,
    _Code.UNKNOWN: errors.InternalError,
    _Code.INVALID_ARGUMENT: errors.InvalidRequest,
    _Code.DEADLINE_EXCEEDED: errors.Timeout,
    _Code.NOT_FOUND: errors.InvalidRequest,
    _Code.ALREADY_EXISTS: errors.InvalidRequest,
    _Code.PERMISSION_DENIED: errors.PermissionDenied,
    _Code.RESOURCE_EXHAUSTED: errors.Busy,
    _Code.FAILED_PRECONDITION: errors.Misuse,
    _Code.ABORTED: errors.StepAborted,
    _Code.OUT_OF_RANGE: errors.InvalidRequest,
    _Code.UNIMPLEMENTED: errors.ConfigurationError,
    _Code.INTERNAL: errors.InternalError,
    _Code.UNAVAILABLE: errors.Broken,
    _Code.DATA_LOSS: errors.CheckpointCorrupt,
    _Code.UNAUTHENTICATED: errors.PermissionDenied,
}
"""The class of a status that comes without an `ErrorDetail`."""

KINDS: Final[Mapping[str, type[AxonError]]] = {kind.__name__: kind for kind in STATUS_OF}
"""The classes of the tree by name, as `ErrorDetail.kind` spells them."""

_CONNECTING: Final = (
    "failed to connect",
    "connection refused",
    "errors resolving",
    "dns resolution",
    "no route to host",
)
_OTHER_NAME: Final = "the server's certificate does not name this host, or not the role that the server must have"
_TLS_HINTS: Final = {
    "certificate_verify_failed": "no authority that we trust has signed its certificate: is the secret that of this "
    "job, or does --tls-ca (AXON_PS_TLS_CA) not hold the server's authority?",
    "wrong_version_number": "the server speaks plaintext; give it a certificate, or leave out --tls and --tls-ca here "
    "(AXON_PS_INSECURE=1 if it was started with --insecure)",
    "hostname verification": _OTHER_NAME,
    "peer name": _OTHER_NAME,
}
_BROKEN: Final = ("rst_stream", "stream removed", "socket closed", "connection reset", "goaway", "broken pipe")


def error_to_detail(error: AxonError) -> common_pb2.ErrorDetail:
    """Convert an error to a message. A class that is not in `STATUS_OF` is sent as its nearest ancestor in it."""
    kind = next(c.__name__ for c in type(error).__mro__ if c in STATUS_OF)
    generation = error.generation if isinstance(error, GenerationChanged) else 0
    return common_pb2.ErrorDetail(kind=kind, message=_cut(str(error)), generation=generation)


def error_from_detail(detail: common_pb2.ErrorDetail) -> AxonError:
    """Return the error in a message; if its class is unknown (a newer peer's), an `AxonError` that names it."""
    kind, message = KINDS.get(detail.kind), printable(detail.message, lines=True)
    if kind is None:
        return AxonError(f"{printable(detail.kind)}: {message}")
    if kind is GenerationChanged:
        return GenerationChanged(message, detail.generation)
    return kind(message)


def status_of(error: AxonError) -> CallStatus:
    """Return the status with which an error is sent."""
    detail = error_to_detail(error)
    return CallStatus(STATUS_OF[KINDS[detail.kind]], detail.message[:MAX_DETAILS_CHARS], detail.SerializeToString())


def status_of_rpc_error(error: grpc.aio.AioRpcError) -> CallStatus:
    """Return the status that an error of gRPC has."""
    return received_status(error.code(), error.details(), error.trailing_metadata())


def received_status(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> CallStatus:
    """Return the status that gRPC has received."""
    error = next((v for key, v in trailing or () if key == ERROR_KEY and isinstance(v, bytes)), b"")
    return CallStatus(code, details or "", error)


def error_of(
    error: grpc.aio.AioRpcError,
    peer: str = "",
    method: str = "",
    *,
    answered: bool = False,
    timeout_s: float | None = None,
) -> AxonError:
    """Return the error of a failed call; see `error_of_status`."""
    return error_of_status(status_of_rpc_error(error), peer, method, answered=answered, timeout_s=timeout_s)


def error_of_status(
    status: CallStatus,
    peer: str = "",
    method: str = "",
    *,
    answered: bool = False,
    timeout_s: float | None = None,
) -> AxonError:
    """Return the error of a status.

    An error that the peer raised keeps its message, and gets a note with peer and method. An error that gRPC made names
    them in its message.

    Args:
        status: the status; not OK.
        peer: "host:port" of the call.
        method: the method called.
        answered: whether anything was received on this call. See Note: [Unreachable or Broken].
        timeout_s: the deadline that was given, for the message.
    """
    code, peer, details = status.code, peer or "the peer", printable(status.details, lines=True)
    target = f"{method or 'a call'} at {peer}"
    if (detail := _detail(status.error)) is not None:
        raised = error_from_detail(detail)
        raised.add_note(f"raised by {target}")
        return raised
    lower = details.lower()
    if code is _Code.UNAVAILABLE and not answered and any(w in lower for w in _CONNECTING):
        return _not_connected(peer, details)
    if code is _Code.DEADLINE_EXCEEDED:
        within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
        return errors.Timeout(f"{target} did not answer {within}")
    if code is _Code.RESOURCE_EXHAUSTED and "larger than max" in lower:
        return errors.InvalidRequest(f"{target}: a message is too large ({details})")
    if code is _Code.UNIMPLEMENTED:
        return errors.ConfigurationError(f"{target} is not offered there: wrong service or version? ({details})")
    if code in (_Code.UNAVAILABLE, _Code.CANCELLED) or any(w in lower for w in _BROKEN):
        return errors.Broken(f"the connection broke during {target} ({details})")
    return ERROR_OF.get(code, InternalError)(f"{target} failed: {details or code.name}")


def _not_connected(peer: str, details: str) -> AxonError:
    lower = details.lower()
    if why := no_more_files(details):
        return Unreachable(f"{peer} cannot be reached: {why} ({details})")
    for sign, hint in _TLS_HINTS.items():
        if sign in lower:
            return PermissionDenied(f"no TLS connection to {peer}: {hint} ({details})")
    if "socket closed" in lower:
        hint = (
            "somebody listens but hangs up; it may want TLS (--tls, or --tls-ca, AXON_PS_TLS_CA), or a client's "
            "certificate (mutual TLS) that its authority has signed and that has not expired; or it has as many "
            "connections as the number of files that it may open allows (ulimit -n there)"
        )
    else:
        hint = "is the address right and the server up?"
    return Unreachable(f"nobody answers at {peer}: {hint} ({details})")


def _detail(error: bytes) -> common_pb2.ErrorDetail | None:
    try:
        return common_pb2.ErrorDetail.FromString(error) if error else None
    except DecodeError:
        return None


def _cut(message: str) -> str:
    encoded = message.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
