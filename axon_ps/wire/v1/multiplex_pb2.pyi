from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frames(_message.Message):
    __slots__ = ("frames", "id")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    id: str
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., id: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("calls", "method", "message", "end", "status", "cancel", "caller")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    method: str
    message: bytes
    end: bool
    status: CallStatus
    cancel: bool
    caller: FrameCaller
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., method: _Optional[str] = ..., message: _Optional[bytes] = ..., end: bool = ..., status: _Optional[_Union[CallStatus, _Mapping]] = ..., cancel: bool = ..., caller: _Optional[_Union[FrameCaller, _Mapping]] = ...) -> None: ...

class FrameCaller(_message.Message):
    __slots__ = ("roles", "rank", "names", "has_secret", "expires_s", "text")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    HAS_SECRET_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    names: _containers.RepeatedScalarFieldContainer[str]
    has_secret: bool
    expires_s: float
    text: str
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., has_secret: bool = ..., expires_s: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class CallStatus(_message.Message):
    __slots__ = ("code", "details", "error")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    error: bytes
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...
