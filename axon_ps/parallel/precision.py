"""torch dtypes and ours, and `MixedPrecision`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.compress.compressor import Compressor
from axon_ps.compress.float8 import Float8
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Parameter, Unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import ELEMENTS, FLOATS, DType, parse_dtype

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {dtype: getattr(torch, dtype.torch_name) for dtype in ELEMENTS}

DTYPES: Final[dict[torch.dtype, DType]] = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}

_FLOAT8: Final = ("float8_e4m3", "float8_e4m3fn")


def torch_dtype(given: object, what: str = "dtype", also: Sequence[str] = ()) -> torch.dtype:
    """Return a dtype of torch's, which may be given by its name ("bfloat16").

    Args:
        given: the dtype. A floating-point or complex one of torch's is returned as it is.
        what: the name of the argument, for the message.
        also: the other values that the caller accepts, for the message.

    Raises:
        InvalidRequest: it is a dtype of integers, or no floating-point dtype has that name.
    """
    if isinstance(given, torch.dtype) and (given.is_floating_point or given.is_complex):
        return given
    return TORCH_DTYPES[parse_dtype(given, what, FLOATS, also)]


class _TorchDType:
    """A field of a dataclass that is a torch dtype or None, and may be given as a dtype's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> torch.dtype | None:
        return None if instance is None else instance.__dict__[self._name]  # of the class: the default value

    def __set__(self, instance: object, given: torch.dtype | str | None) -> None:
        instance.__dict__[self._name] = None if given is None else torch_dtype(given, self._name)


def _module_classes(given: Any) -> tuple[type[nn.Module], ...]:
    """Return `uncast_types` as they are used.

    Raises:
        InvalidRequest: they are not module classes.
    """
    kinds = (given,) if isinstance(given, type) else given
    if not isinstance(kinds, Collection) or not all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds):
        raise InvalidRequest(f"uncast_types is {given!r}; give module classes, as (nn.BatchNorm1d,)")
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """The dtypes in which a wrapped model computes and its values are sent.

    On the servers masters and optimizer state are f32.
    Values may also be sent compressed, with error feedback: `Int8()` (or "int8") or `Int4()` (or "int4") both ways,
    `TopK(0.01)` (or "top_k") for gradients, or any other compressor or its name. See docs/compression.md.

    As `wire_dtype`, "float8_e4m3" (or torch.float8_e4m3fn) sends the weights of linear layers as float8, with one scale
    for a tensor. See docs/float8.md.

    A dtype may be given as torch.bfloat16 or by its name, "bfloat16". As `wire_dtype` and `reduce_dtype`, "bf16" and
    "fp16" are the compressors of these names, with error feedback.

    Attributes:
        param_dtype: parameters during forward and backward; None = the dtype the model was built with.
        wire_dtype: parameters on their way from the servers; None = as `param_dtype`, or a dtype that holds the values
            of all parameters as they were built: f32 for units in bfloat16 beside units in f32.
        reduce_dtype: gradients on their way to the servers, where they are summed in f32; None = as `wire_dtype`, or as
            `param_dtype` if parameters travel as float8. If it is wider than `param_dtype`, those of `no_sync()` are
            summed in f32, too.
        output_dtype: floating-point outputs of the whole model; None = as they come.
        buffer_dtype: floating-point buffers; None = as they were built.
        cast_forward_inputs: True to cast floating-point inputs of the whole model to `param_dtype`.
        uncast_types: classes of modules that become units of their own, if units are chosen at all. Their parameters
            and buffers stay in the dtype that they were built with, which the wire then holds, too. Their inputs are
            cast to f32, and their outputs back.

    Raises:
        InvalidRequest: no dtype has the name that was given, layers cannot compute in it, or `uncast_types` are not
            module classes.
    """

    param_dtype: _TorchDType = _TorchDType()
    wire_dtype: torch.dtype | Compressor | str | None = None
    reduce_dtype: torch.dtype | Compressor | str | None = None
    output_dtype: _TorchDType = _TorchDType()
    buffer_dtype: _TorchDType = _TorchDType()
    cast_forward_inputs: bool = True
    uncast_types: tuple[type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "uncast_types", _module_classes(self.uncast_types))
        if self.param_dtype is not None and self.param_dtype.itemsize == 1:
            raise InvalidRequest(
                f"param_dtype is {self.param_dtype}; layers get their parameters as bfloat16, float16 or float32. Give "
                "wire_dtype='float8_e4m3' to send weights as float8, for layers that compute in it (docs/float8.md)"
            )

    @classmethod
    def of(cls, given: Any) -> Self:
        """Expand a short form: a dtype is `param_dtype`, True is bfloat16 there, None and False are the defaults.

        Raises:
            InvalidRequest: `given` is none of these.
        """
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, bool):
            return cls(param_dtype=torch.bfloat16) if given else cls()
        return cls(param_dtype=torch_dtype(given, "mixed_precision", also=("MixedPrecision(...)", "True", "False")))

    def compute(self, built: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters built as `built` compute."""
        return self.param_dtype or built

    def cast_inputs(self, inputs: Any) -> Any:
        """Return the inputs of a forward as it is to have them."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return inputs
        return cast_floats(inputs, self.param_dtype)

    def cast_output(self, output: Any) -> Any:
        """Return the output of a forward as the caller is to have it."""
        return output if self.output_dtype is None else cast_floats(output, self.output_dtype)

    def wire(self, built: torch.dtype) -> WirePrecision:
        """Return the dtypes in which values of a model built in `built` are sent.

        Raises:
            InvalidRequest: values of a dtype cannot be sent, or there is no such compression.
        """
        names, compute = ("wire_dtype", "reduce_dtype"), self.compute(built)
        param, grad = self.wire_dtype or compute, self.reduce_dtype
        if str(param).lower().removeprefix("torch.") in _FLOAT8:
            param = Float8(rest_bits=16 if compute is torch.bfloat16 else 32)
        if isinstance(param, Compressor) and param.by_tensor:
            grad = grad or compute
        return WirePrecision.of(param, grad, names)


def view_of(values: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Return the view of one parameter in the values of its unit, in its shape; of a raw one in its own dtype.

    See `sharding.layout`, Note: [Raw parameters].
    """
    own = values[parameter.offset : parameter.end]
    if parameter.raw:
        own = own.view(torch.uint8)[: parameter.nbytes].view(TORCH_DTYPES[parameter.dtype])
    return own.view(parameter.shape)


def views_of(values: torch.Tensor, unit: Unit) -> list[torch.Tensor]:
    """Return the views of all parameters in the values of their unit; see `view_of`."""
    return [view_of(values, parameter) for parameter in unit.parameters]


class CastForF32:
    """Hooks that cast the inputs of a module to f32, and its outputs back."""

    def __init__(self) -> None:
        self._given: torch.dtype | None = None

    def register(self, module: nn.Module) -> None:
        """Cast in each forward of a module."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._behind)

    def _before(self, module: nn.Module, inputs: Any) -> Any:
        floats = (x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor))
        given = [x.dtype for x in floats if x.is_floating_point() and x.dtype != torch.float32]
        self._given = given[-1] if given else None
        return cast_floats(inputs, torch.float32)

    def _behind(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output if self._given is None else cast_floats(output, self._given)


def scale_into(target: torch.Tensor, grad: torch.Tensor | None, scale: float) -> None:
    """Set target = grad * scale, computed in the wider of both dtypes; zero without a gradient."""
    if grad is None:
        target.zero_()
    elif cuda.memory().is_on_device(grad) != cuda.memory().is_on_device(target):
        wide = grad if grad.dtype.itemsize >= target.dtype.itemsize else grad.to(target.dtype)
        target.copy_(
            (wide * scale).to(target.dtype)
        )  # scaled and cast on its device, so that only the wire dtype is copied
    elif grad.device == target.device and grad.dtype.itemsize >= target.dtype.itemsize:
        torch.mul(grad, scale, out=target)
    else:
        target.copy_(grad)
        target.mul_(scale)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return nested lists, tuples, dicts and dataclasses, in which floating-point tensors are cast."""

    def cast_one(item: Any) -> Any:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            given = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
            return dataclasses.replace(item, **cast_floats(given, dtype))
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return torch.utils._pytree.tree_map(cast_one, value)
