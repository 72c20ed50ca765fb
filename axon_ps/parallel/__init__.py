"""PyTorch models on shard servers: wrappers and optimizers. The only room that imports torch."""

from axon_ps.parallel.dtypes import MixedPrecision
from axon_ps.parallel.fsdp import FullyShardedDataParallel
from axon_ps.parallel.optim import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, ServerOptimizer
from axon_ps.parallel.strategy import ShardingStrategy

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FullyShardedDataParallel",
    "Lion",
    "MixedPrecision",
    "RMSprop",
    "ServerOptimizer",
    "ShardingStrategy",
]
