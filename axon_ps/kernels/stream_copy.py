"""Copies past the caches: for arrays so large that the written data would leave the caches before it is read.

Owns: the compiled loop. Refuses: to choose when to use it. The caller knows the total number of bytes written.

A plain copy reads every line of its destination from memory before it writes it, and evicts other lines from the cache.
Non-temporal stores (LLVM's `!nontemporal`: movnt on x86, stnp on arm) do neither. So data that others still have to
read, such as the source, stays in the cache they share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from axon_ps.kernels.compiled import compiled
from axon_ps.types import Array

_LINE = 64
_LINE_TYPE = ir.VectorType(ir.IntType(64), _LINE // 8)


@intrinsic
def _line_stored(typing_context: Any, to: Any, source: Any) -> Any:
    """Copy one line: 64 bytes from address `source`, aligned or not, to address `to`, which is a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, source = (builder.inttoptr(argument, _LINE_TYPE.as_pointer()) for argument in arguments)
        line = builder.load(source)
        line.align = 1
        stored = builder.store(line, at)
        stored.align = _LINE
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _settled(typing_context: Any) -> Any:
    """Order all earlier stores before all later ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_store_line: Any = _line_stored  # as loops call them: without the typing context
_settle: Any = _settled


@compiled
def _copy(out: Any, data: Any) -> None:
    size = data.size
    to, source = np.uint64(out.ctypes.data), np.uint64(data.ctypes.data)
    begin = min(size, int((_LINE - to % np.uint64(_LINE)) % np.uint64(_LINE)))
    end = begin + (size - begin) // _LINE * _LINE
    for i in range(begin):
        out[i] = data[i]
    for i in range(begin, end, _LINE):
        _store_line(to + np.uint64(i), source + np.uint64(i))
    for i in range(end, size):
        out[i] = data[i]
    _settle()


def copy(out: Array, data: Array) -> None:
    """Copy data: T[n] to out: T[n], past the caches, with the GIL released.

    Args:
        out: contiguous, of any alignment.
        data: contiguous, of the same element type and length; must not overlap `out`.
    """
    assert out.shape == data.shape, f"{data.shape} does not fit into {out.shape}"
    _copy(out.view(np.uint8), data.view(np.uint8))
