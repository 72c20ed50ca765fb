"""`TensorParallelModule`: a module with shards of parameters, and their partitions.

Owns: the group and the partitions. The layers build on it; `tensor.state` and `tensor.clip` read it.
"""

from __future__ import annotations

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import LayoutMismatch
from axon_ps.parallel.by_reference import ByReference
from axon_ps.parallel.chunks import Shards
from axon_ps.parallel.tensor.partition import Partition


class TensorParallelModule(nn.Module):
    """A module whose parameters are sharded among the ranks of a group.

    Attributes:
        partitions: name of one of its own parameters -> its partition. The others are replicated: they have the same
            values and gradients on every rank.

    Args:
        group: the ranks; None = all workers of the current world.

    Raises:
        Misuse: no group is given and there is no current world; or this worker is not a member.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = ByReference(current_group(group))
        self._rank, self._world_size = self.group.rank, self.group.world_size
        self.partitions: dict[str, Partition] = {}

    @property
    def group(self) -> ProcessGroup:
        """The ranks that its parameters are sharded among."""
        return self._group.value

    def _partition(self, dim: int, size: int) -> Partition:
        return Partition(dim, size, self._world_size, self._rank)

    def full_tensor(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """Return the full tensor of one of its parameters, on every rank. Collective over the group if it is sharded.

        Args:
            name: name of the parameter.
            value: this rank's shard of a tensor of the same shape (its gradient, say); None = the parameter itself.

        After an error: nothing was changed.
        """
        value = self.get_parameter(name) if value is None else value
        partition = self.partitions.get(name)
        if partition is None or partition.num_shards == 1:
            return value.detach().clone()
        return Shards(self.group, partition.dim, partition.counts).gather(value.detach())

    def shard_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor of a parameter's full shape: a view, or `full` itself if replicated."""
        partition = self.partitions.get(name)
        return full if partition is None else partition.shard_of(full)

    def checked_shard_of(self, name: str, full: torch.Tensor, what: str) -> torch.Tensor:
        """Return `shard_of`, for a sharded parameter.

        Raises:
            LayoutMismatch: `full` has another shape than the full parameter. The message begins with `what`.
        """
        needed = self.partitions[name].full_shape(self.get_parameter(name).shape)
        if tuple(full.shape) != needed:
            raise LayoutMismatch(f"{what} is {list(full.shape)}; the full one has {list(needed)}")
        return self.shard_of(name, full)

    def _set_shard(self, name: str, full: torch.Tensor | None) -> None:
        """Make a parameter of this rank's shard of `full`, with its dtype, device and requires_grad."""
        if full is not None:
            shard = self.shard_of(name, full.detach()).clone(memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(shard, requires_grad=full.requires_grad))
