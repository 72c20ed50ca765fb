"""Compression of gradients that are in device memory, on the device: blocks of int8, and top-k.

Owns: compression by torch's operations on the device, to the same bytes as `compress.int8_block` and `compress.top_k`
write. So only compressed bytes are copied to the host. Refuses: to add blocks up; the receiver does, in host memory.

    shape legend: n = numbers, k = ceil(n / 256) blocks, m = numbers that a top-k selects

Edge cases are those of the two modules. A block with a NaN or an infinity becomes all NaN, and its residual is
unchanged. A block whose magnitudes are all under 2^-100 becomes zeros. If the numbers of a top-k are not all finite,
its values are NaN and the residual is unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axon_ps.types import INT8_BLOCK_NUMEL

BLOCK_BYTES = 4 + INT8_BLOCK_NUMEL
"""Bytes of a block: its scale, f32, and its quants."""

_TINY, _LARGEST = 2.0**-100, 127.0


def encode_blocks(values: Tensor, blocks: Tensor, residual: Tensor | None = None) -> None:
    """Make blocks of numbers, rounded to the nearest.

    Args:
        values: f32[n]; read only.
        blocks: u8[k, 260], overwritten.
        residual: f32[n]; added to the values first, then set to the rounding error. None = drop the error.
    """
    total = values if residual is None else values + residual
    rows = _rows(total)
    largest = rows.abs().amax(1)
    finite, tiny = torch.isfinite(largest), largest < _TINY
    # divided by a tensor: CUDA multiplies by the reciprocal of a number, which can differ in the last bit
    scale = largest / torch.full_like(largest, _LARGEST)
    over = ~torch.isfinite(scale * _LARGEST) & finite  # 127 times a scale that was rounded up may be infinite
    scale = torch.where(over, torch.nextafter(scale, torch.zeros_like(scale)), scale)
    inverse = torch.where(finite & ~tiny, 1.0 / scale, torch.zeros_like(scale))
    quants = torch.where(finite[:, None], rows * inverse[:, None], torch.zeros_like(rows)).round()
    scale = torch.where(finite, torch.where(tiny, torch.zeros_like(scale), scale), torch.full_like(scale, torch.nan))
    blocks[:, :4] = scale.view(torch.uint8).view(-1, 4)
    blocks[:, 4:] = quants.to(torch.int8).view(torch.uint8)
    if residual is not None:
        error = rows - quants * scale[:, None]
        residual.copy_(torch.where(finite[:, None], error, _rows(residual)).view(-1)[: values.numel()])


def decode_blocks(blocks: Tensor, values: Tensor) -> None:
    """Make numbers of blocks.

    Args:
        blocks: u8[k, 260].
        values: f32[n], overwritten.
    """
    scale = blocks[:, :4].contiguous().view(torch.float32)
    numbers = blocks[:, 4:].view(torch.int8).to(torch.float32) * scale
    values.copy_(numbers.view(-1)[: values.numel()])


def top_k(values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Select the numbers of largest magnitude. Of equal ones the first are selected.

    Args:
        values: f32[n]; read only.
        out: u8[8 m]: indices u32[m], ascending, then values f32[m]; overwritten.
        residual: f32[n]; added to the values first, then set to the numbers not selected. None = drop those.
    """
    count = out.numel() // 8
    if not count:
        return
    total = values if residual is None else values + residual
    magnitudes = total.abs()
    finite = torch.isfinite(magnitudes).all()
    threshold = torch.where(finite, magnitudes, torch.zeros_like(magnitudes)).topk(count, sorted=True).values[-1]
    above, equal = magnitudes > threshold, magnitudes == threshold
    selected = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    if bool(finite):
        indices = selected.nonzero().view(-1)
        sent = total[indices]
        if residual is not None:
            residual.copy_(total)
            residual[indices] = 0.0
    else:
        indices = torch.arange(count, dtype=torch.int64, device=values.device)
        sent = torch.full((count,), torch.nan, dtype=torch.float32, device=values.device)
    out[: 4 * count] = indices.to(torch.int32).view(torch.uint8)
    out[4 * count :] = sent.view(torch.uint8)


def expand_top_k(data: Tensor, values: Tensor, *, first: bool) -> None:
    """Add the numbers that `top_k` selected to the values. If `first`, the values are set to 0 before.

    Args:
        data: u8[8 m], as `top_k` writes it.
        values: f32[n], updated in place.
    """
    count = data.numel() // 8
    indices = data[: 4 * count].view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
    if first:
        values.zero_()
    values[indices] += data[4 * count :].view(torch.float32)


def _rows(values: Tensor) -> Tensor:
    """Return f32[k, 256]: the numbers with zeros behind them."""
    missing = -values.numel() % INT8_BLOCK_NUMEL
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, INT8_BLOCK_NUMEL)
