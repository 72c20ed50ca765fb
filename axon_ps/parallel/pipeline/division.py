"""Cutting: batches into microbatches, a list of modules into stages."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.pipeline.schedule import PipelineSchedule
from axon_ps.parallel.pipeline.stage import StageModules, Tensors, as_tuple


def even(count: int, num_sizes: int) -> list[int]:
    """Return `num_sizes` sizes, as even as possible, that sum to `count`. The first ones may be larger by one."""
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


def divide(
    modules: Iterable[nn.Module], num_stages: int, ranks: int, schedule: PipelineSchedule, sizes: Sequence[int] | None
) -> list[StageModules]:
    """Divide the modules of a model into stages. Children are named by their position among all modules.

    Args:
        modules: of the full model, in order.
        num_stages: number of stages.
        ranks: number of ranks.
        schedule: the order of work.
        sizes: modules by stage; None = as even as possible, the first stages have one more.
    """
    named = [(str(index), module) for index, module in enumerate(modules)]
    if not ranks <= num_stages <= len(named):
        raise InvalidRequest(
            f"{len(named)} modules were to become {num_stages} stages on {ranks} ranks; every rank needs a "
            "stage, and every stage a module"
        )
    if schedule.loops and num_stages % ranks:
        raise InvalidRequest(f"{schedule.name} needs as many stages on every rank; {num_stages} on {ranks} are not")
    sizes = even(len(named), num_stages) if sizes is None else list(sizes)
    if len(sizes) != num_stages or sum(sizes) != len(named) or min(sizes) < 1:
        raise InvalidRequest(f"sizes are {sizes}; needed are {num_stages} numbers from 1 that sum to {len(named)}")
    ends = list(itertools.accumulate(sizes))
    return [StageModules(OrderedDict(named[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
