"""PyTorch models on shard servers: wrappers and optimizers. The only room that imports torch.

Importing it makes the backend "axon" known to torch.distributed: `init_process_group("axon")`.
"""

from axon_ps.parallel.c10d.register import register as _register
from axon_ps.parallel.dtypes import MixedPrecision
from axon_ps.parallel.fsdp import FullyShardedDataParallel
from axon_ps.parallel.optim import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, ServerOptimizer
from axon_ps.parallel.strategy import ShardingStrategy

FSDP = FullyShardedDataParallel

_register()

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
