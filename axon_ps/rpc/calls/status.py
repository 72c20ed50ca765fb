"""The end of a call: gRPC's status, as a value."""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc

ERROR_KEY: Final = "axon-ps-error-bin"
"""Trailing metadata with the `ErrorDetail`."""

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class CallStatus(NamedTuple):
    """The status with which a call ends.

    Attributes:
        code: the kind of the end.
        details: a text for people.
        error: the encoded `ErrorDetail` of an `AxonError`; empty = the status does not come from one.
        local: whether this side, the client's, has cancelled the call.
    """

    code: grpc.StatusCode
    details: str = ""
    error: bytes = b""
    local: bool = False

    @property
    def is_ok(self) -> bool:
        """True if the call ended without an error."""
        return self.code is grpc.StatusCode.OK

    @property
    def number(self) -> int:
        """The number of the code, as it is sent."""
        return int(self.code.value[0])

    @property
    def trailing(self) -> tuple[tuple[str, bytes], ...]:
        """The trailing metadata."""
        return ((ERROR_KEY, self.error),) if self.error else ()

    @classmethod
    def numbered(cls, number: int, details: str, error: bytes) -> CallStatus:
        """Return the status of a number; an unknown number is that of UNKNOWN."""
        return cls(_CODES.get(number, grpc.StatusCode.UNKNOWN), details, error)


OK: Final = CallStatus(grpc.StatusCode.OK)
CANCELLED: Final = CallStatus(grpc.StatusCode.CANCELLED, "cancelled by the client", local=True)
"""The status of a call that its own client has ended."""
