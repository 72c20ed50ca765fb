"""Casts against torch's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.compress.cast import decode, encode, warm_up
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array, DType

TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
QUIET = {DType.BF16: 0x0040, DType.F16: 0x0200}


def encoded(values: Array, dtype: DType) -> Array:
    """Our encoding, as unsigned bits."""
    out = np.zeros(values.size, dtype.numpy)
    encode(values, out, dtype)
    return out.view(np.uint16)


def torchs(values: Array, dtype: DType) -> Array:
    """torch's encoding, as unsigned bits."""
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)


def check(bits: Array, dtype: DType) -> None:
    """Ours has torch's bits; NaN (of which torch keeps the payload on some machines only) becomes a quiet one."""
    values = bits.astype(np.uint32).view(np.float32)
    ours, nan = encoded(values, dtype), np.isnan(values)
    assert (ours[~nan] == torchs(values, dtype)[~nan]).all()
    assert np.isnan(torch.from_numpy(ours[nan].view(np.int16)).view(TORCH[dtype]).float().numpy()).all()
    assert (ours[nan] & QUIET[dtype]).all()
    assert (ours[nan] >> 15 == bits[nan] >> 31).all()


@pytest.mark.parametrize("dtype", list(TORCH))
def test_encode_every_upper_half_with_every_kind_of_lower_half(dtype: DType) -> None:
    """All 2^16 signs, exponents and upper mantissas: exact, just over, ties and just under the next."""
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    for lower in (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF):
        check(upper | np.uint32(lower), dtype)


def test_encode_f16_around_every_f16_and_every_tie() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves + np.append(halves[1:], np.float32(65536))) / 2
    for values in (halves, ties):
        bits = values.view(np.uint32)
        for step in (-1, 0, 1):
            check((bits.astype(np.int64) + step).clip(0).astype(np.uint32), DType.F16)
            check((bits.astype(np.int64) + step).clip(0).astype(np.uint32) | np.uint32(0x8000_0000), DType.F16)


@pytest.mark.parametrize("dtype", list(TORCH))
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_encode_any_bits(dtype: DType, bits: list[int]) -> None:
    check(np.array(bits, np.uint32), dtype)


@pytest.mark.parametrize(
    ("dtype", "value", "bits"),
    [
        (DType.F16, 65519.996, 0x7BFF),  # the last that rounds down
        (DType.F16, 65520.0, 0x7C00),  # the tie with infinity
        (DType.F16, -1e30, 0xFC00),
        (DType.F16, 2.0**-24, 0x0001),  # the least subnormal
        (DType.F16, 2.0**-25, 0x0000),  # the tie with zero
        (DType.F16, 2.0**-25 * 1.001, 0x0001),
        (DType.F16, 2.0**-14, 0x0400),  # the least normal
        (DType.F16, 2.0**-14 - 2.0**-26, 0x0400),  # rounds up into it
        (DType.F16, -0.0, 0x8000),
        (DType.BF16, -0.0, 0x8000),
        (DType.BF16, 3.4028234e38, 0x7F80),  # the largest f32
        (DType.BF16, 1.0 + 2.0**-8, 0x3F80),  # a tie, to even
        (DType.BF16, 1.0 + 3 * 2.0**-8, 0x3F82),  # a tie, to even
        (DType.BF16, 1e-45, 0x0000),
    ],
)
def test_encode_edges(dtype: DType, value: float, bits: int) -> None:
    assert encoded(np.array([value], np.float32), dtype).tolist() == [bits]


@pytest.mark.parametrize("dtype", list(TORCH))
def test_decode_everything(dtype: DType) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    ours = np.empty(2**16, np.float32)
    decode(bits.view(dtype.numpy), ours, dtype)
    theirs = torch.from_numpy(bits.view(np.int16)).view(TORCH[dtype]).float().numpy()
    nan = np.isnan(theirs)
    assert (ours[~nan].view(np.uint32) == theirs[~nan].view(np.uint32)).all()
    assert np.isnan(ours[nan]).all()
    assert (encoded(ours, dtype)[~nan] == bits[~nan]).all()


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("numel", [0, 1, 7, 63, 64, 65, 1000])
def test_sizes_and_unaligned_bytes(dtype: DType, numel: int) -> None:
    values = np.random.default_rng(numel).standard_normal(numel, dtype=np.float32)
    wire = np.zeros(numel, dtype.numpy)
    encode(values, wire, dtype)
    received = np.frombuffer(b"x" + wire.tobytes(), dtype.numpy, offset=1)
    aligned, unaligned = np.empty(numel, np.float32), np.empty(numel, np.float32)
    decode(wire, aligned, dtype)
    decode(received, unaligned, dtype)
    assert aligned.tobytes() == unaligned.tobytes()
    np.testing.assert_allclose(aligned, values, rtol=2.0**-8 if dtype is DType.BF16 else 2.0**-11, atol=2.0**-25)


def test_warm_up() -> None:
    for dtype in (DType.F32, DType.BF16, DType.F16):
        warm_up(dtype)


@pytest.mark.parametrize(
    ("src", "dst", "dtype", "words"),
    [
        (np.zeros(8, np.float32), np.zeros(8, np.int64), DType.I64, "the wire dtype of arrays is 'i64'; use one of"),
        (np.zeros(8, np.float32), np.zeros(9, np.uint16), DType.BF16, r"dst is uint16\[9\]"),
        (np.zeros(8, np.float32), np.zeros(8, np.float16), DType.BF16, r"dst is float16\[8\]"),
        (np.zeros(8, np.float64), np.zeros(8, np.uint16), DType.BF16, r"src is float64\[8\]"),
        (np.zeros((2, 4), np.float32), np.zeros(8, np.uint16), DType.BF16, r"src is float32\[2, 4\]"),
        (np.zeros(16, np.float32)[::2], np.zeros(8, np.uint16), DType.BF16, "contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(src: Array, dst: Array, dtype: DType, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        encode(src, dst, dtype)
