"""What a worker process of `LocalCluster` runs: load a function by its file and name, call it, send back the result.

The function's module is loaded under its own name (under `__axon_main__` when it was the parent's main program), so
what it returns may be of classes defined there. Parent and child talk over a pipe of their own, as in multiprocessing.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, cast

from axon_ps.errors import InvalidRequest

MAIN = "__axon_main__"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a function is found.

    Attributes:
        path: the parent's `sys.path`.
        module: name of the function's module.
        file: its source file.
        qualname: the function's name in it.
    """

    path: tuple[str, ...]
    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., object]) -> Target:
        """The target that finds `function`.

        Raises:
            InvalidRequest: it is no function of a module (a lambda, or defined in another function).
        """
        qualname = function.__qualname__
        if "<" in qualname:
            raise InvalidRequest(
                f"{qualname} cannot run in another process; give a function defined at the top of a module"
            )
        code = getattr(function, "__code__", None)
        module = MAIN if function.__module__ == "__main__" else function.__module__
        return cls(path=tuple(sys.path), module=module, file=code.co_filename if code else "", qualname=qualname)

    def load(self) -> Callable[..., object]:
        """The function."""
        sys.path[:] = self.path
        module = _load(self.module, self.file)
        function: Callable[..., object] = reduce(getattr, self.qualname.split("."), cast(Any, module))
        return function


def _load(name: str, file: str) -> ModuleType:
    if name != MAIN and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {file!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(fd: int) -> int:
    """Serve one call on the pipe `fd`; 0 when the function returned."""
    faulthandler.enable()  # SIGABRT, which the parent sends when time is up, prints every thread's stack
    with Connection(fd) as connection:
        try:
            function = connection.recv().load()
            args, kwargs = connection.recv()
            reply: tuple[str, Any] = ("value", function(*args, **kwargs))
        except BaseException:
            reply = ("error", traceback.format_exc())
        try:
            connection.send(reply)
        except (TypeError, AttributeError, ValueError) as error:
            reply = ("error", f"the result cannot be sent to the parent: {error!r}")
            connection.send(reply)
    return 0 if reply[0] == "value" else 1
