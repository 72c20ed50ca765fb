"""Tensor parallelism: layers whose matrices are sharded among the ranks of a group, and tools for such models.

torch's `parallelize_module` runs over the backend "axon", too. These layers need no default process group, so ranks may
be threads. They hold plain tensors, because the dispatch of DTensors in Python doubles the step of a small layer on the
CPU. First values are drawn by shards, without a full matrix on any rank.
"""

from axon_ps.parallel.tensor.attention import TensorParallelAttention
from axon_ps.parallel.tensor.clip import clip_grad_norm, grad_norm
from axon_ps.parallel.tensor.dcp import distributed_optimizer_state_dict, distributed_state_dict
from axon_ps.parallel.tensor.functions import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from axon_ps.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, sum_gradients
from axon_ps.parallel.tensor.module import TensorParallelModule
from axon_ps.parallel.tensor.optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from axon_ps.parallel.tensor.partition import Partition
from axon_ps.parallel.tensor.projection import project
from axon_ps.parallel.tensor.state import full_state_dict, load_full_state_dict, local_state_dict

__all__ = [
    "ColumnParallelLinear",
    "Partition",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelModule",
    "clip_grad_norm",
    "copy_to_group",
    "distributed_optimizer_state_dict",
    "distributed_state_dict",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gather_from_group",
    "gather_sequence",
    "grad_norm",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "local_state_dict",
    "project",
    "reduce_from_group",
    "reduce_scatter_sequence",
    "scatter_to_group",
    "sum_gradients",
]
