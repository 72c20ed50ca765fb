"""The interface of a shard server's optimizers: names, hyperparameters, state, and one fused pass over a slice.

Owns: the interface `UpdateRule`, the validation of hyperparameters, and the checks of arrays before they reach a
compiled loop, which does not check its bounds.
Refuses: to store anything. An optimizer object has no state: the caller has the parameters, the moments and the number
of updates. So one object serves every slice, from any number of threads.

Invariants:
- `apply` is element-wise: the bits of a result do not depend on the ranges that a slice was cut into, on the threads
  that ran them, or on the vector width of the machine (no contraction, no reordering). So a primary and its backup
  stay bit-identical by applying the same gradient.
- Scalar factors are computed in f64 and rounded to f32 once, as torch does.

Shapes: `n` is the numel of the range of a slice given to one call.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.kernels.arrays import check_array, readonly
from axon_ps.types import Array, DType, Hyper

_F32_MAX = float(np.finfo(np.float32).max)
_F32, _BF16, _F16 = (dtype.numpy for dtype in (DType.F32, DType.BF16, DType.F16))
_U64 = np.dtype(np.uint64)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that a hyperparameter may take.

    Attributes:
        low: the smallest allowed value.
        below: all values are smaller than this.
        flag: True = only 0.0 and 1.0 are allowed.
    """

    low: float = 0.0
    below: float = math.inf
    flag: bool = False

    def __contains__(self, value: float) -> bool:
        if self.flag:
            return value in (0.0, 1.0)
        return self.low <= value < self.below and abs(value) <= _F32_MAX

    def __str__(self) -> str:
        if self.flag:
            return "0 or 1"
        low = "any finite value" if self.low == -math.inf else f"a finite value ≥ {self.low:g}"
        return low if self.below == math.inf else f"a value in [{self.low:g}, {self.below:g})"


AT_LEAST_0 = Range()
BELOW_1 = Range(below=1.0)
ANY = Range(low=-math.inf)
FLAG = Range(flag=True)


class UpdateRule(ABC):
    """One optimizer, as a set of pure functions.

    Attributes:
        name: the name under which it is registered ("adamw"). `optim.register` sets it.
        defaults: every hyperparameter with its default, which is torch's if torch has it. Flags are 0.0 or 1.0. The
            pair `betas` is "beta1" and "beta2".
        ranges: the values allowed for each of them.
    """

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, float]]
    ranges: ClassVar[Mapping[str, Range]]

    @abstractmethod
    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return torch's names of the state arrays that these parameter groups need, in the order of `apply`.

        Every slice has the same arrays, so this is the union over the groups. A group does not change an array that it
        does not need. Only arrays that are needed are named: SGD without momentum has none.

        Args:
            groups: per parameter group, its hyperparameters. A missing one has its default.
        """

    def initial_state(self, name: str, groups: Sequence[Hyper]) -> float:
        """Return the value that fills the state array `name` before the first update.

        Args:
            name: one of `state_names(groups)`.
            groups: per parameter group, its hyperparameters.

        Raises:
            InvalidRequest: there is no such state array, or the groups ask for different values.
        """
        if name not in self.state_names(groups):
            needed = ", ".join(self.state_names(groups)) or "none"
            raise InvalidRequest(f"{self.name} has no state {name!r} with these groups; it has {needed}")
        return 0.0

    def validate(self, hyper: Hyper) -> dict[str, float]:
        """Check the hyperparameters of one group and fill in the defaults.

        Args:
            hyper: hyperparameter values by name; may be incomplete.

        Returns:
            Every hyperparameter of this optimizer, as floats.

        Raises:
            InvalidRequest: a name is unknown, or a value is not a number in its range.
        """
        unknown = sorted(set(hyper) - set(self.defaults))
        if unknown:
            raise InvalidRequest(
                f"{self.name} has no hyperparameter {unknown[0]!r}; it has {', '.join(self.defaults)}; "
                f"remove it or correct its name"
            )
        return {name: self._number(name, hyper.get(name, default)) for name, default in self.defaults.items()}

    def cannot_follow(self, before: Hyper, hyper: Hyper) -> str:
        """Return why a group's hyperparameters cannot follow its last ones, and a remedy; empty when they can.

        Args:
            before: those of the previous step, validated.
            hyper: those of the next step, validated.
        """
        return ""

    def apply(
        self,
        param: Array,
        grad: Array,
        state: tuple[Array, ...],
        wire: Array | None,
        wire_dtype: DType,
        hyper: Hyper,
        update: int,
        grad_scale: float,
        digests: Array | None = None,
    ) -> None:
        """Update one range of a slice, in place, in one pass, with the GIL released.

        The gradient is first multiplied by `grad_scale` (the clip factor), then treated as in torch.

        Args:
            param: f32[n], the master parameters; updated.
            grad: f32[n]; read only. Must not overlap the others.
            state: per name in `state_names(groups)`, f32[n]; updated.
            wire: wire_dtype.numpy[n], overwritten with the new parameters, or None for no copy.
            wire_dtype: BF16 or F16; ignored when `wire` is None. Values that are sent as f32 need no copy.
            hyper: this group's values, as `validate` returned them. A missing one has its default.
            update: number of this update, counted from 1 (torch's `step` after it was incremented).
            grad_scale: factor for the gradient.
            digests: u64[2, 2 + len(state)]: the digests of the values read of (param, *state, grad) are added to the
                first row, those of the values written of (param, *state) to the second one; see `kernels.digest`.
                None = no digests.

        Raises:
            InvalidRequest: an array has another element type, length or layout than above, a state array that these
                hyperparameters need is missing, `wire_dtype` is another one, or `update` is not positive. Nothing has
                been changed then.
        """
        values = hyper if len(hyper) == len(self.defaults) else {**self.defaults, **hyper}
        if update < 1:
            raise InvalidRequest(f"update is {update}; updates are counted from 1")
        needed = self.state_names((values,))
        if len(state) < len(needed):
            raise InvalidRequest(
                f"{self.name} needs the state {', '.join(needed)} with these hyperparameters, but {len(state)} arrays "
                f"were given; allocate those that state_names(groups) names, with the hyperparameters of every group"
            )
        numel = param.size
        _check_array("param", param, _F32, numel)
        _check_array("grad", grad, _F32, numel)
        for array in state:
            _check_array("state", array, _F32, numel)
        if wire is not None:
            wire = _wire_view(wire, wire_dtype, numel)
        if digests is None:
            self._update(param, grad, state, wire, values, update, float(grad_scale))
            return
        check_array("digests", digests, _U64, (2, 2 + len(state)))
        if self._sums and len(state) == len(needed):
            self._update_summing(param, grad, state, wire, values, update, float(grad_scale), digests)
        else:  # the loop does not sum, or there is a state array that only other groups need
            from axon_ps.kernels.digest import READ, WRITTEN, digests_of

            digests[READ] += digests_of((param, *state, grad))
            self._update(param, grad, state, wire, values, update, float(grad_scale))
            digests[WRITTEN, :-1] += digests_of((param, *state))

    def warm_up(self, groups: Sequence[Hyper], wire_dtype: DType | None) -> None:
        """Compile (or load from disk) the loops that a server needs for these groups, by updating empty arrays.

        A server calls it when it makes the optimizer's state, since the first compilation takes about a second.

        Args:
            groups: per parameter group, its hyperparameters.
            wire_dtype: the dtype of the wire copy, or None for no copy.
        """
        empty = np.empty(0, np.float32)
        state = tuple(empty for _ in self.state_names(groups))
        wire = None if wire_dtype is None else np.empty(0, wire_dtype.numpy)
        for hyper in groups:
            digests = np.zeros((2, 2 + len(state)), np.uint64)
            self.apply(empty, empty, state, wire, wire_dtype or DType.F32, hyper, 1, 1.0, digests)

    @abstractmethod
    def _update(
        self,
        param: Array,
        grad: Array,
        state: tuple[Array, ...],
        wire: Array | None,
        hyper: Hyper,
        update: int,
        grad_scale: float,
    ) -> None:
        """Do the work of `apply` after its checks. `hyper` is complete, and an f16 `wire` comes as int16 bits.

        It may have an optional last argument `digests`, as that of `apply`, and add to it in its own pass. With digests
        it gets at most `kernels.digest.SUMMED_NUMEL` elements at once, and no state that `hyper` does not need.
        """

    def _update_summing(
        self,
        param: Array,
        grad: Array,
        state: tuple[Array, ...],
        wire: Array | None,
        hyper: Hyper,
        update: int,
        grad_scale: float,
        digests: Array,
    ) -> None:
        """Call `_update` with digests, for at most `SUMMED_NUMEL` elements at once."""
        from axon_ps.kernels.digest import SUMMED_NUMEL

        one: Callable[..., None] = self._update
        for begin in range(0, max(1, param.size), SUMMED_NUMEL):
            at = slice(begin, begin + SUMMED_NUMEL)
            states, copy = tuple(array[at] for array in state), None if wire is None else wire[at]
            one(param[at], grad[at], states, copy, hyper, update, grad_scale, digests)

    @cached_property
    def _sums(self) -> bool:
        """True if `_update` has the argument `digests`."""
        return "digests" in inspect.signature(self._update).parameters

    def _write(self, param: Array, wire: Array | None) -> None:
        """Write the wire copy, rounded: for an `_update` that does not write it in its own pass."""
        if wire is not None:
            from axon_ps.kernels import rounding

            rounding.convert(readonly(param), wire)

    @cached_property
    def _kernels(self) -> Any:
        """The compiled loops. Imported at the first update, because describing an optimizer needs no numba."""
        from axon_ps.kernels import optimizer_loops

        return optimizer_loops

    def _any(self, name: str, groups: Sequence[Hyper]) -> bool:
        """Return True if a hyperparameter is not 0 in some group."""
        return any(group.get(name, self.defaults[name]) != 0.0 for group in groups)

    def _number(self, name: str, value: object) -> float:
        """Return a hyperparameter as a float in its range."""
        if isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
            number = float(value)
            if number in self.ranges[name]:
                return number
        raise InvalidRequest(f"{self.name}: {name} is {value!r}; needed is {self.ranges[name]}; correct it")


def _check_array(name: str, array: Array, dtype: np.dtype[np.generic], numel: int) -> None:
    if array.dtype != dtype or array.shape != (numel,) or not array.flags.c_contiguous:
        raise InvalidRequest(
            f"{name} is {array.dtype}{list(array.shape)} with strides {array.strides}; needed is a contiguous "
            f"{dtype}[{numel}]; pass 1-D contiguous arrays that are as long as param"
        )


def _wire_view(wire: Array, dtype: DType, numel: int) -> Array:
    """Return the wire copy in the form for the loops: f16 as int16 bits."""
    if dtype is DType.BF16:
        _check_array("wire", wire, _BF16, numel)
    elif dtype is DType.F16:
        _check_array("wire", wire, _F16, numel)
        return wire.view(np.int16)
    else:
        raise InvalidRequest(f"wire_dtype is {dtype.name}; a copy is BF16 or F16; what travels as f32 needs none: None")
    return wire
