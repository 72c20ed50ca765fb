from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import layout_pb2 as _layout_pb2
from axon_ps.wire.v1 import logs_pb2 as _logs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("role", "rank", "incarnation", "node", "address", "local_rank", "replica", "joined")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    rank: int
    incarnation: str
    node: str
    address: str
    local_rank: int
    replica: int
    joined: int
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., local_rank: _Optional[int] = ..., replica: _Optional[int] = ..., joined: _Optional[int] = ...) -> None: ...

class MembershipEvent(_message.Message):
    __slots__ = ("generation", "workers", "shards", "num_replicas", "step", "version", "complete", "waiting_for", "finished", "models", "by_node", "is_over", "state_id", "grouping")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BY_NODE_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPING_FIELD_NUMBER: _ClassVar[int]
    generation: int
    workers: _containers.RepeatedCompositeFieldContainer[Member]
    shards: _containers.RepeatedCompositeFieldContainer[Member]
    num_replicas: int
    step: int
    version: int
    complete: bool
    waiting_for: str
    finished: _containers.RepeatedCompositeFieldContainer[Member]
    models: _containers.RepeatedCompositeFieldContainer[ModelProgress]
    by_node: bool
    is_over: bool
    state_id: str
    grouping: _layout_pb2.Grouping
    def __init__(self, generation: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., num_replicas: _Optional[int] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., complete: bool = ..., waiting_for: _Optional[str] = ..., finished: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelProgress, _Mapping]]] = ..., by_node: bool = ..., is_over: bool = ..., state_id: _Optional[str] = ..., grouping: _Optional[_Union[_layout_pb2.Grouping, _Mapping]] = ...) -> None: ...

class MembershipDifference(_message.Message):
    __slots__ = ("since", "now", "workers_gone", "shards_gone", "finished_gone", "same_grouping")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    WORKERS_GONE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_GONE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_GONE_FIELD_NUMBER: _ClassVar[int]
    SAME_GROUPING_FIELD_NUMBER: _ClassVar[int]
    since: int
    now: MembershipEvent
    workers_gone: _containers.RepeatedScalarFieldContainer[int]
    shards_gone: _containers.RepeatedScalarFieldContainer[int]
    finished_gone: int
    same_grouping: bool
    def __init__(self, since: _Optional[int] = ..., now: _Optional[_Union[MembershipEvent, _Mapping]] = ..., workers_gone: _Optional[_Iterable[int]] = ..., shards_gone: _Optional[_Iterable[int]] = ..., finished_gone: _Optional[int] = ..., same_grouping: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("rank", "lease_s", "world_size", "num_shards", "state_id", "released", "build", "addends")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    ADDENDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    lease_s: float
    world_size: int
    num_shards: int
    state_id: str
    released: _containers.RepeatedScalarFieldContainer[int]
    build: Build
    addends: bool
    def __init__(self, rank: _Optional[int] = ..., lease_s: _Optional[float] = ..., world_size: _Optional[int] = ..., num_shards: _Optional[int] = ..., state_id: _Optional[str] = ..., released: _Optional[_Iterable[int]] = ..., build: _Optional[_Union[Build, _Mapping]] = ..., addends: bool = ...) -> None: ...

class Build(_message.Message):
    __slots__ = ("version", "protocol")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("generation", "models", "released", "snapshot_id")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    generation: int
    models: _containers.RepeatedCompositeFieldContainer[ModelPosition]
    released: _containers.RepeatedScalarFieldContainer[int]
    snapshot_id: int
    def __init__(self, generation: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelPosition, _Mapping]]] = ..., released: _Optional[_Iterable[int]] = ..., snapshot_id: _Optional[int] = ...) -> None: ...

class ModelPosition(_message.Message):
    __slots__ = ("model", "epoch", "step", "placement", "version", "initialized", "optimized")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZED_FIELD_NUMBER: _ClassVar[int]
    model: int
    epoch: int
    step: int
    placement: int
    version: int
    initialized: bool
    optimized: bool
    def __init__(self, model: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., placement: _Optional[int] = ..., version: _Optional[int] = ..., initialized: bool = ..., optimized: bool = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "finished")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    finished: bool
    def __init__(self, reason: _Optional[str] = ..., finished: bool = ...) -> None: ...

class ModelProgress(_message.Message):
    __slots__ = ("model", "step", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: int
    step: int
    version: int
    def __init__(self, model: _Optional[int] = ..., step: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class CopyFrom(_message.Message):
    __slots__ = ("source", "weight", "version")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    source: int
    weight: float
    version: int
    def __init__(self, source: _Optional[int] = ..., weight: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("metrics", "logs", "logs_dropped", "connectivity")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    LOGS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    CONNECTIVITY_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    logs: _containers.RepeatedCompositeFieldContainer[_logs_pb2.LogRecord]
    logs_dropped: int
    connectivity: Connectivity
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., logs: _Optional[_Iterable[_Union[_logs_pb2.LogRecord, _Mapping]]] = ..., logs_dropped: _Optional[int] = ..., connectivity: _Optional[_Union[Connectivity, _Mapping]] = ...) -> None: ...

class Connectivity(_message.Message):
    __slots__ = ("unreachable", "reached")
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    reached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unreachable: _Optional[_Iterable[str]] = ..., reached: _Optional[_Iterable[str]] = ...) -> None: ...
