"""The factor of a loss before backward, and the gradients that have come of it.

Owns: the scale of the backward under way, and the scale of a model's gradients that wait for a step.
Refuses: to choose a scale (`GradScaler`), and to divide (the runtime, as it sends gradients).

Note: [The scale of a backward]
    A scale is not a model's: one loss may go through several models, and the next loss need not be scaled. So the
    scaled loss itself has a hook, which runs before anything else of its backward. The scale is stored here for every
    model that backward comes to. Backwards are told apart by the number that autograd gives each. A reentrant
    checkpoint makes a backward of its own, inside another in the same thread, with the scale of the outer one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import torch

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.forwards import in_reentrant_checkpoint

_MOST = 64
"""Most backwards whose scales are stored. The scale of a backward that an error broke off stays."""

_scales: dict[int, tuple[int, float]] = {}  # by backward: the thread that began it, and its scale


def scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Mark a loss that was multiplied by `scale`: gradients of its backward will be divided by it."""
    if loss.requires_grad:
        loss.register_hook(partial(_begin, scale))  # type: ignore[no-untyped-call]
    return loss


def _begin(scale: float, _: torch.Tensor) -> None:
    """Begin the backward of a scaled loss.

    Raises:
        Misuse: it is also that of another loss, which has another scale.
    """
    task: int = torch._C._current_graph_task_id()
    if task in _scales:
        if _scales[task][1] != scale:
            raise Misuse(
                f"one backward of losses that were scaled by {_scales[task][1]:g} and {scale:g}: scale them with the "
                "same GradScaler, or call backward() of each by itself"
            )
        return
    while len(_scales) >= _MOST:
        _scales.pop(next(iter(_scales)), None)
    _scales[task] = threading.get_ident(), scale
    torch.autograd.Variable._execution_engine.queue_callback(partial(_end, task))


def _end(task: int) -> None:
    _scales.pop(task, None)


def scale_of_backward() -> float:
    """Return the scale of the backward under way in this thread; 1.0 for a loss that was not scaled."""
    if (found := _scales.get(torch._C._current_graph_task_id())) is not None:
        return found[1]
    if _scales and in_reentrant_checkpoint():
        here = threading.get_ident()
        return next((scale for thread, scale in reversed(list(_scales.values())) if thread == here), 1.0)
    return 1.0


class LossScale:
    """The scale of the gradients of one model that wait for its step.

    Invariant: gradients of a scaled loss are applied only in a step of the scaler. Others never are.

    Attributes:
        value: gradients are divided by it before they are sent.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._of_step = 1.0
        self._is_divided = False

    def begin(self, *, adds: bool) -> None:
        """Begin a backward, whose gradients are added to others if `adds`.

        Raises:
            Misuse: the others have another scale.
        """
        scale = scale_of_backward()
        if adds and scale != self.value and not self._is_divided:
            raise Misuse(
                f"the gradients of a loss scaled by {scale:g} would be added to those of a loss scaled by "
                f"{self.value:g}: call scaler.scale(loss).backward() for all of a step or for none, and "
                "scaler.update() only after the step; to drop those that there are, call optimizer.zero_grad()"
            )
        self.value, self._is_divided = scale, False

    def divided(self) -> None:
        """Record that the present gradients are divided."""
        self._is_divided = True

    @contextlib.contextmanager
    def stepping(self, scale: float) -> Iterator[None]:
        """Permit, during the block, the step of a scaler that has scaled losses by `scale`."""
        self._of_step = scale
        try:
            yield
        finally:
            self._of_step = 1.0

    def check(self) -> None:
        """Check the scale before a step with gradients.

        Raises:
            Misuse: the scaler has not scaled their loss, or the step is not the scaler's.
        """
        if self.value != self._of_step:
            raise Misuse(
                f"the gradients of this step are of a loss that was scaled by {self.value:g}, and the step is for "
                f"one that was scaled by {self._of_step:g}: after scaler.scale(loss).backward() call "
                "scaler.step(optimizer), then scaler.update(); after loss.backward() call optimizer.step()"
            )


__all__ = ["LossScale", "scale_of_backward", "scaled"]
