"""The forms of parameters and gradients on the wire between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import choices, compressor, is_known
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Unit
from axon_ps.types import WIRE_DTYPES, DType, parse_dtype


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

    @classmethod
    def of(
        cls,
        param: object,
        grad: object | None,
        names: Sequence[str],
        among: Sequence[DType] = WIRE_DTYPES,
        *,
        by_tensor: bool = True,
    ) -> Self:
        """Return the precision that a user asks for.

        Args:
            param: the form of parameters: a dtype, as `parse_dtype` takes it, a compressor or its name. A name of both
                a dtype and a compressor, such as "bf16", is the compressor's.
            grad: that of gradients; None = as parameters.
            names: the names of these two arguments, for messages.
            among: the dtypes that are accepted for parameters.
            by_tensor: whether a compressor `by_tensor` is.
        """
        suited = choices(lambda known: not known.gradients_only and by_tensor >= known.by_tensor)
        dtype, packed = form = _form(param, names[0], among, suited)
        if packed is not None and packed.by_tensor > by_tensor:
            raise InvalidRequest(f"{names[0]} is {packed.name!r}, for layers that compute in it; use int8 or a dtype")
        grad_dtype, grad_packed = _form(grad, names[1], WIRE_DTYPES, choices()) if grad else form
        return cls(param=dtype, grad=grad_dtype, param_compression=packed, grad_compression=grad_packed)

    def of_unit(self, unit: Unit) -> WirePrecision:
        """Return the forms of a unit's values on the wire: these, with the compressor of its tensors.

        Raw parameters are sent as words, which look like f32.
        """
        if unit.raw:
            return WirePrecision()
        how = self.param_compression
        if how is None or not how.by_tensor:
            return self
        return replace(self, param_compression=how.of([(p.numel, p.float8) for p in unit.parameters]))

    @property
    def differs(self) -> bool:
        """True if parameters are sent as differences; see `Compressor.differences`."""
        return self.param_compression is not None and self.param_compression.differences

    @property
    def by_tensor(self) -> bool:
        """True if parameters are compressed by tensor; see `Compressor.by_tensor`."""
        return self.param_compression is not None and self.param_compression.by_tensor

    def __post_init__(self) -> None:
        for what, dtype, compression in (
            ("parameters", self.param, self.param_compression),
            ("gradients", self.grad, self.grad_compression),
        ):
            parse_dtype(dtype, f"the wire dtype of {what}")
            if compression is not None and dtype is not DType.F32:
                raise InvalidRequest(f"{what} travel as {compression}, made of f32; {dtype.value} was given beside it")
        if (how := self.param_compression) is not None and how.gradients_only:
            raise InvalidRequest(f"parameters cannot travel as {how}, which {how.gradients_only}; use int8 or a dtype")


def _form(given: object, what: str, among: Sequence[DType], also: Sequence[str]) -> tuple[DType, Compressor | None]:
    """Return the dtype of what is sent, and its compressor, if that was given."""
    for name in (given, given.lower()) if isinstance(given, str) else ():
        if is_known(name):
            return DType.F32, compressor(name)
    if isinstance(given, Compressor):
        return DType.F32, given
    return parse_dtype(given, what, among, also), None
