from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RevokeRequest(_message.Message):
    __slots__ = ("context", "target", "reason")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    target: str
    reason: str
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., target: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ("names", "members", "has_secret")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HAS_SECRET_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedScalarFieldContainer[str]
    has_secret: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[str]] = ..., has_secret: bool = ...) -> None: ...

class RevocationsEvent(_message.Message):
    __slots__ = ("reasons",)
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.ScalarMap[str, str]
    def __init__(self, reasons: _Optional[_Mapping[str, str]] = ...) -> None: ...
