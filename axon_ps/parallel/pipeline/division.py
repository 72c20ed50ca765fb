"""Cutting: batches into microbatches, a list of modules into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.pipeline.stage import StageModules, Tensors, as_tuple


def even(count: int, num_sizes: int) -> list[int]:
    """Return `num_sizes` sizes, as even as possible, that sum to `count`; the first are one larger."""
    return [count // num_sizes + (i < count % num_sizes) for i in range(num_sizes)]


def cut(what: str, value: Any, microbatches: int) -> list[Tensors]:
    """Cut a batch into microbatches, as even as possible, each of them a tuple.

    Args:
        what: the value's name, for messages.
        value: a tensor [rows, ...] or a tuple of such.
        microbatches: number of microbatches.

    Raises:
        InvalidRequest: it is missing, has fewer rows than microbatches, or tensors of different numbers of rows.
    """
    if value is None:
        raise InvalidRequest(f"the {what} is None; this rank's stage needs it")
    tensors = as_tuple(value, f"the {what}")
    rows = {t.shape[0] if t.dim() else 0 for t in tensors}
    if len(rows) != 1 or min(rows) < microbatches:
        raise InvalidRequest(f"the {what} has {sorted(rows)} rows; needed is one number, at least {microbatches}")
    columns: list[Sequence[Tensor]] = [t.tensor_split(microbatches) for t in tensors]
    return list(zip(*columns, strict=True))


def single(tensors: Tensors) -> Any:
    """Return the tensor if there is one, else the tuple."""
    return tensors[0] if len(tensors) == 1 else tensors


def chain(modules: Sequence[nn.Module], sizes: Sequence[int]) -> list[StageModules]:
    """Make stages of `sizes` modules each; their children are named by their position among all modules."""
    chains, index = [], 0
    for size in sizes:
        chains.append(StageModules())
        for _ in range(size):
            chains[-1].add_module(str(index), modules[index])
            index += 1
    return chains
