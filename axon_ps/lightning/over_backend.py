"""Lightning's own strategies over the backend "axon", and the names of all of ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from axon_ps_torch import BACKEND


class IntegerMeans:
    """The additions of our strategies to Lightning's: the mean of integers (samples, say), rounded down as over gloo.

    The backend "axon" refuses it, since it is not exact. Lightning makes an exception for gloo alone.
    """

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as the strategy does, and round means of integers down."""
        integers = isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if not integers or reduce_op not in ("mean", "avg", dist.ReduceOp.AVG):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        total = super().reduce(tensor, group, "sum")  # type: ignore[misc]
        return total.copy_(total // dist.get_world_size(group))


class DDPOverAxon(IntegerMeans, DDPStrategy):
    """`DDPStrategy` over "axon".

    Args:
        options: those of `DDPStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"process_group_backend": BACKEND, **options})


class FSDP2Strategy(IntegerMeans, ModelParallelStrategy):
    """`ModelParallelStrategy` over "axon" whose data-parallel mesh has all processes, unless options say otherwise.

    Args:
        options: those of `ModelParallelStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"process_group_backend": BACKEND, "tensor_parallel_size": 1, **options})

    def setup_environment(self) -> None:
        """Set up as `ModelParallelStrategy` does, which would take the number of nodes for the data-parallel size."""
        if (self._data_parallel_size, self._tensor_parallel_size) == ("auto", 1):
            self._data_parallel_size: Any = self.num_nodes * self.num_processes
        super().setup_environment()


def register(strategy: type[Any]) -> None:
    """Register our names with Lightning; harmless when repeated."""
    known = (
        ("axon", strategy, "model and optimizers on the shard servers of axon_ps"),
        ("axon_ddp", DDPOverAxon, "DDP over axon_ps"),
        ("axon_fsdp2", FSDP2Strategy, "FSDP2 over axon_ps"),
    )
    for name, made, description in known:
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, made, description=description)


__all__ = ["DDPOverAxon", "FSDP2Strategy", "IntegerMeans", "register"]
