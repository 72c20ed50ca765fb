"""Imported before workers and services fork: loads and makes what all of them use, so that no fork has to."""

import contextlib
import encodings.idna  # noqa: F401  # by sockets that bind
import importlib

from axon_ps.compress import cast
from axon_ps.optim import registry
from axon_ps.types import DType

_sgd = registry.create("sgd")
_sgd.warm_up([_sgd.validate({"lr": 0.1, "momentum": 0.5})], None)
cast.warm_up(DType.F32)
_commands = importlib.import_module("axon_ps.cli.main").commands
for _name in ("coordinator", "shard"):  # parsing makes what checks an option, when it first sees the option
    _commands(_name).commands[_name].make_context(_name, []).close()
for _name in ("axon_ps.rpc.health_service", "grpc_reflection.v1alpha.reflection"):  # each server serves both
    with contextlib.suppress(ImportError):  # an extra has them
        importlib.import_module(_name)
