from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_KIND_UNSPECIFIED: _ClassVar[PolicyKind]
    POLICY_KIND_SYNCHRONOUS: _ClassVar[PolicyKind]
    POLICY_KIND_ASYNCHRONOUS: _ClassVar[PolicyKind]
    POLICY_KIND_BOUNDED_STALENESS: _ClassVar[PolicyKind]
    POLICY_KIND_LOCAL_STEPS: _ClassVar[PolicyKind]
POLICY_KIND_UNSPECIFIED: PolicyKind
POLICY_KIND_SYNCHRONOUS: PolicyKind
POLICY_KIND_ASYNCHRONOUS: PolicyKind
POLICY_KIND_BOUNDED_STALENESS: PolicyKind
POLICY_KIND_LOCAL_STEPS: PolicyKind

class Policy(_message.Message):
    __slots__ = ("kind", "max_staleness", "inner_steps", "quorum", "grace_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    kind: PolicyKind
    max_staleness: int
    inner_steps: int
    quorum: float
    grace_s: float
    def __init__(self, kind: _Optional[_Union[PolicyKind, str]] = ..., max_staleness: _Optional[int] = ..., inner_steps: _Optional[int] = ..., quorum: _Optional[float] = ..., grace_s: _Optional[float] = ...) -> None: ...

class StepDue(_message.Message):
    __slots__ = ("generation", "step", "model")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    model: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., model: _Optional[int] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("generation", "step", "model", "blocked", "addend")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    model: int
    blocked: bool
    addend: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., model: _Optional[int] = ..., blocked: bool = ..., addend: _Optional[int] = ...) -> None: ...
