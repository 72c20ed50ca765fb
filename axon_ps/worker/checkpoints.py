"""Information on a checkpoint, for a worker's program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was written or read.

    Attributes:
        uri: where it is.
        version: the version it holds.
        bytes: bytes of all its files.
        extra: what was saved with it.
        versions: where it has several models, the version of each by name.
    """

    uri: str
    version: int
    bytes: int
    extra: Mapping[str, Any]
    versions: Mapping[str, int] = field(default_factory=dict)


def info_of(reply: Any) -> CheckpointInfo:
    """A reply of the coordinator as a `CheckpointInfo`."""
    return CheckpointInfo(
        uri=reply.uri,
        version=reply.version,
        bytes=reply.bytes,
        extra=json.loads(reply.extra_json) if reply.extra_json else {},
        versions=dict(reply.versions),
    )
