"""Retention of the checkpoints written last in a directory. Half-written and half-removed ones are removed.

Blocking I/O: call it in a thread. Owns: the names of the directories of automatic checkpoints, `step-N`. Refuses: to
touch any other directory. The files of a checkpoint are removed only after its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.errors import AxonError, CheckpointError
from axon_ps.host.priority import BACKGROUND
from axon_ps.observe.moments import Moment, reached

if TYPE_CHECKING:
    from axon_ps.storage.manifest import Manifest

_PREFIX: Final = "step-"

Damaged = Callable[[str, AxonError], None]
"""Called with the URI of a checkpoint whose manifest cannot be read, and the error."""


def uri_of(directory: str, version: int) -> str:
    """Return the URI of the automatic checkpoint of a version."""
    return f"{directory.rstrip('/')}/{_PREFIX}{version:010d}"


def _unsaid(_uri: str, _error: AxonError) -> None:
    """Pass over a damaged checkpoint in silence: it was logged when the job began, or before a restore."""


def written(directory: str, damaged: Damaged = _unsaid) -> list[Manifest]:
    """Return the complete checkpoints in a directory, in the order in which they were written.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    from axon_ps.storage.manifest import list_checkpoints

    return sorted(list_checkpoints(directory, damaged), key=lambda manifest: manifest.created)


def newest(directory: str, damaged: Damaged = _unsaid) -> Manifest | None:
    """Return the checkpoint in a directory to begin with, if there is one.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    from axon_ps.storage.manifest import each_checkpoint

    return max(each_checkpoint(directory, damaged), key=lambda manifest: manifest.created, default=None)


def verify(uri: str) -> None:
    """Read a checkpoint that was just written; remove a damaged one.

    Raises:
        CheckpointError: it is damaged.
    """
    from axon_ps.storage import contents, manifest

    try:
        contents.verify(uri, BACKGROUND)
    except CheckpointError:
        manifest.remove(manifest.read_manifest(uri))
        raise


def remove_old(policy: CheckpointPolicy) -> None:
    """Remove incomplete automatic checkpoints, and the oldest complete ones beyond the policy's limit.

    Raises:
        CheckpointError: a file cannot be removed.
    """
    from axon_ps.storage.files import open_store
    from axon_ps.storage.manifest import ATTACHED_PREFIX, FILE_PREFIX, MANIFEST_NAME, discard

    ours = [m for m in written(policy.directory) if _is_ours(m.uri.rpartition("/")[2])]
    for manifest in ours[: -policy.limit]:
        discard(manifest.uri, [MANIFEST_NAME])  # from now on it is not a checkpoint
        reached(Moment.REMOVE, manifest.version)
    store = open_store(policy.directory)
    store.discard_partial(_PREFIX)
    failed: CheckpointError | None = None
    for name in filter(_is_ours, store.directories()):
        child = store.child(name)
        try:
            child.discard_partial()
            if MANIFEST_NAME not in (names := child.names()):
                discard(child.uri, [name for name in names if name.startswith((FILE_PREFIX, ATTACHED_PREFIX))])
        except CheckpointError as error:  # raised after the other directories
            failed = failed or error
    if failed is not None:
        raise failed


def _is_ours(name: str) -> bool:
    return re.fullmatch(_PREFIX + r"\d{10,}", name) is not None
