"""The background loop: results, errors, time-outs, Ctrl-C, closing, forks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest

from axon_ps.errors import Broken, Closed, InvalidRequest, Misuse, Timeout
from axon_ps.rpc import background_loop as loop_module
from axon_ps.rpc.background_loop import BackgroundLoop
from deadlines import HANG_S


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop("test-loop") as made:
        yield made


async def value(given: object) -> object:
    await asyncio.sleep(0)
    return given


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


class Waiter:
    """A coroutine that waits until it is cancelled, and records that."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()

    async def wait(self) -> None:
        self.entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.left.set()


def test_results_and_errors(loop: BackgroundLoop) -> None:
    assert loop.run(value(3)) == 3
    with pytest.raises(InvalidRequest, match="wrong"):
        loop.run(fail(InvalidRequest("wrong")))
    with pytest.raises(ZeroDivisionError):
        loop.run(fail(ZeroDivisionError()))


def test_errors_of_grpc_and_asyncio_become_ours(loop: BackgroundLoop) -> None:
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    with pytest.raises(Broken, match="gone"):
        loop.run(fail(rpc_error))
    with pytest.raises(Timeout, match="fail was not done in time: slow"):
        loop.run(fail(TimeoutError("slow")))
    with pytest.raises(Timeout, match=r"^ours$"):
        loop.run(fail(Timeout("ours")))
    with pytest.raises(Closed, match="fail was cancelled"):
        loop.run(fail(asyncio.CancelledError()))


def test_many_threads_at_once(loop: BackgroundLoop) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: loop.run(value(i)), range(200))) == list(range(200))


def test_submit(loop: BackgroundLoop) -> None:
    assert loop.submit(value(4)).result(5) == 4
    waiter = Waiter()
    future = loop.submit(waiter.wait())
    assert waiter.entered.wait(5)
    future.cancel()
    assert waiter.left.wait(5)


def test_a_time_out_cancels_and_waits(loop: BackgroundLoop) -> None:
    waiter = Waiter()
    with pytest.raises(Timeout, match=r"Waiter\.wait was not done within 0\.05 s"):
        loop.run(waiter.wait(), timeout_s=0.05)
    assert waiter.left.is_set()


def test_a_result_that_comes_with_the_time_out_counts(loop: BackgroundLoop) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "anyway"
        return "never"

    assert loop.run(stubborn(), timeout_s=0.01) == "anyway"


def test_a_coroutine_that_ignores_its_cancellation_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def deaf() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    released = threading.Event()
    monkeypatch.setattr(loop_module, "CANCEL_WAIT_S", 0.03)
    loop = BackgroundLoop("deaf-loop")
    with pytest.raises(Timeout):
        loop.run(deaf(), timeout_s=0.01)
    assert "ignores its cancellation and is left running" in caplog.text
    loop.close()
    assert "the thread deaf-loop is left behind" in caplog.text
    released.set()
    loop._thread.join(5)
    assert not loop._thread.is_alive()


def test_run_on_the_loops_own_thread_is_misuse(loop: BackgroundLoop) -> None:
    async def nested() -> None:
        loop.run(value(1))

    async def closing() -> None:
        loop.close()

    with pytest.raises(Misuse, match="own thread"):
        loop.run(nested())
    with pytest.raises(Misuse, match="own thread"):
        loop.run(closing())


def test_close_cancels_what_runs_and_ends_the_thread() -> None:
    loop = BackgroundLoop("closing-loop")
    waiter = Waiter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop.run, waiter.wait())
        future = loop.submit(waiter.wait())
        assert waiter.entered.wait(5)
        loop.close()
        loop.close()
        with pytest.raises(Closed, match="was cancelled"):
            running.result(5)
    assert future.cancelled()
    assert waiter.left.is_set()
    assert "closing-loop" not in {thread.name for thread in threading.enumerate()}
    for use in (loop.run, loop.submit):
        with pytest.raises(Closed, match="is closed"):
            use(value(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_coroutine_that_ends_the_thread_leaves_a_closed_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="asyncio")
    loop = BackgroundLoop()
    with pytest.raises(SystemExit):
        loop.run(fail(SystemExit(3)))
    loop._thread.join(5)
    with pytest.raises(Closed):
        loop.run(value(1))
    loop.close()


CTRL_C = """
import asyncio, os, signal, sys, threading
from axon_ps.rpc.background_loop import BackgroundLoop

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

async def wait():
    print("running", flush=True)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        print("cancelled", flush=True)

loop = BackgroundLoop()
try:
    loop.run(wait())
except KeyboardInterrupt:
    print("interrupted", flush=True)
async def one():
    return 1
print(loop.run(one()), flush=True)
"""


def test_ctrl_c_cancels_the_coroutine_and_leaves_the_loop_usable() -> None:
    command = [sys.executable, "-c", CTRL_C]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert out == "cancelled\ninterrupted\n1\n"
    assert err == ""
    assert process.returncode == 0


def test_what_is_submitted_is_not_collected_while_it_waits() -> None:
    begun, over = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            over.set()

    with BackgroundLoop() as loop:
        loop.submit(wait())
        assert begun.wait(HANG_S)
        loop.run(asyncio.sleep(0))
        gc.collect()
        assert not over.is_set()
    assert over.is_set()


def test_a_loop_that_nobody_closes_does_not_hold_the_process() -> None:
    script = CTRL_C.replace("loop.run(wait())", "loop.submit(wait()); print(loop.run(asyncio.sleep(0)))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("1\ncancelled\n")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_take_the_loop_along(loop: BackgroundLoop) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: loop.run(value(1)), lambda: loop.submit(value(1)), loop.close, BackgroundLoop):
            try:
                call()
            except Misuse as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        lines = pipe.readlines()
    assert len(lines) == 4
    assert all(line.startswith(f"this process was forked from process {os.getpid()}") for line in lines)
    os.waitpid(child, 0)
    assert loop.run(value(2)) == 2


def test_a_loop_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", fails)
    with pytest.raises(OSError, match="Too many open files"):
        BackgroundLoop("test-loop")


def test_a_loop_may_be_ended_without_waiting_also_on_its_own_thread() -> None:
    for inside in (False, True):
        loop = BackgroundLoop("ended", settle_s=0.0)
        waiter = Waiter()
        running = loop.submit(waiter.wait())
        assert waiter.entered.wait(10)
        if inside:
            loop._loop.call_soon_threadsafe(loop.end)
        else:
            loop.end()
        loop._thread.join(10)
        assert not loop._thread.is_alive()
        assert running.cancelled()
        with pytest.raises(Closed):
            loop.run(value(1))
        loop.end()
        loop.close()
