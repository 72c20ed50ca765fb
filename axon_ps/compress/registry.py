"""Compressors by name, and by the compression that a job is registered with. Importing this imports no numba."""

from __future__ import annotations

from typing import Any

from axon_ps.compress.casts import CastCompressor
from axon_ps.compress.compressor import Compressor
from axon_ps.compress.int8 import Int8Compressor
from axon_ps.compress.top_k import TopKCompressor
from axon_ps.errors import InvalidRequest
from axon_ps.types import Compression, DType, Int8, TopK


def compressor(name: str, **options: Any) -> Compressor:
    """The compressor of that name.

    Args:
        name: "int8" (option `block_numel`), "top_k" (option `fraction`), "bf16" or "fp16".
        options: see `types.Int8` and `types.TopK`.

    Raises:
        InvalidRequest: there is no such compressor, or it has no such option, or the value cannot be.
    """
    kinds: dict[str, Any] = {
        "int8": lambda **given: compressor_of(Int8(**given)),
        "top_k": lambda **given: compressor_of(TopK(**given)),
        "bf16": lambda: CastCompressor(DType.BF16),
        "fp16": lambda: CastCompressor(DType.F16),
    }
    if name not in kinds:
        raise InvalidRequest(f"compressor {name!r} is unknown; use one of {', '.join(kinds)}")
    try:
        made: Compressor = kinds[name](**options)
    except TypeError as error:
        raise InvalidRequest(f"compressor {name!r} does not take {', '.join(options)}: {error}") from error
    return made


def compressor_of(compression: Compression) -> Compressor:
    """The compressor for `compression`."""
    if isinstance(compression, Int8):
        return Int8Compressor(compression.block_numel)
    return TopKCompressor(compression.fraction)
