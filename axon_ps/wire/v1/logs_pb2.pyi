from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogsRequest(_message.Message):
    __slots__ = ("context", "history", "after", "wait_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    history: str
    after: float
    wait_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., history: _Optional[str] = ..., after: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class LogsReply(_message.Message):
    __slots__ = ("history", "records", "more", "dropped", "finished")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    history: str
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    more: bool
    dropped: float
    finished: bool
    def __init__(self, history: _Optional[str] = ..., records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ..., more: bool = ..., dropped: _Optional[float] = ..., finished: bool = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("at_s", "level", "logger", "text", "number", "role", "rank", "node")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    level: int
    logger: str
    text: str
    number: float
    role: _common_pb2.Role
    rank: int
    node: str
    def __init__(self, at_s: _Optional[float] = ..., level: _Optional[int] = ..., logger: _Optional[str] = ..., text: _Optional[str] = ..., number: _Optional[float] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., rank: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...
