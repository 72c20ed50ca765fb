from axon_ps.wire.v1 import checkpoint_pb2 as _checkpoint_pb2
from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import layout_pb2 as _layout_pb2
from axon_ps.wire.v1 import logs_pb2 as _logs_pb2
from axon_ps.wire.v1 import membership_pb2 as _membership_pb2
from axon_ps.wire.v1 import multiplex_pb2 as _multiplex_pb2
from axon_ps.wire.v1 import placement_pb2 as _placement_pb2
from axon_ps.wire.v1 import revocation_pb2 as _revocation_pb2
from axon_ps.wire.v1 import session_pb2 as _session_pb2
from axon_ps.wire.v1 import status_pb2 as _status_pb2
from axon_ps.wire.v1 import trace_pb2 as _trace_pb2
from axon_ps.wire.v1 import watch_pb2 as _watch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_OP_UNSPECIFIED: _ClassVar[KVOp]
    KV_OP_PUT: _ClassVar[KVOp]
    KV_OP_GET: _ClassVar[KVOp]
    KV_OP_WAIT: _ClassVar[KVOp]
    KV_OP_ADD: _ClassVar[KVOp]
    KV_OP_COMPARE_AND_SET: _ClassVar[KVOp]
    KV_OP_DELETE: _ClassVar[KVOp]
KV_OP_UNSPECIFIED: KVOp
KV_OP_PUT: KVOp
KV_OP_GET: KVOp
KV_OP_WAIT: KVOp
KV_OP_ADD: KVOp
KV_OP_COMPARE_AND_SET: KVOp
KV_OP_DELETE: KVOp

class BarrierRequest(_message.Message):
    __slots__ = ("context", "name", "ranks", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    name: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., name: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class KVRequest(_message.Message):
    __slots__ = ("context", "op", "key", "value", "expected", "amount", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    op: KVOp
    key: str
    value: bytes
    expected: bytes
    amount: int
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., op: _Optional[_Union[KVOp, str]] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ..., expected: _Optional[bytes] = ..., amount: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class KVReply(_message.Message):
    __slots__ = ("found", "value", "sum")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    found: bool
    value: bytes
    sum: int
    def __init__(self, found: bool = ..., value: _Optional[bytes] = ..., sum: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("context", "spec", "optimizer", "name", "later", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    spec: _layout_pb2.JobSpec
    optimizer: _common_pb2.OptimizerSpec
    name: str
    later: bool
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., spec: _Optional[_Union[_layout_pb2.JobSpec, _Mapping]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSpec, _Mapping]] = ..., name: _Optional[str] = ..., later: bool = ..., timeout_s: _Optional[float] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("first", "initialized", "version", "upload", "generation", "model")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    first: bool
    initialized: bool
    version: int
    upload: bool
    generation: int
    model: int
    def __init__(self, first: bool = ..., initialized: bool = ..., version: _Optional[int] = ..., upload: bool = ..., generation: _Optional[int] = ..., model: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("context", "model", "name")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    model: int
    name: str
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., model: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("context", "name")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    name: str
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("job", "membership")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    job: _session_pb2.JobEvent
    membership: _membership_pb2.MembershipEvent
    def __init__(self, job: _Optional[_Union[_session_pb2.JobEvent, _Mapping]] = ..., membership: _Optional[_Union[_membership_pb2.MembershipEvent, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("context", "uri", "extra_json", "background", "states")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    uri: str
    extra_json: str
    background: bool
    states: _containers.RepeatedCompositeFieldContainer[_checkpoint_pb2.SnapshotFile]
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., uri: _Optional[str] = ..., extra_json: _Optional[str] = ..., background: bool = ..., states: _Optional[_Iterable[_Union[_checkpoint_pb2.SnapshotFile, _Mapping]]] = ...) -> None: ...

class RestoreCheckpointRequest(_message.Message):
    __slots__ = ("context", "uri", "models")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    uri: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., uri: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...
