"""A checkpoint whose file is cut, and that is then to be restored: it has to be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axon_ps.storage.manifest import MANIFEST_NAME, list_checkpoints
from axon_ps_lab.chaos.plan import Fault


def truncated(directory: str, fault: Fault, restore: Callable[[str], str]) -> str:
    """Cut a file of the newest checkpoint in two, and have it restored; what there is to note.

    Args:
        directory: where the job writes checkpoints; a local one.
        fault: struck is the manifest, which the coordinator reads, or a shard server's file.
        restore: has the job load a checkpoint; returns why it did not, or "".
    """
    found = list_checkpoints(directory) if Path(directory).exists() else []
    if not found:
        return "there was no checkpoint yet"
    files = found[-1].files
    name = MANIFEST_NAME if fault.role == "coordinator" else files[fault.index % len(files)].name
    path = Path(found[-1].uri) / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused = restore(found[-1].uri)
    return f"refused: {refused}" if refused else "WRONG: a cut checkpoint was restored"
