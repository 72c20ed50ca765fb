"""`ModuleWrapper`: a module that wraps another, as a user of torch expects of a wrapper.

Owns: the parts of the module inside that the wrapper shows (signature, attributes, names, class), and the errors of
operations that it cannot do. Refuses: values and steps.

A wrapper is not a copy of its module and cannot be copied: its values are elsewhere, and it takes part in a job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NoReturn

from torch import nn

from axon_ps.errors import Misuse


class _Forward:
    """`forward` of a wrapper: a method with the signature of the module's. An instance's own `forward` overrides it."""

    def __get__(self, wrapper: ModuleWrapper | None, owner: type[ModuleWrapper]) -> Any:
        return owner._run if wrapper is None else MethodType(wrapper._forward, wrapper)


class ModuleWrapper(nn.Module):
    """Base of wrappers. Calling one calls `_run`.

    `isinstance(wrapper, type(module))` is true, as for FSDP2. Parameters and modules have the names that they have in
    the user's module. Attributes that the wrapper does not have are the module's.
    """

    module: nn.Module
    _forward: Callable[..., Any]
    forward = _Forward()

    def _wrap(self, module: nn.Module) -> None:
        """Wrap a module."""
        self.module = module
        wrapper: Any = type(self)
        self._forward = _with_signature(wrapper._run, module.forward)
        kind: Any = type(module)
        self._reported_class = _joined(wrapper, kind)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__.get("_reported_class", type(self))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        inside: Any = self.module
        return inside[key]

    def unwrap(self) -> nn.Module:
        """Return the user's module. Values on the servers can be read only inside `summon_full_params()`."""
        return self.module

    def into_inner(self) -> nn.Module:
        """Return `unwrap()`. This is its name in the Rust crates."""
        return self.unwrap()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapper, then the user's module and all modules in it. The first two have the same name.

        So parameters and buffers have the names that they have in the user's module, as in `state_dict()`.
        """
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def __copy__(self) -> NoReturn:
        self._refuse("copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, what: str) -> NoReturn:
        _refuse(f"a wrapped {type(self.module).__name__}", what)


class Uncopied:
    """An object that hooks of the user's module refer to: neither the module nor a part of it is copied or pickled."""

    def __copy__(self) -> NoReturn:
        _refuse("a module inside a wrapped one", "copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("a module inside a wrapped one", "copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("a module inside a wrapped one", "pickled")


def _refuse(module: str, what: str) -> NoReturn:
    raise Misuse(
        f"{module} cannot be {what}: its values are not in it, and it takes part in a job. Build another module, and "
        "call its load_state_dict(model.state_dict()); to write a file, torch.save(model.state_dict(), path)"
    )


def _with_signature(run: FunctionType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `run` with the signature and documentation of `original`, a bound method."""
    forward = FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    functools.update_wrapper(forward, original)
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):  # not written in Python
        return forward
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    given = [p.replace(kind=p.kind) for p in signature.parameters.values() if p.name != "self"]
    forward.__signature__ = signature.replace(parameters=[first, *given])  # type: ignore[attr-defined]
    return forward


@functools.cache
def _joined(wrapper: Any, module: Any) -> Any:
    """Return the class of a wrapper joined with its module's class; the wrapper's alone where they cannot be joined."""
    try:
        return type(f"{wrapper.__name__}[{module.__name__}]", (wrapper, module), {"forward": module.forward})
    except TypeError:
        return wrapper


__all__ = ["ModuleWrapper", "Uncopied"]
