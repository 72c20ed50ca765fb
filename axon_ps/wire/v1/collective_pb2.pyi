from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    OPERATION_ALL_REDUCE: _ClassVar[Operation]
    OPERATION_REDUCE: _ClassVar[Operation]
    OPERATION_BROADCAST: _ClassVar[Operation]
    OPERATION_ALL_GATHER: _ClassVar[Operation]
    OPERATION_REDUCE_SCATTER: _ClassVar[Operation]
    OPERATION_GATHER: _ClassVar[Operation]
    OPERATION_SCATTER: _ClassVar[Operation]
    OPERATION_ALL_TO_ALL: _ClassVar[Operation]
    OPERATION_BARRIER: _ClassVar[Operation]
    OPERATION_REFUSAL: _ClassVar[Operation]

class ReduceOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCE_OP_UNSPECIFIED: _ClassVar[ReduceOp]
    REDUCE_OP_SUM: _ClassVar[ReduceOp]
    REDUCE_OP_PRODUCT: _ClassVar[ReduceOp]
    REDUCE_OP_MIN: _ClassVar[ReduceOp]
    REDUCE_OP_MAX: _ClassVar[ReduceOp]
    REDUCE_OP_AVERAGE: _ClassVar[ReduceOp]
    REDUCE_OP_BAND: _ClassVar[ReduceOp]
    REDUCE_OP_BOR: _ClassVar[ReduceOp]
    REDUCE_OP_BXOR: _ClassVar[ReduceOp]
OPERATION_UNSPECIFIED: Operation
OPERATION_ALL_REDUCE: Operation
OPERATION_REDUCE: Operation
OPERATION_BROADCAST: Operation
OPERATION_ALL_GATHER: Operation
OPERATION_REDUCE_SCATTER: Operation
OPERATION_GATHER: Operation
OPERATION_SCATTER: Operation
OPERATION_ALL_TO_ALL: Operation
OPERATION_BARRIER: Operation
OPERATION_REFUSAL: Operation
REDUCE_OP_UNSPECIFIED: ReduceOp
REDUCE_OP_SUM: ReduceOp
REDUCE_OP_PRODUCT: ReduceOp
REDUCE_OP_MIN: ReduceOp
REDUCE_OP_MAX: ReduceOp
REDUCE_OP_AVERAGE: ReduceOp
REDUCE_OP_BAND: ReduceOp
REDUCE_OP_BOR: ReduceOp
REDUCE_OP_BXOR: ReduceOp

class Call(_message.Message):
    __slots__ = ("sequence", "operation", "dtype", "counts", "op", "root", "reason")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    operation: Operation
    dtype: _common_pb2.DType
    counts: _containers.RepeatedScalarFieldContainer[int]
    op: ReduceOp
    root: int
    reason: str
    def __init__(self, sequence: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., counts: _Optional[_Iterable[int]] = ..., op: _Optional[_Union[ReduceOp, str]] = ..., root: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("receive", "peer", "tag", "dtype", "numel", "closes")
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    receive: bool
    peer: int
    tag: int
    dtype: _common_pb2.DType
    numel: int
    closes: bool
    def __init__(self, receive: bool = ..., peer: _Optional[int] = ..., tag: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., numel: _Optional[int] = ..., closes: bool = ...) -> None: ...

class CollectiveBegin(_message.Message):
    __slots__ = ("context", "group", "position", "ranks", "members", "timeout_s", "stripe", "stripes", "call", "envelope", "input_counts", "output_counts", "owners", "gives_up")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    STRIPE_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    group: str
    position: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    stripe: int
    stripes: int
    call: Call
    envelope: Envelope
    input_counts: _containers.RepeatedScalarFieldContainer[int]
    output_counts: _containers.RepeatedScalarFieldContainer[int]
    owners: _containers.RepeatedScalarFieldContainer[int]
    gives_up: bool
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., group: _Optional[str] = ..., position: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., members: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ..., stripe: _Optional[int] = ..., stripes: _Optional[int] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., envelope: _Optional[_Union[Envelope, _Mapping]] = ..., input_counts: _Optional[_Iterable[int]] = ..., output_counts: _Optional[_Iterable[int]] = ..., owners: _Optional[_Iterable[int]] = ..., gives_up: bool = ...) -> None: ...

class CollectiveChunk(_message.Message):
    __slots__ = ("begin", "matched", "source", "partition", "offset", "ended", "payload")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    begin: CollectiveBegin
    matched: bool
    source: int
    partition: int
    offset: int
    ended: bool
    payload: bytes
    def __init__(self, begin: _Optional[_Union[CollectiveBegin, _Mapping]] = ..., matched: bool = ..., source: _Optional[int] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., ended: bool = ..., payload: _Optional[bytes] = ...) -> None: ...
