from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("calls", "method", "message", "end", "status", "cancel")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    method: str
    message: bytes
    end: bool
    status: CallStatus
    cancel: bool
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., method: _Optional[str] = ..., message: _Optional[bytes] = ..., end: bool = ..., status: _Optional[_Union[CallStatus, _Mapping]] = ..., cancel: bool = ...) -> None: ...

class CallStatus(_message.Message):
    __slots__ = ("code", "details", "error")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    error: bytes
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...
