"""The coordinator's part of checkpoints on disk: it reads and writes manifests, shard servers everything else.

Blocking I/O: call it in a thread.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass

from axon_ps.coordinator.events import CheckpointInfo
from axon_ps.coordinator.restores import Resume
from axon_ps.coordinator.snapshots import Snapshot
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import Slice, moves_into


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint and what was saved with it."""

    resume: Resume
    info: CheckpointInfo


def find(uri: str, spec: JobSpec | None) -> Found:
    """Read the manifest at `uri`, or of the newest complete checkpoint in it, and see that it fits `spec`.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is not a manifest of ours.
        InvalidRequest: it was saved from another model.
    """
    from axon_ps.storage.manifest import read_manifest

    manifest = read_manifest(uri)
    if spec is not None:
        for index, unit in enumerate(spec.layout.units):
            moves_into(Slice(unit=index, server=0, begin=0, end=unit.numel), spec.layout, manifest.layout)
    info = CheckpointInfo(
        uri=manifest.uri,
        version=manifest.version,
        bytes=sum(f.bytes for f in manifest.files),
        extra_json=json.dumps(manifest.extra),
    )
    return Found(resume=Resume(uri=info.uri, version=info.version), info=info)


def check_extra(extra_json: str) -> dict[str, object]:
    """What is to be saved with a checkpoint.

    Raises:
        InvalidRequest: it is not a JSON object.
    """
    try:
        extra = json.loads(extra_json or "{}")
    except ValueError as error:
        raise InvalidRequest(f"extra_json is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InvalidRequest(f"extra_json is a JSON {type(extra).__name__}; it must be an object")
    return extra


def complete(job: str, snapshot: Snapshot, extra: dict[str, object]) -> CheckpointInfo:
    """Make a checkpoint of files that are all written, by writing its manifest.

    Raises:
        CheckpointError: it cannot be written; then the files are no checkpoint.
        AxonError: what kept a shard server from writing its file; those of the others have been removed.
    """
    from axon_ps.storage.manifest import FileEntry, Manifest, discard, write_manifest

    if snapshot.error is not None:
        discard(snapshot.uri, [f.name for f in snapshot.files])
        raise snapshot.error
    files = tuple(FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in snapshot.files)
    manifest = Manifest(
        job=job,
        version=snapshot.version,
        layout=snapshot.spec.layout,
        optimizer=snapshot.optimizer,
        num_servers=snapshot.num_servers,
        options=snapshot.spec.options,
        files=files,
        extra=extra,
        created=datetime.datetime.now(datetime.UTC).isoformat(),
    )
    write_manifest(snapshot.uri, manifest)
    return CheckpointInfo(
        uri=snapshot.uri,
        version=snapshot.version,
        bytes=sum(f.bytes for f in files),
        extra_json=json.dumps(extra),
    )
