"""Rotated blocks of int4 against numpy: the bytes, what comes back, its error, edges, and what is refused.

Tests of `kernels/int4.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from axon_ps.compress import Int4
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

F32, C = np.float32, Int4()
SIZES = [0, 1, 31, 32, 33, 1000, 1023, 1024, 1025, 2048 + 100]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
H = np.ones((1, 1), np.int64)
for _ in range(5):
    H = np.block([[H, H], [H, -H]])
LARGEST = np.finfo(np.float32).max


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    C.warm_up()


def lowbias32(index: int) -> int:
    """Wellons' hash of an index times 2^32 / golden ratio, but for its last step, which leaves the highest bit."""
    bits = index * 0x9E37_79B9 % 2**32
    bits = (bits ^ bits >> 16) * 0x7FEB_352D % 2**32
    return (bits ^ bits >> 15) * 0x846C_A68B % 2**32


SIGNS = np.array([-1.0 if lowbias32(i) >> 31 else 1.0 for i in range(1024)], np.float32)


def normals(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def packed(values: Array, residual: Array | None = None) -> Array:
    out = np.full(C.compressed_bytes(values.size), 0xEE, np.uint8)
    C.compress(values, out, residual)
    return out


def unpacked(data: Array, numel: int) -> Array:
    out = np.full(numel, np.nan, np.float32)
    C.decompress(data, out)
    return out


def parts(data: Array, numel: int) -> tuple[Array, Array, Array]:
    """Scales of the tiles f32[t], codes u8[b], pairs u8[16 b]: views."""
    tiles, blocks = -(-numel // 1024), -(-numel // 32)
    return data[: 4 * tiles].view(np.float32), data[4 * tiles : 4 * tiles + blocks], data[4 * tiles + blocks :]


def rotated(values: Array) -> Array:
    """f32[b, 32]: means of ±numbers, added up in pairs, neighbours first, in f32."""
    blocks = np.pad(values, (0, -values.size % 32)) * np.resize(SIGNS, -(-values.size // 32) * 32) * F32(1 / 32)
    for bit in range(5):
        pairs = blocks.reshape(-1, 16 >> bit, 2, 1 << bit)
        blocks = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
    return blocks.reshape(-1, 32)


def scale(tile_scale: Array, code: int) -> Array:
    """The tile's scale times a float of 4 bits of exponent and 4 of mantissa, of which 254 is 1."""
    exponent, mantissa = divmod(code - 254, 16)
    return F32(tile_scale * F32(2.0**exponent * (1 + mantissa / 16))) if code else F32(0)


def oracle(values: Array) -> bytes:
    """The bytes of finite numbers, by numpy."""
    coefficients = rotated(values)
    largest = np.abs(coefficients).max(axis=1, initial=0)
    needed = np.where(largest < 2.0**-100, F32(0), largest / F32(7.5))
    scales, codes, pairs = [], [], []
    for first in range(0, needed.size, 32):
        tile_scale = needed[first : first + 32].max()
        quants = []
        for c, s in zip(coefficients[first : first + 32], needed[first : first + 32], strict=True):
            ratios = [(1 + mantissa / 16) * 2.0 ** (e - 16) for e in range(17) for mantissa in range(16)][2:257]
            code = max(1, int(np.searchsorted(ratios, F32(s / tile_scale)))) if s else 0
            codes.append(code)
            with np.errstate(divide="ignore"):
                inverse = F32(1) / scale(tile_scale, code) if code else F32(0)
            quants.append(np.clip(np.rint(c * inverse), -7, 7).astype(np.int8))
        scales.append(tile_scale)
        rows = np.array(quants).T & 15
        pairs.append((rows[:16] | rows[16:] << 4).astype(np.uint8).tobytes())
    return np.array(scales, np.float32).tobytes() + bytes(codes) + b"".join(pairs)


def expected(data: Array, numel: int) -> Array:
    """What data decompresses to, by a dense matrix of integers."""
    scales, codes, pairs = parts(data, numel)
    numbers = []
    for tile, tile_scale in enumerate(scales):
        own = codes[32 * tile : 32 * tile + 32]
        rows = pairs[512 * tile : 512 * tile + 16 * own.size].reshape(16, -1)
        quants = np.concatenate([rows & 15, rows >> 4]).astype(np.int64)
        sums = H @ (quants - 16 * (quants > 7))
        block_scales = np.array([scale(tile_scale, int(code)) for code in own], np.float32)
        numbers.append((sums.astype(np.float32) * block_scales).T.reshape(-1) * SIGNS[: 32 * own.size])
    return np.concatenate([*numbers, np.empty(0, np.float32)])[:numel].astype(np.float32)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_int4_is_what_numpy_makes(numel: int, spread: float) -> None:
    """Also where blocks of a tile are of very different size, by 2^spread or more."""
    values = normals(numel) * np.exp2(spread * normals(numel // 32 + 1, 1)).astype(np.float32).repeat(32)[:numel]
    data = packed(values)
    assert data.size == C.compressed_bytes(numel) == 4 * math.ceil(numel / 1024) + 17 * math.ceil(numel / 32)
    assert data.tobytes() == oracle(values)
    assert unpacked(data, numel).tobytes() == expected(data, numel).tobytes()


@pytest.mark.parametrize("numel", SIZES)
def test_the_residual_is_what_did_not_arrive_bit_for_bit(numel: int) -> None:
    values, residual = normals(numel), normals(numel, 1) * F32(0.1)
    total = values + residual
    data = packed(values, residual)
    assert data.tobytes() == packed(total).tobytes()
    assert residual.tobytes() == (total - unpacked(data, numel)).tobytes()


def test_bytes_of_many_numbers() -> None:
    assert C.compressed_bytes(1 << 18) / (1 << 18) <= 0.54
    assert C.compressed_bytes(0) == 0


@settings(max_examples=60)
@given(arrays(np.float32, st.integers(1, 70), elements=FINITE))
def test_finite_numbers_lose_at_most_half_a_seventh(values: Array) -> None:
    """Of the largest coefficient of a block, in the root mean square over it; or of the largest of a tile by 2^16."""
    data = packed(values)
    assert data.tobytes() == oracle(values)
    back = unpacked(data, values.size)
    assert np.isfinite(back).all()
    largest = np.abs(rotated(values)).max(axis=1).astype(np.float64)
    error = np.pad(back.astype(np.float64) - values, (0, -values.size % 32)).reshape(-1, 32)
    rms = np.sqrt((error**2).mean(axis=1) / 32)  # of coefficients, which are means and not of the length of numbers
    assert np.all(rms <= np.maximum(largest / 14, largest.max() * 2.0**-16 / 14) * 1.00001 + 2.0**-100)


def test_rotation_spreads_what_is_large() -> None:
    """Blocks of one large number, and of equal ones, are as good as any: their coefficients are alike."""
    spikes, ones = normals(1024) * F32(1e-3), np.ones(1024, np.float32)
    spikes[::32] = 1.0
    for values in (spikes, ones):
        assert ((unpacked(packed(values), 1024) - values) ** 2).sum() < 0.02 * (values**2).sum()


def test_the_error_is_a_hundredth_of_the_squares() -> None:
    for values in (normals(1 << 14), np.random.default_rng(1).laplace(size=1 << 14).astype(np.float32)):
        assert ((unpacked(packed(values), values.size) - values) ** 2).sum() < 0.0095 * (values**2).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [33, 1000, 1100])
def test_a_block_with_what_is_no_number_is_none(bad: float, numel: int) -> None:
    """Blocks beside it are as without it, and its residual stays."""
    values, residual, at = normals(numel), normals(numel, 1), numel - 1
    hit = np.arange(numel) // 32 == at // 32
    good, good_residual = values.copy(), residual.copy()
    good[hit] = good_residual[hit] = 0.0
    values[at] = bad
    before = residual.copy()
    back = unpacked(packed(values, residual), numel)
    assert np.isnan(back[hit]).all()
    assert back[~hit].tobytes() == unpacked(packed(good, good_residual), numel)[~hit].tobytes()
    assert residual[hit].tobytes() == before[hit].tobytes()
    assert residual[~hit].tobytes() == good_residual[~hit].tobytes()


def test_the_largest_and_the_smallest() -> None:
    for pattern in (np.ones(1100), SIGNS.repeat(2)[:1100], SIGNS[np.arange(1100) % 1024] * np.tile(H[5], 35)[:1100]):
        huge = (pattern * LARGEST).astype(np.float32)
        residual = np.zeros_like(huge)
        back = unpacked(packed(huge, residual), huge.size)
        assert np.isfinite(back).all()
        assert np.isfinite(residual).all()
        assert ((back / LARGEST - pattern) ** 2).mean() < 0.02
    for tiny in (1e-40, 2.0**-101):
        values, residual = np.full(40, tiny, np.float32), np.zeros(40, np.float32)
        data = packed(values, residual)
        assert not data.any()
        assert residual.tobytes() == values.tobytes()
    assert np.abs(unpacked(packed(normals(64) * F32(2.0**-90)), 64)).max() > 2.0**-91


def test_with_feedback_sums_differ_by_the_last_residual_alone() -> None:
    residual, sent, given_ = np.zeros(1100, np.float32), np.zeros(1100), np.zeros(1100)
    for step in range(50):
        values = normals(1100, step) * F32(1e-3)
        values[:32] *= F32(2.0**-20)  # far under the levels of its tile, at first
        sent += unpacked(packed(values, residual), 1100)
        given_ += values
    np.testing.assert_allclose(sent + residual, given_, atol=1e-7)


def test_received_bytes_may_be_read_only_and_unaligned() -> None:
    data = packed(normals(1100))
    received = np.frombuffer(b"x" + data.tobytes(), np.uint8)[1:]
    assert unpacked(received, 1100).tobytes() == unpacked(data, 1100).tobytes()
    C.check(received, 1100)
    memory = np.zeros(data.size + 1, np.uint8)
    C.compress(normals(1100), memory[1:])
    assert memory[1:].tobytes() == data.tobytes()


def broken(name: str) -> Array:
    """The bytes of 1100 numbers, zeros in the first block and the last tile, with what compress does not write."""
    values = normals(1100)
    values[:32] = values[1024:] = 0.0
    data = packed(values)
    scales, codes, pairs = parts(data, 1100)
    if name == "lower quant":
        pairs[5] = pairs[5] & 0xF0 | 8
    elif name == "upper quant":
        pairs[5] = pairs[5] & 0x0F | 0x80
    elif name == "quant of zeros":
        pairs[32] = 1
    elif name == "quant of the last tile":
        pairs[-1] = 0x10
    elif name == "quant beside a NaN":
        codes[1] = 255
    elif name == "no block of the tile's scale":
        codes[codes == 254] = 253
    elif name == "code in a tile of zeros":
        codes[-1] = 1
    else:
        scales[int(name.startswith("last"))] = float(name.split()[-1])
    return data


@pytest.mark.parametrize(
    "name",
    [
        *("lower quant", "upper quant", "quant of zeros", "quant of the last tile", "quant beside a NaN"),
        *("no block of the tile's scale", "code in a tile of zeros", "last 1", "last nan", "last -0.0"),
        *("first nan", "first inf", "first -1", "first 0", "first 1e-40", "first 3e38"),
    ],
)
def test_what_compress_does_not_write_changes_nothing(name: str) -> None:
    data, acc = broken(name), np.ones(1100, np.float32)
    with pytest.raises(InvalidRequest, match="corrupt"):
        C.check(data, 1100)
    for call in (C.decompress, C.accumulate):
        with pytest.raises(InvalidRequest, match="corrupt"):
            call(data, acc)
    assert (acc == 1).all()


@settings(max_examples=60)
@given(st.integers(1, 1100), st.binary(min_size=8, max_size=64))
def test_any_bytes_are_refused_or_numbers(numel: int, pattern: bytes) -> None:
    data = np.resize(np.frombuffer(pattern, np.uint8), C.compressed_bytes(numel))
    memory = np.full(numel + 64, 7.0, np.float32)
    try:
        C.decompress(data, memory[32:-32])
    except InvalidRequest:
        assert (memory == 7).all()
    assert (memory[:32] == 7).all()
    assert (memory[-32:] == 7).all()
