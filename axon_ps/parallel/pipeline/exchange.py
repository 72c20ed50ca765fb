"""Exchanges of all ranks of a pipeline at once: arguments, statuses, outputs, timelines.

Owns: small values as headers of fixed size, and the collectives over them. Refuses: messages between two stages, which
are `channel`'s. Every function is collective over the group it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axon_ps.collectives.objects import all_gather_object
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, Disagreement, InvalidRequest
from axon_ps.host.shared_memory import boot_id
from axon_ps.parallel.pipeline.timeline import ActionSpan, Timeline
from axon_ps.texts import value_of_json

HEADER_BYTES = 1024
_CLOCK_ROUNDS = 5


def pack(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a small JSON value as u8[HEADER_BYTES].

    Raises:
        InvalidRequest: it is too large.
    """
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES:
        raise InvalidRequest(
            f"a stage's output takes {len(text)} bytes to describe, of {HEADER_BYTES}; return fewer tensors"
        )
    header = np.zeros(HEADER_BYTES, np.uint8)
    header[: len(text)] = np.frombuffer(text, np.uint8)
    return header


def unpack(header: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Return the value that `pack` was given."""
    return value_of_json(header.tobytes().rstrip(b"\0"), "a header")


def exchange(group: ProcessGroup, value: Any) -> list[Any]:
    """Return all ranks' small JSON values, by rank. Collective."""
    rows = group.all_gather(pack(value).reshape(1, -1))
    return [unpack(row) for row in rows]


def end_together(group: ProcessGroup) -> None:
    """Let every rank return from its last collective before one of them ends the group. Errors are ignored."""
    with contextlib.suppress(AxonError):
        group.barrier()


def agree(group: ProcessGroup | None, stages: int, description: str, rest: Any) -> list[int]:
    """Check that all ranks make the same pipeline.

    Args:
        group: the ranks; None = only this one.
        stages: number of this rank's stages.
        description: must be the same on all ranks, and is quoted in messages.
        rest: must be the same on all ranks, too.

    Returns:
        The number of stages of each rank.
    """
    if group is None:
        return [stages]
    digest = hashlib.sha256(repr(rest).encode()).hexdigest()[:16]
    given = exchange(group, [stages, description, digest])
    if any(theirs[1:] != [description, digest] for theirs in given):
        listed = "; ".join(f"rank {r}: {w}, {d}" for r, (_, w, d) in enumerate(given))
        raise Disagreement(f"the ranks made different pipelines (last: digest of loss and ties): {listed}")
    return [count for count, *_ in given]


def spread(group: ProcessGroup, tensors: tuple[Tensor, ...], root: int, device: torch.device) -> tuple[Tensor, ...]:
    """Broadcast the root's tensors.

    Args:
        group: the ranks.
        tensors: the root's.
        root: the rank that has them.
        device: the device of the copies on the other ranks.
    """
    fields = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = pack(fields) if group.rank == root else np.empty(HEADER_BYTES, np.uint8)
    group.broadcast(header, root)
    if group.rank != root:
        shapes = unpack(header)
        tensors = tuple(torch.empty(shape, dtype=getattr(torch, name), device=device) for name, shape in shapes)
    for tensor in tensors:
        group.broadcast(tensor, root)
    return tensors


def gather_timeline(group: ProcessGroup, spans: Sequence[ActionSpan]) -> Timeline:
    """Gather all ranks' spans, on rank 0's clock.

    Ranks on one boot of a host share a clock. Other clocks are compared by the times at which barriers return.
    """

    def now() -> float:
        group.barrier()
        return time.monotonic()

    times = [now() for _ in range(_CLOCK_ROUNDS)]
    gathered = all_gather_object((boot_id(), times, [span.as_json() for span in spans]), group)
    first_boot, first_times, _ = gathered[0]
    found: list[ActionSpan] = []
    for boot, times, listed in gathered:
        offset_s = 0.0 if boot == first_boot else float(np.median(np.subtract(times, first_times)))
        found.extend(ActionSpan.from_json(fields, offset_s) for fields in listed)
    return Timeline(tuple(found), len(gathered))
