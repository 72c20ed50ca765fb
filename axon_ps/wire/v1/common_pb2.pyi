from axon_ps.wire.v1 import lease_pb2 as _lease_pb2
from axon_ps.wire.v1 import policy_pb2 as _policy_pb2
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

class Parameter(_message.Message):
    __slots__ = ("name", "shape", "offset", "dtype", "aliases", "full", "raw", "float8")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    FLOAT8_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    dtype: DType
    aliases: _containers.RepeatedScalarFieldContainer[str]
    full: FullTensor
    raw: bool
    float8: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., aliases: _Optional[_Iterable[str]] = ..., full: _Optional[_Union[FullTensor, _Mapping]] = ..., raw: bool = ..., float8: bool = ...) -> None: ...

class FullTensor(_message.Message):
    __slots__ = ("name", "shape", "begin", "aliases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    begin: _containers.RepeatedScalarFieldContainer[int]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., begin: _Optional[_Iterable[int]] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("name", "parameters", "trainable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    trainable: bool
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., trainable: bool = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[Unit]
    def __init__(self, units: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("replica", "clock", "slowest_clock")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_CLOCK_FIELD_NUMBER: _ClassVar[int]
    replica: int
    clock: int
    slowest_clock: int
    def __init__(self, replica: _Optional[int] = ..., clock: _Optional[int] = ..., slowest_clock: _Optional[int] = ...) -> None: ...

class Compression(_message.Message):
    __slots__ = ("name", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Grouping(_message.Message):
    __slots__ = ("by_node", "size", "rows")
    BY_NODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    by_node: bool
    size: int
    rows: _containers.RepeatedCompositeFieldContainer[RankRow]
    def __init__(self, by_node: bool = ..., size: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RankRow, _Mapping]]] = ...) -> None: ...

class RankRow(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("layout", "param_dtype", "grad_dtype", "chunk_numel", "min_slice_numel", "replica_is_node", "param_compression", "grad_compression", "policy", "model", "grouping")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PARAM_DTYPE_FIELD_NUMBER: _ClassVar[int]
    GRAD_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NUMEL_FIELD_NUMBER: _ClassVar[int]
    MIN_SLICE_NUMEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IS_NODE_FIELD_NUMBER: _ClassVar[int]
    PARAM_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    GRAD_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUPING_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    param_dtype: DType
    grad_dtype: DType
    chunk_numel: int
    min_slice_numel: int
    replica_is_node: bool
    param_compression: Compression
    grad_compression: Compression
    policy: _policy_pb2.Policy
    model: str
    grouping: Grouping
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., param_dtype: _Optional[_Union[DType, str]] = ..., grad_dtype: _Optional[_Union[DType, str]] = ..., chunk_numel: _Optional[int] = ..., min_slice_numel: _Optional[int] = ..., replica_is_node: bool = ..., param_compression: _Optional[_Union[Compression, _Mapping]] = ..., grad_compression: _Optional[_Union[Compression, _Mapping]] = ..., policy: _Optional[_Union[_policy_pb2.Policy, _Mapping]] = ..., model: _Optional[str] = ..., grouping: _Optional[_Union[Grouping, _Mapping]] = ...) -> None: ...

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
