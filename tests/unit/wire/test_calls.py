"""Collectives on the wire: calls survive the trip, nonsense is refused, segments are encoded as protobuf does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.reduction.call import Call, Operation
from axon_ps.rpc.service import RAW_MESSAGES
from axon_ps.types import DType, ReduceOp
from axon_ps.wire.calls import call_from_proto, call_to_proto
from axon_ps.wire.frames import decode_bulk, elements, encode_chunk
from axon_ps.wire.v1 import collective_pb2
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk


def test_every_operation_survives_the_trip() -> None:
    for operation in Operation:
        whole = operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
        uncounted = operation in (Operation.ALL_TO_ALL, Operation.BARRIER, Operation.REFUSAL)
        reducing = operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
        rooted = operation in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
        call = Call(
            sequence=7,
            operation=operation,
            dtype=DType.BF16,
            counts=() if uncounted else (5,) if whole else (5, 0, 9),
            op=ReduceOp.MAX if reducing else None,
            root=2 if rooted else -1,
            reason="because" if operation is Operation.REFUSAL else "",
        )
        assert call_from_proto(call_to_proto(call), 3) == call


@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_reduce_operation_survives_the_trip(op: ReduceOp) -> None:
    dtype = DType.F32 if op is ReduceOp.AVERAGE else DType.I32
    call = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=dtype, counts=(1,), op=op)
    assert call_from_proto(call_to_proto(call), 2).op is op


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operation": 0}, "operation number 0"),
        ({"operation": 99}, "operation number 99"),
        ({"dtype": 0}, "dtype is unset"),
        ({"counts": [1, 2]}, "2 counts"),
        ({"counts": [1 << 60]}, "elements in all"),
        ({"op": 0}, "reduce operation number 0"),
        ({"op": collective_pb2.REDUCE_OP_BAND}, "bitwise"),
        ({"operation": collective_pb2.OPERATION_BROADCAST, "root": 3}, "root 3"),
        ({"operation": collective_pb2.OPERATION_BROADCAST, "root": -1}, "root -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    call = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(4,), op=ReduceOp.SUM)
    message = call_to_proto(call)
    for name, value in changes.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest, match=words):
        call_from_proto(message, 3)


@pytest.mark.parametrize(
    "header", [{}, {"source": 3, "partition": 300, "offset": 1 << 40}, {"begin": CollectiveBegin()}]
)
@pytest.mark.parametrize("numel", [0, 1, 100, 1 << 15])
def test_a_segment_is_encoded_as_protobuf_does(header: dict[str, Any], numel: int) -> None:
    values = np.arange(numel, dtype=np.float64)
    data = encode_chunk(CollectiveChunk(**header), values)
    assert data == CollectiveChunk(**header, payload=values.tobytes()).SerializeToString()
    decoded, payload = decode_bulk(CollectiveChunk, data)
    assert decoded == CollectiveChunk(**header)
    np.testing.assert_array_equal(elements(payload, DType.F64), values)


def test_segments_pass_servicers_as_bytes() -> None:
    assert CollectiveChunk.DESCRIPTOR.full_name in RAW_MESSAGES


def test_what_is_no_segment_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a CollectiveChunk"):
        decode_bulk(CollectiveChunk, b"\xff\xff\xff")
    with pytest.raises(InvalidRequest, match="no whole number of f32"):
        elements(memoryview(b"123"), DType.F32)
    with pytest.raises(InvalidRequest, match="other than 0 and 1"):
        elements(memoryview(b"\x00\x02"), DType.BOOL)
