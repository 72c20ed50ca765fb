"""Every collective of a group, called with invalid arguments on one rank: all ranks get the error, and soon.

Owns: one right call and some wrong calls of each collective. The right call must work after the wrong ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from axon_ps.collectives import functional
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement

PROMPT_S = 60.0
"""Seconds that an error may take to arrive: far less than a time-out, also on a busy machine."""

_Call = Callable[..., object]


class Mistake:
    """A collective, called correctly and wrongly.

    Args:
        right: a valid call; it takes the group.
        wrong: the same call with invalid arguments.
    """

    def __init__(self, right: _Call, *wrong: _Call) -> None:
        self.right, self.wrong = right, wrong


def _rows(group: ProcessGroup, each: int = 2) -> np.ndarray[Any, Any]:
    return np.ones((group.world_size * each, 3), np.float32)


_STRANGE = np.ones(3, np.complex64)
_FROZEN = np.broadcast_to(np.float32(1), (3,))
_NOBODY: Any = None


def _reducing(reduce: _Call) -> Mistake:
    return Mistake(
        lambda g: reduce(np.ones(3), group=g),
        lambda g: reduce([1.0], group=g),
        lambda g: reduce(_STRANGE, group=g),
        lambda g: reduce(_FROZEN, group=g),
        lambda g: reduce(np.ones(3), out=np.ones(4), group=g),
        lambda g: reduce(np.ones(3), timeout_s=-1.0, group=g),
    )


def _scattering(reduce: _Call) -> Mistake:
    return Mistake(
        lambda g: reduce(_rows(g), group=g),
        lambda g: reduce(_STRANGE, group=g),
        lambda g: reduce(_rows(g), counts=[1], group=g),
        lambda g: reduce(_rows(g), counts=["one"] * g.size, group=g),
        lambda g: reduce(_rows(g), out=np.ones(1), group=g),
    )


def _mistakes() -> Mapping[str, Mistake]:
    return {
        "all_reduce_sum": _reducing(functional.all_reduce_sum),
        "all_reduce_mean": _reducing(functional.all_reduce_mean),
        "all_reduce_min": _reducing(functional.all_reduce_min),
        "all_reduce_max": _reducing(functional.all_reduce_max),
        "all_reduce_product": _reducing(functional.all_reduce_product),
        "reduce_scatter_sum": _scattering(functional.reduce_scatter_sum),
        "reduce_scatter_mean": _scattering(functional.reduce_scatter_mean),
        "integers have no average": Mistake(
            lambda g: functional.all_reduce_mean(np.ones(3), group=g),
            lambda g: functional.all_reduce_mean(np.ones(3, np.int32), group=g),
        ),
        "reduce": Mistake(lambda g: g.reduce(np.ones(3)), lambda g: g.reduce(np.ones(3), dst=g.size)),
        "broadcast": Mistake(
            lambda g: functional.broadcast(np.ones(3), group=g), lambda g: functional.broadcast(_NOBODY, group=g)
        ),
        "broadcast_from": Mistake(
            lambda g: functional.broadcast_from(np.ones(3), 0, group=g),
            lambda g: functional.broadcast_from(np.ones(3), -1, group=g),
            lambda g: functional.broadcast_from(np.ones(3), _NOBODY, group=g),
        ),
        "all_gather": Mistake(
            lambda g: functional.all_gather(_rows(g), group=g),
            lambda g: functional.all_gather(_rows(g), counts=[1] * g.size, group=g),
            lambda g: functional.all_gather(_rows(g), out=np.ones(2), group=g),
        ),
        "gather_tensor": Mistake(
            lambda g: functional.gather_tensor(_rows(g), group=g),
            lambda g: functional.gather_tensor(_rows(g), dst=99, group=g),
            lambda g: functional.gather_tensor(_rows(g), counts=[-1] * g.size, group=g),
        ),
        "scatter_tensor": Mistake(
            lambda g: functional.scatter_tensor(_rows(g), group=g),
            lambda g: functional.scatter_tensor(None, group=g),
            lambda g: (
                functional.scatter_tensor(_rows(g)[1:], group=g)
                if g.size > 1
                else functional.scatter_tensor(None, group=g)
            ),
            lambda g: functional.scatter_tensor(None, out=_FROZEN, group=g),
        ),
        "all_to_all": Mistake(
            lambda g: functional.all_to_all(_rows(g), group=g),
            lambda g: functional.all_to_all(_rows(g), input_counts=[1] * g.size, group=g),
            lambda g: functional.all_to_all(_rows(g), output_counts=[1] * (g.size + 1), group=g),
        ),
        "barrier": Mistake(
            lambda g: functional.barrier(group=g), lambda g: functional.barrier(timeout_s=-1.0, group=g)
        ),
        "sync_gradient": Mistake(
            lambda g: functional.sync_gradient(np.ones(3), group=g),
            lambda g: functional.sync_gradient(_STRANGE, group=g),
        ),
        "sync_gradients": Mistake(
            lambda g: functional.sync_gradients([np.ones(3), np.ones(3, np.float32)], group=g),
            lambda g: functional.sync_gradients([np.ones(3), _STRANGE], group=g),
        ),
    }


def check_arguments(group: ProcessGroup) -> list[str]:
    """Call every collective with a mistake on the last rank; all ranks of the group must call this.

    Returns:
        Descriptions of the errors found.
    """
    wrong: list[str] = []
    odd = group.rank == group.world_size - 1
    for name, mistake in _mistakes().items():
        for number, call in enumerate(mistake.wrong):
            what, begin_s = f"{name}, mistake {number} of one rank of {group.world_size}", time.monotonic()
            try:
                (call if odd else mistake.right)(group)
            except Disagreement as error:
                if odd or f"rank {group.ranks[-1]}: refused" not in str(error):
                    wrong.append(f"{what}: {error}")
            except Exception as error:
                if not odd:
                    wrong.append(f"{what}: {type(error).__name__}: {error}")
            else:
                if odd or group.world_size > 1:
                    wrong.append(f"{what} is no error")
            if (took_s := time.monotonic() - begin_s) > PROMPT_S:
                wrong.append(f"{what} was reported after {took_s:.1f} s")
            if not (odd and group.world_size == 1):
                mistake.right(group)
            if functional.all_reduce_sum(np.ones(1), group=group).item() != group.world_size:
                wrong.append(f"the group adds up wrongly after {what}")
    return wrong
