"""The module of a program, as torch builds it: layers that do what people's own layers do.

Everything is `WIDTH` wide, so that layers go together in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from program import Block, Net

WIDTH = 4
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


class Boom(RuntimeError):
    """The error that a program raises in forward or backward, and catches."""


class Exploding(torch.autograd.Function):
    """Backward raises `Boom`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Never returns."""
        raise Boom("in backward")


class Box:
    """An object that holds a tensor, where no wrapper looks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Symmetric(nn.Module):
    """A parametrization without state."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The symmetric part."""
        return (weight + weight.T) / 2


class Layer(nn.Module):
    """A layer of a program.

    Attributes:
        kind: see `Block`.
        lin: most kinds have it.
        aux: what "auxiliary" adds to the loss, of the last forward.
        used: whether "sometimes" uses all of it.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.kind = kind = block.kind
        self.aux: torch.Tensor | None = None
        self.used = False
        if kind == "norm":
            self.body: nn.Module = nn.LayerNorm(WIDTH)
        elif kind == "batch norm":
            self.body = nn.BatchNorm1d(WIDTH)
        elif kind == "mlp":
            self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        elif kind == "attention":
            self.body = nn.MultiheadAttention(WIDTH, 2)
        elif kind == "max norm":
            self.body = nn.Embedding(8, WIDTH, max_norm=1.0)
        elif kind == "scale":
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
            self.shift = nn.Parameter(torch.tensor(0.1))
        else:
            self.lin = nn.Linear(WIDTH, WIDTH)
        if kind in ("spare", "sometimes", "auxiliary"):
            self.more = nn.Linear(WIDTH, WIDTH)
        if kind == "counter":
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(WIDTH))
        if kind == "codebook":
            self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        if kind == "weight norm":
            parametrizations.weight_norm(self.lin)
        if kind == "spectral norm":
            parametrizations.spectral_norm(self.lin)
        if kind == "symmetric":
            parametrize.register_parametrization(self.lin, "weight", Symmetric())
        if block.frozen == "all":
            self.requires_grad_(False)
        elif block.frozen == "first":
            next(iter(self.parameters())).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        """What `plain` makes a tensor of again."""
        kind = self.kind
        if kind in ("norm", "batch norm", "mlp"):
            return self.body(x)
        if kind == "attention":
            return self.body(x[:, None], x[:, None], x[:, None])[0][:, 0]
        if kind == "max norm":
            return x + self.body(torch.arange(len(x)) % 8)
        if kind == "scale":
            return x * self.weight + self.shift
        if kind == "clamp":
            with torch.no_grad():
                self.lin.weight.clamp_(-0.3, 0.3)
        elif kind == "decay" and self.training:
            self.lin.weight.data.mul_(0.9)
        out = self.lin(x)
        if kind == "codebook":
            out = out + self.book
            with torch.no_grad():
                self.book.mul_(0.9)
        elif kind == "tanh":
            out = torch.tanh(out)
        elif kind == "sometimes" and self.used:
            out = out + self.more(x)
        elif kind == "auxiliary":
            self.aux = self.more(out).square().mean()
        elif kind == "counter":
            self.calls += 1
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            out = out - self.mean.detach().clone()
        elif kind == "twice":
            out = self.lin(out)
        elif kind == "detached":
            out = out + x @ self.lin.weight.detach()
        if kind == "dict":
            return {"out": out, "none": None}
        if kind == "tuple":
            return None, (out,)
        if kind == "box":
            return Box(out)
        if kind == "distribution":
            return torch.distributions.Normal(out, 1.0)
        return out


class InRoot(Layer):
    """A layer that is no unit of its own."""


def plain(value: Any) -> torch.Tensor:
    """The tensor in what a layer, or a module, has returned."""
    if isinstance(value, dict):
        return value["out"]
    if isinstance(value, tuple):
        return value[1][0]
    if isinstance(value, Box):
        return value.value
    return value.mean if isinstance(value, torch.distributions.Normal) else value


class Module(nn.Module):
    """The module of a program.

    Attributes:
        kept: what the last forward has returned.
        dtype: of inputs and outputs.
        dtypes: of the layers.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.kept: torch.Tensor | None = None
        self.layers = nn.ModuleList((Layer if block.unit else InRoot)(block) for block in net.blocks)
        self.to(DTYPES[net.dtype])
        for layer, block in zip(self.layers, net.blocks, strict=True):
            if block.dtype:
                layer.to(DTYPES[block.dtype])
        self.dtype = DTYPES[net.dtype]
        self.dtypes = [DTYPES[block.dtype or net.dtype] for block in net.blocks]
        linear = [layer.lin for layer in self.layers if hasattr(layer, "lin") and "weight" in layer.lin._parameters]
        if net.tie and len(linear) > 1:
            linear[-1].weight = linear[0].weight

    def compute_in(self, dtype: torch.dtype) -> None:
        """All of it, whatever the program says."""
        self.to(dtype)
        self.dtype, self.dtypes = dtype, [dtype] * len(self.layers)

    def forward(self, x: torch.Tensor, raises: int = -1, explodes: int = -1) -> Any:
        """Apply the layers; raise `Boom` before the call of that number, or in its backward."""
        for number, i in enumerate(self.net.calls):
            if number == raises:
                raise Boom("in forward")
            x = self._apply_layer(self.layers[i], x.to(self.dtypes[i])).to(self.dtype)
            if number == explodes:
                x = Exploding.apply(x)
        self.kept = x
        if self.net.returns == "dict":
            return {"out": x}
        return Box(x) if self.net.returns == "object" else x

    def _apply_layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.net.checkpoint and torch.is_grad_enabled():
            return plain(checkpoint(layer, x, use_reentrant=self.net.checkpoint == "reentrant"))
        return plain(layer(x))


def hook(module: Module, *, after: bool) -> None:
    """Register the hooks that a program registers before or after wrapping."""
    for layer, block in zip(module.layers, module.net.blocks, strict=True):
        if block.hook and block.hook_after == after:
            HOOK[block.hook](layer)


def _first_trainable(layer: nn.Module) -> nn.Parameter | None:
    return next((p for p in layer.parameters() if p.requires_grad), None)


def _halve(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _half_of(value: Any) -> Any:
    return value * 0.5 if isinstance(value, torch.Tensor) else None


def _output(_: nn.Module, __: Any, value: Any) -> None:
    tensor = plain(value)
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: grad * 0.5)


def _of_parameter(layer: nn.Module) -> None:
    if (param := _first_trainable(layer)) is not None:
        param.register_hook(lambda grad: grad * 0.5)


def _post_accumulate(layer: nn.Module) -> None:
    if (param := _first_trainable(layer)) is not None:
        param.register_post_accumulate_grad_hook(_halve)


HOOK: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda layer: layer.register_forward_hook(lambda _, __, out: _half_of(out)),
    "forward pre": lambda layer: layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)),
    "full backward": lambda layer: layer.register_full_backward_hook(
        lambda _, grad_in, __: tuple(None if g is None else g * 0.5 for g in grad_in)
    ),
    "output": lambda layer: layer.register_forward_hook(_output),
    "parameter": _of_parameter,
    "post accumulate": _post_accumulate,
}
