"""Gradients that have left this worker, as torch's functions see them.

Gradients are sent while backward runs, so `param.grad` is empty when a training loop, or a framework's, clips them.
Torch's clipping must not take that for a model without gradients. So `param.grad` is a placeholder then, a
`SentGradient`. It has a shape and no values, and raises for every function of values but those that make up
`torch.nn.utils.clip_grad_norm_`. Their norm is a `PendingNorm`. Once all gradients are multiplied by the clip factor
made of it, the servers will clip the step.

Invariant: torch's clipping has the same effect on these as `FullyShardedDataParallel.clip_grad_norm_`, or it raises.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.fsdp.tensors.torch_functions import DESCRIBES, function_name

_CALL = "call model.clip_grad_norm_(max_norm)"


@dataclass(frozen=True, eq=False)
class Home:
    """The model and unit of a parameter.

    Attributes:
        model: the wrapper, for optimizers to find.
        name: the parameter's name in the user's module.
        unit: number of its unit in the layout.
        sent: that model's gradients that have left this worker.
    """

    model: weakref.ref[nn.Module]
    name: str
    unit: int
    sent: SentGradients


class SentGradients:
    """Gradients of a model that have left this worker for the step under way, and the norm to clip them to.

    Torch leaves a gradient in `param.grad` after the step, and adds the next one to it unless `zero_grad()` is called.
    The servers cannot add to a gradient that they have applied, so it counts as retained until `zero_grad()`.

    Attributes:
        max_norm: global L2 norm to clip to; 0 = do not clip.
        factor: the number by which the program has multiplied all of them.
    """

    def __init__(self) -> None:
        self._retained: set[Home] = set()
        self._begin()

    def _begin(self) -> None:
        """Begin a step: nothing has left for it."""
        self.max_norm, self.factor = 0.0, 1.0
        self._multiplied: dict[float, set[tuple[int, str]]] = {}  # by the number, some of them
        self._params: dict[int, int] = {}  # by unit, its number of parameters
        self._norms: list[PendingNorm] = []
        self._scaled: dict[
            float, set[tuple[int, str]]
        ] = {}  # by the norm that they are clipped to, the gradients that torch's clipping scaled

    def __contains__(self, unit: int) -> bool:
        return unit in self._params

    def add(self, unit: int, num_params: int) -> None:
        """Record that the gradients of a unit have left, or were staged."""
        self._params[unit] = num_params

    def drop(self, unit: int) -> None:
        """Forget the gradients of a unit, which were dropped."""
        self._params.pop(unit, None)

    def retain(self, homes: Iterable[Home]) -> None:
        """Record gradients that the last step has applied, and that torch would still have."""
        self._retained.update(homes)

    def forget(self, home: Home | None = None) -> None:
        """Forget the retained gradient of a parameter, which was set to None; None = those of all parameters."""
        if home is None:
            self._retained.clear()
        else:
            self._retained.discard(home)

    @property
    def retains(self) -> bool:
        """True if torch would still have gradients of a step before."""
        return bool(self._retained)

    def check_not_retained(self, home: Home) -> None:
        """Check that another gradient of a parameter may come.

        Raises:
            Misuse: torch would add it to that of a step before.
        """
        if home in self._retained:
            raise Misuse(
                f"the gradient of {home.name!r} from the step before was not dropped, and torch would add this one to "
                "it; the shard servers have applied it and forgotten it. Call optimizer.zero_grad() in each step"
            )

    def check_none_retained(self) -> None:
        """Check that a step may be made.

        Raises:
            Misuse: torch would apply gradients of a step before once more.
        """
        if self._retained:
            name = min(home.name for home in self._retained)
            raise Misuse(
                f"the gradient of {name!r} from the step before was not dropped, and torch would apply it again with "
                "this step; the shard servers have applied it and forgotten it. Call optimizer.zero_grad() in each step"
            )

    @property
    def count(self) -> int:
        """Number of parameters whose gradients have left."""
        return sum(self._params.values())

    def of(self, param: Any, home: Home) -> SentGradient | None:
        """Return the placeholder for the gradient of a parameter; None if it has not been sent."""
        if home.unit not in self._params and home not in self._retained:
            return None
        empty = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(param.shape)
        grad = empty.as_subclass(SentGradient)
        grad.home = home
        return grad

    def clip(self, max_norm: float) -> PendingNorm:
        """Let the step clip to a global norm, the smallest of all calls; return the norm before clipping, pending.

        Raises:
            InvalidRequest: it is not above 0.
        """
        if not max_norm > 0.0:
            raise InvalidRequest(f"max_norm is {max_norm}; it must be above 0 (leave the call out to not clip)")
        if math.isfinite(max_norm):  # with inf the norm is only measured
            self.max_norm = min(self.max_norm or max_norm, max_norm)
        return self.norm()

    def norm(self) -> PendingNorm:
        """Return the norm before clipping of the step under way."""
        norm = PendingNorm.of(self, "norm")
        self._norms.append(norm)
        return norm

    def scaled(self, home: Home, max_norm: float) -> None:
        """Record that torch's clipping multiplied a gradient by the clip factor for `max_norm`."""
        scaled = self._scaled.setdefault(max_norm, set())
        scaled.add((home.unit, home.name))
        if len(scaled) == self.count:
            self.clip(max_norm)
            del self._scaled[max_norm]

    def multiply(self, home: Home, factor: float) -> None:
        """Multiply a gradient by a number, as a pipeline's schedule does with all of them.

        Raises:
            InvalidRequest: it is not above 0.
        """
        if not (factor > 0.0 and math.isfinite(factor)):
            raise InvalidRequest(f"gradients on their way are to be multiplied by {factor}; it must be above 0")
        multiplied = self._multiplied.setdefault(factor, set())
        multiplied.add((home.unit, home.name))
        if len(multiplied) == self.count:
            self.factor *= factor
            del self._multiplied[factor]

    def checked_max_norm(self) -> float:
        """Return the norm to which the step under way clips.

        Raises:
            Misuse: some gradients were clipped or multiplied, and others not.
        """
        if self._multiplied:
            some = len(next(iter(self._multiplied.values())))
            self._multiplied = {}
            raise Misuse(f"{some} of the {self.count} gradients sent were multiplied by a number; multiply all of them")
        if self._scaled:
            some = len(next(iter(self._scaled.values())))
            self._scaled = {}
            raise Misuse(f"{some} of the {self.count} gradients sent were clipped; {_CALL}, which clips all of them")
        return self.max_norm

    def decided(self, norm: float | None) -> None:
        """End the step: `norm` is that before clipping, None = unknown. No gradient counts as sent any more."""
        for pending in self._norms:
            pending.resolve(norm)
        self._begin()

    def refuse(self, home: Home, what: str) -> NoReturn:
        """Raise because something was done to a gradient that is not here."""
        raise Misuse(
            f"{what} cannot be done to the gradient of {home.name!r}: it was sent to the shard servers while backward "
            f"ran. To clip, {_CALL}; to make a step, use an optimizer of axon_ps.parallel, as axon_ps.parallel.AdamW; "
            "to scale a loss, axon_ps.parallel.GradScaler; to accumulate, model.no_sync(). What needs gradients on the "
            "worker needs ShardingStrategy.NO_SHARD"
        )


class SentGradient(Tensor):
    """The placeholder for a sent gradient. It can be clipped together with all others, and used for nothing else."""

    home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        grads = list(_sent_in(args))
        if isinstance(args[0], (list, tuple)) and len(grads) < len(args[0]):
            raise Misuse(_mixed(len(args[0]) - len(grads)))
        if name in ("linalg_vector_norm", "_foreach_norm") and not (kwargs or {}):
            order = float(args[1]) if len(args) > 1 else 2.0
            norms = [PendingNorm.of(g.home.sent, "partial", order, (g.home,)) for g in grads]
            return norms if name == "_foreach_norm" else norms[0]
        factor = args[1] if len(args) > 1 else None
        if name in ("mul_", "_foreach_mul_") and isinstance(factor, PendingNorm) and factor.stage == "factor":
            for grad in grads:
                grad.home.sent.scaled(grad.home, factor.max_norm)
            return args[0]
        if name in ("mul_", "div_") and isinstance(factor, (int, float)) and factor:
            grads[0].home.sent.multiply(grads[0].home, factor if name == "mul_" else 1.0 / factor)
            return args[0]
        home = grads[0].home if grads else next(_sent_in((kwargs or {}).values())).home
        home.sent.refuse(home, function_name(func))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"<the gradient of {self.home.name!r} {list(self.shape)}, which was sent to the shard servers>"

    def __format__(self, spec: str) -> str:
        return repr(self)


_STAGES: Mapping[tuple[str, str], str] = {
    ("partial", "to"): "partial",
    ("partial", "stack"): "partials",
    ("partials", "linalg_vector_norm"): "norm",
    ("norm", "add"): "shifted",
    ("shifted", "__rdiv__"): "ratio",
    ("ratio", "clamp"): "factor",
    ("factor", "to"): "factor",
}
"""The stages of `torch.nn.utils.clip_grad_norm_`, from norms of gradients to min(1, max_norm / (norm + eps))."""


class PendingNorm(Tensor):
    """A gradient norm that is known when the step is decided. Until then, reading it is an error.

    After `optimizer.step()` it is an ordinary number; NaN if the step was not decided, or broken off.
    """

    stage: str
    order: float
    homes: tuple[Home, ...]
    max_norm: float
    _sent: SentGradients
    _known: bool

    @classmethod
    def of(cls, sent: SentGradients, stage: str, order: float = 2.0, homes: tuple[Home, ...] = ()) -> PendingNorm:
        """Make a norm, or another stage of its computation."""
        norm: PendingNorm = torch.full((), math.nan, dtype=torch.float32, device="cpu").as_subclass(cls)
        norm.stage, norm.order, norm.homes, norm.max_norm = stage, order, homes, 0.0
        norm._sent, norm._known = sent, False
        return norm

    def resolve(self, value: float | None) -> None:
        """Become a number; infinite if it is larger than a number of 32 bits can be."""
        with torch._C.DisableTorchFunctionSubclass():
            self.copy_(torch.tensor(math.nan if value is None else value, dtype=torch.float64, device="cpu"))
        self._known = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pending = [n for n in _norms_in((*args, *kwargs.values())) if not n._known]
        if not pending or func in DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = pending[0]
        name = getattr(func, "__name__", "")
        stage = _STAGES.get((first.stage, name))
        if stage is None:
            raise Misuse(
                f"{function_name(func)} needs the gradient norm, which is known when the step is decided: read it "
                "after optimizer.step(), or take StepResult.grad_norm"
            )
        if stage == "partials":
            _check_stack(args[0])
        if stage == "norm":
            first._check_complete(float(args[1]) if len(args) > 1 else 2.0)
            return first._sent.norm()
        after = PendingNorm.of(first._sent, stage, first.order, tuple(h for n in pending for h in n.homes))
        after.max_norm = float(args[1]) if name == "__rdiv__" else first.max_norm
        return after

    def _check_complete(self, order: float) -> None:
        if order != 2.0 or self.order != 2.0:
            raise InvalidRequest(f"norm_type is {self.order:g}; the servers compute the L2 norm, pass norm_type=2")
        if len({(h.unit, h.name) for h in self.homes}) < self._sent.count:
            raise Misuse(
                f"the norm of {len(self.homes)} of {self._sent.count} gradients was asked for; the servers know that "
                f"of all of them: {_CALL}, or give torch.nn.utils.clip_grad_norm_ all parameters of the model"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        if self._known:
            return f"PendingNorm({self.item()})"
        return "<a gradient norm, known when the step is decided>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self._known else repr(self)


def _check_stack(values: Iterable[Any]) -> None:
    values = list(values)
    sent = [v for v in values if isinstance(v, PendingNorm)]
    if len(sent) < len(values) or len({id(v._sent) for v in sent}) > 1:
        raise Misuse(_mixed(len(values) - len(sent)))


def _mixed(others: int) -> str:
    return (
        f"gradients of one wrapped model were clipped together with {others} that were not sent with them; clip those "
        f"apart, and for the model {_CALL}"
    )


def _sent_in(args: Iterable[Any]) -> Iterator[SentGradient]:
    for arg in args:
        if isinstance(arg, SentGradient):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _sent_in(arg)


def _norms_in(args: Iterable[Any]) -> Iterator[PendingNorm]:
    for arg in args:
        if isinstance(arg, PendingNorm):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _norms_in(arg)


__all__ = ["Home", "PendingNorm", "SentGradient", "SentGradients"]
