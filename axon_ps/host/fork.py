"""Forks of a worker: data loaders, pools and programs may fork it at any moment, and both processes stay unharmed.

Owns: switching gRPC's own fork handlers off, detecting a fork of a process that had opened connections, and the limits
on such a fork.

Note: [A fork of a worker]
    A fork has the memory and the descriptors of its parent and none of its threads: no event loop, no thread that
    releases a lock, no thread that serves gRPC. So in a fork of a process in which connections were opened (`opened`):
    - every call that communicates raises `Misuse` at once, before it takes a lock (`check`);
    - nothing is closed: callbacks of `at_exit` and `finalize` are not called, and objects of the parent are not
      collected. Objects that close themselves with their last reference stay referenced (`in_child`);
    - it may not join a job: gRPC can be started once in a process, and the parent has started it.
    gRPC's own handlers do the opposite: they stop its threads, start others in the child, and end the connections
    there. That causes a segmentation fault when an event loop uses gRPC meanwhile. The handlers can be turned off only
    before gRPC is loaded, by a variable. If a program has loaded gRPC with them before `axon_ps`, forking is refused.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from axon_ps.errors import Misuse

VARIABLE: Final = "GRPC_ENABLE_FORK_SUPPORT"
"""gRPC reads it when it is loaded. The default is on."""

_ON, _OFF = ("1", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no")
_FORKS: Final = ("os.fork", "os.forkpty")  # events of audit hooks

_logger = logging.getLogger(__name__)
_opened = False  # connections, in this process or in an ancestor that it was forked from
_parent = 0  # id of the process that this one was forked from, when that had opened connections
_handlers_are_on = False
_in_child: list[Callable[[], object]] = []
_retained: list[object] = []
_at_exit: dict[Callable[[], object], Callable[[], None]] = {}


def disable_grpc_fork_handlers() -> None:
    """Have gRPC loaded without its fork handlers. `import axon_ps` calls it before any module of ours loads gRPC.

    See Note: [A fork of a worker].
    """
    global _handlers_are_on
    given = os.environ.get(VARIABLE, "").lower()
    if given in _OFF:
        return
    if "grpc._cython.cygrpc" in sys.modules:
        _handlers_are_on = True
        return
    if given in _ON:
        _logger.warning(
            "%s=%s cannot take effect: with gRPC's fork handlers a fork of a worker ends in a segmentation fault; "
            "axon_ps has set it to 0",
            VARIABLE,
            given,
        )
    os.environ[VARIABLE] = "0"


def opened() -> None:
    """Record that this process opens connections. See Note: [A fork of a worker]."""
    global _opened
    if not _opened and _handlers_are_on:
        sys.addaudithook(_refuse_forks)
    _opened = True


def is_fork() -> bool:
    """Return True if this process was forked from a process that had opened connections."""
    return _parent != 0


def check() -> None:
    """Raise in a fork of a process that had opened connections; do nothing elsewhere.

    Raises:
        Misuse: this process was forked from a process that had opened connections.
    """
    if _parent:
        raise Misuse(
            f"this process was forked from process {_parent} after that one had joined a job (World.init() or "
            'init_process_group("axon")): its world, models, optimizers and collectives can be used there only, and a '
            "fork cannot join a job. Do this in the parent, or start this process with the start method 'spawn' or "
            "'forkserver' (DataLoader: multiprocessing_context='spawn') and let it join by itself"
        )


def check_may_join() -> None:
    """Return if this process may join a job.

    Raises:
        Misuse: it is a fork of a worker, or was started by `multiprocessing` and is importing the main module again.
    """
    check()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise Misuse(
            "this process was started by multiprocessing ('spawn' or 'forkserver') and imports the program's main "
            "module again, which would join the job a second time: put what the program does, from World.init() or "
            'init_process_group() on, below `if __name__ == "__main__":`'
        )


def in_child(callback: Callable[[], object]) -> Callable[[], object]:
    """Have `callback` called at the beginning of every fork of a worker. Its result lives as long as the fork."""
    _in_child.append(callback)
    return callback


def at_exit(callback: Callable[[], object]) -> None:
    """Register a callback like `atexit.register`, but not for forks."""

    def call() -> None:
        if not _parent:
            callback()

    _at_exit[callback] = call
    atexit.register(call)


def not_at_exit(callback: Callable[[], object]) -> None:
    """Undo `at_exit`; harmless when there is nothing to undo."""
    atexit.unregister(_at_exit.pop(callback, callback))


def finalize(owner: object, callback: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Make a `weakref.finalize` that does nothing in forks."""
    return weakref.finalize(owner, _finalize, callback, args)


def _finalize(callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    if not _parent:
        callback(*args)


def _refuse_forks(event: str, _: tuple[Any, ...]) -> None:
    if event in _FORKS:
        raise Misuse(
            "this process cannot fork (DataLoader workers, multiprocessing): gRPC was loaded before axon_ps, with its "
            "fork handlers, which make a fork of a worker end in a segmentation fault. Import axon_ps before grpc, or "
            f"set {VARIABLE}=0 in the program's environment, or use the start method 'spawn' or 'forkserver'"
        )


def _begin_child() -> None:
    global _parent
    if not _opened:
        return
    _parent = os.getppid()
    gc.freeze()  # the child never collects objects of its parent
    _retained.extend(callback() for callback in _in_child)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_retained))  # also when the interpreter ends, and clears this module


os.register_at_fork(after_in_child=_begin_child)
