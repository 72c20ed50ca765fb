"""gRPC's fork handlers are off, or forking is refused; a main module that is imported again joins nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon_ps.host.fork import VARIABLE
from deadlines import HANG_S

LOOP = """
import os
from axon_ps.rpc.background_loop import BackgroundLoop
with BackgroundLoop():
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(len(os.listdir("/proc/self/task")))
        print("threads in the fork:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except Exception as error:
        print(type(error).__name__, error)
"""
FORKED = "threads in the fork: 1\n"


def output(script: str, variable: str | None = None) -> tuple[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    if variable is not None:
        environment[VARIABLE] = variable
    run = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("script", ["import axon_ps, grpc" + LOOP, LOOP])
def test_grpc_is_loaded_without_its_handlers(script: str) -> None:
    assert output(script) == (FORKED, "")


@pytest.mark.parametrize("variable", ["0", "false"])
def test_grpc_may_come_first_where_the_environment_has_turned_them_off(variable: str) -> None:
    assert output("import grpc" + LOOP, variable) == (FORKED, "")


def test_handlers_that_the_environment_asks_for_are_turned_off_with_a_warning() -> None:
    out, err = output(LOOP, "1")
    assert out == FORKED
    assert f"{VARIABLE}=1 cannot take effect" in err


def test_forking_is_refused_where_grpc_was_loaded_with_its_handlers() -> None:
    out, _ = output("import grpc" + LOOP)
    assert out.startswith("Misuse this process cannot fork")
    assert "Import axon_ps before grpc" in out


def test_without_a_loop_a_fork_may_do_everything() -> None:
    out, _ = output(
        "import axon_ps, os; from axon_ps.rpc.background_loop import BackgroundLoop; import asyncio\n"
        "pid = os.fork()\n"
        "if pid == 0: print(BackgroundLoop().run(asyncio.sleep(0, 'done')), flush=True)\n"
        "else: os.waitpid(pid, 0)"
    )
    assert out == "done\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_main_module_that_is_imported_again_does_not_join(tmp_path: Path, method: str) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import multiprocessing, axon_ps\n"
        "try:\n"
        "    axon_ps.World.init()\n"
        "except axon_ps.errors.ConfigurationError as error:\n"  # there is no job; the first time it got that far
        "    print('first', flush=True)\n"
        f"process = multiprocessing.get_context({method!r}).Process(target=print)\n"
        "process.start()\n"
        "process.join(20)\n"
        "print(process.exitcode, flush=True)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("AXON_PS_COORDINATOR", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S, env=environment, check=False
    )
    assert done.stdout.count("first") == 1, done.stdout
    assert "imports the program's main module again" in done.stderr, done.stderr
