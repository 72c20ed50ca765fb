"""The headers that ranks exchange before a collective, if the transport does not compare calls itself.

Owns: the encoding of one rank's call, of one size for all ranks of a group, and the comparison of all ranks' calls.
It is pure.

    header: u8[16 digest | text, padded with zeros | i64 counts: n sent, n received | 1 end mark], n = world_size
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Call, GroupContext, disagreement
from axon_ps.collectives.backends.request import Request, describe
from axon_ps.types import Array

_DIGEST_BYTES = 16
_TEXT_BYTES = 480
_MARK = 0xA5


def numel(world_size: int) -> int:
    """Return the size of a header, in bytes."""
    return _DIGEST_BYTES + _TEXT_BYTES + 16 * world_size + 1


def encode(request: Request, world_size: int) -> Array:
    """Return the header of one rank: u8[numel(world_size)]."""
    call, header = request.call, np.zeros(numel(world_size), np.uint8)
    text = describe(call, request.output_counts, request.input_counts).encode()[:_TEXT_BYTES]
    header[:_DIGEST_BYTES] = np.frombuffer(_digest(call), np.uint8)
    header[_DIGEST_BYTES : _DIGEST_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    if request.input_counts:
        counts = np.array([*request.input_counts, *request.output_counts], "<i8")
        header[_DIGEST_BYTES + _TEXT_BYTES : -1] = counts.view(np.uint8)
    header[-1] = _MARK
    return header


def arrived(header: Array) -> bool:
    """Return True if a header, in a buffer that was all zeros, was received to its end."""
    return bool(header[-1] == _MARK)


def check(headers: Sequence[Array], call: Call, context: GroupContext) -> list[list[int]]:
    """Compare the headers of all ranks, given by rank; the result is the same on every rank.

    Returns:
        The number of elements from rank i to rank j, `[i][j]`; only used in an all-to-all.

    Raises:
        Disagreement: the ranks do not make the same call.
    """
    n = len(context.ranks)
    counts = np.array([h[_DIGEST_BYTES + _TEXT_BYTES : -1].view("<i8") for h in headers]).reshape(n, 2, n)
    sent, expected = counts[:, 0, :], counts[:, 1, :]
    if (
        any(bytes(h[:_DIGEST_BYTES]) != bytes(headers[0][:_DIGEST_BYTES]) for h in headers)
        or (sent != expected.T).any()
    ):
        cut = [bytes(h[_DIGEST_BYTES : _DIGEST_BYTES + _TEXT_BYTES]).rstrip(b"\0") for h in headers]
        texts = [text.decode("utf-8", "replace") for text in cut]
        what = f"call {call.sequence} of group {context.name!r}"
        raise disagreement(dict(zip(context.ranks, texts, strict=True)), what)
    matrix: list[list[int]] = sent.tolist()
    return matrix


def _digest(call: Call) -> bytes:
    fields = (call.sequence, call.operation.value, call.dtype.value, call.counts, call.op and call.op.value, call.root)
    return hashlib.blake2b(repr(fields).encode(), digest_size=_DIGEST_BYTES).digest()
