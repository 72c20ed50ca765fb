"""Compression on the device writes the bytes that compression on the host does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from axon_ps.compress import int8_block
from axon_ps.compress.registry import compressor
from axon_ps.parallel.comm_hooks import device_codecs
from axon_ps.types import INT8_BLOCK_NUMEL, Array

SIZES = [1, 255, 256, 1000, 4096 + 17]


def numbers(numel: int, kind: str) -> Array:
    """f32[numel], with what may go wrong in some blocks."""
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    if kind == "edges":
        values[: numel // 4] *= np.float32(1e-35)
        values[-1] = np.finfo(np.float32).max
        values[numel // 2] = 0.0
    elif kind == "ties":
        values = np.round(values)
    elif kind == "not finite":
        values[numel // 3], values[-1] = np.nan, np.inf
    return values


@pytest.mark.parametrize("kind", ["plain", "edges", "ties", "not finite"])
@pytest.mark.parametrize("numel", SIZES)
def test_blocks_are_those_of_the_host(numel: int, kind: str) -> None:
    values, residual = numbers(numel, kind), 0.1 * numbers(numel, "plain")[::-1].copy()
    theirs, host_residual = int8_block.empty(numel), residual.copy()
    int8_block.encode(values, theirs, host_residual)
    blocks = torch.empty(-(-numel // INT8_BLOCK_NUMEL), device_codecs.BLOCK_BYTES, dtype=torch.uint8)
    device_residual = torch.from_numpy(residual.copy())
    device_codecs.encode_blocks(torch.from_numpy(values), blocks, device_residual)
    expected = theirs.view(np.uint8).reshape(blocks.shape)
    np.testing.assert_array_equal(blocks.numpy()[:, 4:], expected[:, 4:])
    np.testing.assert_array_equal(blocks[:, :4].contiguous().view(torch.float32).numpy()[:, 0], theirs["scale"])
    np.testing.assert_array_equal(device_residual.numpy(), host_residual)
    out, numpys = torch.empty(numel), np.empty(numel, np.float32)
    device_codecs.decode_blocks(blocks, out)
    int8_block.decode(theirs, numpys)
    np.testing.assert_array_equal(out.numpy(), numpys)


@pytest.mark.parametrize("kind", ["plain", "ties", "not finite"])
@pytest.mark.parametrize("numel", SIZES)
def test_a_top_k_is_that_of_the_host(numel: int, kind: str) -> None:
    host = compressor("top_k", fraction=0.1)
    values, residual = numbers(numel, kind), 0.1 * numbers(numel, "ties")[::-1].copy()
    theirs, host_residual = np.empty(host.compressed_bytes(numel), np.uint8), residual.copy()
    host.compress(values, theirs, host_residual)
    out, device_residual = torch.empty(theirs.size, dtype=torch.uint8), torch.from_numpy(residual.copy())
    device_codecs.top_k(torch.from_numpy(values), out, device_residual)
    split = theirs.size // 2
    np.testing.assert_array_equal(out.numpy()[:split], theirs[:split])
    np.testing.assert_array_equal(out.numpy()[split:].view(np.float32), theirs[split:].copy().view(np.float32))
    np.testing.assert_array_equal(device_residual.numpy(), host_residual)
    for first in (True, False):
        mine, others = torch.ones(numel), np.ones(numel, np.float32)
        device_codecs.expand_top_k(out, mine, first=first)
        (host.decompress if first else host.accumulate)(theirs, others)
        np.testing.assert_array_equal(mine.numpy(), others)
