from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Handshake(_message.Message):
    __slots__ = ("pid", "address", "secret")
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    pid: int
    address: int
    secret: bytes
    def __init__(self, pid: _Optional[int] = ..., address: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class ReadLease(_message.Message):
    __slots__ = ("address", "size_bytes", "number_address", "number", "mapping", "offset")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    address: int
    size_bytes: int
    number_address: int
    number: int
    mapping: Mapping
    offset: int
    def __init__(self, address: _Optional[int] = ..., size_bytes: _Optional[int] = ..., number_address: _Optional[int] = ..., number: _Optional[int] = ..., mapping: _Optional[_Union[Mapping, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class Mapping(_message.Message):
    __slots__ = ("boot", "pid", "fd", "inode", "size_bytes")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot: str
    pid: int
    fd: int
    inode: int
    size_bytes: int
    def __init__(self, boot: _Optional[str] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., inode: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
