from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.CallContext
    def __init__(self, context: _Optional[_Union[_common_pb2.CallContext, _Mapping]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("job", "membership", "version", "step", "registered", "initialized", "parameters", "uptime_s", "counters", "pending", "lease_s", "models", "replication", "draining", "awaited", "checkpoints", "progress", "phase", "headline", "steps_per_s")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HEADLINE_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    membership: _membership_pb2.MembershipEvent
    version: int
    step: int
    registered: bool
    initialized: bool
    parameters: int
    uptime_s: float
    counters: _containers.ScalarMap[str, float]
    pending: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    replication: int
    draining: _containers.RepeatedScalarFieldContainer[int]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    checkpoints: CheckpointStatus
    progress: ProgressReport
    phase: str
    headline: str
    steps_per_s: float
    def __init__(self, job: _Optional[str] = ..., membership: _Optional[_Union[_membership_pb2.MembershipEvent, _Mapping]] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., registered: bool = ..., initialized: bool = ..., parameters: _Optional[int] = ..., uptime_s: _Optional[float] = ..., counters: _Optional[_Mapping[str, float]] = ..., pending: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., replication: _Optional[int] = ..., draining: _Optional[_Iterable[int]] = ..., awaited: _Optional[_Iterable[str]] = ..., checkpoints: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., progress: _Optional[_Union[ProgressReport, _Mapping]] = ..., phase: _Optional[str] = ..., headline: _Optional[str] = ..., steps_per_s: _Optional[float] = ...) -> None: ...

class ProgressReport(_message.Message):
    __slots__ = ("step", "steps", "loss", "steps_per_s", "values", "at", "by_version")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    BY_VERSION_FIELD_NUMBER: _ClassVar[int]
    step: float
    steps: float
    loss: float
    steps_per_s: float
    values: _containers.ScalarMap[str, float]
    at: float
    by_version: bool
    def __init__(self, step: _Optional[float] = ..., steps: _Optional[float] = ..., loss: _Optional[float] = ..., steps_per_s: _Optional[float] = ..., values: _Optional[_Mapping[str, float]] = ..., at: _Optional[float] = ..., by_version: bool = ...) -> None: ...

class CheckpointStatus(_message.Message):
    __slots__ = ("uri", "version", "age_s", "took_s", "bytes", "failure", "failure_age_s", "activity")
    URI_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    uri: str
    version: int
    age_s: float
    took_s: float
    bytes: int
    failure: str
    failure_age_s: float
    activity: str
    def __init__(self, uri: _Optional[str] = ..., version: _Optional[int] = ..., age_s: _Optional[float] = ..., took_s: _Optional[float] = ..., bytes: _Optional[int] = ..., failure: _Optional[str] = ..., failure_age_s: _Optional[float] = ..., activity: _Optional[str] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model", "name", "version", "step", "epoch", "initialized", "parameters", "slices", "lacking", "steps_per_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    model: int
    name: str
    version: int
    step: int
    epoch: int
    initialized: bool
    parameters: int
    slices: int
    lacking: int
    steps_per_s: float
    def __init__(self, model: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., initialized: bool = ..., parameters: _Optional[int] = ..., slices: _Optional[int] = ..., lacking: _Optional[int] = ..., steps_per_s: _Optional[float] = ...) -> None: ...
