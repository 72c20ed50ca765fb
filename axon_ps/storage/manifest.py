"""The manifest: what makes a directory of files a checkpoint.

It is written last and atomically, so a directory has a complete checkpoint or none. It has everything that a later job
needs: the layout and how it was sharded, the optimizer, and each file with its size and hash. Every writer chooses new
file names, so a second checkpoint in the same directory does not touch the first until its manifest replaces the other;
then the files that no manifest names any more are removed.

The file is the message `wire.v1.Manifest` in protobuf's JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from google.protobuf import json_format

from axon_ps.errors import AxonError, CheckpointCorrupt, CheckpointError, CheckpointNotFound, InvalidRequest
from axon_ps.host.priority import UNTHROTTLED, Throttle
from axon_ps.observe.work import Work
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.plan import Plan, PlanOptions, Slice, make_plan
from axon_ps.storage.checkpoint import FileEntry, check_file, check_size
from axon_ps.storage.files import FileStore, open_store
from axon_ps.storage.signature import check_signature, key_in_use
from axon_ps.types import BUFFERS, OptimizerSpec
from axon_ps.wire import codec
from axon_ps.wire.v1 import checkpoint_pb2

_logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
"""Version of a manifest and of the files that it names. Before 4 each shard server wrote the slices of one number."""

MANIFEST_NAME = "manifest.json"
FILE_PREFIX = "shard-"
"""The prefix of every file that a shard server writes."""

ATTACHED_PREFIX = "attached-"
"""The prefix of every file that has something small of the workers: see `Manifest.attached`."""

MAX_ATTACHED_BYTES = 256 << 20
"""Largest of them."""
STATE_PREFIX = "state-"
"""The prefix of every file of a worker's own state."""

MAX_STATE_BYTES = 64 << 20
"""Most bytes of a file of a worker's own state."""

_MAX_BYTES = 256 << 20
_NO_HASH = b"0" * 64
"""Stands in the place of a manifest's own hash while that is computed."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint: a model, and the manifests of `others` if the job had several.

    Attributes:
        job: name of the job that wrote it.
        name: name of the model in the job; empty if it has none.
        version: committed steps.
        layout: its parameters.
        optimizer: the one whose state it has, its groups as of this version; None when the job had no optimizer yet.
        num_servers: over how many shard servers units were cut.
        options: how units were cut.
        files: the files that the servers wrote.
        slices_in: by the number of a slice, which of `files` has it; empty = file p has what the plan gives server p.
        extra: values of the caller (sampler, schedule), as JSON.
        created: time of writing, ISO 8601 in UTC.
        uri: the URI it was read from; not part of the file.
        others: the other models, without others themselves.
        committed: the values that were committed with its steps up to this version, by name.
        attached: by key, small files of the workers, whatever their models: `BUFFERS` and a model's name is the key of
            a safetensors file of its buffers. Every section has all of them.
        states: by the rank of a worker, the file of its own state.
        sha256: the hash that the file has of itself, in hex; empty before it is written, and in old ones.
        signature: of that, in hex; empty = it is not signed. See `storage.signature`.
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
        """How units were divided into slices."""
        return make_plan(self.layout, self.num_servers, self.options)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.bytes for f in self.all_files)

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """The files of all models, what is attached, and those of workers' own state."""
        models = (f for section in self.sections for f in section.files)
        return (*models, *self.attached.values(), *self.states.values())

    @property
    def sections(self) -> tuple[Manifest, ...]:
        """All models, this one first."""
        return (self, *self.others)

    def section(self, name: str = "", *, only: bool = True) -> Manifest:
        """A model.

        Args:
            name: its name; empty = the only one.
            only: whether no other model is wanted: if there is exactly one, it is meant, whatever its name.

        Raises:
            InvalidRequest: there is none of that name; the message says which there are.
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
        """Which of `files` has a slice of the plan."""
        return self.slices_in[self.plan.number_of(s)] if self.slices_in else s.server


def file_prefix(server: int, num_servers: int) -> str:
    """The prefix of the names of a shard server's files."""
    return f"{FILE_PREFIX}{server:05d}-of-{num_servers:05d}-"


def write_manifest(uri: str, manifest: Manifest) -> None:
    """Make the directory at `uri` a checkpoint; replaces the one that was there, and removes its files.

    Raises:
        InvalidRequest: `extra` has values that JSON cannot represent, or a name is not printable.
        StorageFull: no space left; what was there before is untouched.
        CheckpointError: it could not be written; what was there before is untouched.
    """
    store = open_store(uri)
    message = _to_proto(manifest)
    message.sha256 = _NO_HASH.decode()
    message.signature = _NO_HASH.decode() if (key := key_in_use()) is not None else ""
    _from_proto(message, uri)  # what could not be read again is refused now
    text = json_format.MessageToJson(
        message, indent=1, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    content = text.encode()
    with store.create(MANIFEST_NAME, len(content)) as sink:
        sha256 = hashlib.sha256(content).hexdigest()
        before, _, after = content.rpartition(_NO_HASH)  # its own is the last, and the signature the one before
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
    """Write small files for a manifest that is still to be written: by key, what it names them by.

    Raises:
        InvalidRequest: one is too large.
        StorageFull: no space left.
        CheckpointError: one could not be written; files of those before it are left, and no manifest names them.
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


def read_attached(manifest: Manifest, keys: Sequence[str] | None = None) -> dict[str, bytes]:
    """By key, the small files of a checkpoint: those of `keys`, which it must have; None = all.

    Raises:
        CheckpointCorrupt: one is missing, truncated or altered.
        CheckpointError: one could not be read.
    """
    store, found = open_store(manifest.uri), {}
    for key in manifest.attached if keys is None else keys:
        entry = manifest.attached[key]
        if entry.bytes > MAX_ATTACHED_BYTES:
            raise CheckpointCorrupt(f"{key!r} is said to have {entry.bytes} bytes; at most {MAX_ATTACHED_BYTES} can be")
        check_size(store, entry)
        with store.open(entry.name) as source:
            found[key] = source.read(0, entry.bytes)
        if hashlib.sha256(found[key]).hexdigest() != entry.sha256:
            raise CheckpointCorrupt(f"{store.uri}/{entry.name} was altered: it is not what the manifest says")
    return found


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
    """Remove a checkpoint; it is none any more before the first of its files is gone.

    Raises:
        CheckpointError: a file cannot be removed.
    """
    discard(manifest.uri, [MANIFEST_NAME, *(entry.name for entry in manifest.all_files)])


def read_manifest(uri: str) -> Manifest:
    """The manifest at `uri`; of a directory of checkpoints, that of the newest complete one.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: the manifest is damaged or of a later format; in a directory of checkpoints, all are.
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
    """Of `list_checkpoints` the last; None where nothing is.

    Args:
        uri: a checkpoint, or a directory of them.
        damaged: called with the URI of each that is left out, and why; None = that is logged.

    Raises:
        CheckpointCorrupt: there are some, and all are damaged: whoever goes on as if there were none would begin anew.
        CheckpointError: the directory could not be read.
    """
    left_out: list[AxonError] = []

    def leave_out(where: str, error: AxonError) -> None:
        left_out.append(error)
        (damaged or log_damaged)(where, error)

    found = list_checkpoints(uri, leave_out)
    if left_out and not found:
        raise CheckpointCorrupt(f"none of the {len(left_out)} checkpoints in {uri} can be read: {left_out[-1]}")
    return found[-1] if found else None


def nothing_at(uri: str) -> CheckpointNotFound:
    """The error where there is no checkpoint; it says whether there is the directory."""
    if not open_store(uri).exists():
        return CheckpointNotFound(f"there is no complete checkpoint at {uri}: there is no such directory")
    return CheckpointNotFound(
        f"there is no complete checkpoint at {uri}: no {MANIFEST_NAME} in it, or in a directory of it"
    )


def log_damaged(uri: str, error: AxonError) -> None:
    """Log that a checkpoint is left out."""
    _logger.error("checkpoint %s is passed over: %s", uri, error)


def list_checkpoints(uri: str, damaged: Callable[[str, AxonError], None] = log_damaged) -> list[Manifest]:
    """The complete checkpoints at `uri` and in its directories, oldest first.

    Those with a damaged manifest are left out. They are ordered by version; where there are several models, by the sum
    of their versions.

    Args:
        uri: a checkpoint, or a directory of them.
        damaged: called with the URI of each that is left out, and why.

    Raises:
        CheckpointError: the directory could not be read.
    """
    store = open_store(uri)
    found: list[Manifest] = []
    for candidate in (store, *(store.child(name) for name in store.directories())):
        if MANIFEST_NAME in candidate.names():
            try:
                found.append(_read(candidate))
            except AxonError as error:
                damaged(candidate.uri, error)
    return sorted(found, key=lambda m: (sum(section.version for section in m.sections), m.created))


def verify(uri: str, throttle: Throttle = UNTHROTTLED, work: Work | None = None) -> Manifest:
    """Read every file of a checkpoint, throttled or not, and compare it with the manifest.

    Args:
        uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
        throttle: of the reading.
        work: gets the bytes to read, and those that were read.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: a file is missing, truncated or altered; the message says which, and what was expected.
        CheckpointError: a file could not be read.
    """
    manifest = read_manifest(uri)
    store = open_store(manifest.uri)
    if work is not None:
        work.total_bytes += manifest.bytes
    for entry in manifest.all_files:
        check_file(store, entry, throttle, work)
    return manifest


def check_sizes(manifest: Manifest) -> None:
    """Look whether every file of a checkpoint is there and as long as it should be, without reading it.

    Raises:
        CheckpointCorrupt: one is missing, or of another size.
        CheckpointError: one could not be opened.
    """
    store = open_store(manifest.uri)
    for entry in manifest.all_files:
        check_size(store, entry)


def _read(store: FileStore) -> Manifest:
    path = f"{store.uri}/{MANIFEST_NAME}"
    with store.open(MANIFEST_NAME) as source:
        if source.size > _MAX_BYTES:
            raise CheckpointCorrupt(f"{path} has {source.size} bytes; a manifest has at most {_MAX_BYTES}")
        text = source.read(0, source.size)
    try:
        value = json.loads(text)
        if (version := value["format_version"]) != FORMAT_VERSION:
            raise CheckpointCorrupt(f"{path} is of format {version!r}; this program reads format {FORMAT_VERSION}")
        own, signature = str(value.get("sha256", "")), str(value.get("signature", ""))
        if own and _own_hash(text, own, signature) != own:
            raise CheckpointCorrupt(f"{path} was altered: it is not what its own hash says")
        check_signature(store.uri, own, signature)
        return _from_proto(json_format.ParseDict(value, checkpoint_pb2.Manifest()), store.uri)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, json_format.Error) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error!r}") from error


def _own_hash(text: bytes, own: str, signature: str) -> str:
    """The hash of a manifest as if it had no hash and no signature; both are at its end."""
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
    first, *others = (_section(message, model, uri) for model in message.models)
    states = {f.model: FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in message.states}
    return dataclasses.replace(first, extra=dict(json.loads(message.extra_json)), others=tuple(others), states=states)


def _section(message: checkpoint_pb2.Manifest, model: checkpoint_pb2.Manifest.Model, uri: str) -> Manifest:
    hashed = all(f.sha256 for f in (*model.files, *message.attached.values()))
    if not (model.HasField("version") and model.layout.units and hashed):
        raise InvalidRequest("a model lacks its version or its units, or a file its hash")
    manifest = Manifest(
        job=message.job,
        version=model.version,
        created=message.created,
        num_servers=message.num_servers,
        options=PlanOptions(chunk_numel=model.chunk_numel, min_slice_numel=model.min_slice_numel),
        files=tuple(FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in model.files),
        optimizer=codec.optimizer_from_proto(model.optimizer) if model.HasField("optimizer") else None,
        layout=codec.layout_from_proto(model.layout),
        uri=uri,
        sha256=message.sha256,
        signature=message.signature,
        name=model.name,
        slices_in=tuple(model.file_of),
        committed=dict(model.committed),
        attached={k: FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for k, f in message.attached.items()},
    )
    slices = manifest.plan.numbered
    if manifest.slices_in and len(manifest.slices_in) != len(slices):
        raise InvalidRequest(f"{len(slices)} slices are in {len(manifest.slices_in)} places")
    if slices and max(map(manifest.file_of, slices)) >= len(manifest.files):
        raise InvalidRequest(f"{len(manifest.files)} files are named, which do not have all slices")
    return manifest


__all__ = [
    "BUFFERS",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MAX_STATE_BYTES",
    "STATE_PREFIX",
    "FileEntry",
    "Manifest",
    "check_sizes",
    "file_prefix",
    "list_checkpoints",
    "newest",
    "nothing_at",
    "read_attached",
    "read_manifest",
    "remove",
    "verify",
    "write_attached",
    "write_manifest",
]
