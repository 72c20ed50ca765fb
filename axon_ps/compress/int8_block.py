"""Arrays of `DType.INT8_BLOCK`: blocks of int8 as elements that collectives move and add up.

Owns: f32 numbers → blocks and back, and sums of blocks. A block is the result of `compress.int8` for 256 numbers, with
its scale beside it: 260 bytes. Zeros fill the last block. Importing this imports numba.

    shape legend: n = numbers, k = ceil(n / 256) blocks

Note: [Sums are rounded at random]
    A rank that makes blocks rounds to the nearest and adds the error to its next ones (error feedback). The process
    that adds blocks has no state between calls, and rounding to the nearest would always drop a small number beside a
    large one. So a sum is rounded up with the probability of its distance from the lower quant, which is right on
    average (Alistarh et al., 2017, "QSGD", https://arxiv.org/abs/1610.02132). The random bits come from a hash of the
    block's 256 sums, so the same contributions give the same bits in any process at any time.

Edge cases are those of `compress.int8`: a block with a NaN or an infinity becomes all NaN, and a block under 2^-100
becomes zeros.
"""

from __future__ import annotations

import numpy as np

from axon_ps.compress.compressor import blocks_of
from axon_ps.kernels import int8
from axon_ps.kernels.arrays import check_array, readonly
from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType

BLOCK = DType.INT8_BLOCK.numpy
_F32 = np.dtype(np.float32)
_SCALE_BYTES = 4


def empty(numel: int) -> Array:
    """Return blocks for so many numbers: BLOCK[ceil(numel / 256)], not initialised."""
    return np.empty(blocks_of(numel, INT8_BLOCK_NUMEL), BLOCK)


def encode(values: Array, blocks: Array, residual: Array | None = None) -> None:
    """Make blocks of numbers, rounded to the nearest.

    Args:
        values: f32[n]; read only.
        blocks: BLOCK[k], overwritten.
        residual: f32[n]; added to the values first, then set to the rounding error. None = drop the error.

    Raises:
        InvalidRequest: an array has another element type, length or layout than stated. Nothing has been changed.
    """
    _check_numbers("values", values, values.size, blocks)
    if residual is not None:
        _check_numbers("residual", residual, values.size, blocks)
    scales = np.empty(blocks.size, np.float32)
    if blocks.size and values.size % INT8_BLOCK_NUMEL:
        blocks["quants"][-1] = 0
    int8.quantise(readonly(values), residual, None, scales, _quants(blocks), INT8_BLOCK_NUMEL, BLOCK.itemsize)
    blocks["scale"] = scales


def decode(blocks: Array, values: Array) -> None:
    """Make numbers of blocks.

    Args:
        blocks: BLOCK[k]; may be read-only and unaligned, as cut from a received message.
        values: f32[n], overwritten.

    Raises:
        InvalidRequest: an array has another element type, length or layout than stated. Nothing has been changed.
    """
    _check_numbers("values", values, values.size, blocks)
    _add(blocks, values, first=True)


def accumulate(acc: Array, blocks: Array, *, first: bool) -> None:
    """Add blocks to a sum in f32.

    Args:
        acc: f32[k, 256], updated in place.
        blocks: BLOCK[k]; may be read-only and unaligned, as cut from a received message.
        first: whether `acc` is overwritten, whatever it held.

    Raises:
        InvalidRequest: an array has another element type, shape or layout than stated. Nothing has been changed.
    """
    _check_sums(acc, blocks)
    _add(blocks, acc.reshape(-1), first=first)


def encode_sums(acc: Array, blocks: Array) -> None:
    """Make blocks of sums. See Note: [Sums are rounded at random].

    Args:
        acc: f32[k, 256]; read only.
        blocks: BLOCK[k], overwritten.

    Raises:
        InvalidRequest: an array has another element type, shape or layout than stated. Nothing has been changed.
    """
    _check_sums(acc, blocks)
    scales = np.empty(blocks.size, np.float32)
    int8.quantise_at_random(readonly(acc.reshape(-1)), scales, _quants(blocks), INT8_BLOCK_NUMEL, BLOCK.itemsize)
    blocks["scale"] = scales


def warm_up() -> None:
    """Compile (or load from disk) the loops, on empty arrays."""
    blocks, values, acc = empty(0), np.empty(0, np.float32), np.empty((0, INT8_BLOCK_NUMEL), np.float32)
    encode(values, blocks)
    encode(values, blocks, values.copy())
    decode(blocks, values)
    encode_sums(acc, blocks)


def _add(blocks: Array, acc: Array, *, first: bool) -> None:
    scales = blocks["scale"].copy()  # without it, one block is read-only received memory: another loop
    int8.dequantise(scales, readonly(_quants(blocks)), acc, INT8_BLOCK_NUMEL, BLOCK.itemsize, first)


def _quants(blocks: Array) -> Array:
    """Return the blocks' bytes from the first quant on: those of block b begin at 260 b."""
    return blocks.view(np.int8)[_SCALE_BYTES:]


def _check_numbers(name: str, array: Array, numel: int, blocks: Array) -> None:
    check_array(name, array, _F32, (numel,))
    check_array("blocks", blocks, BLOCK, (blocks_of(numel, INT8_BLOCK_NUMEL),))


def _check_sums(acc: Array, blocks: Array) -> None:
    check_array("sums", acc, _F32, (blocks.size, INT8_BLOCK_NUMEL))
    check_array("blocks", blocks, BLOCK, (blocks.size,))
