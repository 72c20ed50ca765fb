"""PyTorch models on shard servers: wrappers and optimizers.

`import torch` registers the backend "axon" of torch.distributed (`axon_ps_torch`). If that was turned off, importing
this package registers it.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "axon_ps.parallel needs PyTorch, which is not installed: pip install 'axon-ps[torch]'", name="torch"
    ) from None

from axon_ps.compress import BlockTopK, Float8, Int4, Int8, TopK
from axon_ps.data import DistributedSampler
from axon_ps.parallel.checkpoints.own_state import RandomState
from axon_ps.parallel.comm_hooks.hooks import CommunicationHook
from axon_ps.parallel.comm_hooks.registry import comm_hook
from axon_ps.parallel.ddp.buckets import GradientBucket
from axon_ps.parallel.ddp.ddp import DistributedDataParallel
from axon_ps.parallel.ddp.sync_batch_norm import SyncBatchNorm
from axon_ps.parallel.ddp.synchronizer import GradientSynchronizer, GradSyncStrategy
from axon_ps.parallel.diloco import DiLoCo, LocalSGD
from axon_ps.parallel.elastic_loader import ElasticLoader
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.on_servers.traffic import TrafficEstimate, estimate
from axon_ps.parallel.fsdp.stats import FSDPMemoryStats, MemoryStats
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.fsdp2.api import fully_shard, register_fsdp_forward_method, sharded_model
from axon_ps.parallel.fsdp2.modules import FSDPModule
from axon_ps.parallel.grad_scaler import GradScaler
from axon_ps.parallel.mesh import Mesh
from axon_ps.parallel.optim import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, ServerOptimizer
from axon_ps.parallel.pipeline import Pipeline, PipelineMemoryStats, PipelineSchedule, PipelineStage
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorParallelAttention, clip_grad_norm
from axon_ps.parallel.weights import WeightReceiver, load_weights, update_weights, weight_tensors
from axon_ps.sharding.policy import Asynchronous, BoundedStaleness, Policy, Synchronous
from axon_ps_torch import register as _register

DDP = DistributedDataParallel
FSDP = FullyShardedDataParallel

_register()

__all__ = [
    "DDP",
    "FSDP",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Asynchronous",
    "BlockTopK",
    "BoundedStaleness",
    "CPUOffload",
    "ColumnParallelLinear",
    "CommunicationHook",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ElasticLoader",
    "FSDPMemoryStats",
    "FSDPModule",
    "Float8",
    "FullyShardedDataParallel",
    "GradScaler",
    "GradSyncStrategy",
    "GradientBucket",
    "GradientSynchronizer",
    "Int4",
    "Int8",
    "Lion",
    "LocalSGD",
    "MemoryStats",
    "Mesh",
    "MixedPrecision",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "Policy",
    "RMSprop",
    "RandomState",
    "RowParallelLinear",
    "ServerOptimizer",
    "ShardingStrategy",
    "SyncBatchNorm",
    "Synchronous",
    "TensorParallelAttention",
    "TopK",
    "TrafficEstimate",
    "WeightReceiver",
    "clip_grad_norm",
    "comm_hook",
    "estimate",
    "fully_shard",
    "load_weights",
    "register_fsdp_forward_method",
    "sharded_model",
    "update_weights",
    "weight_tensors",
]
