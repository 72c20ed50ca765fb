"""axon_ps: a gRPC parameter server for sharded training.

`import axon_ps` imports only the standard library. Its names, the packages `data`, `parallel` and `testing`, and the
module `types` are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from axon_ps import errors, renamed
from axon_ps.host.fork import disable_grpc_fork_handlers
from axon_ps.version import __version__

if TYPE_CHECKING:
    from axon_ps.collectives.backends.gloo import GlooBackend as GlooBackend
    from axon_ps.collectives.backends.grpc import GrpcBackend as GrpcBackend
    from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend as HierarchicalBackend
    from axon_ps.collectives.backends.mock import MockBackend as MockBackend
    from axon_ps.collectives.backends.nccl.backend import NcclBackend as NcclBackend
    from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend as SharedMemoryBackend
    from axon_ps.collectives.functional import all_gather as all_gather
    from axon_ps.collectives.functional import all_reduce_max as all_reduce_max
    from axon_ps.collectives.functional import all_reduce_mean as all_reduce_mean
    from axon_ps.collectives.functional import all_reduce_min as all_reduce_min
    from axon_ps.collectives.functional import all_reduce_product as all_reduce_product
    from axon_ps.collectives.functional import all_reduce_sum as all_reduce_sum
    from axon_ps.collectives.functional import all_reduce_sum_group as all_reduce_sum_group
    from axon_ps.collectives.functional import all_to_all as all_to_all
    from axon_ps.collectives.functional import barrier as barrier
    from axon_ps.collectives.functional import broadcast as broadcast
    from axon_ps.collectives.functional import broadcast_from as broadcast_from
    from axon_ps.collectives.functional import empty_shared as empty_shared
    from axon_ps.collectives.functional import gather_tensor as gather_tensor
    from axon_ps.collectives.functional import is_main_process as is_main_process
    from axon_ps.collectives.functional import rank as rank
    from axon_ps.collectives.functional import recv as recv
    from axon_ps.collectives.functional import reduce_scatter_mean as reduce_scatter_mean
    from axon_ps.collectives.functional import reduce_scatter_sum as reduce_scatter_sum
    from axon_ps.collectives.functional import scatter_tensor as scatter_tensor
    from axon_ps.collectives.functional import send as send
    from axon_ps.collectives.functional import sync_gradient as sync_gradient
    from axon_ps.collectives.functional import sync_gradients as sync_gradients
    from axon_ps.collectives.functional import world_size as world_size
    from axon_ps.collectives.objects import (
        all_gather_object as all_gather_object,
    )
    from axon_ps.collectives.objects import (
        broadcast_object_list as broadcast_object_list,
    )
    from axon_ps.collectives.objects import (
        gather_object as gather_object,
    )
    from axon_ps.collectives.objects import (
        recv_object_list as recv_object_list,
    )
    from axon_ps.collectives.objects import (
        scatter_object_list as scatter_object_list,
    )
    from axon_ps.collectives.objects import (
        send_object_list as send_object_list,
    )
    from axon_ps.collectives.p2p import (
        P2POp as P2POp,
    )
    from axon_ps.collectives.p2p import (
        batch_isend_irecv as batch_isend_irecv,
    )
    from axon_ps.collectives.p2p import (
        irecv as irecv,
    )
    from axon_ps.collectives.p2p import (
        isend as isend,
    )
    from axon_ps.collectives.p2p import (
        sendrecv as sendrecv,
    )
    from axon_ps.collectives.process_group import ProcessGroup as ProcessGroup
    from axon_ps.collectives.work import Work as Work
    from axon_ps.types import Backend as Backend
    from axon_ps.types import ReduceOp as ReduceOp
    from axon_ps.types import StepResult as StepResult
    from axon_ps.worker.checkpoints import CheckpointInfo as CheckpointInfo
    from axon_ps.worker.subscription import Subscription as Subscription
    from axon_ps.worker.subscription import Weights as Weights
    from axon_ps.worker.subscription import subscribe as subscribe
    from axon_ps.worker.world import World as World

_COLLECTIVES = (
    "all_gather",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_reduce_sum_group",
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
_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
_MESSAGES = ("P2POp", "batch_isend_irecv", "irecv", "isend", "sendrecv")
_BACKENDS = {
    "GlooBackend": "gloo",
    "GrpcBackend": "grpc",
    "HierarchicalBackend": "hierarchical.backend",
    "MockBackend": "mock",
    "NcclBackend": "nccl.backend",
    "SharedMemoryBackend": "shm.backend",
}
_LAZY = {
    **dict.fromkeys(("Backend", "ReduceOp", "StepResult"), "axon_ps.types"),
    **{name: f"axon_ps.collectives.backends.{module}" for name, module in _BACKENDS.items()},
    "World": "axon_ps.worker.world",
    "ProcessGroup": "axon_ps.collectives.process_group",
    "CheckpointInfo": "axon_ps.worker.checkpoints",
    "Work": "axon_ps.collectives.work",
    **dict.fromkeys(("Subscription", "Weights", "subscribe"), "axon_ps.worker.subscription"),
    **dict.fromkeys(_COLLECTIVES, "axon_ps.collectives.functional"),
    **dict.fromkeys(_OBJECTS, "axon_ps.collectives.objects"),
    **dict.fromkeys(_MESSAGES, "axon_ps.collectives.p2p"),
}
_PACKAGES = ("data", "parallel", "testing", "types")

__all__ = ["__version__", "errors", *_LAZY]
__all__.remove("GlooBackend")  # `from axon_ps import *` needs no torch

renamed.install()
disable_grpc_fork_handlers()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"axon_ps.{name}")
    raise AttributeError(f"module 'axon_ps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, "GlooBackend", *_PACKAGES))
