from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    dtype: _common_pb2.DType
    aliases: _containers.RepeatedScalarFieldContainer[str]
    full: FullTensor
    raw: bool
    float8: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., aliases: _Optional[_Iterable[str]] = ..., full: _Optional[_Union[FullTensor, _Mapping]] = ..., raw: bool = ..., float8: bool = ...) -> None: ...

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
    param_dtype: _common_pb2.DType
    grad_dtype: _common_pb2.DType
    chunk_numel: int
    min_slice_numel: int
    replica_is_node: bool
    param_compression: Compression
    grad_compression: Compression
    policy: _policy_pb2.Policy
    model: str
    grouping: Grouping
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., param_dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., grad_dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., chunk_numel: _Optional[int] = ..., min_slice_numel: _Optional[int] = ..., replica_is_node: bool = ..., param_compression: _Optional[_Union[Compression, _Mapping]] = ..., grad_compression: _Optional[_Union[Compression, _Mapping]] = ..., policy: _Optional[_Union[_policy_pb2.Policy, _Mapping]] = ..., model: _Optional[str] = ..., grouping: _Optional[_Union[Grouping, _Mapping]] = ...) -> None: ...
