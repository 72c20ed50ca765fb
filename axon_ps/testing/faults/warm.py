"""Imported before workers and services fork: loads and makes what all of them use, so that no fork has to."""

import contextlib
import encodings.ascii
import encodings.idna  # noqa: F401  # by sockets that bind

from axon_ps.cli.main import commands
from axon_ps.compress import cast
from axon_ps.optim import registry
from axon_ps.types import DType

_sgd = registry.create("sgd")
_sgd.warm_up([_sgd.validate({"lr": 0.1, "momentum": 0.5})], None)
cast.warm_up(DType.F32)
for _name in ("coordinator", "shard"):  # parsing makes what checks an option, when it first sees the option
    commands(_name).commands[_name].make_context(_name, []).close()
with contextlib.suppress(ImportError):  # extras; each server serves both
    import grpc_reflection.v1alpha.reflection  # noqa: F401

    import axon_ps.rpc.health_service  # noqa: F401
