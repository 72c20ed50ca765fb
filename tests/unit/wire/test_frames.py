"""Frames against protobuf's own encoder and decoder."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.types import NUMBERS, DType
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import Target, decode_chunk, encode_buffers, encode_chunk, payload_array
from axon_ps.wire.v1 import common_pb2

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
PAYLOADS = st.binary(max_size=300) | st.integers(100, 20_000).map(lambda n: b"\x7a" * n)
CONTEXTS = st.builds(common_pb2.CallContext, job=st.text(max_size=20), generation=U64, incarnation=st.text(max_size=32))
HEADERS = st.builds(
    common_pb2.Chunk,
    context=st.none() | CONTEXTS,
    step=U64,
    version=U64,
    unit=U32,
    offset=U64,
    numel=U64,
    dtype=st.integers(0, 8),
    replica=U32,
    absent=st.booleans(),
)


def varint_field(number: int, value: int) -> bytes:
    return _VarintBytes(number << 3) + _VarintBytes(value)


def bytes_field(number: int, value: bytes) -> bytes:
    return _VarintBytes(number << 3 | 2) + _VarintBytes(len(value)) + value


UNKNOWN_FIELDS = st.one_of(
    st.builds(varint_field, st.integers(17, 5000), U64),
    st.builds(bytes_field, st.integers(17, 5000), st.binary(max_size=200)),
    st.builds(lambda n, v: _VarintBytes(n << 3 | 1) + v, st.integers(17, 5000), st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: _VarintBytes(n << 3 | 5) + v, st.integers(17, 5000), st.binary(min_size=4, max_size=4)),
    st.builds(  # a group, empty or with a field in it
        lambda n, v: _VarintBytes(n << 3 | 3) + v + _VarintBytes(n << 3 | 4),
        st.integers(17, 5000),
        st.just(b"") | st.builds(varint_field, st.integers(1, 20), U64),
    ),
)


def whole(header: common_pb2.Chunk, payload: bytes) -> common_pb2.Chunk:
    message = common_pb2.Chunk()
    message.CopyFrom(header)
    message.payload = payload
    return message


def assert_decodes_as_protobuf_does(data: bytes) -> None:
    expected = common_pb2.Chunk.FromString(data)
    header, payload = decode_chunk(data)
    assert not header.payload
    assert bytes(payload) == expected.payload
    expected.ClearField("payload")
    assert header == expected


@given(HEADERS, PAYLOADS)
def test_encoding_is_byte_equal_to_protobuf(header: common_pb2.Chunk, payload: bytes) -> None:
    assert encode_chunk(header, payload) == whole(header, payload).SerializeToString()


@given(HEADERS)
def test_no_payload_is_protobufs_default(header: common_pb2.Chunk) -> None:
    assert encode_chunk(header, None) == encode_chunk(header, b"") == header.SerializeToString()


@given(HEADERS, PAYLOADS)
def test_every_protobuf_encoding_decodes(header: common_pb2.Chunk, payload: bytes) -> None:
    assert_decodes_as_protobuf_does(whole(header, payload).SerializeToString())


@given(st.permutations(range(8)), st.lists(UNKNOWN_FIELDS, max_size=6), PAYLOADS, PAYLOADS, U64)
def test_other_field_orders_and_unknown_fields_decode(
    order: list[int], unknown: list[bytes], payload: bytes, first: bytes, number: int
) -> None:
    fields = [
        bytes_field(1, common_pb2.CallContext(job="j", generation=number).SerializeToString()),
        varint_field(2, number),
        varint_field(4, number & 0xFFFFFFFF),
        varint_field(7, 2),
        varint_field(9, 1),
        bytes_field(15, payload),
        b"".join(unknown),
        bytes_field(15, first),  # twice: the last one counts
    ]
    assert_decodes_as_protobuf_does(b"".join(fields[i] for i in order))


@given(st.binary(max_size=80))
def test_any_bytes_decode_as_protobuf_decodes_them_or_are_refused(data: bytes) -> None:
    try:
        common_pb2.Chunk.FromString(data)
    except Exception:
        with pytest.raises(InvalidRequest):
            decode_chunk(data)
    else:
        assert_decodes_as_protobuf_does(data)


@given(HEADERS, st.binary(min_size=1, max_size=300), st.data())
def test_truncation_is_refused_or_ends_at_a_field(
    header: common_pb2.Chunk, payload: bytes, data: st.DataObject
) -> None:
    encoded = whole(header, payload).SerializeToString()
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        common_pb2.Chunk.FromString(cut)
    except Exception:
        with pytest.raises(InvalidRequest, match=f"{len(cut)} bytes"):
            decode_chunk(cut)
    else:
        assert_decodes_as_protobuf_does(cut)


def test_a_cut_payload_is_refused() -> None:
    encoded = encode_chunk(common_pb2.Chunk(step=1), b"x" * 1000)
    for keep in range(3, len(encoded)):
        with pytest.raises(InvalidRequest, match="not a Chunk"):
            decode_chunk(encoded[:keep])


def test_many_unknown_fields_before_the_payload_are_left_to_protobuf() -> None:
    data = varint_field(100, 7) * 1000 + bytes_field(15, b"abc")
    assert_decodes_as_protobuf_does(data)
    assert len(decode_chunk(data)[1]) == 3


def test_the_payload_is_a_view_and_nothing_is_copied() -> None:
    encoded = encode_chunk(common_pb2.Chunk(step=1), b"x" * 1000)
    _, payload = decode_chunk(encoded)
    assert payload.obj is encoded
    assert payload.readonly


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrays_round_trip(dtype: DType) -> None:
    values = np.arange(24).reshape(4, 6).astype(dtype.numpy)
    header = common_pb2.Chunk(numel=24, dtype=dtype_to_proto(dtype))
    decoded, payload = decode_chunk(encode_chunk(header, values))
    array = payload_array(decoded, payload, 24)
    assert array.dtype == dtype.numpy
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, values.reshape(-1))


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.float32)])
def test_any_buffer_may_be_a_payload(make: object) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    assert decode_chunk(encode_chunk(common_pb2.Chunk(), make(data)))[1] == data  # type: ignore[operator]


def test_a_header_with_a_payload_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="leave it unset"):
        encode_chunk(common_pb2.Chunk(payload=b"a"), b"b")
    with pytest.raises(InvalidRequest, match="leave it unset"):
        encode_chunk(common_pb2.Chunk(payload=b"a"), None)


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ascontiguousarray"):
        encode_chunk(common_pb2.Chunk(), np.zeros((4, 4), np.float32)[:, ::2])


F32 = common_pb2.D_TYPE_F32


@pytest.mark.parametrize(
    ("header", "payload", "words"),
    [
        (common_pb2.Chunk(numel=2), b"12345678", "dtype is unset"),
        (common_pb2.Chunk(numel=2, dtype=99), b"12345678", "number 99"),  # type: ignore[arg-type]
        (common_pb2.Chunk(numel=101, dtype=F32), b"", "101 elements; at most 100"),
        (common_pb2.Chunk(numel=2**63, dtype=F32), b"", "at most 100"),
        (common_pb2.Chunk(numel=2, dtype=F32), b"1234567", "payload of 7 bytes; it must have 8"),
        (common_pb2.Chunk(numel=2, dtype=F32), b"", "payload of 0 bytes; it must have 8"),
        (common_pb2.Chunk(numel=1, dtype=F32), b"12345678", "payload of 8 bytes; it must have 4"),
        (common_pb2.Chunk(numel=2, dtype=F32, absent=True), b"12345678", "an absent chunk"),
        (common_pb2.Chunk(numel=2, dtype=common_pb2.D_TYPE_BOOL), b"\x01\x02", "other than 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused(header: common_pb2.Chunk, payload: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        payload_array(header, memoryview(payload), 100)


def receive(message: bytes, target: Target[common_pb2.Chunk]) -> tuple[common_pb2.Chunk, memoryview, bool]:
    """As a bulk connection does: the target is asked with the first bytes, and gets the payload where it says."""
    found = target(memoryview(message)[:512], len(message))
    if found is None:
        return target.decode(message)
    start, memory = found
    memory[:] = message[start:]
    return target.decode(message[:start])


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 511, 4096, 1 << 21])
def test_a_target_has_the_payload_where_it_said(nbytes: int) -> None:
    payload, memory = np.random.default_rng(nbytes).bytes(nbytes), bytearray(b"\xff" * nbytes)
    header = common_pb2.Chunk(unit=3, offset=1 << 40, numel=nbytes, dtype=common_pb2.D_TYPE_U8, version=9)
    target = Target(common_pb2.Chunk, lambda header, size: memoryview(memory) if header.unit == 3 else None)
    got, there, copied = receive(encode_chunk(header, payload), target)
    assert (got, bytes(there), copied) == (header, payload, nbytes > 0)
    if copied:
        assert bytes(memory) == payload
        header.unit = 4
        got, there, copied = receive(encode_chunk(header, payload), target)
        assert (got, bytes(there), copied) == (header, payload, False), "the next one is decoded by itself"


def test_a_target_is_not_asked_about_messages_that_are_written_otherwise() -> None:
    def unexpected(header: common_pb2.Chunk, size: int) -> None:
        raise AssertionError("nobody knows yet where its payload is")

    payload = bytes(2048)
    whole = common_pb2.Chunk(unit=3, payload=payload)
    twice = whole.SerializeToString() + common_pb2.Chunk(payload=b"last").SerializeToString()
    first = common_pb2.Chunk(payload=payload).SerializeToString() + common_pb2.Chunk(unit=3).SerializeToString()
    for message, wanted in ((twice, b"last"), (first, payload)):
        header, got, copied = receive(message, Target(common_pb2.Chunk, unexpected))
        assert (header.unit, bytes(got), copied) == (3, wanted, False)
    with pytest.raises(InvalidRequest):
        receive(b"\xff" * 1024, Target(common_pb2.Chunk, unexpected))


def test_buffers_follow_each_other_as_the_encoding_and_hold_the_payload_itself() -> None:
    payload = np.arange(1000, dtype=np.float32)
    header = common_pb2.Chunk(unit=3, numel=1000)
    head, last = encode_buffers(header, payload)
    assert bytes(head) + bytes(last) == encode_chunk(header, payload)
    payload[:] = 7
    assert bytes(last) == payload.tobytes()
