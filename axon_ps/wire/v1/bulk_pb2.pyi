from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("port", "capability")
    PORT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    port: int
    capability: bytes
    def __init__(self, port: _Optional[int] = ..., capability: _Optional[bytes] = ...) -> None: ...

class BulkHello(_message.Message):
    __slots__ = ("capability", "method")
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    capability: bytes
    method: str
    def __init__(self, capability: _Optional[bytes] = ..., method: _Optional[str] = ...) -> None: ...

class BulkStatus(_message.Message):
    __slots__ = ("code", "details", "error")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    error: bytes
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...
