"""torch dtypes and ours, and what `MixedPrecision` means."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axon_ps.errors import InvalidRequest
from axon_ps.types import WIRE_DTYPES, DType, WirePrecision

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
    """Our name of a torch dtype in which parameters can be held and travel.

    Raises:
        InvalidRequest: parameters of this dtype are not supported; `what` says whose it is.
    """
    ours = _FROM_TORCH.get(dtype)
    if ours not in WIRE_DTYPES:
        raise InvalidRequest(f"{what} has dtype {dtype}; use torch.float32, torch.bfloat16 or torch.float16")
    return ours


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtypes a wrapped model computes and its bytes travel. Masters and optimizer state are always f32.

    Attributes:
        param_dtype: parameters during forward and backward; None = the dtype the model was built with.
        wire_dtype: parameters on their way from the servers; None = as `param_dtype`.
        reduce_dtype: gradients on their way to the servers, where they are summed in f32; None = as `wire_dtype`.
        output_dtype: floating-point outputs of the whole model; None = as they come.
        cast_forward_inputs: whether floating-point inputs of the whole model are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute(self, built: torch.dtype) -> torch.dtype:
        """The dtype that parameters built as `built` compute in."""
        return self.param_dtype or built

    def wire(self, built: torch.dtype) -> WirePrecision:
        """What travels for a model built in `built`.

        Raises:
            InvalidRequest: a dtype cannot travel.
        """
        param = dtype_from_torch(self.wire_dtype or self.compute(built), "wire_dtype")
        grad = dtype_from_torch(self.reduce_dtype, "reduce_dtype") if self.reduce_dtype else param
        return WirePrecision(param=param, grad=grad)
