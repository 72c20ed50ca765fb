from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Lease(_message.Message):
    __slots__ = ("segment", "offset", "size_bytes", "tag")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    size_bytes: int
    tag: int
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...
