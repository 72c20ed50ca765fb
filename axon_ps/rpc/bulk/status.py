"""The end of a bulk call: gRPC's status of a call, as a value and as the last frame."""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc

from axon_ps.rpc.status import ERROR_KEY
from axon_ps.wire.v1 import bulk_pb2

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Status(NamedTuple):
    """A status like gRPC's: code, details, and the `ErrorDetail` that came with it, if any."""

    code: grpc.StatusCode
    details: str = ""
    error: bytes = b""

    @property
    def trailing(self) -> tuple[tuple[str, bytes], ...]:
        """The trailing metadata."""
        return ((ERROR_KEY, self.error),) if self.error else ()

    def encode(self) -> bytes:
        """Encode as a `BulkStatus`."""
        number: int = self.code.value[0]
        return bulk_pb2.BulkStatus(code=number, details=self.details, error=self.error).SerializeToString()

    @classmethod
    def decode(cls, frame: memoryview) -> Status:
        """Decode a `BulkStatus`.

        Raises:
            DecodeError: the frame is malformed.
        """
        message = bulk_pb2.BulkStatus.FromString(bytes(frame))
        return cls(_CODES.get(message.code, grpc.StatusCode.UNKNOWN), message.details, message.error)


OK: Final = Status(grpc.StatusCode.OK)
