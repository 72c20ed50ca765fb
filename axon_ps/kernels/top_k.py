"""The compiled loops of `compress.top_k`, which checks arguments. These do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled

MAGNITUDE, INFINITY = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
U0, U10, U20 = np.uint32(0), np.uint32(10), np.uint32(20)
LOW = np.uint32(0x3FF)


@compiled
def _cut(counts: Any, wanted: Any) -> Any:
    """Return the bucket of the `wanted`-th largest value, and the number of values wanted of that bucket."""
    bucket = counts.size - 1
    while counts[bucket] < wanted:
        wanted -= counts[bucket]
        bucket -= 1
    return np.uint32(bucket), wanted


@compiled
def _select(values: Any, indices: Any, selected: Any) -> None:
    """Select the largest magnitudes of finite values, in the order of their indices."""
    counts = np.zeros(2048, np.int64)  # by the top 11 bits of a magnitude, then the next 10, then the last 10
    for i in range(values.size):
        counts[np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE) >> U20] += 1
    high, wanted = _cut(counts, indices.size)
    counts = np.zeros(1024, np.int64)
    for i in range(values.size):
        bits = np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE)
        if np.uint32(bits >> U20) == high:
            counts[np.uint32(bits >> U10) & LOW] += 1
    middle, wanted = _cut(counts, wanted)
    prefix = np.uint32(np.uint32(high << U10) | middle)
    counts = np.zeros(1024, np.int64)
    for i in range(values.size):
        bits = np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE)
        if np.uint32(bits >> U10) == prefix:
            counts[bits & LOW] += 1
    low, wanted = _cut(counts, wanted)
    threshold = np.uint32(np.uint32(prefix << U10) | low)
    position = 0
    for i in range(values.size):
        bits = np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE)
        if bits >= threshold:
            if bits == threshold:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[position] = i
            selected[position] = values[i]
            position += 1


@compiled
def select(values: Any, residual: Any, indices: Any, selected: Any) -> None:
    """Select the top-k of values (+ residual). The residual, if there is one, becomes the rest."""
    if indices.size == 0:
        return
    largest = U0
    if residual is not None:
        for i in range(values.size):
            largest = max(largest, np.uint32(np.float32(values[i] + residual[i]).view(np.uint32) & MAGNITUDE))
    else:
        for i in range(values.size):
            largest = max(largest, np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE))
    if largest >= INFINITY:
        for j in range(indices.size):
            indices[j] = j
            selected[j] = np.nan
        return
    if residual is not None:
        for i in range(values.size):
            residual[i] += values[i]
        _select(residual, indices, selected)
        for j in range(indices.size):
            residual[indices[j]] = np.float32(0.0)
    else:
        _select(values, indices, selected)


@compiled
def scatter(indices: Any, selected: Any, acc: Any, first: bool) -> Any:
    """Set acc = 0 if `first`, then acc[indices] += selected; False, without change, unless indices ascend below n."""
    below = np.int64(-1)
    for j in range(indices.size):
        index = np.int64(indices[j])
        if index <= below:
            return False
        below = index
    if below >= acc.size:
        return False
    if first:
        for i in range(acc.size):
            acc[i] = np.float32(0.0)
    for j in range(indices.size):
        acc[indices[j]] += selected[j]
    return True
