"""The sharded parameter in the user's hands, and torch's functions on it.

Owns: the two classes that a parameter alternates between, and the value of `param.grad` once the gradient was sent.
Refuses: to know when a unit is gathered (`flat_unit`, `runtime`).

Note: [Classes as states]
    A sharded parameter stays the object that the user's module made. While its unit is unsharded its class adds nothing
    to torch's dispatch, so that forward and backward run as on plain parameters. While the unit is sharded its class
    has a `__torch_function__`. It lets functions of the shape and its like through, and raises for all that would read
    or write values. Code that bypasses Python (autograd's own C++, a `DisableTorchFunctionSubclass` block) is not
    stopped, and reads NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.fsdp.mesh.boxes import is_divided
from axon_ps.parallel.fsdp.tensors.sent_gradients import Home
from axon_ps.parallel.fsdp.tensors.torch_functions import DESCRIBES, function_name

_GRAD: Any = torch._C.TensorBase.grad

_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__
_OWN_GRAD = {_GET_GRAD, _SET_GRAD, _GRAD.__delete__}
_DATA: Any = Tensor.data
_DETACHING = {Tensor.detach, _DATA.__get__}


class _Sharded:
    """A tensor whose values are on the shard servers; see Note: [Classes as states]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in DESCRIBES or func in _OWN_GRAD:
            return _disabled_torch_function_impl(func, types, args, kwargs or {})
        if func in _DETACHING:
            if is_divided(args[0]):
                values = torch.full((), math.nan, dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            else:
                values = _disabled_torch_function_impl(func, types, args, kwargs or {})
            detached: Any = values.as_subclass(ShardedValue)
            detached._axon_home = getattr(args[0], "_axon_home", None)
            return detached
        if in_backward() and _gathered_for_backward(args):
            return _disabled_torch_function_impl(func, types, args, kwargs or {})
        _refuse_read(func, (*args, *(kwargs or {}).values()))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:
        where: Any = self
        name = home.name if (home := getattr(self, "_axon_home", None)) is not None else "?"
        return f"<parameter {name!r} {list(where.shape)} {where.dtype}, its values are on the shard servers>"

    def __format__(self, spec: str) -> str:
        return repr(self)


class ShardedValue(_Sharded, Tensor):  # type: ignore[misc]
    """A sharded parameter, detached."""


class _OfServers:
    """`param.grad` and `param.data` of a parameter of the servers, whose gradient may have been sent."""

    _axon_home: Home

    @property
    def grad(self) -> Tensor | None:
        """The gradient, or once it was sent a placeholder, which can be clipped and used for nothing else."""
        own = own_grad(self)
        home: Home | None = getattr(self, "_axon_home", None)
        return own if own is not None or home is None else home.sent.of(self, home)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (home := getattr(self, "_axon_home", None)) is not None:
            if home.unit in home.sent:
                home.sent.refuse(home, "setting param.grad" if value is not None else "setting param.grad to None")
            home.sent.forget(home)
        set_own_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def data(self) -> Tensor:
        """The values, as of `detach()`: autograd counts writes to them."""
        return Tensor.detach(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_read(_DATA.__set__, (self,))


States: TypeAlias = tuple[type[nn.Parameter], type[nn.Parameter]]


@functools.cache
def states_of(plain: type[nn.Parameter]) -> States:
    """Return the classes of a parameter while its unit is sharded, and while it is unsharded.

    Args:
        plain: the class it was made with, or either of the two.
    """
    if issubclass(plain, _OfServers):
        plain = plain.__mro__[plain.__mro__.index(_OfServers) + 1]
    sharded = type(f"Sharded{plain.__name__}", (_Sharded, _OfServers, plain), {})
    unsharded = type(f"Unsharded{plain.__name__}", (_OfServers, plain), {})
    return sharded, unsharded


def become(param: nn.Parameter, state: type[nn.Parameter]) -> None:
    """Change the class of a parameter to another state.

    Raises:
        InvalidRequest: its class cannot be extended.
    """
    try:
        param.__class__ = state
    except TypeError as error:
        raise InvalidRequest(
            f"a parameter of class {type(param).__name__} cannot be sharded ({error}); use torch.nn.Parameter"
        ) from error


def own_grad(param: Any) -> Tensor | None:
    """Return the gradient that is here, not a sent one."""
    grad: Tensor | None = _disabled_torch_function_impl(_GET_GRAD, (), (param,), {})
    return grad


def set_own_grad(param: Any, grad: Tensor | None) -> None:
    """Set the gradient that is here."""
    _disabled_torch_function_impl(_SET_GRAD, (), (param, grad), {})


def in_backward() -> bool:
    """Return True if autograd is running a backward in this thread (a forward now is a recomputation)."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _gathered_for_backward(args: tuple[Any, ...]) -> bool:
    """Gather the units of sharded parameters that backward reads; return True if all of these have values then.

    An activation checkpoint inside a unit recomputes with the parameters themselves, and so does an autograd function
    that has stored one.
    """
    tensors = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    for param in (t for t in tensors if isinstance(t, _OfServers)):
        home = param._axon_home
        model: Any = home.model()
        if model is not None:
            model.runtime.gather_for_backward(home.unit)
    return not any(isinstance(t, _Sharded) for t in tensors)


def set_own_data(param: Any, values: Tensor) -> None:
    """Replace the memory of a parameter; of a DTensor, that of its box on this worker."""
    if is_divided(param):
        param._local_tensor = values
        return
    _disabled_torch_function_impl(_DATA.__set__, (), (param, values), {})


def _refuse_read(func: Any, args: Sequence[Any]) -> NoReturn:
    given = (a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    homes = (getattr(a, "_axon_home", None) for a in given if isinstance(a, _Sharded))  # not those that have values
    name = next((home.name for home in homes if home is not None), "?")
    raise Misuse(
        f"{function_name(func)} was called on parameter {name!r}, whose values are on the shard servers; they are here "
        "only while its unit runs. Read it inside `with model.summon_full_params():` or from model.state_dict(); "
        "change it with model.load_state_dict(); to train it use an optimizer of "
        "axon_ps.parallel, as axon_ps.parallel.AdamW. A module whose forward reads a parameter of another module needs "
        "it in its own unit: make the reader, or a module around both, a unit (unit_types)"
    )


__all__ = ["ShardedValue", "States", "become", "own_grad", "set_own_data", "set_own_grad", "states_of"]
