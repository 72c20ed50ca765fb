"""axon_ps: a gRPC parameter server for sharded training.

`import axon_ps` needs only numpy and grpcio; `axon_ps.World`, `axon_ps.parallel` and `axon_ps.testing` are loaded when
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from axon_ps import errors
from axon_ps.types import StepResult

if TYPE_CHECKING:
    from axon_ps.collectives.world import CheckpointInfo, ProcessGroup, World

__version__ = "0.1.0"
__all__ = ["CheckpointInfo", "ProcessGroup", "StepResult", "World", "__version__", "errors"]

_LAZY = {
    "World": "axon_ps.collectives.world",
    "ProcessGroup": "axon_ps.collectives.world",
    "CheckpointInfo": "axon_ps.collectives.world",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("parallel", "testing"):
        return importlib.import_module(f"axon_ps.{name}")
    raise AttributeError(f"module 'axon_ps' has no attribute {name!r}")
