"""The optimizers that run on shard servers, and gradient clipping. Pure arithmetic.

`create("adamw")` returns an optimizer. Only `apply` needs numba. Describing and validating an optimizer do not.
Importing an optimizer's module here registers it.
"""

from __future__ import annotations

from axon_ps.optim.adagrad import Adagrad
from axon_ps.optim.adam import Adam, AdamW
from axon_ps.optim.base import UpdateRule
from axon_ps.optim.clipping import clip_factor, global_norm
from axon_ps.optim.lion import Lion
from axon_ps.optim.registry import create, names, register
from axon_ps.optim.rmsprop import RMSprop
from axon_ps.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "RMSprop",
    "UpdateRule",
    "clip_factor",
    "create",
    "global_norm",
    "names",
    "register",
]
