from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SliceHolders(_message.Message):
    __slots__ = ("complete", "copying")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    complete: _containers.RepeatedScalarFieldContainer[int]
    copying: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, complete: _Optional[_Iterable[int]] = ..., copying: _Optional[_Iterable[int]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("number", "slices", "num_cuts", "replication")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    NUM_CUTS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    number: int
    slices: _containers.RepeatedCompositeFieldContainer[SliceHolders]
    num_cuts: int
    replication: int
    def __init__(self, number: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[SliceHolders, _Mapping]]] = ..., num_cuts: _Optional[int] = ..., replication: _Optional[int] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("slice", "value")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    value: int
    def __init__(self, slice: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class Copied(_message.Message):
    __slots__ = ("model", "epoch", "slices", "placement")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    model: int
    epoch: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    placement: int
    def __init__(self, model: _Optional[int] = ..., epoch: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., placement: _Optional[int] = ...) -> None: ...

class Corrupted(_message.Message):
    __slots__ = ("model", "epoch", "slice", "placement", "generation", "lost", "blocks", "version")
    class Block(_message.Message):
        __slots__ = ("array", "begin", "end")
        ARRAY_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        array: str
        begin: int
        end: int
        def __init__(self, array: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: int
    epoch: int
    slice: int
    placement: int
    generation: int
    lost: bool
    blocks: _containers.RepeatedCompositeFieldContainer[Corrupted.Block]
    version: int
    def __init__(self, model: _Optional[int] = ..., epoch: _Optional[int] = ..., slice: _Optional[int] = ..., placement: _Optional[int] = ..., generation: _Optional[int] = ..., lost: bool = ..., blocks: _Optional[_Iterable[_Union[Corrupted.Block, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("context", "rank")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    rank: int
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: int
    def __init__(self, slices: _Optional[int] = ...) -> None: ...
