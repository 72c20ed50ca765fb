"""Truncated checkpoints: a file of one is cut, and restoring it has to be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axon_ps.storage.manifest import MANIFEST_NAME, list_checkpoints
from axon_ps_lab.chaos.plan import PlannedFault


def truncated(directory: str, fault: PlannedFault, restore: Callable[[str], str]) -> str:
    """Cut a file of the newest checkpoint in two, and have the checkpoint restored; returns a note for the report.

    Args:
        directory: directory of the job's checkpoints; a local one.
        fault: its role selects the file: the manifest, which the coordinator reads, or a shard server's.
        restore: makes the job load a checkpoint; returns the reason for a refusal, or "".
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
