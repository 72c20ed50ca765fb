"""`SyncBatchNorm`: batch normalisation over the batches of all ranks of a group together.

Owns: the layer and its exchange. Its results are those of torch's BatchNorm in one process that has all ranks' batches,
one after the other. torch's own SyncBatchNorm does so on GPUs alone.

    shape legend: x: [N, C, ...], n = values per channel on this rank, T = of all ranks, R = ranks

    forward    each rank: mean, sum of squares about it, n      all-gather f64[2 C + 1]
               together: mean and variance of the T values (Chan et al. 1979), the same bits on every rank
    backward   each rank: sum of dy, sum of dy (x - mean)       all-reduce [2, C]
               dx = (dy - sum dy / T - (x - mean) sum(dy (x - mean)) / (T var)) weight / std

Gradients of weight and bias are those of this rank's batch: DDP and FSDP average them like all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from axon_ps.collectives import arrays
from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.by_reference import ByReference
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.precision import torch_dtype

if TYPE_CHECKING:
    from axon_ps.worker.world import World


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d whose statistics in training are those of all ranks' batches, as `torch.nn.SyncBatchNorm`.

    Ranks may have batches of different sizes, and empty ones. In evaluation nothing is exchanged. A training forward is
    collective over the group, and so is its backward where the input needs a gradient.

    Args:
        num_features: C, of inputs [N, C, ...].
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None = all batches count the same.
        affine: True = there are weight and bias.
        track_running_stats: True = there are running statistics; False = evaluation uses those of its batch.
        process_group: the ranks: a group, or a world for all of its workers; None = the current world, with the workers
            that it has at the time.
        device: of the parameters.
        dtype: of the parameters, or its name.
        bias: True = there is a bias with the weight.

    Raises:
        InvalidRequest: in a forward: the input has other channels or fewer than two dimensions (in training the other
            ranks get the error too); in training: all ranks together have one value per channel or none.
        Misuse: in a training forward: no group was given and there is no current world.

    After an error: see `ProcessGroup`. The running statistics are unchanged.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | World | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        bias: bool = True,
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": None if dtype is None else torch_dtype(dtype)}
        options |= {} if bias else {"bias": False}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self._group = ByReference(process_group)

    @property
    def process_group(self) -> ProcessGroup | World | None:
        """The ranks, as they were given."""
        return self._group.value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each channel.

        Args:
            x: [N, C, ...]; the other ranks' may have another N and, in training, other sizes after C.

        Returns:
            A tensor of x's shape and dtype.
        """
        if not self.training:
            self._check_input_dim(x)
            own = self.running_mean is None
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps
            )
        return _in_training(self, x)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or not 0 < input.size(1) == self.num_features:
            n = self.num_features
            raise InvalidRequest(f"SyncBatchNorm({n}) was given {list(input.shape)}; it needs [N, {n}, ...]")

    def _track(self, mean: torch.Tensor, var: torch.Tensor, total: float) -> None:
        """Count a batch in the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, var * (total / (total - 1.0)))):
            running.mul_(1.0 - factor).add_(value.to(running.dtype), alpha=factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup | World | None = None) -> nn.Module:
        """Replace every BatchNorm layer of a module, torch's or ours. Call it before the module is wrapped.

        Args:
            module: changed in place, except where it is such a layer itself. Parameters and buffers stay the same.
            process_group: as for the constructor.

        Returns:
            The module; if it is such a layer, the new one.

        Raises:
            InvalidRequest: a lazy layer does not know its channels yet.
        """
        converted = cls._converted(module, process_group) if isinstance(module, _BatchNorm) else module
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted

    @classmethod
    def _converted(cls, old: _BatchNorm, process_group: ProcessGroup | World | None) -> SyncBatchNorm:
        if isinstance(old, LazyModuleMixin) and old.has_uninitialized_params():
            raise InvalidRequest(
                f"{type(old).__name__} does not know its channels yet; make a forward before converting"
            )
        bias = not old.affine or old.bias is not None
        new = cls(
            old.num_features,
            old.eps,
            old.momentum,
            old.affine,
            old.track_running_stats,
            process_group,
            device="meta",
            bias=bias,
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(old, name))
        new.training = old.training
        return new


@uncompiled
def _in_training(layer: SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    group = current_group(layer.process_group)
    with group.calls.preparing("SyncBatchNorm", arrays.on_device(x), None, False):
        layer._check_input_dim(x)
    with torch.no_grad():
        mean, var, total = _statistics(x, group)
        if total < 2:
            raise InvalidRequest(
                f"SyncBatchNorm needs more than one value per channel in training; the {group.world_size} ranks "
                f"together have {total}"
            )
        layer._track(mean, var, total)
        invstd = (var + layer.eps).rsqrt()
    result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean, var, invstd, layer.eps, total, group
    )
    return result


def _statistics(x: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and variance by channel of all ranks' values, f64[C] each, and their number."""
    channels, count = x.size(1), x.numel() // x.size(1)
    ours = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        var, mean = torch.var_mean(x.to(_accurate(x)), _all_but_channels(x), correction=0)
        ours[:channels], ours[channels:-1], ours[-1] = mean, var.double() * count, count
    everybody: torch.Tensor = group.all_gather(ours.reshape(1, -1))  # [R, 2 C + 1]
    means, squares, counts = torch.split(everybody, [channels, channels, 1], dim=1)
    total = int(counts.sum())
    mean = (means * counts).sum(0) / max(1, total)
    var = (squares + counts * (means - mean).square()).sum(0) / max(1, total)
    return mean, var, total


class _Normalise(torch.autograd.Function):
    """(x - mean) invstd weight + bias, where mean and invstd depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        invstd: torch.Tensor,
        eps: float,
        total: int,
        group: ProcessGroup,
    ) -> torch.Tensor:
        exact = _accurate(x)
        mean, invstd = mean.to(exact), invstd.to(exact)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.total, ctx.group, ctx.has_bias = total, group, bias is not None
        if not x.numel():
            return torch.empty_like(x)
        scale, shift = (p if p is None else p.to(exact) for p in (weight, bias))
        return functional.batch_norm(x, mean, var.to(exact), scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        exact, over = _accurate(x), _all_but_channels(x)
        shape = [1, -1] + [1] * (x.dim() - 2)
        dy = grad.to(exact)
        centered = x.to(exact) - mean.view(shape)
        sums = torch.stack([dy.sum(over), (dy * centered).sum(over)])
        grads: list[torch.Tensor | None] = [None] * 9
        if weight is not None and ctx.needs_input_grad[1]:
            grads[1] = (sums[1] * invstd).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grads[2] = sums[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            sums = sums.clone()
            ctx.group.all_reduce(sums)
            offset, slope = sums[0] / ctx.total, sums[1] / ctx.total * invstd.square()
            scale = invstd if weight is None else invstd * weight.to(exact)
            dx = (dy - offset.view(shape) - centered * slope.view(shape)) * scale.view(shape)
            grads[0] = dx.to(x.dtype)
        return tuple(grads)


def _accurate(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums of x are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
