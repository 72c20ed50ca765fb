"""Functions and classes that torch.compile leaves alone, since they make calls to other ranks.

Note: [Compiled in place]
    After `module.compile()`, the compiler gets the frame of each hook of the module, and of its forward, on their own.
    With fullgraph=True a hook's frame would be an error, so the compiler is to skip it before any hook is called. The
    model's first call is outside of compiled modules, and sees to that.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Disable torch.compile for a function, once the compiler is imported.

    `torch.compiler.disable` itself imports the compiler. That takes most of a second in every process, and most
    processes never compile anything.
    """
    disabled: Callable[P, T] | None = None
    skipped = False

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled, skipped
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not skipped:  # of all functions, which have this code in common; see Note: [Compiled in place]
            torch._dynamo.eval_frame.skip_code(marked.__code__)
            skipped = True
        if not torch.compiler.is_dynamo_compiling() and get_eval_frame_callback() is None:
            return function(*args, **kwargs)  # nothing here is compiled, and `disabled` would take microseconds
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    marked: Any = call
    marked._torchdynamo_disable = True  # breaks the graph before `call`, whose own frame has nothing to compile
    return call


def uncompiled_methods(cls: C) -> C:
    """Make each method of a class (but special ones) `uncompiled`, as C++ may call it in the midst of a graph."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(cls, name, uncompiled(method))
    return cls
