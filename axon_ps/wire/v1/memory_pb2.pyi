from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Memory(_message.Message):
    __slots__ = ("available_bytes", "resident_bytes", "pool")
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    available_bytes: int
    resident_bytes: int
    pool: str
    def __init__(self, available_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class NoRoom(_message.Message):
    __slots__ = ("model", "placement", "error")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    model: int
    placement: int
    error: _common_pb2.ErrorDetail
    def __init__(self, model: _Optional[int] = ..., placement: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
