"""Imported before workers and services fork: loads what they load when they first use it, so that no fork has to.

That is the compiled loops, and what the command line reads its options with.
"""

import contextlib
import io

from axon_ps.compress import cast
from axon_ps.optim import registry
from axon_ps.testing.fork_server import run_command
from axon_ps.types import DType

_sgd = registry.create("sgd")
_sgd.warm_up([_sgd.validate({"lr": 0.1, "momentum": 0.5})], None)
cast.warm_up(DType.F32)
with contextlib.redirect_stdout(io.StringIO()):
    run_command(["auth", "table", "--json"])
