"""`ColumnParallelLinear` and `RowParallelLinear`: `nn.Linear` with its matrix sharded among the ranks of a group.

    y = x W^T + b       W: [out, in]      Column: rank i has rows i of W and of b, and computes columns i of y
                                          Row:    rank i has columns i of W, takes columns i of x, and computes a
                                                  partial sum of y; b is replicated and added once, after the sum

A column-parallel layer without `gather_output`, something element by element, and a row-parallel layer with
`input_is_parallel` are an MLP with one all-reduce in forward and one in backward (Shoeybi et al. 2019, section 3).

With `sequence_parallel` the tensors outside of the pair are sharded along the sequence instead of being replicated: the
column-parallel layer's input, and the row-parallel layer's output, are this rank's equal shard of it. The same bytes
move (an all-reduce is a reduce-scatter and an all-gather). The modules between pairs of layers (norms, dropout,
residuals) cost 1/n of the memory and time (Korthikanti et al. 2022). The parameters of these modules need
`sum_gradients`.

Features are divided as by `torch.chunk`, also unevenly. A sequence must divide evenly.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.chunks import all_reduce
from axon_ps.parallel.precision import torch_dtype
from axon_ps.parallel.tensor.functions import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from axon_ps.parallel.tensor.module import TensorParallelModule
from axon_ps.parallel.tensor.partition import draw_uniform_
from axon_ps.parallel.tensor.projection import Matrix, project

L = TypeVar("L", bound="ParallelLinear")


class ParallelLinear(TensorParallelModule):
    """The common part of the two layers: parameters, first values, conversion.

    Attributes:
        in_features, out_features: of the full layer.
        weight: this rank's shard of [out_features, in_features].
        bias: this rank's shard of [out_features], or all of it, or None.
    """

    _weight_dim: int
    """The dimension of the weight that is sharded."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: ProcessGroup | None,
        sequence_parallel: bool,
        sequence_dim: int,
    ) -> None:
        if not isinstance(bias, bool):
            raise InvalidRequest(
                f"bias is a {type(bias).__name__}; it is True or False, and the group comes after it or as group="
            )
        super().__init__(group)
        if in_features < 1 or out_features < 1:
            raise InvalidRequest(f"a layer of {in_features} to {out_features} features was asked for; both are from 1")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.partitions["weight"] = self._partition(self._weight_dim, (out_features, in_features)[self._weight_dim])
        if self._weight_dim == 0 and bias:
            self.partitions["bias"] = self._partition(0, out_features)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        # First values have the bounds of nn.Linear (nn.init.kaiming_uniform_ with a = sqrt(5), and 1 / sqrt(in)).
        self.weight_bound = math.sqrt(3.0) * (math.sqrt(2.0 / (1 + 5.0)) / math.sqrt(in_features))
        self.bias_bound = 1.0 / math.sqrt(in_features)

    def _make(
        self,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | str | None,
        generator: torch.Generator | None,
    ) -> None:
        """Make the parameters and draw their first values."""
        known = None if dtype is None else torch_dtype(dtype)
        full = torch.empty(self.out_features, self.in_features, device="meta", dtype=known)
        options: dict[str, Any] = {"device": device, "dtype": full.dtype}
        self.weight = nn.Parameter(torch.empty(self.shard_of("weight", full).shape, **options))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.shard_of("bias", full[:, 0]).shape, **options))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw this rank's shard of the first values that `nn.Linear` has from the same seed on the CPU.

        Args:
            generator: a host generator, in the same state on all ranks; None = torch's default one.
        """
        draw_uniform_(self.weight, self.weight_bound, self.partitions["weight"], generator)
        if self.bias is not None:
            draw_uniform_(self.bias, self.bias_bound, self.partitions.get("bias"), generator)

    @classmethod
    def from_linear(cls: type[L], linear: nn.Linear, group: ProcessGroup | None = None, **options: Any) -> L:
        """Shard a layer that every rank has. The parameters are copies, frozen where the layer's are.

        Args:
            linear: the same on every rank.
            group: the ranks; None = all workers of the current world.
            options: as for the constructor (`gather_output`, `input_is_parallel`, `sequence_parallel`, ...).
        """
        given = linear.bias is not None
        options["device"] = "meta"
        layer = cls(linear.in_features, linear.out_features, given, group, **options)
        layer._set_shard("weight", linear.weight)
        layer._set_shard("bias", linear.bias)
        layer.train(linear.training)
        return layer

    def to_linear(self) -> nn.Linear:
        """Return the full layer, on every rank. Collective over the group."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.full_tensor("weight"), requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.full_tensor("bias"), requires_grad=self.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """Describe the layer for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"shard={self._rank} of {self._world_size}"
        )


class ColumnParallelLinear(ParallelLinear):
    """`nn.Linear` with its output features sharded among the ranks.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the full output's last dimension.
        bias: True = add one.
        group: the ranks; None = all workers of the current world.
        gather_output: True = every rank gets the full output, False = its own features.
        sequence_parallel: True = the input is this rank's equal shard of the sequence.
        sequence_dim: the dimension of the input that is the sequence.
        device: of the parameters.
        dtype: of the parameters, or its name.
        generator: draws first values; None = torch's default one (see `reset_parameters`).

    Raises:
        InvalidRequest: a size is below 1, or `bias` is not a bool.
        Misuse: as for `TensorParallelModule`.
    """

    _weight_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: ProcessGroup | None = None,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        *,
        sequence_dim: int = -2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, sequence_dim)
        self.gather_output = gather_output
        self._make(bias, device, dtype, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T + b. Collective over the group, here and in backward.

        Args:
            x: [..., in_features], replicated; with `sequence_parallel` this rank's shard of the sequence.

        Returns:
            [..., out_features], replicated; without `gather_output` [..., this rank's features].

        Raises:
            Disagreement: with `sequence_parallel`, the ranks' shards of the sequence differ.

        After an error: see `ProcessGroup`.
        """
        (y,) = project(x, self.group, [self.matrix], self.sequence_dim if self.sequence_parallel else None)
        return gather_from_group(y, self.group, -1, self.out_features) if self.gather_output else y

    @property
    def matrix(self) -> Matrix:
        """This rank's rows of weight and bias, for `project`."""
        return self.weight, self.bias


class RowParallelLinear(ParallelLinear):
    """`nn.Linear` with its input features sharded among the ranks.

    Args:
        in_features: size of the full input's last dimension.
        out_features: size of the output's last dimension.
        bias: True = add one, the same on all ranks.
        group: the ranks; None = all workers of the current world.
        input_is_parallel: True = the input has this rank's features only, as from a column-parallel layer; False = it
            is replicated, and each rank takes its own.
        sequence_parallel: True = the output is this rank's equal shard of the sequence.
        sequence_dim: the dimension of the output that is the sequence.
        device: of the parameters.
        dtype: of the parameters, or its name.
        generator: draws first values; None = torch's default one (see `reset_parameters`).

    Raises:
        InvalidRequest: a size is below 1, or `bias` is not a bool.
        Misuse: as for `TensorParallelModule`.
    """

    _weight_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: ProcessGroup | None = None,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        *,
        sequence_dim: int = -2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, sequence_dim)
        self.input_is_parallel = input_is_parallel
        self._make(bias, device, dtype, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T + b. Collective over the group; in backward only with `sequence_parallel` or replicated input.

        Args:
            x: [..., in_features], replicated; with `input_is_parallel` [..., this rank's features].

        Returns:
            [..., out_features], replicated; with `sequence_parallel` this rank's shard of the sequence.

        Raises:
            InvalidRequest: with `sequence_parallel`, the sequence does not divide.

        After an error: see `ProcessGroup`.
        """
        if not self.input_is_parallel:
            x = scatter_to_group(x, self.group, -1)
        partial = functional.linear(x, self.weight)
        if not self.sequence_parallel:
            y = reduce_from_group(partial, self.group)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        y = reduce_scatter_sequence(partial, self.group, self.sequence_dim)
        # Every rank adds the bias to its shard of the sequence, so its gradient is the sum of theirs.
        return y if self.bias is None else y + copy_to_group(self.bias, self.group).to(y.dtype)


def sum_gradients(module: nn.Module, group: ProcessGroup) -> nn.Module:
    """Sum the gradients of a replicated module that gets this rank's shard of the sequence: a norm, say.

    Each gradient is summed over all ranks as soon as it is there in backward, before DDP or the optimizer uses it. So
    the parameters stay equal. Collective over the group, in backward. The sum is made by hooks, which deep copies of
    the module do not have.

    Args:
        module: the same on every rank.
        group: the ranks that have the other shards.

    Returns:
        The module.
    """

    if group.world_size > 1:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(all_reduce, group=group))  # type: ignore[no-untyped-call]
    return module
