"""The largest magnitudes of every block, against numpy.

Tests of `compress/block_top_k.py` and `kernels/block_top_k.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.compress import BlockTopK
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

BLOCK = 4096


def normals(numel: int) -> Array:
    return np.random.default_rng(numel).standard_normal(numel, dtype=np.float32)


def there_and_back(c: BlockTopK, values: Array, residual: Array | None = None) -> Array:
    data = np.full(c.compressed_bytes(values.size), 0xEE, np.uint8)
    c.compress(values, data, residual)
    c.check(data, values.size)
    out = np.full(values.size, np.nan, np.float32)
    c.decompress(data, out)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_of_every_block_the_largest_are_sent_within_half_a_level(numel: int, bits: int) -> None:
    c, values = BlockTopK(bits=bits), normals(numel)
    back = there_and_back(c, values)
    for begin in range(0, numel, BLOCK):
        own, got = values[begin : begin + BLOCK], back[begin : begin + BLOCK]
        k = math.ceil(own.size / 64)
        chosen = np.sort(np.argsort(-np.abs(own), kind="stable")[:k])
        assert np.flatnonzero(got).tolist() == chosen.tolist()
        sent = np.abs(own[chosen])
        half = (sent.max() - sent.min()) / 2 ** (bits - 1) / 2
        assert np.all(np.sign(got[chosen]) == np.sign(own[chosen]))
        assert np.all(np.abs(got[chosen] - own[chosen]) <= half * 1.0001 + 1e-7)


def test_it_is_as_small_as_it_says() -> None:
    numel = 64 * BLOCK
    assert BlockTopK().compressed_bytes(numel) == 64 * (8 + 64 * 14 // 8)
    assert 4 * numel / BlockTopK().compressed_bytes(numel) > 136
    assert BlockTopK().compressed_bytes(0) == 0


@settings(max_examples=40)
@given(st.integers(1, 9000), st.sampled_from([0.001, 1 / 64, 0.3, 1.0]), st.sampled_from([2, 4]), st.integers(0, 9))
def test_what_is_not_sent_is_in_the_residual(numel: int, fraction: float, bits: int, seed: int) -> None:
    c, rng = BlockTopK(fraction=fraction, bits=bits), np.random.default_rng(seed)
    values, residual = rng.standard_normal((2, numel), dtype=np.float32)
    total, after = values + residual, np.empty(numel, np.float32)
    data = np.empty(c.compressed_bytes(numel), np.uint8)
    c.compress(values, data, residual, after)
    sent = np.empty(numel, np.float32)
    c.decompress(data, sent)
    np.testing.assert_allclose(sent + after, total, rtol=1e-6, atol=1e-6)
    in_place = residual.copy()
    again = np.empty_like(data)
    c.compress(values, again, in_place)
    assert again.tobytes() == data.tobytes()
    assert in_place.tobytes() == after.tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_and_keeps_its_residual(bad: float) -> None:
    c, values = BlockTopK(fraction=0.01), normals(2 * BLOCK)
    values[BLOCK + 5] = bad
    residual = np.full(values.size, 0.25, np.float32)
    back = there_and_back(c, values, residual)
    assert np.isfinite(back[:BLOCK]).all()
    assert np.isnan(back[BLOCK:]).sum() == math.ceil(BLOCK * 0.01)
    assert (residual[BLOCK:] == 0.25).all()
    assert not (residual[:BLOCK] == 0.25).any()


@settings(max_examples=300)
@given(st.binary(min_size=8 + 4, max_size=8 + 4))
def test_other_bytes_are_refused_or_decompress_within_the_array(data: bytes) -> None:
    c = BlockTopK(fraction=0.02)  # two of a hundred numbers
    assert c.compressed_bytes(100) == len(data)
    acc = np.ones(100, np.float32)
    try:
        c.accumulate(np.frombuffer(data, np.uint8), acc)
    except InvalidRequest:
        assert (acc == 1.0).all()
    else:
        assert (acc != 1.0).sum() <= 2


@pytest.mark.parametrize("options", [{"fraction": 0.0}, {"fraction": 1.5}, {"bits": 1}, {"bits": 5}])
def test_options_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        BlockTopK(**options)  # type: ignore[arg-type]
