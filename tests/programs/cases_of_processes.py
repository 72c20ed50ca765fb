"""Processes: threads, signals, other processes, and futures beside a training job."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from case_parts import Block, go_on, two
from case_table import SERVED, SHARDED, Wrong, add, case
from sides import Side, Values, built

Beside = Callable[[Any, Any, Callable[[], None]], object]


def _stepping(side: Any, beside: Beside, steps: int = 4) -> Values:
    """Something beside, which may make some of the steps; then the others."""
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    done = [0]

    def step() -> None:
        go_on(side, model, optimizer, done[0], 1)
        done[0] += 1

    if hasattr(side, "world"):
        beside(side, model, step)
    while done[0] < steps:
        step()
    return side.values(model)


def evaluating_threads(side: Any, model: Any, step: Callable[[], None]) -> None:
    """Many threads evaluate at once: all get the same."""
    with torch.no_grad(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: float(model(torch.ones(2, 8)).sum()), range(20)))
    if len(set(outs)) != 1:
        raise Wrong(f"{len(set(outs))} different outputs of one input")


def evaluating_while_training(side: Any, model: Any, step: Callable[[], None]) -> None:
    """A thread evaluates while this one trains."""
    stop, errors = threading.Event(), list[BaseException]()

    def evaluate() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    model(torch.ones(2, 8))
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(4):
            step()
    finally:
        stop.set()
        thread.join(20.0)
    if errors:
        raise errors[0]


def in_asyncio(side: Any, model: Any, step: Callable[[], None]) -> None:
    async def main() -> None:
        step()
        await asyncio.sleep(0)
        await asyncio.to_thread(step)

    asyncio.run(main())


def own_handlers(side: Any, model: Any, step: Callable[[], None]) -> None:
    """A user's signal handlers are called."""
    got: list[int] = []
    old = {number: signal.signal(number, lambda n, _: got.append(n)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        step()
        for number in old:
            os.kill(os.getpid(), number)
        step()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if got != [signal.SIGTERM, signal.SIGUSR1]:
        raise Wrong(f"the user's handlers got {got}")


def alarm(side: Any, model: Any, step: Callable[[], None]) -> None:
    """An alarm that raises, outside of a step, is the user's own error.

    It rings again if that is lost: Python drops what a handler raises inside of a destructor or a future's callback.
    """
    lost = []

    def ring(_: int, __: Any) -> None:
        lost.append(True)
        raise TimeoutError("the user's alarm")

    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        ends = time.monotonic() + 5.0
        while time.monotonic() < ends:
            model.state_dict()
            if lost:
                lost.clear()
                signal.setitimer(signal.ITIMER_REAL, 0.05)
        raise Wrong("the alarm did not ring")
    except TimeoutError as error:
        if "the user's alarm" not in str(error):
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)


def a_fork(side: Any, model: Any, step: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def a_subprocess(side: Any, model: Any, step: Callable[[], None]) -> None:
    subprocess.run([sys.executable, "-S", "-c", "print(1)"], check=True, capture_output=True, timeout=20)


def a_pool(side: Any, model: Any, step: Callable[[], None]) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        if pool.map(abs, [-1]) != [1]:
            raise Wrong("the pool")


def a_loader(side: Any, model: Any, step: Callable[[], None]) -> None:
    loader = torch.utils.data.DataLoader([torch.ones(8)] * 8, batch_size=4, num_workers=1)
    if [len(batch) for batch in loader] != [4, 4]:
        raise Wrong("the loader")


for _name, _beside, _says in (
    ("threads that evaluate", evaluating_threads, r"[Tt]hreads? .*forward|one thread"),
    ("a thread that evaluates while this one trains", evaluating_while_training, r"[Tt]hreads? .*forward|one thread"),
    ("steps inside asyncio", in_asyncio, ""),
    ("a user's signal handlers", own_handlers, ""),
    ("a user's alarm", alarm, r"[Aa]larm|signal handler"),
    ("a fork", a_fork, ""),
    ("a subprocess", a_subprocess, ""),
    ("a pool of forks", a_pool, ""),
    ("a loader with a worker", a_loader, ""),
):
    add(f"processes: {_name}", lambda side, b=_beside: _stepping(side, b), wrappers=SHARDED, says=_says)


@case("processes: a model is deleted, another one made", wrappers=SERVED)
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0)
    del model, optimizer
    again = side.wrap(built(lambda: nn.Linear(8, 1)))
    go_on(side, again, side.optimizer("SGD", again.parameters(), lr=0.1), 2)
    return side.values(again)


@case("processes: a future's callback waits for another collective", wrappers=("DDP",), workers=(2, 3))
def _(side: Any) -> Values:
    """As torch's PowerSGD hook does; over gloo it works."""
    wanted = torch.full((4,), float(side.workers))
    if not hasattr(side, "world"):
        return {"sum": wanted}
    import torch.distributed as dist

    with _default_group(side):
        first = dist.all_reduce(torch.ones(4) * side.rank, async_op=True).get_future()

        def then(_: Any) -> torch.Tensor:
            got: torch.Tensor = dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()[0]
            return got

        return {"sum": first.then(then).wait()}


class _default_group:
    """torch.distributed over "axon", in the job that this process is in."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def __enter__(self) -> None:
        import torch.distributed as dist

        store = dist.FileStore(f"{self._side.uri}/store", self._side.workers)
        dist.init_process_group("axon", store=store, rank=self._side.rank, world_size=self._side.workers)

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


@case("processes: run_threads waits for all of its ranks", wrappers=("NO_SHARD",), workers=(1,))
def _(side: Any) -> Values:
    """A rank that returns does not leave before the others have begun."""
    if hasattr(side, "world"):
        from axon_ps.testing import run_threads

        for _ in range(5):
            if (sizes := run_threads(lambda world: world.world_size, 3)) != [3, 3, 3]:
                raise Wrong(f"three ranks saw worlds of {sizes}")
    return {}
