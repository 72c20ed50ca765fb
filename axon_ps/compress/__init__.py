"""Compressors for arrays that are sent between processes. Importing a compressor's module registers it.

This package stays light on purpose: `cast` and `int8_block` need numba, so the modules that need them import them.
"""

from __future__ import annotations

from axon_ps.compress.block_top_k import BlockTopK
from axon_ps.compress.compressor import Compressor
from axon_ps.compress.float8 import Float8
from axon_ps.compress.floats import BF16, FP16
from axon_ps.compress.int4 import Int4
from axon_ps.compress.int8 import Int8
from axon_ps.compress.registry import names, register
from axon_ps.compress.top_k import TopK

__all__ = ["BF16", "FP16", "BlockTopK", "Compressor", "Float8", "Int4", "Int8", "TopK", "names", "register"]
