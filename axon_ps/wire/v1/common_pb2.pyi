from axon_ps.wire.v1 import lease_pb2 as _lease_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_F32: _ClassVar[DType]
    D_TYPE_BF16: _ClassVar[DType]
    D_TYPE_F16: _ClassVar[DType]
    D_TYPE_F64: _ClassVar[DType]
    D_TYPE_I64: _ClassVar[DType]
    D_TYPE_I32: _ClassVar[DType]
    D_TYPE_U8: _ClassVar[DType]
    D_TYPE_BOOL: _ClassVar[DType]
    D_TYPE_INT8_BLOCK: _ClassVar[DType]
    D_TYPE_F8_E4M3: _ClassVar[DType]
    D_TYPE_F8_E5M2: _ClassVar[DType]
    D_TYPE_F8_E4M3FNUZ: _ClassVar[DType]
    D_TYPE_F8_E5M2FNUZ: _ClassVar[DType]
    D_TYPE_F8_E8M0: _ClassVar[DType]
    D_TYPE_F4_X2: _ClassVar[DType]
    D_TYPE_I8: _ClassVar[DType]
    D_TYPE_I16: _ClassVar[DType]
    D_TYPE_U16: _ClassVar[DType]
    D_TYPE_U32: _ClassVar[DType]
    D_TYPE_U64: _ClassVar[DType]
    D_TYPE_C32: _ClassVar[DType]
    D_TYPE_C64: _ClassVar[DType]
    D_TYPE_C128: _ClassVar[DType]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SHARD: _ClassVar[Role]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMIT: _ClassVar[Outcome]
    OUTCOME_SKIP: _ClassVar[Outcome]
    OUTCOME_ABORT: _ClassVar[Outcome]
D_TYPE_UNSPECIFIED: DType
D_TYPE_F32: DType
D_TYPE_BF16: DType
D_TYPE_F16: DType
D_TYPE_F64: DType
D_TYPE_I64: DType
D_TYPE_I32: DType
D_TYPE_U8: DType
D_TYPE_BOOL: DType
D_TYPE_INT8_BLOCK: DType
D_TYPE_F8_E4M3: DType
D_TYPE_F8_E5M2: DType
D_TYPE_F8_E4M3FNUZ: DType
D_TYPE_F8_E5M2FNUZ: DType
D_TYPE_F8_E8M0: DType
D_TYPE_F4_X2: DType
D_TYPE_I8: DType
D_TYPE_I16: DType
D_TYPE_U16: DType
D_TYPE_U32: DType
D_TYPE_U64: DType
D_TYPE_C32: DType
D_TYPE_C64: DType
D_TYPE_C128: DType
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SHARD: Role
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMIT: Outcome
OUTCOME_SKIP: Outcome
OUTCOME_ABORT: Outcome

class CallContext(_message.Message):
    __slots__ = ("job", "generation", "incarnation", "model", "placement", "traceparent", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    incarnation: str
    model: int
    placement: int
    traceparent: str
    state_id: str
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., model: _Optional[int] = ..., placement: _Optional[int] = ..., traceparent: _Optional[str] = ..., state_id: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("replica", "clock", "slowest_clock")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_CLOCK_FIELD_NUMBER: _ClassVar[int]
    replica: int
    clock: int
    slowest_clock: int
    def __init__(self, replica: _Optional[int] = ..., clock: _Optional[int] = ..., slowest_clock: _Optional[int] = ...) -> None: ...

class Hyper(_message.Message):
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

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "groups", "group_of", "moments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_OF_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    groups: _containers.RepeatedCompositeFieldContainer[Hyper]
    group_of: _containers.RepeatedScalarFieldContainer[int]
    moments: _containers.RepeatedCompositeFieldContainer[Hyper]
    def __init__(self, name: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Hyper, _Mapping]]] = ..., group_of: _Optional[_Iterable[int]] = ..., moments: _Optional[_Iterable[_Union[Hyper, _Mapping]]] = ...) -> None: ...

class OptimizerChange(_message.Message):
    __slots__ = ("optimizer", "retains_moments")
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    RETAINS_MOMENTS_FIELD_NUMBER: _ClassVar[int]
    optimizer: OptimizerSpec
    retains_moments: bool
    def __init__(self, optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., retains_moments: bool = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("context", "step", "version", "unit", "offset", "numel", "dtype", "replica", "absent", "compressed", "epoch", "end", "payload", "lease", "digest", "base", "addend", "updates")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    context: CallContext
    step: int
    version: int
    unit: int
    offset: int
    numel: int
    dtype: DType
    replica: int
    absent: bool
    compressed: bool
    epoch: int
    end: int
    payload: bytes
    lease: _lease_pb2.Lease
    digest: int
    base: int
    addend: int
    updates: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context: _Optional[_Union[CallContext, _Mapping]] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., unit: _Optional[int] = ..., offset: _Optional[int] = ..., numel: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., replica: _Optional[int] = ..., absent: bool = ..., compressed: bool = ..., epoch: _Optional[int] = ..., end: _Optional[int] = ..., payload: _Optional[bytes] = ..., lease: _Optional[_Union[_lease_pb2.Lease, _Mapping]] = ..., digest: _Optional[int] = ..., base: _Optional[int] = ..., addend: _Optional[int] = ..., updates: _Optional[_Iterable[int]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "generation")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    generation: int
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
