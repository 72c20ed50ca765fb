"""`GradScaler`: loss scaling for fp16 when gradients leave the worker before `step()`.

torch's scaler divides gradients and looks for infinities in `step()`. By then ours are on the servers. So they are
divided as they are pushed, and the servers skip a step with infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from axon_ps.errors import Misuse
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.tensors.loss_scale import scaled
from axon_ps.parallel.optim import owner_of
from axon_ps.types import StepResult


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for wrapped models and our optimizers; used in the same way.

    Gradients are divided by the scale in the wider of their dtype and the wire's, then cast to the wire's. With
    `param_dtype=torch.float16` give `reduce_dtype=torch.float32`, or values that the scale has saved underflow in the
    cast. With `no_sync()` the scale must stay the same until the step, as with torch's.

    Args:
        model: a wrapped model, whose device the scale is on. Losses of others may be scaled, too.
        options: of torch's scaler: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, model: FullyShardedDataParallel, **options: Any) -> None:
        device = next(model.sharded_parameters()).device.type
        super().__init__(device, **options)
        self._stepped: set[int] = set()  # ids of the optimizers that stepped since the last update
        self._skipped: list[bool] = []  # for each of their steps that was decided, True if it was skipped

    @uncompiled
    def scale(self, outputs: Any) -> Any:
        """Return the loss times the scale. Gradients of its backward will be divided by it."""
        multiplied = super().scale(outputs)
        return _scaled(multiplied, self.get_scale()) if self.is_enabled() else multiplied

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients were divided as they were pushed."""

    def step(  # type: ignore[override]  # torch's returns the optimizer's result
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> StepResult:
        """Call `optimizer.step()`. The servers skip a step whose gradients are not finite.

        Raises:
            InvalidRequest: the optimizer is not of a wrapped model.
            Misuse: `update()` was not called after its last step; or the gradients are not of a loss that was scaled,
                or were scaled by another number; or the optimizer, which has stepped then, is not ours.
        """
        if id(optimizer) in self._stepped:
            raise Misuse("step() was called twice; call update() after each step")
        runtime = owner_of(optimizer.param_groups).runtime
        decides = not runtime.accumulation.goes_on
        with runtime.loss_scale.stepping(self.get_scale()):
            result: Any = optimizer.step(*args, **kwargs)
        result = getattr(optimizer, "last", result)  # one of torch's for `fully_shard` returns the loss
        if not isinstance(result, StepResult):
            raise Misuse(
                f"GradScaler makes steps of axon_ps.parallel's optimizers, and {type(optimizer).__name__} is another: "
                "for one of torch.optim, under NO_SHARD, use torch.amp.GradScaler"
            )
        self._stepped.add(id(optimizer))
        if decides:
            self._skipped.append(not result.committed and not math.isfinite(result.grad_norm))
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Lower the scale after a skipped step, raise it after many that were not, or set it to a scalar that is given.

        Raises:
            Misuse: there was no `step()` before it.
        """
        if not self._stepped:
            raise Misuse("update() was called without a step() before it")
        skipped, self._skipped = self._skipped, []
        self._stepped.clear()
        if not self.is_enabled() or not skipped:
            return
        if new_scale is not None:
            super().update(new_scale)
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.full((1,), float(any(skipped)), dtype=torch.float32, device=scale.device),
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
        )


def _scaled(outputs: Any, scale: float) -> Any:
    """Mark one or several losses, the product of torch's scaler, with this scale."""
    if isinstance(outputs, torch.Tensor):
        return scaled(outputs, scale)
    found: Iterable[Any] = (_scaled(output, scale) for output in outputs)
    return type(outputs)(found) if isinstance(outputs, (list, tuple)) else found


__all__ = ["GradScaler"]
