"""The scales of tensors that lie in several chunks, against torch's float8."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from axon_ps.compress import Float8
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.tensor_scales import TensorScales
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array

TENSORS = [(40, True), (5, False), (7, True), (3, False), (10, False), (35, True)]
NUMEL = sum(numel for numel, _ in TENSORS)
COMPRESSOR = Float8(rest_bits=32).of(TENSORS)


def normals(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(NUMEL, dtype=np.float32)


def oracle(values: Array) -> Array:
    out, begin = values.copy(), 0
    for numel, float8 in TENSORS:
        if float8:
            x = torch.from_numpy(values[begin : begin + numel])
            scale = (448.0 / x.abs().max().double()).float()
            out[begin : begin + numel] = (x * scale).to(torch.float8_e4m3fn).float() / scale
        begin += numel
    return out


def unpacked(scales: TensorScales, chunks: Chunks, values: Array) -> Array:
    out = np.empty(NUMEL, np.float32)
    for index, (begin, end) in enumerate(chunks.bounds):
        COMPRESSOR.within(begin, end).decompress(scales.pack(index, values[begin:end]), out[begin:end])
    return out


@pytest.mark.parametrize("chunk_numel", [1, 8, 17, 64, 100])
def test_each_chunk_is_ready_once_with_the_scale_of_all_of_a_tensor(chunk_numel: int) -> None:
    chunks = Chunks(Slice(unit=0, server=0, begin=0, end=NUMEL), chunk_numel)
    scales, count = TensorScales(chunks, COMPRESSOR), len(chunks.bounds)
    for seed in range(3):
        values, order = normals(seed), np.random.default_rng(seed).permutation(count)
        scales.begin()
        added, ready = set[int](), list[int]()
        for index in order.tolist():
            added.add(index)
            now = scales.add(index, index + 1, values)
            ready += now
            for one in now:
                assert all(other in added for other in touching(chunks, one))
        assert sorted(ready) == list(range(count))
        assert unpacked(scales, chunks, values).tobytes() == oracle(values).tobytes()


def touching(chunks: Chunks, index: int) -> set[int]:
    """The chunks that have a float8 tensor in common with one."""
    ends = list(itertools.accumulate(numel for numel, _ in TENSORS))
    ranges = [(end - numel, end) for end, (numel, float8) in zip(ends, TENSORS, strict=True) if float8]

    def tensors(one: int) -> set[int]:
        begin, end = chunks.bounds[one]
        return {i for i, (first, last) in enumerate(ranges) if first < end and begin < last}

    return {other for other in range(len(chunks.bounds)) if tensors(other) & tensors(index)}


def test_threads_may_add_at_once() -> None:
    chunks = Chunks(Slice(unit=0, server=0, begin=0, end=NUMEL), 1)
    scales = TensorScales(chunks, COMPRESSOR)
    for seed in range(20):
        values, ready = normals(seed), list[int]()
        scales.begin()

        def add(first: int, values: Array = values, ready: list[int] = ready) -> None:
            for index in range(first, NUMEL, 4):
                ready.extend(scales.add(index, index + 1, values))

        threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ready) == list(range(NUMEL))
        assert unpacked(scales, chunks, values).tobytes() == oracle(values).tobytes()


def test_a_slice_in_the_middle_of_a_unit() -> None:
    chunks = Chunks(Slice(unit=0, server=1, begin=40, end=NUMEL), 9)
    scales, values = TensorScales(chunks, COMPRESSOR), normals(1)
    scales.begin()
    assert sorted(scales.add(0, len(chunks.bounds), values[40:])) == list(range(len(chunks.bounds)))
    out = np.empty(NUMEL - 40, np.float32)
    for index, (begin, end) in enumerate(chunks.bounds):
        compressor, here = COMPRESSOR.within(begin, end), slice(begin - 40, end - 40)
        compressor.decompress(scales.pack(index, values[begin:end]), out[here])
    assert out.tobytes() == oracle(values)[40:].tobytes()
