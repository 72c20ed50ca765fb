"""The forms of parameters and gradients on the wire between workers and servers."""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InvalidRequest
from axon_ps.types import DType, check_wire_dtype


@dataclass(frozen=True, kw_only=True)
class WirePrecision:
    """The dtypes between workers and servers: `param` from servers, `grad` to servers.

    Attributes:
        param: dtype of parameters; F32 when they are compressed.
        grad: dtype of gradients; F32 when they are compressed.
        param_compression: compressor of parameters; None = they are not compressed.
        grad_compression: compressor of gradients; None = they are not compressed.

    Raises:
        InvalidRequest: a dtype is not a wire dtype or is given beside a compression, or the compression of parameters
            is for gradients only.
    """

    param: DType = DType.F32
    grad: DType = DType.F32
    param_compression: Compressor | None = None
    grad_compression: Compressor | None = None

    @property
    def differs(self) -> bool:
        """True if parameters are sent as differences; see `Compressor.differences`."""
        return self.param_compression is not None and self.param_compression.differences

    def __post_init__(self) -> None:
        for what, dtype, compression in (
            ("parameters", self.param, self.param_compression),
            ("gradients", self.grad, self.grad_compression),
        ):
            check_wire_dtype(dtype, what)
            if compression is not None and dtype is not DType.F32:
                raise InvalidRequest(f"{what} travel as {compression}, made of f32; {dtype.value} was given beside it")
        if (how := self.param_compression) is not None and how.gradients_only:
            raise InvalidRequest(f"parameters cannot travel as {how}, which {how.gradients_only}; use int8 or a dtype")
