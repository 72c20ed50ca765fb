from axon_ps.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceRequest(_message.Message):
    __slots__ = ("context", "model", "first", "steps", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    model: str
    first: int
    steps: int
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ..., model: _Optional[str] = ..., first: _Optional[int] = ..., steps: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("first", "last", "reports", "missing")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    reports: _containers.RepeatedCompositeFieldContainer[SpanReport]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[SpanReport, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class TraceOrder(_message.Message):
    __slots__ = ("id", "model", "first", "last", "timeout_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    model: int
    first: int
    last: int
    timeout_s: float
    def __init__(self, id: _Optional[int] = ..., model: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SpanReport(_message.Message):
    __slots__ = ("order", "spans", "dropped", "sent_ns", "member", "node", "offset_s")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    order: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    dropped: int
    sent_ns: int
    member: str
    node: str
    offset_s: float
    def __init__(self, order: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., dropped: _Optional[int] = ..., sent_ns: _Optional[int] = ..., member: _Optional[str] = ..., node: _Optional[str] = ..., offset_s: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("trace_id", "span_id", "parent_id", "name", "start_ns", "duration_ns", "numbers", "texts", "error", "events")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    span_id: int
    parent_id: int
    name: str
    start_ns: int
    duration_ns: int
    numbers: _containers.ScalarMap[str, float]
    texts: _containers.ScalarMap[str, str]
    error: str
    events: _containers.RepeatedCompositeFieldContainer[SpanEvent]
    def __init__(self, trace_id: _Optional[bytes] = ..., span_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., name: _Optional[str] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., numbers: _Optional[_Mapping[str, float]] = ..., texts: _Optional[_Mapping[str, str]] = ..., error: _Optional[str] = ..., events: _Optional[_Iterable[_Union[SpanEvent, _Mapping]]] = ...) -> None: ...

class SpanEvent(_message.Message):
    __slots__ = ("at_ns", "name")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    name: str
    def __init__(self, at_ns: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...
