from axon_ps.wire.v1 import common_pb2 as _common_pb2
from axon_ps.wire.v1 import layout_pb2 as _layout_pb2
from axon_ps.wire.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotFile(_message.Message):
    __slots__ = ("name", "sha256", "bytes", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    bytes: int
    model: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., model: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("format_version", "job", "created", "num_servers", "extra_json", "models", "attached", "states", "signature", "sha256")
    class Model(_message.Message):
        __slots__ = ("name", "version", "chunk_numel", "min_slice_numel", "files", "optimizer", "layout", "file_of", "committed")
        class CommittedEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        CHUNK_NUMEL_FIELD_NUMBER: _ClassVar[int]
        MIN_SLICE_NUMEL_FIELD_NUMBER: _ClassVar[int]
        FILES_FIELD_NUMBER: _ClassVar[int]
        OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        FILE_OF_FIELD_NUMBER: _ClassVar[int]
        COMMITTED_FIELD_NUMBER: _ClassVar[int]
        name: str
        version: int
        chunk_numel: int
        min_slice_numel: int
        files: _containers.RepeatedCompositeFieldContainer[SnapshotFile]
        optimizer: _common_pb2.OptimizerSpec
        layout: _layout_pb2.Layout
        file_of: _containers.RepeatedScalarFieldContainer[int]
        committed: _containers.ScalarMap[str, str]
        def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., chunk_numel: _Optional[int] = ..., min_slice_numel: _Optional[int] = ..., files: _Optional[_Iterable[_Union[SnapshotFile, _Mapping]]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSpec, _Mapping]] = ..., layout: _Optional[_Union[_layout_pb2.Layout, _Mapping]] = ..., file_of: _Optional[_Iterable[int]] = ..., committed: _Optional[_Mapping[str, str]] = ...) -> None: ...
    class AttachedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SnapshotFile
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SnapshotFile, _Mapping]] = ...) -> None: ...
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    job: str
    created: str
    num_servers: int
    extra_json: str
    models: _containers.RepeatedCompositeFieldContainer[Manifest.Model]
    attached: _containers.MessageMap[str, SnapshotFile]
    states: _containers.RepeatedCompositeFieldContainer[SnapshotFile]
    signature: str
    sha256: str
    def __init__(self, format_version: _Optional[int] = ..., job: _Optional[str] = ..., created: _Optional[str] = ..., num_servers: _Optional[int] = ..., extra_json: _Optional[str] = ..., models: _Optional[_Iterable[_Union[Manifest.Model, _Mapping]]] = ..., attached: _Optional[_Mapping[str, SnapshotFile]] = ..., states: _Optional[_Iterable[_Union[SnapshotFile, _Mapping]]] = ..., signature: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class SnapshotReport(_message.Message):
    __slots__ = ("id", "files", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    files: _containers.RepeatedCompositeFieldContainer[SnapshotFile]
    error: _common_pb2.ErrorDetail
    def __init__(self, id: _Optional[int] = ..., files: _Optional[_Iterable[_Union[SnapshotFile, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class RestoreReport(_message.Message):
    __slots__ = ("epoch", "error", "model")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    error: _common_pb2.ErrorDetail
    model: int
    def __init__(self, epoch: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., model: _Optional[int] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ("id", "uri", "version", "models", "background")
    ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    id: int
    uri: str
    version: int
    models: _containers.RepeatedCompositeFieldContainer[_membership_pb2.ModelProgress]
    background: bool
    def __init__(self, id: _Optional[int] = ..., uri: _Optional[str] = ..., version: _Optional[int] = ..., models: _Optional[_Iterable[_Union[_membership_pb2.ModelProgress, _Mapping]]] = ..., background: bool = ...) -> None: ...

class RestoreOrder(_message.Message):
    __slots__ = ("epoch", "uri", "version", "model", "section", "sha256")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    uri: str
    version: int
    model: int
    section: str
    sha256: str
    def __init__(self, epoch: _Optional[int] = ..., uri: _Optional[str] = ..., version: _Optional[int] = ..., model: _Optional[int] = ..., section: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("uri", "version", "bytes", "extra_json", "versions", "optimizer", "hyper", "states")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    URI_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    uri: str
    version: int
    bytes: int
    extra_json: str
    versions: _containers.ScalarMap[str, int]
    optimizer: str
    hyper: _containers.RepeatedCompositeFieldContainer[_common_pb2.Hyper]
    states: _containers.RepeatedCompositeFieldContainer[SnapshotFile]
    def __init__(self, uri: _Optional[str] = ..., version: _Optional[int] = ..., bytes: _Optional[int] = ..., extra_json: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., optimizer: _Optional[str] = ..., hyper: _Optional[_Iterable[_Union[_common_pb2.Hyper, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[SnapshotFile, _Mapping]]] = ...) -> None: ...
