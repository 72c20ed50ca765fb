"""Imported before workers and services fork: loads the compiled loops that they use, so that no fork has to."""

from axon_ps.compress import cast
from axon_ps.optim import registry
from axon_ps.types import DType

_sgd = registry.create("sgd")
_sgd.warm_up([_sgd.validate({"lr": 0.1, "momentum": 0.5})], None)
cast.warm_up(DType.F32)
