"""The manifests and attachments of checkpoints, read and written by the coordinator. Shard servers do so with slices.

Blocking I/O: call it in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from axon_ps.coordinator.attachments import Attachment
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshot
from axon_ps.coordinator.core.kv import MAX_TOTAL_BYTES
from axon_ps.errors import CheckpointError, InvalidRequest, again
from axon_ps.optim.registry import initial_states
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.moves import TensorSources
from axon_ps.sharding.plan import Slice
from axon_ps.texts import value_of_json
from axon_ps.types import BUFFERS
from axon_ps.wire import committed
from axon_ps.wire.events import CheckpointReply, SnapshotFile

if TYPE_CHECKING:
    from axon_ps.storage.manifest import Manifest

MAX_EXTRA_BYTES: Final = 4 << 20
"""Most bytes of the JSON object that is saved with a checkpoint."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint and the data saved with it. `resumes` are the models to restore from it."""

    resumes: tuple[Resume, ...]
    info: CheckpointReply


def find(uri: str, specs: Mapping[str, JobSpec], wanted: Sequence[str] = ()) -> FoundCheckpoint:
    """Read the manifest at `uri`, or of the newest complete checkpoint in it, and check that it fits the job's models.

    Args:
        uri: the checkpoint.
        specs: the job's models by name.
        wanted: names of those to restore; empty = all, and then the checkpoint must have no others.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is not a manifest of ours.
        InvalidRequest: it was saved from other models, or has parts that this job cannot take.
    """
    from axon_ps.storage.manifest import read_manifest

    return _fitted(read_manifest(uri), specs, wanted)


def _fitted(manifest: Manifest, specs: Mapping[str, JobSpec], wanted: Sequence[str]) -> FoundCheckpoint:
    """Check that a manifest fits the job's models; see `find`."""
    attached = _attachments(manifest)
    names = tuple(wanted) or tuple(specs)
    resumes = []
    for name in names:
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequest(f"the job has no model {name!r} to restore; it has {_named(specs)}")
        section = manifest.section(name, only=len(names) == 1 and (len(specs) == 1 or not manifest.name))
        origin = TensorSources(section.layout)
        for index, unit in enumerate(spec.layout.units):
            origin.moves_into(Slice(unit=index, server=0, begin=0, end=unit.numel), spec.layout)
        committed.checked(section.committed)
        initial_states(section.optimizer)
        resumes.append(
            Resume(
                uri=manifest.uri,
                version=section.version,
                model=name,
                section=section.name,
                sha256=manifest.sha256,
                committed=section.committed,
                attached=_attached_to(attached, section.name, name),
                optimizer=section.optimizer,
            )
        )
    if not wanted and len(manifest.sections) > max(1, len(specs)):
        others = [section.name for section in manifest.sections if section.name not in specs]
        raise InvalidRequest(
            f"the checkpoint at {manifest.uri} also has model {_named(others)}, which the job has not; wrap it before "
            "you restore, or name the models to restore"
        )
    info, first = info_of(manifest), resumes[0] if resumes else None
    if first is not None and first.optimizer is not None:
        info = dataclasses.replace(info, optimizer=first.optimizer.name, hyper=first.optimizer.groups)
    return FoundCheckpoint(
        resumes=tuple(resumes), info=dataclasses.replace(info, version=resumes[0].version) if wanted else info
    )


def _attachments(manifest: Manifest) -> dict[str, Attachment]:
    """Return the attachments of a checkpoint by key, in their stored form. One is uncompressed at a time.

    Raises:
        InvalidRequest: they are too large.
        CheckpointCorrupt: a file is missing, truncated, altered or not that of its key.
    """
    from axon_ps.storage.contents import read_attached

    found, size_bytes = {}, 0
    for key in manifest.attached:
        found[key] = Attachment.made(key, read_attached(manifest, key), manifest.uri)
        size_bytes += sum(map(len, found[key].blocks))
        if size_bytes > MAX_TOTAL_BYTES:
            raise InvalidRequest(
                f"what is attached to the checkpoint at {manifest.uri} has {size_bytes} bytes and more; at most "
                f"{MAX_TOTAL_BYTES} can be"
            )
    return found


def _attached_to(attached: Mapping[str, Attachment], section: str, name: str) -> dict[str, Attachment]:
    """Return the attachments for a model (`section` in the checkpoint, `name` in the job), and those of no model."""
    others = {key: a for key, a in attached.items() if not key.startswith(BUFFERS)}
    buffers = attached.get(f"{BUFFERS}{section}")
    return others if buffers is None else {**others, f"{BUFFERS}{name}": buffers}


def find_complete(
    uri: str, specs: Mapping[str, JobSpec], wanted: Sequence[str] = (), *, read: bool = False
) -> FoundCheckpoint:
    """Do as `find`, and check that all files exist with the sizes in the manifest, since they replace servers' values.

    Each server checks the content of the files that it needs before it overwrites anything. But others may have
    overwritten their part by then. With `read` all files are read and checked here before.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is not a manifest of ours, or a file is missing, truncated or, if it was read, altered.
        InvalidRequest: it was saved from other models.
    """
    from axon_ps.storage.contents import verify_files
    from axon_ps.storage.manifest import check_sizes, read_manifest

    manifest = read_manifest(uri)
    found = _fitted(manifest, specs, wanted)
    if read:
        verify_files(manifest)
    else:
        check_sizes(manifest)
    return found


def begin(uri: str, specs: Mapping[str, JobSpec], name: str) -> Resume | None:
    """Return the first values of the model `name` in a job that resumes from the checkpoint at `uri`; None = its own.

    It is None, with a warning, if the job has several models and the checkpoint lacks this one.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is not a manifest of ours.
        InvalidRequest: it was saved from another model.
    """
    from axon_ps.storage.manifest import read_manifest

    manifest = read_manifest(uri)
    if len(specs) > 1 and name not in {section.name for section in manifest.sections}:
        _logger.warning(
            "the checkpoint at %s has no model %r (it has %s): it begins with the values that its worker gives it",
            manifest.uri,
            name,
            _named(section.name for section in manifest.sections),
        )
        return None
    return find(uri, specs, (name,)).resumes[0]


def _named(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def info_of(manifest: Manifest) -> CheckpointReply:
    """Return the description of a checkpoint, from its manifest."""
    several = len(manifest.sections) > 1
    return CheckpointReply(
        uri=manifest.uri,
        version=manifest.version,
        bytes=manifest.bytes,
        extra_json=json.dumps(manifest.extra),
        versions={section.name: section.version for section in manifest.sections} if several else {},
        states=tuple(SnapshotFile(**vars(entry), model=rank) for rank, entry in manifest.states.items()),
    )


def check_states(states: Sequence[SnapshotFile]) -> tuple[SnapshotFile, ...]:
    """Check the files of workers' own state: each rank may have one.

    Raises:
        InvalidRequest: a name is not that of such a file, one is too large, or a rank has two.
    """
    from axon_ps.storage import manifest

    manifest.check_states(states)
    return tuple(states)


def check_extra(extra_json: str) -> dict[str, object]:
    """Parse the JSON object to save with a checkpoint.

    Raises:
        InvalidRequest: it is not a JSON object, or is too large or too deep.
    """
    extra = value_of_json(extra_json or "{}", "extra_json", max_bytes=MAX_EXTRA_BYTES)
    if not isinstance(extra, dict):
        raise InvalidRequest(f"extra_json is a JSON {type(extra).__name__}; it must be an object")
    return extra


def complete(
    job: str,
    snapshot: Snapshot,
    extra: dict[str, object],
    attached: Mapping[str, Attachment] = MappingProxyType({}),
    states: Sequence[SnapshotFile] = (),
) -> CheckpointReply:
    """Make a checkpoint of files that are all written, by writing its attachments and its manifest.

    Raises:
        CheckpointError: it cannot be written. Then the files are not a checkpoint.
        AxonError: the error of a shard server that could not write its file. The others' files are removed if possible.
    """
    from axon_ps.storage.manifest import FileEntry, Manifest, discard, write_attached, write_manifest

    if snapshot.error is not None:
        with contextlib.suppress(CheckpointError):  # without a manifest they are not a checkpoint
            discard(snapshot.uri, [f.name for f in (*snapshot.files, *states)])
        raise again(snapshot.error)
    created = datetime.datetime.now(datetime.UTC).isoformat()
    sections: list[Manifest] = []
    for model in snapshot.models:
        written = [(f, rank) for f, rank in zip(snapshot.files, snapshot.ranks, strict=True) if f.model == model.number]
        file_of = {rank: index for index, (_, rank) in enumerate(written)}
        sections.append(
            Manifest(
                job=job,
                name=model.name,
                version=model.version,
                layout=model.spec.layout,
                optimizer=model.optimizer,
                committed=model.committed,
                num_servers=model.placement.num_cuts,
                options=model.spec.options,
                files=tuple(FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f, _ in written),
                slices_in=tuple(file_of[holders.primary] for holders in model.placement.holders),
                extra=extra if not sections else {},
                created=created,
                uri=snapshot.uri,
            )
        )
    entries = write_attached(snapshot.uri, {key: attachment.content() for key, attachment in attached.items()})
    of_workers = {f.model: FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in states}
    manifest = dataclasses.replace(sections[0], others=tuple(sections[1:]), attached=entries, states=of_workers)
    write_manifest(snapshot.uri, manifest)
    return info_of(manifest)
