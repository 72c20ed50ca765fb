from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("begins", "history", "began_s", "at_s", "status", "steps", "events", "curves", "members")
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    begins: bool
    history: str
    began_s: float
    at_s: float
    status: _status_pb2.StatusReply
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    events: _containers.RepeatedCompositeFieldContainer[EventRecord]
    curves: _containers.RepeatedCompositeFieldContainer[Curve]
    members: _containers.RepeatedCompositeFieldContainer[MemberLoad]
    def __init__(self, begins: bool = ..., history: _Optional[str] = ..., began_s: _Optional[float] = ..., at_s: _Optional[float] = ..., status: _Optional[_Union[_status_pb2.StatusReply, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[EventRecord, _Mapping]]] = ..., curves: _Optional[_Iterable[_Union[Curve, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[MemberLoad, _Mapping]]] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("model", "step", "version", "outcome", "reason", "at_s", "duration_s", "computing_s", "waiting_s", "summing_s", "waited_for", "marginal_s", "grad_norm")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    SUMMING_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    MARGINAL_S_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    model: int
    step: float
    version: float
    outcome: str
    reason: str
    at_s: float
    duration_s: float
    computing_s: float
    waiting_s: float
    summing_s: float
    waited_for: int
    marginal_s: float
    grad_norm: float
    def __init__(self, model: _Optional[int] = ..., step: _Optional[float] = ..., version: _Optional[float] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., at_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., computing_s: _Optional[float] = ..., waiting_s: _Optional[float] = ..., summing_s: _Optional[float] = ..., waited_for: _Optional[int] = ..., marginal_s: _Optional[float] = ..., grad_norm: _Optional[float] = ...) -> None: ...

class EventRecord(_message.Message):
    __slots__ = ("number", "at_s", "kind", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    at_s: float
    kind: str
    text: str
    def __init__(self, number: _Optional[float] = ..., at_s: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Curve(_message.Message):
    __slots__ = ("name", "at_s", "step", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    at_s: _containers.RepeatedScalarFieldContainer[float]
    step: _containers.RepeatedScalarFieldContainer[float]
    value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., at_s: _Optional[_Iterable[float]] = ..., step: _Optional[_Iterable[float]] = ..., value: _Optional[_Iterable[float]] = ...) -> None: ...

class MemberLoad(_message.Message):
    __slots__ = ("role", "rank", "sent_bytes_per_s", "received_bytes_per_s", "memory_bytes", "cpu", "lag_s", "last_in", "cost_s", "primary_slices", "backup_slices", "copying_slices", "reported_s", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    LAST_IN_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_SLICES_FIELD_NUMBER: _ClassVar[int]
    BACKUP_SLICES_FIELD_NUMBER: _ClassVar[int]
    COPYING_SLICES_FIELD_NUMBER: _ClassVar[int]
    REPORTED_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    rank: int
    sent_bytes_per_s: float
    received_bytes_per_s: float
    memory_bytes: float
    cpu: float
    lag_s: float
    last_in: int
    cost_s: float
    primary_slices: int
    backup_slices: int
    copying_slices: int
    reported_s: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., rank: _Optional[int] = ..., sent_bytes_per_s: _Optional[float] = ..., received_bytes_per_s: _Optional[float] = ..., memory_bytes: _Optional[float] = ..., cpu: _Optional[float] = ..., lag_s: _Optional[float] = ..., last_in: _Optional[int] = ..., cost_s: _Optional[float] = ..., primary_slices: _Optional[int] = ..., backup_slices: _Optional[int] = ..., copying_slices: _Optional[int] = ..., reported_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...
