"""PyTorch's own values in torch.distributed's object collectives, taken apart and put together without pickle.

Owns: the list of these types, beyond `collectives.encoding.SENDABLE`. torch itself sends dataclasses, enums,
named tuples and exceptions of its own modules (plans and metadata of distributed checkpoints, of pipeline stages, of
sharded optimizers).

Invariant: putting together imports nothing, and runs no `__init__` of a class that the content names. Such a class is
an exception of Python's, or it is from a module of torch that this process has imported. There it must be a dataclass,
an enum, a named tuple or an exception.

    tensor                a tensor, as safetensors; it arrives on the CPU
    size, dtype, ...      torch's own small values, by name
    object                a dataclass of torch's: its class and its fields
    enum, named           a member of an enum, a named tuple: of torch's
    error, stack          an exception, and its stack; an exception that is neither built in nor torch's becomes a
                          RuntimeError that names it
    set, slice, path ...  types of Python that torch uses
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, Final

import torch
from safetensors.torch import load, save

from axon_ps.collectives.encoding import Types

_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format)
_OWN: Final = "torch."


def _take_apart(value: Any) -> tuple[str, Any] | None:
    """See `Types.take_apart`."""
    kind = type(value)
    if kind in _SIMPLE:
        tag, content, _ = _SIMPLE[kind]
        return tag, content(value)
    if kind in _NAMED:
        return "$torch", str(value).removeprefix(_OWN)
    if isinstance(value, BaseException):
        return _error(value)
    if isinstance(value, PurePath):
        return "$path", str(value)
    if not kind.__module__.startswith(_OWN):
        return None
    if isinstance(value, enum.Enum):
        return "$enum", [_name(kind), value.name]
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value))
        return "$object", [_name(kind), {name: getattr(value, name) for name in fields if hasattr(value, name)}]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "$named", [_name(kind), list(value)]
    return None


def _put_together(tag: str, content: Any) -> Any:
    """See `Types.put_together`."""
    made = _BY_TAG.get(tag)
    if made is None:
        raise ValueError(f"{tag} is not known")
    try:
        return made(content)
    except Exception as error:  # errors of PyTorch and safetensors: the content is from another process
        raise ValueError(f"{content!r:.200} is no {tag}: {error}") from error


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, is_one: Callable[[type], bool]) -> Any:
    """Return a class of torch's by its name.

    Raises:
        ValueError: no module that is imported here has it, or it is of another kind.
    """
    module, _, path = str(name).partition(":")
    found: Any = sys.modules.get(module) if module.startswith(_OWN) else None
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    if not isinstance(found, type) or _name(found) != name or not is_one(found):
        raise ValueError(f"{name} is no value of PyTorch's that may be sent; import its module on every rank")
    return found


def _object(content: Any) -> Any:
    name, state = content
    kind = _class(name, dataclasses.is_dataclass)
    made, known = object.__new__(kind), {field.name for field in dataclasses.fields(kind)}
    if not state.keys() <= known:
        raise ValueError(f"{name} has no {', '.join(sorted(state.keys() - known))}; is it another version of PyTorch?")
    for field, value in state.items():
        object.__setattr__(made, field, value)
    return made


def _named(content: Any) -> Any:
    name, items = content
    return tuple.__new__(_class(name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields")), items)


def _enum(content: Any) -> Any:
    name, member = content
    return _class(name, lambda kind: issubclass(kind, enum.Enum))[member]


def _error(error: BaseException) -> tuple[str, Any]:
    kind = type(error)
    if kind.__module__ == "builtins" or kind.__module__.startswith(_OWN):
        simple = all(type(arg) in (str, int, float, bool, type(None)) for arg in error.args)
        state = dict(vars(error)) if kind.__module__ != "builtins" else {}
        return "$error", [_name(kind), list(error.args) if simple or state else [str(error)], state]
    text = "".join(traceback.format_exception_only(error)).strip()
    return "$error", ["builtins:RuntimeError", [text], {}]


def _raised(content: Any) -> BaseException:
    name, args, state = content
    module, _, path = str(name).partition(":")
    if module == "builtins":
        found = getattr(builtins, path, None)
        kind: Any = found if isinstance(found, type) and issubclass(found, BaseException) else RuntimeError
    else:
        kind = _class(name, lambda kind: issubclass(kind, BaseException))
    made: BaseException = kind.__new__(kind, *args)
    made.args = tuple(args)
    vars(made).update(state)
    return made


def _tensor_content(tensor: torch.Tensor) -> Any:
    return [save({"": tensor.detach().cpu().contiguous()}), tensor.requires_grad]


def _tensor(content: Any) -> torch.Tensor:
    data, requires_grad = content
    return load(data)[""].requires_grad_(bool(requires_grad))


def _torch_value(name: Any) -> Any:
    found = getattr(torch, str(name), None)
    if not isinstance(found, _NAMED):
        raise ValueError(f"torch.{name} is no dtype, layout or memory format")
    return found


def _frames(stack: traceback.StackSummary) -> Any:
    return [[frame.filename, frame.lineno, frame.name, frame.line] for frame in stack]


def _stack(content: Any) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([tuple(frame) for frame in content])


_SIMPLE: Final[dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    torch.Tensor: ("$tensor", _tensor_content, _tensor),
    torch.Size: ("$size", list, torch.Size),
    torch.device: ("$device", str, torch.device),
    set: ("$set", list, set),
    frozenset: ("$frozenset", list, frozenset),
    bytearray: ("$bytearray", bytes, bytearray),
    complex: ("$complex", lambda z: [z.real, z.imag], lambda c: complex(*c)),
    slice: ("$slice", lambda s: [s.start, s.stop, s.step], lambda c: slice(*c)),
    range: ("$range", lambda r: [r.start, r.stop, r.step], lambda c: range(*c)),
    timedelta: ("$timedelta", lambda t: [t.days, t.seconds, t.microseconds], lambda c: timedelta(*c)),
    OrderedDict: ("$ordered", lambda d: [list(pair) for pair in d.items()], OrderedDict),
    traceback.StackSummary: ("$stack", _frames, _stack),
}

_BY_TAG: Final[dict[str, Callable[[Any], Any]]] = {tag: made for tag, _, made in _SIMPLE.values()} | {
    "$torch": _torch_value,
    "$error": _raised,
    "$path": Path,
    "$enum": _enum,
    "$object": _object,
    "$named": _named,
}

TORCH: Final = Types(
    _take_apart,
    _put_together,
    ", sets, paths, tensors, and dataclasses and enums of PyTorch's own modules",
)
"""The types beyond `collectives.encoding.SENDABLE`."""

__all__ = ["TORCH"]
