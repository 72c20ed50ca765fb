"""The manifest: the file that makes a directory of files a checkpoint.

It is written last and atomically, so a directory has a complete checkpoint or none. It has everything that a later job
needs: the layout and how it was sharded, the optimizer, and each file with its size and hash. Every writer chooses new
file names, so a second checkpoint in the same directory does not touch the first until its manifest replaces the other.
Then the files that no manifest names any more are removed.

The file is the message `wire.v1.Manifest` in protobuf's JSON.

A `Manifest` that was read is within bounds: `_from_proto` checks every name, count and size before they are used. A
manifest that would be refused at reading is refused at writing. `storage.contents` checks the files that it names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

from google.protobuf import json_format

from axon_ps.errors import AxonError, CheckpointCorrupt, CheckpointError, CheckpointNotFound, InvalidRequest
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.plan import Plan, PlanOptions, Slice, make_plan, num_slices
from axon_ps.storage.checkpoint import FileEntry, check_size, described
from axon_ps.storage.files import FileStore, open_store
from axon_ps.storage.signature import check_signature, key_in_use
from axon_ps.texts import printable, value_of_json
from axon_ps.types import BUFFERS, OptimizerSpec
from axon_ps.wire import codec
from axon_ps.wire.v1 import checkpoint_pb2

_logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
"""Version of a manifest and of the files that it names. Before 4, each shard server wrote its slices of the plan."""

MANIFEST_NAME = "manifest.json"
FILE_PREFIX = "shard-"
"""The prefix of every file that a shard server writes."""

ATTACHED_PREFIX = "attached-"
"""The prefix of every small file of the workers: see `Manifest.attached`."""

MAX_ATTACHED_BYTES = 256 << 20
"""Most bytes of such a file."""

STATE_PREFIX = "state-"
"""The prefix of every file of a worker's own state."""

MAX_STATE_BYTES = 64 << 20
"""Most bytes of a worker's own state: of its JSON and its tensors."""

MAX_SLICES: Final = 1 << 21
"""Most slices of a model in a checkpoint: 2048 units over 1024 servers."""

MAX_GROUPS: Final = 1 << 16
"""Most parameter groups of an optimizer, and most groups that it has for their moments alone."""

MAX_VERSION: Final = 1 << 53
"""Newest version of a model in a checkpoint, and most updates of a parameter."""

MAX_TOTAL_BYTES: Final = 1 << 60
"""Most bytes of all files of a checkpoint."""

MAX_ATTACHED: Final = 1024
"""Most attached files."""

MAX_KEY_BYTES: Final = 400
"""Longest key of an attached file: it becomes a part of a key of the job's key-value store."""

MAX_MANIFEST_BYTES: Final = 128 << 20
"""Largest manifest."""

_NO_HASH = b"0" * 64
"""Stands for a manifest's own hash, and for its signature, while the hash is computed."""

_SHA256: Final = re.compile("[0-9a-f]{64}")
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape in JSON that may be half of a character."""


class SavedFile(Protocol):
    """A file as a message has it: of `model`, or the own state of the worker of that rank."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def model(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint: a model, and the manifests of `others` if the job had several.

    Attributes:
        job: name of the job that wrote it.
        name: name of the model in the job; empty if it has none.
        version: committed steps.
        layout: its parameters.
        optimizer: the optimizer whose state it has, with its groups at this version; None when the job had none yet.
        num_servers: number of shard servers over which units were cut.
        options: those by which units were cut.
        files: the files that the servers wrote.
        slices_in: by the number of a slice, the index of its file in `files`; empty = file p has server p's slices.
        extra: values of the caller (sampler, schedule), as JSON.
        created: time of writing, ISO 8601 with its zone; empty = it is not known.
        uri: the URI it was read from; not part of the file.
        others: the other models, without others themselves.
        committed: the values that were committed with its steps up to this version, by name.
        attached: by key, small files of the workers, for all models: `BUFFERS` and a model's name is the key of a
            safetensors file of its buffers. Every section has all of them.
        states: by the rank of a worker, the file of its own state.
        sha256: the hash that the file has of itself, in hex; empty before it is written, and in old files.
        signature: that of the hash, in hex; empty = it is not signed. See `storage.signature`.
    """

    job: str
    version: int
    layout: Layout
    optimizer: OptimizerSpec | None
    num_servers: int
    options: PlanOptions
    files: tuple[FileEntry, ...]
    slices_in: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    uri: str = ""
    name: str = ""
    others: tuple[Manifest, ...] = ()
    committed: Mapping[str, str] = field(default_factory=dict)
    attached: Mapping[str, FileEntry] = field(default_factory=dict)
    states: Mapping[int, FileEntry] = field(default_factory=dict)
    sha256: str = field(default="", compare=False)
    signature: str = field(default="", compare=False)

    @cached_property
    def plan(self) -> Plan:
        """The division of units into slices."""
        return make_plan(self.layout, self.num_servers, self.options)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.bytes for f in self.all_files)

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """The files of all models, the attached files, and those of workers' own state."""
        models = (f for section in self.sections for f in section.files)
        return (*models, *self.attached.values(), *self.states.values())

    @property
    def sections(self) -> tuple[Manifest, ...]:
        """All models, this one first."""
        return (self, *self.others)

    def section(self, name: str = "", *, only: bool = True) -> Manifest:
        """Return the section of a model.

        Args:
            name: its name; empty = the only one.
            only: if the checkpoint has exactly one model, return that, whatever its name.

        Raises:
            InvalidRequest: there is none of that name. The message says which there are.
        """
        if only and not self.others:
            return self
        for section in self.sections:
            if section.name == name:
                return section
        names = ", ".join(repr(section.name) for section in self.sections)
        wanted = f"has no model {name!r}" if name else "has several models; name one"
        raise InvalidRequest(f"the checkpoint at {self.uri} {wanted}: it has {names}")

    def file_of(self, s: Slice) -> int:
        """Return the file, of `files`, that has a slice of the plan."""
        return self.slices_in[self.plan.number_of(s)] if self.slices_in else s.server


def file_prefix(server: int, num_servers: int) -> str:
    """Return the prefix of the names of a shard server's files."""
    return f"{FILE_PREFIX}{server:05d}-of-{num_servers:05d}-"


def write_manifest(uri: str, manifest: Manifest) -> None:
    """Make the directory at `uri` a checkpoint; replaces an earlier one there, and removes its files.

    Raises:
        InvalidRequest: `extra` has values that JSON cannot represent, or `read_manifest` would refuse the manifest.
        StorageFull: no space left. An earlier checkpoint there is untouched.
        CheckpointError: it could not be written. An earlier checkpoint there is untouched.
    """
    store = open_store(uri)
    message = _to_proto(manifest)
    message.sha256 = _NO_HASH.decode()
    message.signature = _NO_HASH.decode() if (key := key_in_use()) is not None else ""
    _from_proto(message, uri)  # a manifest that could not be read again is refused now
    text = json_format.MessageToJson(
        message, indent=1, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    content = text.encode()
    with store.create(MANIFEST_NAME, len(content)) as sink:
        sha256 = hashlib.sha256(content).hexdigest()
        before, _, after = content.rpartition(_NO_HASH)  # the last is its own hash, the one before the signature
        if key is not None:
            head, _, between = before.rpartition(_NO_HASH)
            before = head + key.sign(sha256).encode() + between
        sink.write(before + sha256.encode() + after)
    named = {f.name for f in manifest.all_files}
    with contextlib.suppress(CheckpointError):  # the checkpoint is complete; the files left over only take space
        for name in store.names():
            if name.startswith((FILE_PREFIX, ATTACHED_PREFIX, STATE_PREFIX)) and name not in named:
                store.remove(name)


def write_attached(uri: str, attached: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write small files for a manifest that is still to be written; returns its entries for them, by key.

    Raises:
        InvalidRequest: one is too large.
        StorageFull: no space left.
        CheckpointError: one could not be written. Files written before it are left, and no manifest names them.
    """
    store, life, entries = open_store(uri), secrets.token_hex(8), {}
    for index, (key, content) in enumerate(sorted(attached.items())):
        if len(content) > MAX_ATTACHED_BYTES:
            raise InvalidRequest(f"{key!r} has {len(content)} bytes; at most {MAX_ATTACHED_BYTES} go into a checkpoint")
        name = f"{ATTACHED_PREFIX}{life}-{index:05d}"
        with store.create(name, len(content)) as sink:
            sink.write(content)
        entries[key] = FileEntry(name=name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    return entries


def discard(uri: str, names: Sequence[str]) -> None:
    """Remove files of a checkpoint that will not be complete, and its directory if nothing else is in it.

    Raises:
        CheckpointError: one cannot be removed.
    """
    store = open_store(uri)
    for name in names:
        store.remove(name)
    store.prune()


def remove(manifest: Manifest) -> None:
    """Remove a checkpoint. Its manifest is removed first, so it never is a checkpoint that lacks files.

    Raises:
        CheckpointError: a file cannot be removed.
    """
    discard(manifest.uri, [MANIFEST_NAME, *(entry.name for entry in manifest.all_files)])


def read_manifest(uri: str) -> Manifest:
    """Read the manifest at `uri`; of a directory of checkpoints, that of the newest complete one.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: the manifest is damaged or of another format. In a directory of checkpoints, none can be
            loaded.
        CheckpointError: it could not be read, or this process must not load it (see `storage.signature`).
    """
    store = open_store(uri)
    if MANIFEST_NAME in store.names():
        return _read(store)
    found = newest(uri)
    if found is None:
        raise nothing_at(uri)
    return found


def newest(uri: str, damaged: Callable[[str, AxonError], None] | None = None) -> Manifest | None:
    """Return the last of `list_checkpoints`; None if there is none.

    Args:
        uri: a checkpoint, or a directory of them.
        damaged: called with the URI and the error of each that is left out; None = the error is logged.

    Raises:
        CheckpointCorrupt: there are some, and none can be loaded: a caller that saw none would begin anew.
        CheckpointError: the directory could not be read.
    """
    left_out: list[AxonError] = []

    def leave_out(where: str, error: AxonError) -> None:
        left_out.append(error)
        (damaged or log_damaged)(where, error)

    found = max(each_checkpoint(uri, leave_out), key=_progress, default=None)
    if found is None and left_out:
        raise none_readable(uri, left_out)
    return found


def none_readable(uri: str, left_out: Sequence[AxonError]) -> CheckpointCorrupt:
    """Return the error for a directory in which there are checkpoints, and none can be read."""
    return CheckpointCorrupt(f"none of the {len(left_out)} checkpoints in {uri} can be read: {left_out[-1]}")


def nothing_at(uri: str) -> CheckpointNotFound:
    """Return the error for a missing checkpoint. It says whether the directory exists."""
    if not open_store(uri).exists():
        return CheckpointNotFound(f"there is no complete checkpoint at {uri}: there is no such directory")
    return CheckpointNotFound(
        f"there is no complete checkpoint at {uri}: no {MANIFEST_NAME} in it, or in a directory of it"
    )


def log_damaged(uri: str, error: AxonError) -> None:
    """Log that a checkpoint is left out."""
    _logger.error("checkpoint %s is passed over: %s", uri, error)


def list_checkpoints(uri: str, damaged: Callable[[str, AxonError], None] = log_damaged) -> list[Manifest]:
    """Return the complete checkpoints at `uri` and in its directories, oldest first.

    Those with a manifest that cannot be read, or must not be loaded, are left out. They are ordered by version; if
    there are several models, by the sum of their versions.

    Args:
        uri: a checkpoint, or a directory of them.
        damaged: called with the URI and the error of each that is left out.

    Raises:
        CheckpointError: the directory could not be read.
    """
    return sorted(each_checkpoint(uri, damaged), key=_progress)


def each_checkpoint(uri: str, damaged: Callable[[str, AxonError], None] = log_damaged) -> Iterator[Manifest]:
    """Yield the checkpoints of `list_checkpoints`, in any order, one in memory at a time.

    Raises:
        CheckpointError: the directory could not be read.
    """
    store = open_store(uri)
    for name in ("", *store.directories()):
        where = f"{store.uri}/{name}" if name else store.uri
        try:
            manifest = _read(store.child(name) if name else store)
        except CheckpointNotFound:  # it is not a checkpoint
            continue
        except AxonError as error:
            unnamed = InvalidRequest(f"the name of the directory, {name!a}, is not printable; rename it")
            damaged(printable(where), error if name.isprintable() else unnamed)
        else:
            yield manifest


def _progress(manifest: Manifest) -> tuple[int, str]:
    """Return the key by which checkpoints are ordered."""
    return sum(section.version for section in manifest.sections), manifest.created


def check_sizes(manifest: Manifest) -> None:
    """Check that every file of a checkpoint is there and as long as it should be, without reading it.

    Raises:
        CheckpointCorrupt: one is missing, or of another size.
        CheckpointError: one could not be opened.
    """
    store = open_store(manifest.uri)
    for entry in manifest.all_files:
        check_size(store, entry)


def _read(store: FileStore) -> Manifest:
    """Read the manifest in a directory.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is damaged, of another format, or out of bounds.
        CheckpointError: it could not be read, or this process must not load it.
    """
    path = f"{store.uri}/{MANIFEST_NAME}"
    with store.open(MANIFEST_NAME) as source:
        if source.size > MAX_MANIFEST_BYTES:
            raise CheckpointCorrupt(f"{path} has {source.size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
        text = source.read(0, source.size)
    try:
        value = value_of_json(text, "it", max_bytes=MAX_MANIFEST_BYTES)
        if _HALF.search(text):  # protobuf reports text that is not Unicode by another error
            json.dumps(value, ensure_ascii=False).encode()
        if (version := value["format_version"]) != FORMAT_VERSION:
            raise CheckpointCorrupt(f"{path} is of format {version!r:.80}; this program reads format {FORMAT_VERSION}")
        own, signature = str(value.get("sha256", "")), str(value.get("signature", ""))
        if own and _own_hash(text, own, signature) != own:
            raise CheckpointCorrupt(f"{path} was altered: it is not what its own hash says")
        check_signature(store.uri, own, signature)
        return _from_proto(json_format.ParseDict(value, checkpoint_pb2.Manifest()), store.uri)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, json_format.Error) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {described(error)}") from error


def _own_hash(text: bytes, own: str, signature: str) -> str:
    """Return the hash of a manifest as if it had no hash and no signature. Both are at its end."""
    for value in filter(None, (own, signature)):
        before, found, after = text.rpartition(value.encode())
        text = before + _NO_HASH + after if found else text
    return hashlib.sha256(text).hexdigest()


def _to_proto(manifest: Manifest) -> checkpoint_pb2.Manifest:
    try:
        extra_json = json.dumps(dict(manifest.extra))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"extra holds what JSON cannot: {error}") from error
    return checkpoint_pb2.Manifest(
        format_version=FORMAT_VERSION,
        job=manifest.job,
        created=manifest.created,
        num_servers=manifest.num_servers,
        extra_json=extra_json,
        attached={key: checkpoint_pb2.SnapshotFile(**vars(entry)) for key, entry in manifest.attached.items()},
        states=[checkpoint_pb2.SnapshotFile(**vars(entry), model=rank) for rank, entry in manifest.states.items()],
        models=[
            checkpoint_pb2.Manifest.Model(
                name=section.name,
                version=section.version,
                chunk_numel=section.options.chunk_numel,
                min_slice_numel=section.options.min_slice_numel,
                files=[checkpoint_pb2.SnapshotFile(**vars(entry)) for entry in section.files],
                file_of=section.slices_in,
                optimizer=None if section.optimizer is None else codec.optimizer_to_proto(section.optimizer),
                layout=codec.layout_to_proto(section.layout),
                committed=section.committed,
            )
            for section in manifest.sections
        ],
    )


def _from_proto(message: checkpoint_pb2.Manifest, uri: str) -> Manifest:
    """Make a manifest from its message.

    Raises:
        InvalidRequest: something is out of bounds, or does not fit the rest.
    """
    codec.name_from_proto(uri, "the URI of the checkpoint")
    codec.name_from_proto(message.job, "the name of the job", empty=True)
    if not 1 <= message.num_servers <= codec.MAX_CUTS:
        raise InvalidRequest(f"units are cut over {message.num_servers} servers; it must be 1 to {codec.MAX_CUTS}")
    _check_time(message.created)
    extra = value_of_json(message.extra_json, "extra_json", max_bytes=MAX_MANIFEST_BYTES)
    if not isinstance(extra, dict):
        raise InvalidRequest(f"extra_json is a JSON {type(extra).__name__}; it must be an object")
    if len(message.attached) > MAX_ATTACHED:
        raise InvalidRequest(f"{len(message.attached)} files are attached; at most {MAX_ATTACHED} can be")
    attached = {_key(k): _entry(f, ATTACHED_PREFIX, MAX_ATTACHED_BYTES) for k, f in message.attached.items()}
    first, *others = (_section(message, model, uri, attached) for model in message.models)
    if len({section.name for section in (first, *others)}) != 1 + len(others):
        raise InvalidRequest("two models have the same name")
    states = check_states(message.states)
    manifest = dataclasses.replace(first, extra=extra, others=tuple(others), states=states)
    if manifest.bytes > MAX_TOTAL_BYTES:
        raise InvalidRequest(f"its files have {manifest.bytes} bytes; at most {MAX_TOTAL_BYTES} can be")
    return manifest


def _section(
    message: checkpoint_pb2.Manifest,
    model: checkpoint_pb2.Manifest.Model,
    uri: str,
    attached: Mapping[str, FileEntry],
) -> Manifest:
    name = codec.name_from_proto(model.name, "the name of a model", empty=True)
    if not (model.HasField("version") and model.layout.units):
        raise InvalidRequest("a model lacks its version or its units")
    if model.version > MAX_VERSION:
        raise InvalidRequest(f"model {name!r} is at version {model.version}; the newest that is read is {MAX_VERSION}")
    layout = codec.layout_from_proto(model.layout)
    options = PlanOptions(chunk_numel=model.chunk_numel, min_slice_numel=model.min_slice_numel)
    count = num_slices(layout, message.num_servers, options)
    if count > MAX_SLICES:
        raise InvalidRequest(f"model {name!r} is cut into {count} slices; at most {MAX_SLICES} are read")
    if model.file_of and len(model.file_of) != count:
        raise InvalidRequest(f"{count} slices are in {len(model.file_of)} places")
    for key, value in model.committed.items():
        codec.name_from_proto(key, "the name of a committed value")
        value_of_json(value, f"the committed value {key!r}")
    manifest = Manifest(
        job=message.job,
        version=model.version,
        created=message.created,
        num_servers=message.num_servers,
        options=options,
        files=tuple(_entry(f, FILE_PREFIX) for f in model.files),
        optimizer=_optimizer(model, layout),
        layout=layout,
        uri=uri,
        sha256=message.sha256,
        signature=message.signature,
        name=name,
        slices_in=tuple(model.file_of),
        committed=dict(model.committed),
        attached=attached,
    )
    if max(map(manifest.file_of, manifest.plan.numbered)) >= len(manifest.files):
        raise InvalidRequest(f"{len(manifest.files)} files are named, which do not have all slices")
    return manifest


def _optimizer(model: checkpoint_pb2.Manifest.Model, layout: Layout) -> OptimizerSpec | None:
    """Return the optimizer of a model, if it has one.

    Its name and its values are checked where it is restored: a program without a plugin may list and export a
    checkpoint that was trained with it.
    """
    if not model.HasField("optimizer"):
        return None
    groups = max(len(model.optimizer.groups), len(model.optimizer.moments))
    if groups > MAX_GROUPS:
        raise InvalidRequest(f"the optimizer has {groups} groups; at most {MAX_GROUPS} are read")
    optimizer = codec.optimizer_from_proto(model.optimizer)
    count = sum(len(unit.parameters) for unit in layout.units)
    if len(optimizer.group_of) != count:
        raise InvalidRequest(f"{len(optimizer.group_of)} parameters are in groups; the layout has {count}")
    return optimizer


def check_states(files: Iterable[SavedFile]) -> dict[int, FileEntry]:
    """Return the file of each worker's own state, by the worker's rank.

    Raises:
        InvalidRequest: a name is not that of such a file, one is too large, or a rank has two.
    """
    found: dict[int, FileEntry] = {}
    for f in files:
        if f.model in found:
            raise InvalidRequest("a worker has two files of its own state; it may have one")
        found[f.model] = _entry(f, STATE_PREFIX, 2 * MAX_STATE_BYTES)  # values and header
    return found


def _entry(f: SavedFile, prefix: str, max_bytes: int = MAX_TOTAL_BYTES) -> FileEntry:
    """Return a file of a checkpoint, whose name must begin with a prefix."""
    name = codec.name_from_proto(f.name, "the name of a file")
    if not name.startswith(prefix) or "/" in name or "\\" in name:
        raise InvalidRequest(f"a file is called {name!r}; its name begins with {prefix!r}, and is that of no directory")
    if not _SHA256.fullmatch(f.sha256):
        raise InvalidRequest(f"the hash of {name!r} is {f.sha256[:80]!r}; it has 64 hexadecimal digits")
    if f.bytes > max_bytes:
        raise InvalidRequest(f"{name!r} has {f.bytes} bytes; at most {max_bytes} can be")
    return FileEntry(name=name, sha256=f.sha256, bytes=f.bytes)


def _key(key: str) -> str:
    if not key or not key.isprintable() or len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidRequest(
            f"{key[:80]!r} is attached; a key is printable and has 1 to {MAX_KEY_BYTES} bytes, and this one "
            f"{len(key.encode())}"
        )
    return key


def _check_time(created: str) -> None:
    if created and (len(created) > 64 or datetime.datetime.fromisoformat(created).tzinfo is None):
        raise InvalidRequest(f"it was made at {created[:80]!r}; a time is in ISO 8601, with its zone")


__all__ = [
    "BUFFERS",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MAX_STATE_BYTES",
    "STATE_PREFIX",
    "FileEntry",
    "Manifest",
    "check_sizes",
    "check_states",
    "each_checkpoint",
    "file_prefix",
    "list_checkpoints",
    "newest",
    "none_readable",
    "nothing_at",
    "read_manifest",
    "remove",
    "write_attached",
    "write_manifest",
]
