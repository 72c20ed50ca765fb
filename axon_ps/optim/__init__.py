"""The optimizers that run on shard servers, gradient clipping and learning rate schedules. Pure arithmetic.

`create("adamw")` gives an optimizer; describing and validating one needs no numba, only `apply` does.
"""

from __future__ import annotations

from axon_ps.optim.base import ServerOptimizer
from axon_ps.optim.clipping import clip_factor, global_norm
from axon_ps.optim.registry import create, names

__all__ = ["ServerOptimizer", "clip_factor", "create", "global_norm", "names"]
