"""Bulk messages, encoded and decoded without the protobuf library copying the payload.

Owns: the conversions `encode_chunk`, `encode_buffers`, `decode_chunk` and `Target`, and `payload_array` and `elements`,
which check a payload before it is used. Refuses: bytes that are not a bulk message, with `InvalidRequest`.

Bulk messages are `Chunk` (parameters and gradients) and `CollectiveChunk`.

Note: [The payload comes last]
    `payload` has the same number in all bulk messages, and we write it last. So the encoding of a complete chunk is the
    encoding of its small fields, then the payload's tag, its length and its bytes. Protobuf encodes the small fields
    here, and the rest is joined to them. The payload is copied at most once, into the message. Decoding is the reverse
    and copies nothing: the small fields are skipped, protobuf decodes the bytes before the payload, and the rest is
    returned as a view.

    The begin of the payload is found by its tag, followed by the length of the rest. The tag's byte may be found in
    another field, too. But if protobuf can decode all bytes before it, a field begins there, and it is the payload.

    Another client may write the fields in another order, or so many that the payload begins late. Then protobuf parses
    the entire message, which copies more. Both ways accept the same messages and give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from axon_ps.errors import InvalidRequest
from axon_ps.types import Array, DType
from axon_ps.wire.codec import dtype_from_proto
from axon_ps.wire.v1 import collective_pb2, common_pb2

BulkMessage = common_pb2.Chunk | collective_pb2.CollectiveChunk
Bulk = TypeVar("Bulk", common_pb2.Chunk, collective_pb2.CollectiveChunk)

BULK_MESSAGES: Final[tuple[type[BulkMessage], ...]] = (common_pb2.Chunk, collective_pb2.CollectiveChunk)
"""The message types of this module. Servicers and stubs pass them as encoded bytes."""

Payload = bytes | bytearray | memoryview | Array
"""The types of a payload, which must be contiguous. Its bytes are sent unchanged."""

_PAYLOAD_FIELD: Final = common_pb2.Chunk.PAYLOAD_FIELD_NUMBER
_LENGTH_DELIMITED: Final = 2
_PAYLOAD_TAG: Final = _PAYLOAD_FIELD << 3 | _LENGTH_DELIMITED
_PAYLOAD_TAG_BYTE: Final = bytes((_PAYLOAD_TAG,))
_HEAD_BYTES: Final = 512
"""If the payload begins later than this, the protobuf library decodes the message."""


def encode_chunk(header: BulkMessage, payload: Payload | None) -> bytes:
    """Encode `header` with `payload` in it, with one copy of the payload; see `encode_buffers`."""
    return b"".join(encode_buffers(header, payload))


def encode_buffers(header: BulkMessage, payload: Payload | None) -> tuple[bytes | memoryview, ...]:
    """Encode `header` with `payload` in it, as buffers that follow each other. The last is the payload itself.

    It must not change until the buffers are sent. See Note: [The payload comes last].

    Args:
        header: every field except the payload, which must be unset.
        payload: contiguous bytes or array, little-endian; None or empty leaves the field out, as protobuf does.

    Raises:
        InvalidRequest: the header has a payload of its own, or the array is not contiguous.
    """
    if header.payload:
        raise InvalidRequest("a chunk was given a header that has a payload itself; leave it unset")
    head = header.SerializeToString()
    if payload is None:
        return (head,)
    view: memoryview[Any] = memoryview(payload)  # type: ignore[arg-type]  # before 3.12 no type says "has a buffer"
    if view.nbytes == 0:
        return (head,)
    if not view.c_contiguous:
        raise InvalidRequest("a payload must be contiguous; give numpy.ascontiguousarray(array)")
    return head + _PAYLOAD_TAG_BYTE + _varint(view.nbytes), view


def decode_chunk(data: bytes | memoryview) -> tuple[common_pb2.Chunk, memoryview]:
    """Decode a `Chunk`: its header (payload unset) and a view of its payload, which may refer to `data`.

    See Note: [The payload comes last].

    Raises:
        InvalidRequest: `data` is not an encoded `Chunk`.
    """
    return decode_bulk(common_pb2.Chunk, data)


def decode_bulk(kind: type[Bulk], data: bytes | memoryview) -> tuple[Bulk, memoryview]:
    """Decode a message of `kind`: its header (payload unset) and a view of its payload, which may refer to `data`.

    Raises:
        InvalidRequest: `data` is not an encoded message of that kind.
    """
    found = _split(kind, data, len(data))
    if found is not None:
        header, start = found
        return header, memoryview(data)[start:]
    try:
        header = kind.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidRequest(f"{len(data)} bytes received are not a {kind.DESCRIPTOR.name} message: {error}") from error
    payload = memoryview(header.payload)
    header.ClearField("payload")
    return header, payload


class Target(Generic[Bulk]):
    """Destinations of payloads while their messages are received: memory chosen by the header, without a copy.

    It is an argument of `rpc.stream.Stream.read`. If `read` does not call it, `decode` returns the payload as it came.

    Args:
        kind: the type of the messages.
        memory: returns the memory for a payload, by its header and size; None = any memory. The payload is not checked
            yet, and may not come in full.
    """

    def __init__(self, kind: type[Bulk], memory: Callable[[Bulk, int], memoryview | None]) -> None:
        self._kind: type[Bulk] = kind
        self._memory: Callable[[Bulk, int], memoryview | None] = memory
        self._payload = memoryview(b"")
        self._header: Bulk | None = None

    def __call__(self, first: memoryview, size: int) -> tuple[int, memoryview] | None:
        """Return the payload's offset, and the memory for it, by the first bytes of a message of `size` bytes."""
        found = _split(self._kind, first, size)
        if found is None:
            return None
        header, start = found
        memory = self._memory(header, size - start)
        if memory is None:
            return None
        self._header, self._payload = header, memory
        return start, memory

    def decode(self, message: bytes | memoryview) -> tuple[Bulk, memoryview, bool]:
        """Return header and payload of a message that was read, and whether the payload is in the memory of `memory`.

        Raises:
            InvalidRequest: see `decode_bulk`.
        """
        header, self._header = self._header, None
        if header is None:
            header, payload = decode_bulk(self._kind, message)
            return header, payload, False
        return header, self._payload, True


def payload_array(
    header: common_pb2.Chunk, payload: memoryview, max_numel: int, compressed_bytes: Callable[[int], int] | None = None
) -> Array:
    """Return the payload as a 1-D array of the header's dtype, not copied; bf16 as uint16, compressed as u8.

    Args:
        header: has dtype and number of elements.
        payload: the bytes. The array is read-only if they are.
        max_numel: the most elements that the receiver accepts.
        compressed_bytes: the compressed size of a number of elements; None = the job does not compress.

    Raises:
        InvalidRequest: the dtype is unknown, there are more elements than `max_numel`, the length does not fit, the
            chunk is `absent`, so that there are none, or it is compressed and the job's chunks are not.
    """
    dtype = dtype_from_proto(header.dtype)
    if header.absent:
        raise InvalidRequest(f"an absent chunk came where {header.numel} elements are needed")
    if header.numel > max_numel:
        raise InvalidRequest(f"a chunk claims {header.numel} elements; at most {max_numel} fit here")
    if header.compressed and (compressed_bytes is None or dtype is not DType.F32):
        raise InvalidRequest(f"a chunk is compressed (as {dtype.value}); this job does not compress them")
    if header.compressed and compressed_bytes is not None:
        if payload.nbytes != (needed := compressed_bytes(header.numel)):
            raise InvalidRequest(
                f"a compressed chunk of {header.numel} elements has a payload of {payload.nbytes} bytes; it must have "
                f"{needed}"
            )
        return np.frombuffer(payload, np.uint8)
    if payload.nbytes != (needed := header.numel * dtype.itemsize):
        raise InvalidRequest(
            f"a chunk of {header.numel} elements of {dtype.value} has a payload of {payload.nbytes} bytes; it must "
            f"have {needed}"
        )
    return elements(payload, dtype)


def elements(payload: memoryview, dtype: DType) -> Array:
    """Return a payload as a 1-D array, not copied, read-only if it is; bf16 as uint16. The caller checks its length.

    Raises:
        InvalidRequest: it is not an integral number of elements, or a bool is neither 0 nor 1.
    """
    if payload.nbytes % dtype.itemsize:
        raise InvalidRequest(f"a payload of {payload.nbytes} bytes is no whole number of {dtype.value} elements")
    if dtype is DType.BOOL and payload.nbytes and int(np.frombuffer(payload, np.uint8).max()) > 1:
        raise InvalidRequest("a chunk of bool holds bytes other than 0 and 1")
    return np.frombuffer(payload, dtype.numpy)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _split(kind: type[Bulk], data: bytes | memoryview, size: int) -> tuple[Bulk, int] | None:
    """Return the header of a message of `size` bytes that begins with `data`, and the offset of its payload.

    None if no payload is found in this way; see Note: [The payload comes last].
    """
    head = bytes(data[:_HEAD_BYTES])
    tag = head.find(_PAYLOAD_TAG_BYTE)
    while tag >= 0:
        length, start = _read_varint(head, tag + 1)
        if start + length == size:
            try:
                header = kind.FromString(head[:tag])
            except DecodeError:  # the byte is in the middle of a field
                pass
            else:
                header.ClearField("payload")  # if there are two payloads, the last counts
                return header, start
        tag = head.find(_PAYLOAD_TAG_BYTE, tag + 1)
    return None


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint of at most four bytes, and the position after it; (-1, position) if it is longer, or cut off."""
    value = 0
    for shift, byte in zip((0, 7, 14, 21), data[position : position + 4], strict=False):
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
    return -1, position
