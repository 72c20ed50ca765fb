"""Worker processes that run one small job after the other, each with services of its own in a thread of this process.

A job takes a tenth of a second where starting its processes would take seconds. What one job does wrong does not reach
the next: it joins another coordinator. Workers that do not answer in time are ended, with their stacks, and replaced.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection as connections
import os
import pickle
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from axon_ps.testing.workers import WorkerProcess
from deadlines import HANG_S
from job_services import TOKEN, JobServices

AFTER_A_FAILURE_S = 30.0
"""Seconds that the others of a job have to notice that one of them has left: a loaded machine needs some."""
JOIN_S = 60.0
START_S = HANG_S


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job of a few workers.

    Attributes:
        function: "module:name"; each worker calls it with its world and `args`, and sends back what it returns.
        args: further arguments.
        workers: how many.
        shards: shard servers.
        mapped: whether workers and servers see that they are on one host, so that parameters are mapped.
        per_node: workers of a node, where they are not mapped.
        wait_s: how long each waits for others at most.
    """

    function: str
    args: tuple[Any, ...] = ()
    workers: int = 1
    shards: int = 1
    mapped: bool = False
    per_node: int = 1
    wait_s: float = 300.0


@dataclass(frozen=True)
class Failed:
    """A worker that raised, died or did not end."""

    text: str
    hung: bool = False


class SharedWorkers:
    """Worker processes, as a context manager.

    Args:
        workers: how many at most.
        logs: a directory for their output.
        timeout_s: how long a job may take.
        environment: further variables.
    """

    def __init__(
        self, workers: int, logs: Path, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> None:
        self._timeout_s, self._logs = timeout_s, logs
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")}
        self._environment |= {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._started = 0
        self._address = str(logs / "workers.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(START_S)
        self._workers: list[tuple[WorkerProcess, Connection] | None] = [None] * workers

    def __enter__(self) -> SharedWorkers:
        for rank in range(len(self._workers)):
            self._connection(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for rank in range(len(self._workers)):
            self._end(rank)
        self._listener.close()

    def run(self, task: Task) -> list[Any]:
        """What each worker of a job returned, or `Failed`.

        A job that did not end in time has as much time once more, and then counts: the machine may have been busy.
        """
        results = self._run_once(task)
        return self._run_once(task) if any(isinstance(r, Failed) and r.hung for r in results) else results

    def _run_once(self, task: Task) -> list[Any]:
        with JobServices([(task.workers, task.shards)]) as services:
            return self._run(task, services.addresses[0])

    def _run(self, task: Task, address: str) -> list[Any]:
        ranks = {self._connection(rank): rank for rank in range(task.workers)}
        for connection in ranks:
            connection.send_bytes(pickle.dumps((task, address)))
        results: list[Any] = [None] * task.workers
        deadline, hung = time.monotonic() + self._timeout_s, True
        while ranks and (ready := connections.wait(list(ranks), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = ranks.pop(connection)  # type: ignore[call-overload]
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())  # tensors by value: they outlive their worker
                except (EOFError, ConnectionError):
                    results[rank] = Failed(f"it died: {self._end(rank)}")
                if _ended_early(results[rank]):
                    hung, deadline = False, min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        for rank in ranks.values():
            text = f"it did not end within {self._timeout_s:g} s" if hung else "it waited for one that had failed"
            results[rank] = Failed(f"{text}: {self._end(rank)}", hung=hung)
        return results

    def _connection(self, rank: int) -> Connection:
        if (worker := self._workers[rank]) is not None:
            return worker[1]
        self._started += 1
        process = WorkerProcess(
            rank,
            serve,
            (self._address, rank),
            {},
            environment=self._environment,
            log=self._logs / f"worker-{rank}-{self._started}.log",
        )
        try:
            connection = Connection(self._listener.accept()[0].detach())
        except TimeoutError:
            raise RuntimeError(f"a worker did not start within {START_S:g} s: {process.end().output}") from None
        self._workers[rank] = process, connection
        return connection

    def _end(self, rank: int) -> str:
        """End a worker; the end of its output, which has the stacks of one that was at work."""
        if (worker := self._workers[rank]) is None:
            return ""
        process, connection = worker
        self._workers[rank] = None
        connection.close()
        return process.end().output[-3000:]


def _ended_early(result: Any) -> bool:
    return isinstance(result, Failed) or bool(getattr(result, "error", ""))


def serve(address: str, rank: int) -> None:
    """A worker: run jobs until the connection is closed."""
    import torch

    torch.set_num_threads(1)
    with connections.Client(address) as connection:
        while True:
            try:
                task, coordinator = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            connection.send_bytes(pickle.dumps(_perform(task, coordinator, rank)))


def _perform(task: Task, coordinator: str, rank: int) -> Any:
    import traceback

    import axon_ps
    from axon_ps.rpc.security import Security
    from axon_ps.worker.environment import WorkerConfig

    per_node = task.workers if task.mapped else task.per_node
    config = WorkerConfig(
        coordinator=coordinator,
        rank=rank,
        world_size=task.workers,
        local_rank=rank % per_node,
        local_world_size=per_node,
        node=socket.gethostname() if task.mapped else f"node-{rank // per_node}",
        direct_memory=task.mapped,
        security=Security(token=TOKEN),
    )
    module, _, name = task.function.partition(":")
    try:
        with axon_ps.World.init(config, timeout_s=task.wait_s, join_timeout_s=JOIN_S) as world:
            result = getattr(importlib.import_module(module), name)(world, *task.args)
            if not _ended_early(result):
                world.barrier("done")
            return result
    except BaseException as error:
        return Failed("".join(traceback.format_exception(error))[-3000:])
