"""axon_ps: a gRPC parameter server for sharded training.

`import axon_ps` needs only numpy and grpcio; `axon_ps.World`, `axon_ps.data`, `axon_ps.parallel` and `axon_ps.testing`
are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from axon_ps import errors
from axon_ps.host.fork import turn_grpc_handlers_off
from axon_ps.types import BackendName as Backend
from axon_ps.types import ReduceOp, StepResult

if TYPE_CHECKING:
    from axon_ps.collectives.group import ProcessGroup
    from axon_ps.collectives.ops import (
        all_gather as all_gather,
    )
    from axon_ps.collectives.ops import (
        all_reduce_max as all_reduce_max,
    )
    from axon_ps.collectives.ops import (
        all_reduce_mean as all_reduce_mean,
    )
    from axon_ps.collectives.ops import (
        all_reduce_min as all_reduce_min,
    )
    from axon_ps.collectives.ops import (
        all_reduce_product as all_reduce_product,
    )
    from axon_ps.collectives.ops import (
        all_reduce_sum as all_reduce_sum,
    )
    from axon_ps.collectives.ops import (
        all_to_all as all_to_all,
    )
    from axon_ps.collectives.ops import (
        barrier as barrier,
    )
    from axon_ps.collectives.ops import (
        broadcast as broadcast,
    )
    from axon_ps.collectives.ops import (
        broadcast_from as broadcast_from,
    )
    from axon_ps.collectives.ops import (
        empty_shared as empty_shared,
    )
    from axon_ps.collectives.ops import (
        gather_tensor as gather_tensor,
    )
    from axon_ps.collectives.ops import (
        is_main_process as is_main_process,
    )
    from axon_ps.collectives.ops import (
        rank as rank,
    )
    from axon_ps.collectives.ops import (
        recv as recv,
    )
    from axon_ps.collectives.ops import (
        reduce_scatter_mean as reduce_scatter_mean,
    )
    from axon_ps.collectives.ops import (
        reduce_scatter_sum as reduce_scatter_sum,
    )
    from axon_ps.collectives.ops import (
        scatter_tensor as scatter_tensor,
    )
    from axon_ps.collectives.ops import (
        send as send,
    )
    from axon_ps.collectives.ops import (
        sync_gradient as sync_gradient,
    )
    from axon_ps.collectives.ops import (
        sync_gradients as sync_gradients,
    )
    from axon_ps.collectives.ops import (
        world_size as world_size,
    )
    from axon_ps.collectives.values import CheckpointInfo
    from axon_ps.collectives.work import Work
    from axon_ps.collectives.world import World

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "CheckpointInfo",
    "ProcessGroup",
    "ReduceOp",
    "StepResult",
    "Work",
    "World",
    "__version__",
    "errors",
]

_COLLECTIVES = (
    "all_gather",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_from",
    "empty_shared",
    "gather_tensor",
    "is_main_process",
    "rank",
    "recv",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_tensor",
    "send",
    "sync_gradient",
    "sync_gradients",
    "world_size",
)
_LAZY = {
    "World": "axon_ps.collectives.world",
    "ProcessGroup": "axon_ps.collectives.group",
    "CheckpointInfo": "axon_ps.collectives.values",
    "Work": "axon_ps.collectives.work",
    **dict.fromkeys(_COLLECTIVES, "axon_ps.collectives.ops"),
}


turn_grpc_handlers_off()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("data", "parallel", "testing"):
        return importlib.import_module(f"axon_ps.{name}")
    raise AttributeError(f"module 'axon_ps' has no attribute {name!r}")
