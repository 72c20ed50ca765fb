"""float8 e4m3 against torch's casts. Tests of `compress/float8.py` and `kernels/float8.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from axon_ps.compress import Float8
from axon_ps.compress.compressor import Compressor
from axon_ps.compress.float8 import scale_of
from axon_ps.errors import InvalidRequest
from axon_ps.kernels import float8
from axon_ps.types import Array


def normals(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def packed(c: Compressor, values: Array) -> Array:
    out = np.full(c.compressed_bytes(values.size), 0xEE, np.uint8)
    c.compress(values, out)
    return out


def unpacked(c: Compressor, data: Array, numel: int) -> Array:
    out = np.full(numel, np.nan, np.float32)
    c.decompress(data, out)
    return out


def torch_scale(x: torch.Tensor) -> torch.Tensor:
    """torchao's `tensor_to_scale`, dynamic and by tensor."""
    return (torch.finfo(torch.float8_e4m3fn).max / x.abs().max().double().clamp(min=1e-12)).float()


def test_codes_are_those_of_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    subnormal = np.arange(-3000, 3000, dtype=np.float32) / np.float32(1 << 14)
    ties = np.arange(-4096, 4096, dtype=np.float32) / np.float32(8)
    edges = np.array([448, 463.9, 464, 465, 1e9, math.inf, 0.0, 2**-10, 2**-9 * 1.5, 2**-6], np.float32)
    values = np.concatenate([bits, subnormal, ties, edges, -edges])
    codes = np.empty(values.size, np.uint8)
    float8.quantise(values, np.float32(1), codes)
    of_torch = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    nan = np.isnan(values)
    assert codes[~nan].tobytes() == of_torch[~nan].tobytes()
    assert np.all(codes[nan] & 0x7F == 0x7F)


def test_all_numbers_are_those_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    data = np.concatenate([np.ones(1, np.float32).view(np.uint8), codes])
    of_torch = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(unpacked(Float8(), data, 256), of_torch)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-11, 1e-20, 1e30])
def test_a_tensor_is_scaled_as_by_torchao(size: float) -> None:
    values = normals(5000) * np.float32(size)
    data = packed(Float8(), values)
    x = torch.from_numpy(values)
    scale = torch_scale(x)
    codes = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert data.tobytes() == scale.numpy().tobytes() + codes.view(torch.uint8).numpy().tobytes()
    assert unpacked(Float8(), data, 5000).tobytes() == (codes.float() / scale).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_arrived_has_the_same_float8_numbers_when_it_is_quantised_again(dtype: torch.dtype) -> None:
    for seed in range(20):
        values = normals(3000, seed) * np.float32(0.02 * (1 + seed))
        data = packed(Float8(), values)
        arrived = torch.from_numpy(unpacked(Float8(), data, 3000)).to(dtype).float()
        again = (arrived * torch_scale(arrived)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert again.view(torch.uint8).numpy().tobytes() == data[4:].tobytes()


@pytest.mark.parametrize(("rest_bits", "dtype"), [(16, torch.bfloat16), (32, torch.float32)])
def test_tensors_have_a_scale_each_and_others_their_numbers(rest_bits: int, dtype: torch.dtype) -> None:
    sizes = [(300, True), (7, False), (11, True), (20, False)]
    c, values = Float8(rest_bits).of(sizes), normals(338) * np.float32(3)
    data = packed(c, values)
    assert data.size == c.compressed_bytes(338) == 2 * 4 + 311 + 27 * rest_bits // 8
    expected = []
    for (_, is_float8), x in zip(sizes, torch.from_numpy(values).split([n for n, _ in sizes]), strict=True):
        scale = torch_scale(x)
        expected.append((x * scale).to(torch.float8_e4m3fn).float() / scale if is_float8 else x.to(dtype).float())
    assert unpacked(c, data, 338).tobytes() == torch.cat(expected).numpy().tobytes()
    acc = values.copy()
    c.accumulate(data, acc)
    assert acc.tobytes() == (values + torch.cat(expected).numpy()).tobytes()


def test_edges() -> None:
    c = Float8()
    for bad in (math.nan, math.inf, -math.inf):
        values = normals(50)
        values[17] = bad
        assert np.all(np.isnan(unpacked(c, packed(c, values), 50)))
    huge = np.full(20, np.finfo(np.float32).max, np.float32)
    assert np.all(np.isfinite(unpacked(c, packed(c, huge), 20)))
    assert not unpacked(c, packed(c, np.zeros(20, np.float32)), 20).any()
    assert scale_of(0) == scale_of(1) == np.float32(448e12)


def test_options_and_sizes_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="rest_bits is 8; it must be 16"):
        Float8(8)
    with pytest.raises(InvalidRequest, match="an array of 30 elements came where tensors of 20 are needed"):
        Float8().of([(20, True)]).compressed_bytes(30)
    assert "linear layers as bf16" in str(Float8())
