"""A worker that trains from loaders: all ways of sharing, all start methods, and calls that its forks may not make."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import axon_ps
from axon_ps.parallel import AdamW, DistributedDataParallel, FullyShardedDataParallel
from axon_ps_lab.campaigns.loader_rows import BATCH, BATCHES, Rows

METHODS = ("fork", "spawn", "forkserver")
KINDS = ("fsdp", "ddp", "axon")
WITHOUT_SHARED_MEMORY = {"AXON_PS_DIRECT_MEMORY": "0", "AXON_PS_BACKEND": "grpc"}

HARMLESS = ("nothing", "leave a block", "drop everything")
"""The tries of `refusals` that a fork may make."""
_END_S = 120

Step = Callable[[Tensor], None]


@contextmanager
def trainer(kind: str) -> Iterator[Step]:
    """Yield a function that does one training step with a batch."""
    torch.manual_seed(0)
    module = nn.Linear(4, 300)
    if kind == "axon":
        dist.init_process_group("axon", init_method="axon://")
        model: nn.Module = nn.parallel.DistributedDataParallel(module)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        world = axon_ps.World.init()
        if kind == "fsdp":
            model = FullyShardedDataParallel(module, world.default_group)
            optimizer = AdamW(model.parameters(), lr=1e-3)
        else:
            model = DistributedDataParallel(module, world.default_group)
            optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)

    yield step
    if kind == "axon":
        dist.destroy_process_group()
    else:
        world.close()


def epoch(loader: DataLoader[Tensor], step: Step) -> None:
    """Train on every batch; the batches must have the data of the data set, in order."""
    first = 0
    for batch in loader:
        assert batch[:, 0].tolist() == [float(i) for i in range(first, first + BATCH)], batch
        first += BATCH
        step(batch)
    assert first == BATCH * BATCHES


def loader(workers: int, method: str, deadly: int = -1, **options: Any) -> DataLoader[Tensor]:
    """Return a loader without torch's warning about the number of cores."""
    with warnings.catch_warnings(action="ignore"):
        return DataLoader(
            Rows(deadly),
            BATCH,
            num_workers=workers,
            multiprocessing_context=method if workers else None,
            **({"timeout": 300 if workers else 0} | options),
        )


def children() -> list[str]:
    """Return the command lines of child processes, except those that multiprocessing keeps until its end."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    lines = [" ".join(p.cmdline()) for p in found]
    return [line for line in lines if "resource_tracker" not in line and "forkserver" not in line]


def wait_for_no_children() -> None:
    """Return when all children have ended; loader workers may take a moment to."""
    limit = time.monotonic() + _END_S
    while left := children():
        assert time.monotonic() < limit, f"a loader has left processes behind: {left}"
        time.sleep(0.01)


def runs(kind: str, cases: list[tuple[int, str]], times: int) -> dict[str, int]:
    """Train from a new loader `times` times for each (workers, start method); returns the good runs of each."""
    multiprocessing.set_forkserver_preload(["torch"])
    well: dict[str, int] = {}
    with trainer(kind) as step:
        for workers, method in cases:
            for _ in range(times):
                epoch(loader(workers, method), step)
                wait_for_no_children()
                well[f"{workers} {method}"] = well.get(f"{workers} {method}", 0) + 1
    return well


def killed(kind: str, method: str) -> str:
    """Train until a worker of the loader is killed; returns the text of torch's error, "" without one."""
    with trainer(kind) as step:
        try:
            # prefetch_factor: torch cannot read a batch that a dead worker has sent, unless it was forked
            # timeout: if it is set, torch checks the workers of a fork server only when it is over
            epoch(loader(1, method, deadly=BATCH * 2, prefetch_factor=1, timeout=0), step)
        except RuntimeError as error:
            message = str(error)
        else:
            message = ""
        wait_for_no_children()
    return message


def others(kind: str) -> None:
    """Use persistent workers, pinned memory, a pool and a subprocess, with steps between."""
    with trainer(kind) as step, warnings.catch_warnings(action="ignore"):
        data = loader(2, "fork", persistent_workers=True, pin_memory=True)
        epoch(data, step)
        epoch(data, step)
        del data
        with multiprocessing.get_context("fork").Pool(2) as pool:
            result = pool.map_async(abs, range(-50, 0))
            step(torch.ones(2, 4))
            assert result.get(_END_S) == list(range(50, 0, -1))
        assert subprocess.run(["true"], close_fds=False).returncode == 0
        wait_for_no_children()
        step(torch.ones(2, 4))


def outlived() -> float:
    """Kill rank 1 and not its fork; returns, on rank 0, the seconds until the membership shows it."""
    world = axon_ps.World.init()
    if world.rank == 1:
        pid = os.fork()
        if pid == 0:
            time.sleep(2 * _END_S)
            os._exit(0)
        world.kv_put("fork", str(pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    fork = int(world.kv_wait("fork"))
    begun = time.monotonic()
    try:
        world.view.wait_generation(world.generation + 1, 60.0)
    finally:
        os.kill(fork, signal.SIGKILL)
    assert world.world_size == 1
    return time.monotonic() - begun


def in_a_fork(what: Callable[[], Any]) -> str:
    """Return the error that `what` raises in a fork of this process, which then ends in order; "" = none."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        message = ""
        try:
            what()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write, message.encode())
        os.close(write)
        if __name__ == "__main__":
            sys.exit()  # as any program ends
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    limit = time.monotonic() + _END_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"the fork did not end; it said {message!r}"
        time.sleep(0.005)
    return message


def refusals() -> dict[str, str]:
    """Return the errors that forks of a worker get, by the call that they try."""
    world = axon_ps.World.init()
    replicated = DistributedDataParallel(nn.Linear(4, 4), world.default_group)
    model = FullyShardedDataParallel(nn.Linear(4, 300), world.default_group)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(2, 4)

    def leave_a_block() -> None:
        with world:
            pass

    def drop_everything() -> None:
        nonlocal world, replicated, model, optimizer
        del world, replicated, model, optimizer
        gc.collect()

    tries: dict[str, Callable[[], Any]] = {
        "World.init": axon_ps.World.init,
        "World.close": lambda: world.close(),
        "World.kv_get": lambda: world.kv_get("key"),
        "World.barrier": lambda: world.barrier(),
        "all_reduce": lambda: axon_ps.all_reduce_sum(batch),
        "group.close": lambda: world.default_group.close(),
        "FSDP.forward": lambda: model(batch),
        "FSDP.state_dict": lambda: model.state_dict(),
        "optimizer.step": lambda: optimizer.step(),
        "DDP.forward": lambda: replicated(batch),
        "init_process_group": lambda: dist.init_process_group("axon", init_method="axon://"),
        "empty_shared": lambda: axon_ps.empty_shared((4,)),
        "nothing": lambda: None,
        "leave a block": leave_a_block,
        "drop everything": drop_everything,
    }
    messages = {}
    assert set(HARMLESS) < set(tries)
    for what, call in tries.items():
        model(batch).sum().backward()  # the loop is busy with the pushed gradients
        messages[what] = in_a_fork(call)
        assert optimizer.step().committed
        optimizer.zero_grad()
    world.close()
    return messages


if __name__ == "__main__":
    print(json.dumps(refusals()))
