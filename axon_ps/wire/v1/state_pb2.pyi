from axon_ps.wire.v1 import checkpoint_pb2 as _checkpoint_pb2
from axon_ps.wire.v1 import membership_pb2 as _membership_pb2
from axon_ps.wire.v1 import placement_pb2 as _placement_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobRecord(_message.Message):
    __slots__ = ("state_id", "job", "world_size", "num_shards")
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    state_id: str
    job: str
    world_size: int
    num_shards: int
    def __init__(self, state_id: _Optional[str] = ..., job: _Optional[str] = ..., world_size: _Optional[int] = ..., num_shards: _Optional[int] = ...) -> None: ...

class MembersRecord(_message.Message):
    __slots__ = ("membership", "was_complete", "vacant", "draining", "needed_shards")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    WAS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VACANT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NEEDED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    membership: _membership_pb2.MembershipEvent
    was_complete: bool
    vacant: int
    draining: _containers.RepeatedScalarFieldContainer[int]
    needed_shards: int
    def __init__(self, membership: _Optional[_Union[_membership_pb2.MembershipEvent, _Mapping]] = ..., was_complete: bool = ..., vacant: _Optional[int] = ..., draining: _Optional[_Iterable[int]] = ..., needed_shards: _Optional[int] = ...) -> None: ...

class ModelsRecord(_message.Message):
    __slots__ = ("names", "next")
    class NamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.ScalarMap[int, str]
    next: int
    def __init__(self, names: _Optional[_Mapping[int, str]] = ..., next: _Optional[int] = ...) -> None: ...

class ParametersRecord(_message.Message):
    __slots__ = ("epoch", "initialized", "holders", "uploader", "restore", "failure", "placement", "copied", "replaced", "lost", "lost_version", "corrupt", "run_began")
    class HoldersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    class LostEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Slices
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Slices, _Mapping]] = ...) -> None: ...
    class CorruptEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    UPLOADER_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_VERSION_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RUN_BEGAN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    initialized: bool
    holders: _containers.ScalarMap[int, str]
    uploader: str
    restore: _checkpoint_pb2.RestoreOrder
    failure: str
    placement: _placement_pb2.Placement
    copied: int
    replaced: bool
    lost: _containers.MessageMap[str, Slices]
    lost_version: int
    corrupt: _containers.ScalarMap[int, str]
    run_began: int
    def __init__(self, epoch: _Optional[int] = ..., initialized: bool = ..., holders: _Optional[_Mapping[int, str]] = ..., uploader: _Optional[str] = ..., restore: _Optional[_Union[_checkpoint_pb2.RestoreOrder, _Mapping]] = ..., failure: _Optional[str] = ..., placement: _Optional[_Union[_placement_pb2.Placement, _Mapping]] = ..., copied: _Optional[int] = ..., replaced: bool = ..., lost: _Optional[_Mapping[str, Slices]] = ..., lost_version: _Optional[int] = ..., corrupt: _Optional[_Mapping[int, str]] = ..., run_began: _Optional[int] = ...) -> None: ...

class Slices(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class CommittedRecord(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...
