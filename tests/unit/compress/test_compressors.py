"""Compressors against numpy, and what must hold for all of them.

Tests of `compress/floats.py` and `kernels/top_k.py`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from axon_ps.compress import BF16, Int8
from axon_ps.compress.compressor import Compressor, selected_numel
from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

ALL = [compressor("int8"), compressor("int8", block_numel=16), compressor("top_k", fraction=0.1)]
ALL += [compressor("int4"), compressor("bf16"), compressor("fp16"), compressor("float8_e4m3")]
ALL += [compressor("block_top_k", fraction=0.1, bits=bits) for bits in (2, 3, 4)]
NAMES = [f"{c.name}-{i}" for i, c in enumerate(ALL)]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
F32 = np.float32


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    for c in ALL:
        c.warm_up()


def normals(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def packed(c: Compressor, values: Array, residual: Array | None = None) -> Array:
    out = np.full(c.compressed_bytes(values.size), 0xEE, np.uint8)
    c.compress(values, out, residual)
    return out


def unpacked(c: Compressor, data: Array, numel: int) -> Array:
    out = np.full(numel, np.nan, np.float32)
    c.decompress(data, out)
    return out


def int8_oracle(values: Array, block: int) -> tuple[Array, Array]:
    """Scales and quants by numpy, in the same f32 operations."""
    scales, quants = [], []
    for start in range(0, values.size, block):
        part = values[start : start + block]
        scale = F32(np.abs(part).max() / F32(127))
        if np.abs(part).max() < 2.0**-100:
            scale, q = F32(0), np.zeros(part.size)
        else:
            q = np.rint(part * F32(F32(1) / scale))
        scales.append(scale)
        quants.append(q.astype(np.int8))
    return np.array(scales, np.float32), np.concatenate(quants) if quants else np.empty(0, np.int8)


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000, 4097])
def test_int8_is_what_numpy_makes(numel: int) -> None:
    c, values = compressor("int8", block_numel=16), normals(numel)
    data = packed(c, values)
    scales, quants = int8_oracle(values, 16)
    assert data.size == c.compressed_bytes(numel) == 4 * math.ceil(numel / 16) + numel
    assert data.tobytes() == scales.tobytes() + quants.tobytes()
    expected = np.repeat(scales, 16)[:numel] * quants.astype(np.float32)
    assert unpacked(c, data, numel).tobytes() == expected.tobytes()


@settings(max_examples=60)
@given(arrays(np.float32, st.integers(1, 70), elements=FINITE))
def test_int8_loses_at_most_half_a_scale(values: Array) -> None:
    c = compressor("int8", block_numel=16)
    back = unpacked(c, packed(c, values), values.size)
    largest = np.repeat(np.maximum.reduceat(np.abs(values), np.arange(0, values.size, 16)), 16)[: values.size]
    assert np.all(np.abs(back - values) <= largest * (0.5 / 127 * 1.0001) + 2.0**-100)


def test_int8_keeps_what_is_exact() -> None:
    values = np.arange(-127, 128, dtype=np.float32) * F32(0.25)
    c = compressor("int8")
    assert unpacked(c, packed(c, values), values.size).tobytes() == values.tobytes()
    huge = np.full(20, np.finfo(np.float32).max, np.float32)
    assert np.all(np.isfinite(unpacked(c, packed(c, huge), 20)))
    tiny = np.full(20, 1e-40, np.float32)
    residual = np.zeros(20, np.float32)
    assert not unpacked(c, packed(c, tiny, residual), 20).any()
    assert residual.tobytes() == tiny.tobytes()


@settings(max_examples=60)
@given(
    arrays(np.float32, st.integers(0, 70), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e-42, 7e8])),
    st.sampled_from([0.001, 0.1, 0.5, 1.0]),
)
def test_top_k_takes_the_largest_and_of_equals_the_first(values: Array, fraction: float) -> None:
    c = compressor("top_k", fraction=fraction)
    k = selected_numel(values.size, fraction)
    chosen = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    data = packed(c, values)
    assert data.tobytes() == chosen.astype(np.uint32).tobytes() + values[chosen].tobytes()
    expected = np.zeros(values.size, np.float32)
    expected[chosen] += values[chosen]
    assert unpacked(c, data, values.size).tobytes() == expected.tobytes()


@pytest.mark.parametrize("numel", [300, 20011])
def test_top_k_of_many(numel: int) -> None:
    values = normals(numel)
    data = packed(compressor("top_k", fraction=0.01), values)
    k = selected_numel(numel, 0.01)
    assert data[: 4 * k].view(np.uint32).tolist() == sorted(np.argsort(-np.abs(values), kind="stable")[:k].tolist())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_casts_are_those_of_ml_dtypes(name: str) -> None:
    values = normals(1000)
    oracle = values.astype({"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[name])
    assert packed(compressor(name), values).tobytes() == oracle.tobytes()


@pytest.mark.parametrize("c", ALL, ids=NAMES)
def test_the_compression_error_is_in_the_residual(c: Compressor) -> None:
    values, residual = normals(1000), normals(1000, 1) * F32(0.01)
    total = values + residual
    back = unpacked(c, packed(c, values, residual), 1000)
    assert residual.tobytes() == (total - back).tobytes()


@pytest.mark.parametrize("c", ALL, ids=NAMES)
@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_the_residual_may_go_to_another_array(c: Compressor, bad: float) -> None:
    values, residual, residual_out = normals(1000), normals(1000, 1) * F32(0.01), np.empty(1000, np.float32)
    values[[3, 30]] = 1e-38, bad
    before, data = residual.copy(), np.empty(c.compressed_bytes(1000), np.uint8)
    c.compress(values, data, residual, residual_out)
    assert residual.tobytes() == before.tobytes()
    assert packed(c, values, residual).tobytes() == data.tobytes()
    assert residual.tobytes() == residual_out.tobytes()


@pytest.mark.parametrize("c", ALL, ids=NAMES)
def test_with_feedback_the_error_does_not_add_up_over_time(c: Compressor) -> None:
    residual, sent, given_ = np.zeros(500, np.float32), np.zeros(500), np.zeros(500)
    for step in range(40):
        values = normals(500, step)
        back = unpacked(c, packed(c, values, residual), 500)
        sent, given_ = sent + back, given_ + values
    assert np.abs(sent + residual - given_).max() < 1e-4


@pytest.mark.parametrize("c", ALL, ids=NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_is_not_carried(c: Compressor, bad: float) -> None:
    values, residual = normals(100), np.full(100, 0.5, np.float32)
    values[37] = bad
    data = packed(c, values, residual)
    back = unpacked(c, data, 100)
    assert not np.all(np.isfinite(back))
    assert np.all(np.isfinite(residual))
    acc = np.zeros(100, np.float32)
    c.accumulate(data, acc)
    assert not math.isfinite(float((acc.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("c", ALL, ids=NAMES)
def test_accumulate_adds(c: Compressor) -> None:
    acc, data = normals(1000, 5), packed(c, normals(1000))
    expected = acc + unpacked(c, data, 1000)
    received = np.frombuffer(b"xyz" + data.tobytes(), np.uint8)[3:]  # read-only and unaligned
    c.accumulate(received, acc)
    assert acc.tobytes() == expected.tobytes()


@pytest.mark.parametrize("c", ALL, ids=NAMES)
def test_wrong_arrays_are_refused(c: Compressor) -> None:
    values, data = normals(64), np.empty(c.compressed_bytes(64), np.uint8)
    calls: list[Callable[[], None]] = [
        lambda: c.compress(values.astype(np.float64), data),
        lambda: c.compress(values, data[:-1]),
        lambda: c.compress(values, data, np.zeros(63, np.float32)),
        lambda: c.compress(normals(128)[::2], data),
        lambda: c.decompress(data[:-1], values),
        lambda: c.accumulate(data, normals(200)),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()


@pytest.mark.parametrize("indices", [[3, 3], [4, 1], [1, 20], [0, 2**32 - 1]])
def test_top_k_writes_nowhere_else(indices: list[int]) -> None:
    data = np.concatenate([np.array(indices, np.uint32).view(np.uint8), np.ones(2, np.float32).view(np.uint8)])
    acc = np.zeros(20, np.float32)
    with pytest.raises(InvalidRequest, match="corrupt"):
        compressor("top_k", fraction=0.1).accumulate(data, acc)
    assert not acc.any()


def test_options_are_checked() -> None:
    for name, options in (("int8", {"block_numel": 8}), ("top_k", {"fraction": 0.0}), ("top_k", {"fraction": 1.5})):
        with pytest.raises(InvalidRequest):
            compressor(name, **options)
    with pytest.raises(InvalidRequest, match="unknown"):
        compressor("zip")
    with pytest.raises(InvalidRequest, match="does not take"):
        compressor("bf16", fraction=0.1)


def test_a_compressor_is_its_name_and_options() -> None:
    for c in ALL:
        assert compressor(c.name, **c.options) == c
        assert hash(compressor(c.name, **c.options)) == hash(c)
    assert compressor("int8") != compressor("int8", block_numel=64) != compressor("top_k")
    assert compressor("int8", block_numel=64.0) == Int8(64)
    assert (str(Int8(64)), str(BF16()), BF16().options) == ("int8 in blocks of 64", "bf16", {})
    with pytest.raises(InvalidRequest, match="option block_numel of compressor 'int8' is 64.5; it must be an integer"):
        compressor("int8", block_numel=64.5)
    for number in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(InvalidRequest, match=f"block_numel of .* is {number}; it must be an integer"):
            compressor("int8", block_numel=number)
    with pytest.raises(InvalidRequest, match="option fraction of compressor 'top_k' is 'half'; it must be a number"):
        compressor("top_k", fraction="half")  # type: ignore[arg-type]


def test_importing_compressors_imports_no_numba() -> None:
    code = "import sys; from axon_ps.compress.registry import compressor"
    code += "; [compressor(name) for name in ('int8', 'int4', 'top_k')]"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'numba' not in sys.modules"], check=True)
