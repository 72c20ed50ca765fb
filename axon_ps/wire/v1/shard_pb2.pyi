from axon_ps.wire.v1 import collective_pb2 as _collective_pb2
from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AllGatherRequest(_message.Message):
    __slots__ = ("context", "unit", "begin", "end", "min_version", "epoch", "dtype", "compressed", "since", "map", "accept_leases", "step", "expected", "addend", "moment")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LEASES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    unit: int
    begin: int
    end: int
    min_version: int
    epoch: int
    dtype: _common_pb2.DType
    compressed: bool
    since: int
    map: bool
    accept_leases: bool
    step: int
    expected: _containers.RepeatedCompositeFieldContainer[_common_pb2.Hyper]
    addend: int
    moment: str
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., unit: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., min_version: _Optional[int] = ..., epoch: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., compressed: bool = ..., since: _Optional[int] = ..., map: bool = ..., accept_leases: bool = ..., step: _Optional[int] = ..., expected: _Optional[_Iterable[_Union[_common_pb2.Hyper, _Mapping]]] = ..., addend: _Optional[int] = ..., moment: _Optional[str] = ...) -> None: ...

class ReduceScatterReply(_message.Message):
    __slots__ = ("step", "chunks", "missing", "addend")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    step: int
    chunks: int
    missing: int
    addend: int
    def __init__(self, step: _Optional[int] = ..., chunks: _Optional[int] = ..., missing: _Optional[int] = ..., addend: _Optional[int] = ...) -> None: ...

class ReplicateReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("context", "slice", "version", "epoch")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    slice: int
    version: int
    epoch: int
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., slice: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SliceChunk(_message.Message):
    __slots__ = ("tensor", "begin", "changed", "copied", "updates", "complete", "digest", "payload")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    begin: int
    changed: int
    copied: int
    updates: _containers.RepeatedScalarFieldContainer[int]
    complete: bool
    digest: int
    payload: bytes
    def __init__(self, tensor: _Optional[str] = ..., begin: _Optional[int] = ..., changed: _Optional[int] = ..., copied: _Optional[int] = ..., updates: _Optional[_Iterable[int]] = ..., complete: bool = ..., digest: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("context", "reserve", "pull")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    reserve: Reserve
    pull: Pull
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("dtype", "min_version", "epoch", "multiple_of")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MULTIPLE_OF_FIELD_NUMBER: _ClassVar[int]
    dtype: _common_pb2.DType
    min_version: int
    epoch: int
    multiple_of: int
    def __init__(self, dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., min_version: _Optional[int] = ..., epoch: _Optional[int] = ..., multiple_of: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("version", "epoch", "slices", "since", "changes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    since: int
    changes: bool
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., since: _Optional[int] = ..., changes: bool = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("complete",)
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    def __init__(self, complete: bool = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("socket", "nonce")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    socket: str
    nonce: bytes
    def __init__(self, socket: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class EchoMessage(_message.Message):
    __slots__ = ("context", "payload")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    payload: bytes
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...
