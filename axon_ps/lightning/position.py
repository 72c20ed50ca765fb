"""The position in a fit, as it commits with each step, and as Lightning's loops take it; pure: dicts in, dicts out.

A step is made in the middle of a batch, and the position after the batch must commit with it. So the loops' progress is
changed to the form in which Lightning saves it at a batch's end: the batch is processed and not yet completed, and the
optimizer's step is completed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "lightning"
"""The name of the position among the values that are committed with each step."""

_BATCHES: Final = "epoch_loop.batch_progress"
_OPTIMIZERS: Final = "epoch_loop.automatic_optimization.optim_progress"
_MANUAL: Final = "epoch_loop.manual_optimization.optim_step_progress"
_KINDS: Final = ("total", "current")
_LOOPS: Final = ("epoch_progress", "state_dict", "epoch_loop.state_dict", "epoch_loop.scheduler_progress")


def after_step(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position after the step that is about to be made.

    Args:
        fit_loop: `trainer.fit_loop.state_dict()`, inside `optimizer.step()`.
    """
    position = {
        key: copy.deepcopy(fit_loop[key]) for key in (*_LOOPS, _BATCHES, _OPTIMIZERS, _MANUAL) if key in fit_loop
    }
    optimizer = position[_OPTIMIZERS]["optimizer"]
    for kind in _KINDS:
        batches = position[_BATCHES][kind]
        batches["started"] = batches["processed"] = batches["ready"]
        batches["completed"] = batches["ready"] - 1
        for progress in (optimizer["step"], optimizer["zero_grad"], position[_MANUAL]):
            progress[kind] = dict.fromkeys(progress[kind], progress[kind]["ready"])
    return position


def batches_used(position: Mapping[str, Any]) -> int:
    """Return the number of batches of the epoch under way that were used."""
    current = position[_BATCHES]["current"]
    return 0 if position[_BATCHES]["is_last_batch"] else int(current["ready"])


def steps_made(position: Mapping[str, Any]) -> int:
    """Return the number of steps made, in all epochs, by Lightning or by the module itself."""
    automatic, manual = position[_OPTIMIZERS]["optimizer"]["step"], position[_MANUAL]
    return int(automatic["total"]["completed"] + manual["total"]["completed"])


def epochs_made(position: Mapping[str, Any]) -> int:
    """Return the number of completed epochs."""
    return int(position["epoch_progress"]["current"]["completed"])


__all__ = ["NAME", "after_step", "batches_used", "epochs_made", "steps_made"]
