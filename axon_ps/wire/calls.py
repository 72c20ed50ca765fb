"""Conversion between calls of collectives and the messages of `v1`. As in `wire.codec`, messages are validated."""

from __future__ import annotations

from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.reduction import ops
from axon_ps.reduction.call import REASON_CHARS, Call, Operation
from axon_ps.types import ReduceOp
from axon_ps.wire.codec import dtype_from_proto, dtype_to_proto
from axon_ps.wire.v1 import collective_pb2

MAX_RANKS: Final = 1 << 16
"""Most members of a group that are accepted from the wire."""

MAX_NUMEL: Final = 1 << 45
"""Most elements of one collective that are accepted from the wire."""

_OPERATIONS: Final = {
    Operation.ALL_REDUCE: collective_pb2.OPERATION_ALL_REDUCE,
    Operation.REDUCE: collective_pb2.OPERATION_REDUCE,
    Operation.BROADCAST: collective_pb2.OPERATION_BROADCAST,
    Operation.ALL_GATHER: collective_pb2.OPERATION_ALL_GATHER,
    Operation.REDUCE_SCATTER: collective_pb2.OPERATION_REDUCE_SCATTER,
    Operation.GATHER: collective_pb2.OPERATION_GATHER,
    Operation.SCATTER: collective_pb2.OPERATION_SCATTER,
    Operation.ALL_TO_ALL: collective_pb2.OPERATION_ALL_TO_ALL,
    Operation.BARRIER: collective_pb2.OPERATION_BARRIER,
    Operation.REFUSAL: collective_pb2.OPERATION_REFUSAL,
}
_OPERATIONS_BY_NUMBER: Final[dict[int, Operation]] = {number: operation for operation, number in _OPERATIONS.items()}
_REDUCE_OPS: Final = {
    ReduceOp.SUM: collective_pb2.REDUCE_OP_SUM,
    ReduceOp.PRODUCT: collective_pb2.REDUCE_OP_PRODUCT,
    ReduceOp.MIN: collective_pb2.REDUCE_OP_MIN,
    ReduceOp.MAX: collective_pb2.REDUCE_OP_MAX,
    ReduceOp.AVERAGE: collective_pb2.REDUCE_OP_AVERAGE,
    ReduceOp.BAND: collective_pb2.REDUCE_OP_BAND,
    ReduceOp.BOR: collective_pb2.REDUCE_OP_BOR,
    ReduceOp.BXOR: collective_pb2.REDUCE_OP_BXOR,
}
_REDUCE_OPS_BY_NUMBER: Final[dict[int, ReduceOp]] = {number: op for op, number in _REDUCE_OPS.items()}
_REDUCING: Final = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_SINGLE_COUNT: Final = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
_UNCOUNTED: Final = (Operation.ALL_TO_ALL, Operation.BARRIER, Operation.REFUSAL)
_ROOTED: Final = (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)


def call_to_proto(call: Call) -> collective_pb2.Call:
    """Convert a call to a message."""
    return collective_pb2.Call(
        sequence=call.sequence,
        operation=_OPERATIONS[call.operation],
        dtype=dtype_to_proto(call.dtype),
        counts=call.counts,
        op=_REDUCE_OPS[call.op] if call.op is not None else collective_pb2.REDUCE_OP_UNSPECIFIED,
        root=call.root,
        reason=call.reason,
    )


def call_from_proto(message: collective_pb2.Call, world_size: int) -> Call:
    """Convert a message to a call, in a group of `world_size` ranks.

    Raises:
        InvalidRequest: the operation, dtype or reduce operation is unknown, or counts or root do not fit the group.
    """
    operation = _OPERATIONS_BY_NUMBER.get(message.operation)
    if operation is None:
        raise InvalidRequest(f"a collective has operation number {message.operation}, which is unset or unknown here")
    call = Call(
        sequence=message.sequence,
        operation=operation,
        dtype=dtype_from_proto(message.dtype, blocks=True),
        counts=tuple(message.counts),
        op=_REDUCE_OPS_BY_NUMBER.get(message.op),
        root=message.root,
        reason=message.reason[:REASON_CHARS],
    )
    needed = 0 if operation in _UNCOUNTED else 1 if operation in _SINGLE_COUNT else world_size
    if len(call.counts) != needed or sum(call.counts) > MAX_NUMEL:
        raise InvalidRequest(
            f"{operation.value} in a group of {world_size} came with {len(call.counts)} counts of {sum(call.counts)} "
            f"elements in all; it needs {needed} of at most {MAX_NUMEL}"
        )
    if operation in _REDUCING:
        if call.op is None:
            raise InvalidRequest(f"{operation.value} came with reduce operation number {message.op}, which is unknown")
        ops.check(call.op, call.dtype)
    if operation in _ROOTED and not 0 <= call.root < world_size:
        raise InvalidRequest(f"{operation.value} has root {call.root}; the group has {world_size} ranks")
    return call
