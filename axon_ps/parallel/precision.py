"""torch dtypes and ours, and `MixedPrecision`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from axon_ps.collectives import cuda
from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import WIRE_DTYPES, DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F64: torch.float64,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}

_FROM_TORCH = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}


def dtype_from_torch(dtype: torch.dtype, what: str) -> DType:
    """Return our dtype for a torch dtype in which parameters can be stored and sent.

    Raises:
        InvalidRequest: parameters of this dtype are not supported; `what` names it in the message.
    """
    ours = _FROM_TORCH.get(dtype)
    if ours not in WIRE_DTYPES:
        raise InvalidRequest(f"{what} has dtype {dtype}; use torch.float32, torch.bfloat16 or torch.float16")
    return ours


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """The dtypes in which a wrapped model computes and its values are sent. Masters and optimizer state are always f32.

    Values may also be sent compressed, with error feedback: `Int8()` (or "int8") or `Int4()` (or "int4") both ways,
    `TopK(0.01)` (or "top_k") for gradients, or any other compressor or its name. See docs/compression.md.

    Attributes:
        param_dtype: parameters during forward and backward; None = the dtype the model was built with.
        wire_dtype: parameters on their way from the servers; None = as `param_dtype`, or a dtype that holds the values
            of all parameters as they were built: f32 for units in bfloat16 beside units in f32.
        reduce_dtype: gradients on their way to the servers, where they are summed in f32; None = as `wire_dtype`.
        output_dtype: floating-point outputs of the whole model; None = as they come.
        buffer_dtype: floating-point buffers; None = as they were built.
        cast_forward_inputs: True to cast floating-point inputs of the whole model to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | Compressor | str | None = None
    reduce_dtype: torch.dtype | Compressor | str | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, given: Any) -> Self:
        """Expand a short form: None and False mean nothing, True means bfloat16, a dtype means `param_dtype`.

        Raises:
            InvalidRequest: `given` is none of these.
        """
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, bool):
            return cls(param_dtype=torch.bfloat16) if given else cls()
        if isinstance(given, torch.dtype):
            return cls(param_dtype=given)
        raise InvalidRequest(f"mixed_precision is {given!r}; give a MixedPrecision, a torch.dtype, True or False")

    def compute(self, built: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters built as `built` compute."""
        return self.param_dtype or built

    def wire(self, built: torch.dtype) -> WirePrecision:
        """Return the dtypes in which values of a model built in `built` are sent.

        Raises:
            InvalidRequest: values of a dtype cannot be sent, or there is no such compression.
        """
        param, packed_param = _travels(self.wire_dtype or self.compute(built), "wire_dtype")
        grad, packed_grad = _travels(self.reduce_dtype, "reduce_dtype") if self.reduce_dtype else (param, packed_param)
        return WirePrecision(param=param, grad=grad, param_compression=packed_param, grad_compression=packed_grad)


def _travels(choice: torch.dtype | Compressor | str, what: str) -> tuple[DType, Compressor | None]:
    if isinstance(choice, str):
        try:
            choice = compressor(choice)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"{what} is {choice!r}; use a torch dtype, 'int8', 'int4' or 'top_k': {error}"
            ) from error
    return (dtype_from_torch(choice, what), None) if isinstance(choice, torch.dtype) else (DType.F32, choice)


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
