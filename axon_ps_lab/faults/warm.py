"""Modules and objects for all forks: workers and services fork after the import of this module."""

import contextlib
import encodings.idna  # noqa: F401  # needed by sockets that bind
import importlib

from axon_ps.compress import cast
from axon_ps.optim import registry
from axon_ps.types import DType

_sgd = registry.create("sgd")
_sgd.warm_up([_sgd.validate({"lr": 0.1, "momentum": 0.5})], None)
cast.warm_up(DType.F32)
_commands = importlib.import_module("axon_ps.cli.main").commands
for _name in ("coordinator", "shard"):  # parsing an option makes its checks at the first use
    _commands(_name).commands[_name].make_context(_name, []).close()
for _name in ("axon_ps.rpc.health_service", "grpc_reflection.v1alpha.reflection"):  # each server serves both
    with contextlib.suppress(ImportError):  # they are part of an extra
        importlib.import_module(_name)
