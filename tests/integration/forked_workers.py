"""Runs the `main` of modules one after the other, each in a job of its own, by workers that are forks of this process.

    python forked_workers.py RUNS.json

Importing torch, numba's kernels or transformers takes seconds of CPU; here they are imported once. A fork is safe as
long as nothing has started a thread, which imports do not. A module's `warm_up`, if it has one, is called before.
RUNS.json: {"path": directory of the modules, "runs": [[module, arguments, environment by rank]]}.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def in_a_worker(path: str) -> None:
    """As `main`, in a worker of a cluster, which has imported most of it already."""
    if main(path):
        raise RuntimeError("a worker has failed; its output shows how")


def main(path: str) -> int:
    """Run everything; 0 when every worker ended well."""
    plan = json.loads(Path(path).read_text())
    sys.path.insert(0, plan["path"])
    runs = [(importlib.import_module(name), arguments, environments) for name, arguments, environments in plan["runs"]]
    for warm_up in {module.warm_up for module, *_ in runs if hasattr(module, "warm_up")}:
        warm_up()
    return max(run(module.main, arguments, environments) for module, arguments, environments in runs)


def run(main: Callable[[list[str]], Any], arguments: list[str], environments: list[dict[str, str]]) -> int:
    """One module; all its workers end when one fails."""
    workers = {fork(main, arguments, environment) for environment in environments}
    worst = 0
    while workers:
        pid, status = os.wait()
        workers.discard(pid)
        if status:
            worst = 1
            for other in workers:
                os.kill(other, signal.SIGKILL)
    return worst


def fork(main: Callable[[list[str]], Any], arguments: list[str], environment: dict[str, str]) -> int:
    """One worker."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ |= environment
        main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
