"""`GradScaler`: loss scaling for fp16 when gradients leave the worker before `step()`.

torch's scaler divides gradients and looks for infinities in `step()`. By then ours are on the servers: so they are
divided as they are pushed, and the servers find infinities and skip the step.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.types import StepResult


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a wrapped model and one of our optimizers; used in the same way.

    Gradients are divided by the scale in the wider of their dtype and the wire's, then cast to the wire's: with
    `param_dtype=torch.float16` give `reduce_dtype=torch.float32`, or the cast underflows what the scale has saved.
    With `no_sync()` the scale must stay the same until the step, as with torch's.

    Args:
        model: the wrapped model.
        options: of torch's scaler: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, model: FullyShardedDataParallel, **options: Any) -> None:
        device = next(model.sharded_parameters()).device.type
        super().__init__(device, **options)
        self._model = model
        self._skipped: bool | None = None

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale; gradients of this backward will be divided by it."""
        scaled = super().scale(outputs)
        self._model.runtime.grad_scale = self.get_scale()
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: gradients were divided as they were pushed."""

    def step(  # type: ignore[override]  # torch's gives what the optimizer gives
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> StepResult:
        """`optimizer.step()`; what is not finite, the servers skip.

        Raises:
            Misuse: `update()` was not called after the last step.
        """
        if self._skipped is not None:
            raise Misuse("step() was called twice; call update() after each step")
        result: Any = optimizer.step(*args, **kwargs)
        assert isinstance(result, StepResult)
        self._skipped = not result.committed and not math.isfinite(result.grad_norm)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Lower the scale after a skipped step, raise it after many that were not."""
        if self._skipped is None:
            raise Misuse("update() was called without a step() before it")
        found, self._skipped = self._skipped, None
        if not self.is_enabled() or self._model.runtime.accumulating:
            return
        if new_scale is not None:
            super().update(new_scale)
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.full((1,), float(found), dtype=torch.float32, device=scale.device),
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
        )


__all__ = ["GradScaler"]
