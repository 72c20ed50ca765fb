"""The program of a worker process of `LocalCluster`: load a function by its file and name, call it, send its result.

The function's module is loaded under its own name (under `__axon_main__` when it was the parent's main program), so
its result may be of classes defined there. A function is sent by value, with all that it uses, if it is a lambda, is
inside another function, or is in no file (typed in a notebook, at a prompt or on standard input). Its result is then
sent by value, too. Parent and child communicate over a pipe, as in multiprocessing.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PickleError
from types import ModuleType
from typing import Any, cast

from axon_ps.errors import InvalidRequest

MAIN = "__axon_main__"


@dataclass(frozen=True, kw_only=True)
class ByName:
    """A function that is loaded by its file and name.

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
    def of(cls, function: Callable[..., object]) -> ByName | None:
        """Return the file and name of `function`; None if the function has to be sent by value."""
        code = getattr(function, "__code__", None)
        file, is_main = code.co_filename if code else "", function.__module__ == "__main__"
        if "<" in function.__qualname__ or (is_main and not Path(file).is_file()):
            return None
        module = MAIN if is_main else function.__module__
        return cls(path=tuple(sys.path), module=module, file=file, qualname=function.__qualname__)

    def load(self) -> Callable[..., object]:
        """Load the function."""
        sys.path[:] = self.path
        module = _load(self.module, self.file)
        function: Callable[..., object] = reduce(getattr, self.qualname.split("."), cast(Any, module))
        return function


@dataclass(frozen=True)
class ByValue:
    """A function that is sent by value.

    Attributes:
        path: the parent's `sys.path`.
        function: the function.
    """

    path: tuple[str, ...]
    function: Callable[..., object]

    def load(self) -> Callable[..., object]:
        """Return the function."""
        sys.path[:] = self.path
        return self.function


def dumped(value: object, *, by_value: bool) -> Any:
    """Return the pickle of a value, for the other end's `recv`.

    Raises:
        InvalidRequest: `by_value` is set, and cloudpickle is not installed.
        TypeError, AttributeError, ValueError, pickle.PicklingError: the value cannot be sent.
    """
    if not by_value:
        return ForkingPickler.dumps(value)
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise InvalidRequest(
            "a function that is in no file (or is a lambda, or inside another function) is sent to a worker by value, "
            "which needs cloudpickle: pip install 'axon-ps[notebook]', or put it at the top of a module"
        ) from None
    return cloudpickle.dumps(value)


def _load(name: str, file: str) -> ModuleType:
    if name != MAIN and _can_be_imported(name):
        return importlib.import_module(name)
    for package in accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(package, ModuleType(package))  # without it nothing of the module can be pickled
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {file!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _can_be_imported(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing: in the mode "importlib" pytest names modules by path
        return False


def main(fd: int) -> int:
    """Serve one call on the pipe `fd`; returns 0 if the function returned and its result was sent."""
    faulthandler.enable()  # SIGABRT, which the parent sends when time is up, prints every thread's stack
    with Connection(fd) as connection:
        by_value = False
        try:
            target = connection.recv()
            by_value = isinstance(target, ByValue)
            function = target.load()
            args, kwargs = connection.recv()
            reply: tuple[str, Any] = ("value", function(*args, **kwargs))
        except BaseException:
            reply = ("error", traceback.format_exc())
        try:
            content = dumped(reply, by_value=by_value)
        except (TypeError, AttributeError, ValueError, PickleError) as error:
            reply = ("error", f"the result cannot be sent to the parent: {error!r}")
            content = dumped(reply, by_value=False)
        connection.send_bytes(content)
    return 0 if reply[0] == "value" else 1
