from axon_ps.wire.v1 import checkpoint_pb2 as _checkpoint_pb2
from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import layout_pb2 as _layout_pb2
from axon_ps.wire.v1 import membership_pb2 as _membership_pb2
from axon_ps.wire.v1 import memory_pb2 as _memory_pb2
from axon_ps.wire.v1 import placement_pb2 as _placement_pb2
from axon_ps.wire.v1 import policy_pb2 as _policy_pb2
from axon_ps.wire.v1 import revocation_pb2 as _revocation_pb2
from axon_ps.wire.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("join", "heartbeat", "vote", "ready", "initialized", "snapshot", "restore", "leave", "arrived", "copied", "spans", "no_room", "corrupted", "knowledge")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    CORRUPTED_FIELD_NUMBER: _ClassVar[int]
    KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: _membership_pb2.Heartbeat
    vote: Vote
    ready: Ready
    initialized: Initialized
    snapshot: _checkpoint_pb2.SnapshotReport
    restore: _checkpoint_pb2.RestoreReport
    leave: _membership_pb2.Leave
    arrived: _policy_pb2.Arrived
    copied: _placement_pb2.Copied
    spans: _trace_pb2.SpanReport
    no_room: _memory_pb2.NoRoom
    corrupted: _placement_pb2.Corrupted
    knowledge: Knowledge
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[_membership_pb2.Heartbeat, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., initialized: _Optional[_Union[Initialized, _Mapping]] = ..., snapshot: _Optional[_Union[_checkpoint_pb2.SnapshotReport, _Mapping]] = ..., restore: _Optional[_Union[_checkpoint_pb2.RestoreReport, _Mapping]] = ..., leave: _Optional[_Union[_membership_pb2.Leave, _Mapping]] = ..., arrived: _Optional[_Union[_policy_pb2.Arrived, _Mapping]] = ..., copied: _Optional[_Union[_placement_pb2.Copied, _Mapping]] = ..., spans: _Optional[_Union[_trace_pb2.SpanReport, _Mapping]] = ..., no_room: _Optional[_Union[_memory_pb2.NoRoom, _Mapping]] = ..., corrupted: _Optional[_Union[_placement_pb2.Corrupted, _Mapping]] = ..., knowledge: _Optional[_Union[Knowledge, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("job", "role", "incarnation", "node", "address", "requested_rank", "world_size", "standby", "optimizers", "compressors", "memory", "state_id", "differences", "position", "build", "connectivity")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSORS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CONNECTIVITY_FIELD_NUMBER: _ClassVar[int]
    job: str
    role: _common_pb2.Role
    incarnation: str
    node: str
    address: str
    requested_rank: int
    world_size: int
    standby: bool
    optimizers: _containers.RepeatedScalarFieldContainer[str]
    compressors: _containers.RepeatedScalarFieldContainer[str]
    memory: _memory_pb2.Memory
    state_id: str
    differences: bool
    position: _membership_pb2.Position
    build: _membership_pb2.Build
    connectivity: _membership_pb2.Connectivity
    def __init__(self, job: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., incarnation: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., requested_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., standby: bool = ..., optimizers: _Optional[_Iterable[str]] = ..., compressors: _Optional[_Iterable[str]] = ..., memory: _Optional[_Union[_memory_pb2.Memory, _Mapping]] = ..., state_id: _Optional[str] = ..., differences: bool = ..., position: _Optional[_Union[_membership_pb2.Position, _Mapping]] = ..., build: _Optional[_Union[_membership_pb2.Build, _Mapping]] = ..., connectivity: _Optional[_Union[_membership_pb2.Connectivity, _Mapping]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("generation", "step", "max_norm", "hyper", "version", "model", "copy", "blocked", "commit", "traceparent", "weight", "untouched", "withdrawn", "optimizer", "last_addend")
    class CommitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_NORM_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UNTOUCHED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LAST_ADDEND_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    max_norm: float
    hyper: _containers.RepeatedCompositeFieldContainer[_common_pb2.Hyper]
    version: int
    model: int
    copy: _membership_pb2.CopyFrom
    blocked: bool
    commit: _containers.ScalarMap[str, str]
    traceparent: str
    weight: float
    untouched: _containers.RepeatedScalarFieldContainer[int]
    withdrawn: bool
    optimizer: _common_pb2.OptimizerChange
    last_addend: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., max_norm: _Optional[float] = ..., hyper: _Optional[_Iterable[_Union[_common_pb2.Hyper, _Mapping]]] = ..., version: _Optional[int] = ..., model: _Optional[int] = ..., copy: _Optional[_Union[_membership_pb2.CopyFrom, _Mapping]] = ..., blocked: bool = ..., commit: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., weight: _Optional[float] = ..., untouched: _Optional[_Iterable[int]] = ..., withdrawn: bool = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerChange, _Mapping]] = ..., last_addend: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("generation", "step", "sums_of_squares", "replica", "model", "placement", "digests", "last_addend")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SUMS_OF_SQUARES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ADDEND_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    sums_of_squares: _containers.RepeatedScalarFieldContainer[float]
    replica: int
    model: int
    placement: int
    digests: _containers.RepeatedCompositeFieldContainer[_placement_pb2.Digest]
    last_addend: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., sums_of_squares: _Optional[_Iterable[float]] = ..., replica: _Optional[int] = ..., model: _Optional[int] = ..., placement: _Optional[int] = ..., digests: _Optional[_Iterable[_Union[_placement_pb2.Digest, _Mapping]]] = ..., last_addend: _Optional[int] = ...) -> None: ...

class Initialized(_message.Message):
    __slots__ = ("version", "epoch", "model")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    model: int
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., model: _Optional[int] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("welcome", "membership", "job", "decision", "snapshot", "restore", "trace", "revocations", "difference", "due", "request_knowledge")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    welcome: _membership_pb2.Welcome
    membership: _membership_pb2.MembershipEvent
    job: JobEvent
    decision: DecisionEvent
    snapshot: _checkpoint_pb2.SnapshotOrder
    restore: _checkpoint_pb2.RestoreOrder
    trace: _trace_pb2.TraceOrder
    revocations: _revocation_pb2.RevocationsEvent
    difference: _membership_pb2.MembershipDifference
    due: _policy_pb2.StepDue
    request_knowledge: bool
    def __init__(self, welcome: _Optional[_Union[_membership_pb2.Welcome, _Mapping]] = ..., membership: _Optional[_Union[_membership_pb2.MembershipEvent, _Mapping]] = ..., job: _Optional[_Union[JobEvent, _Mapping]] = ..., decision: _Optional[_Union[DecisionEvent, _Mapping]] = ..., snapshot: _Optional[_Union[_checkpoint_pb2.SnapshotOrder, _Mapping]] = ..., restore: _Optional[_Union[_checkpoint_pb2.RestoreOrder, _Mapping]] = ..., trace: _Optional[_Union[_trace_pb2.TraceOrder, _Mapping]] = ..., revocations: _Optional[_Union[_revocation_pb2.RevocationsEvent, _Mapping]] = ..., difference: _Optional[_Union[_membership_pb2.MembershipDifference, _Mapping]] = ..., due: _Optional[_Union[_policy_pb2.StepDue, _Mapping]] = ..., request_knowledge: bool = ...) -> None: ...

class Knowledge(_message.Message):
    __slots__ = ("events", "progress")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SessionEvent]
    progress: _containers.RepeatedCompositeFieldContainer[_membership_pb2.ModelProgress]
    def __init__(self, events: _Optional[_Iterable[_Union[SessionEvent, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[_membership_pb2.ModelProgress, _Mapping]]] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("spec", "optimizer", "initialized", "version", "epoch", "model", "name", "copied", "released", "placement", "committed", "no_room")
    class CommittedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    spec: _layout_pb2.JobSpec
    optimizer: _common_pb2.OptimizerSpec
    initialized: bool
    version: int
    epoch: int
    model: int
    name: str
    copied: int
    released: bool
    placement: _placement_pb2.Placement
    committed: _containers.ScalarMap[str, str]
    no_room: str
    def __init__(self, spec: _Optional[_Union[_layout_pb2.JobSpec, _Mapping]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSpec, _Mapping]] = ..., initialized: bool = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., model: _Optional[int] = ..., name: _Optional[str] = ..., copied: _Optional[int] = ..., released: bool = ..., placement: _Optional[_Union[_placement_pb2.Placement, _Mapping]] = ..., committed: _Optional[_Mapping[str, str]] = ..., no_room: _Optional[str] = ...) -> None: ...

class DecisionEvent(_message.Message):
    __slots__ = ("step", "generation", "outcome", "version", "grad_norm", "clip_factor", "hyper", "reason", "next_generation", "turn", "model", "copy", "commit", "traceparent", "weight", "untouched", "optimizer", "refused")
    class CommitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UNTOUCHED_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    step: int
    generation: int
    outcome: _common_pb2.Outcome
    version: int
    grad_norm: float
    clip_factor: float
    hyper: _containers.RepeatedCompositeFieldContainer[_common_pb2.Hyper]
    reason: str
    next_generation: int
    turn: _common_pb2.Turn
    model: int
    copy: _membership_pb2.CopyFrom
    commit: _containers.ScalarMap[str, str]
    traceparent: str
    weight: float
    untouched: _containers.RepeatedScalarFieldContainer[int]
    optimizer: _common_pb2.OptimizerChange
    refused: int
    def __init__(self, step: _Optional[int] = ..., generation: _Optional[int] = ..., outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., version: _Optional[int] = ..., grad_norm: _Optional[float] = ..., clip_factor: _Optional[float] = ..., hyper: _Optional[_Iterable[_Union[_common_pb2.Hyper, _Mapping]]] = ..., reason: _Optional[str] = ..., next_generation: _Optional[int] = ..., turn: _Optional[_Union[_common_pb2.Turn, _Mapping]] = ..., model: _Optional[int] = ..., copy: _Optional[_Union[_membership_pb2.CopyFrom, _Mapping]] = ..., commit: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., weight: _Optional[float] = ..., untouched: _Optional[_Iterable[int]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerChange, _Mapping]] = ..., refused: _Optional[int] = ...) -> None: ...
