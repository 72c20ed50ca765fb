"""A standby, as `axon-ps run --standby` starts it: it has imported everything, and has no rank until one is free.

    python -m axon_ps.cli.launch.standby SCRIPT [ARGUMENTS...]        or: -m MODULE [ARGUMENTS...]

Most of the time between a worker's death and its successor's first step is Python importing torch. A standby has done
that already. The launcher writes the environment variables of the worker that it replaces to its standard input (one
line of JSON). Then it becomes the worker: the script runs as `__main__`, with its own arguments, as if Python had been
started with it.

It imports axon_ps and the modules that the script imports at its top, if they are installed or Python's own: the user's
own modules may read the environment when they are imported, and ranks are not known yet.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType


def main(program: Sequence[str]) -> None:
    """Import, wait for a worker to replace, and run the program as that worker."""
    _prepare(program[0])
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the job ended without a failure
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.environ.update(json.loads(line))
    sys.excepthook = _without_us
    if program[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        sys.argv = list(program)
        _run_script(program[0])


def _prepare(script: str) -> None:
    """Import the program's modules, as far as possible; the program itself raises the error if one is missing."""
    for name in imports_of(script):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):  # a job without torch
        from axon_ps.parallel.warm_up import warm_up

        warm_up()


def imports_of(script: str) -> Iterator[str]:
    """Yield the modules that a script imports at its top, without the user's own."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for statement in body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        else:
            continue
        yield from filter(_is_installed, names)


def _is_installed(name: str) -> bool:
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root == "axon_ps":
        return True
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return bool(spec and spec.origin) and not installed.isdisjoint(Path(str(spec and spec.origin)).resolve().parents)


def _run_script(path: str) -> None:
    """Run a script as `__main__`. It stays that to the end of the process, for pickles, children and `atexit`."""
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)


def _without_us(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as if Python had been started with the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(sys.argv[1:])
