"""Calls of a few bytes on one host: the data lies beside the headers, so they take one barrier.

Owns: the test for small calls, and their results. Once the headers are exchanged every rank has all data and computes
its own result, so no rank waits a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.request import partition_starts, required
from axon_ps.collectives.backends.shm.agreement import Agreement
from axon_ps.collectives.backends.shm.control import INLINE_BYTES
from axon_ps.reduction import ops
from axon_ps.types import COLLECTIVE_DTYPES, Array

_GATHERING = (Operation.ALL_GATHER, Operation.GATHER)
_SCATTERING = (Operation.SCATTER, Operation.REDUCE_SCATTER)
_COPYING = (Operation.SCATTER, Operation.BROADCAST)
_MIN_INLINE_NUMEL = INLINE_BYTES // max(dtype.itemsize for dtype in COLLECTIVE_DTYPES)
"""A call of so many elements is small in every dtype."""


def is_small(call: Call) -> bool:
    """Return True if every rank's data fits beside its header; not for ALL_TO_ALL, whose counts only headers have."""
    counts = call.counts
    numel = max(counts) if call.operation in _GATHERING else sum(counts)
    return numel <= _MIN_INLINE_NUMEL or numel * call.dtype.itemsize <= INLINE_BYTES


def run(agreement: Agreement, request: Request, deadline: float) -> None:
    """Make a small call; see `Backend.run`."""
    call, rank = request.call, agreement.rank
    operation, dtype, root = call.operation, call.dtype, call.root
    sent = None if operation is Operation.BROADCAST and rank != root else request.data
    index = agreement.exchange_headers(call, sent, deadline)
    out = request.target(rank)
    if out is None:
        return
    if operation in _GATHERING:
        _copy_inputs(agreement, index, out, call, [0] * len(call.counts), call.counts)
        return
    begin = partition_starts(call.counts)[rank] if operation in _SCATTERING else 0
    if operation in _COPYING:
        np.copyto(out, agreement.input(index, root, dtype, begin, out.size))
    else:
        assert call.op is not None
        ops.reduce_into(out, agreement.inputs(index, dtype, out.size, begin), call.op, dtype)


def all_to_all(agreement: Agreement, request: Request, index: int, inputs: Sequence[Sequence[int]]) -> None:
    """Finish an all-to-all whose headers were exchanged; `inputs`: by rank, the counts that it sends to each rank."""
    begins = [partition_starts(sent)[agreement.rank] for sent in inputs]
    _copy_inputs(agreement, index, required(request.output), request.call, begins, request.output_counts)


def _copy_inputs(
    agreement: Agreement, index: int, out: Array, call: Call, begins: Sequence[int], counts: Sequence[int]
) -> None:
    """Copy [begins[r], begins[r] + counts[r]) of rank r's data to partition r of out, for every r."""
    for r, (start, begin, count) in enumerate(zip(partition_starts(counts), begins, counts, strict=True)):
        np.copyto(out[start : start + count], agreement.input(index, r, call.dtype, begin, count))
