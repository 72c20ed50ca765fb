"""The workers of this node: started, watched, and started again when they fail, one by one and with the same rank.

Every worker has ranks and restarts. When its process fails, a standby takes over its ranks. Without a standby a new
process is started, after the pause of `restarts`. The other workers keep running: a worker that joins
needs only the coordinator and the shard servers. Workers that cannot continue without the dead one (an all-reduce among
workers) fail by themselves, and are restarted with their own ranks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from axon_ps.cli.launch.console import Console
from axon_ps.cli.launch.plan import Launch
from axon_ps.cli.launch.processes import PYTHON, Process
from axon_ps.cli.launch.restarts import Restarts

REFILL_S = 5.0
"""Seconds until the next standby starts when one has taken over: the job has recovered by then."""


@dataclass
class _Worker:
    name: str
    ranks: Mapping[str, str]
    process: Process
    restarts: Restarts
    exhausted: bool = False


class WorkerProcesses:
    """The workers of this node.

    Args:
        launch: the number of workers, their program, and their restarts.
        console: gets their lines.
        environment: returns the variables that all of them get, once the coordinator's address is known.
    """

    def __init__(self, launch: Launch, console: Console, environment: Callable[[], Mapping[str, str]]) -> None:
        self._launch, self._console, self._environment = launch, console, environment
        self._workers: list[_Worker] = []
        self._standbys: list[Process] = []
        self._refills: set[asyncio.Task[None]] = set()

    @property
    def processes(self) -> Iterable[Process]:
        """The processes that run, and the last one of every worker."""
        return (*(worker.process for worker in self._workers), *self._standbys)

    def exhausted(self) -> Iterable[Process]:
        """Return the workers without a restart left that have failed; all workers if there are no restarts."""
        return [p.process for p in self._workers if p.exhausted or not self._launch.max_restarts]

    def history(self, process: Process) -> str:
        """Return the number of its restarts, as text; empty when there were none."""
        restarts = next((p.restarts.count for p in self._workers if p.process is process), 0)
        return f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""

    def start(self) -> None:
        """Start all of them, and the standbys."""
        launch = self._launch
        for local_rank in range(launch.nproc_per_node):
            rank = launch.node_rank * launch.nproc_per_node + local_rank
            ranks = {"LOCAL_RANK": str(local_rank)}
            if launch.node_rank >= 0:
                ranks |= {"RANK": str(rank), "GROUP_RANK": str(launch.node_rank)}
            name = f"worker {rank if launch.node_rank >= 0 else local_rank}"
            process = self._start(name, ranks, 0)
            self._workers.append(_Worker(name, ranks, process, Restarts(launch.max_restarts, time.monotonic())))
        for _ in range(launch.standby):
            self._start_standby()

    async def watch(self) -> None:
        """Keep every worker running; return when all have ended well, or one has failed for the last time."""
        watching = {asyncio.ensure_future(self._watch_worker(worker)) for worker in self._workers}
        try:
            while watching:
                done, watching = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
                if not all(task.result() for task in done):
                    return
        finally:
            tasks = watching | self._refills
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _watch_worker(self, worker: _Worker) -> bool:
        """Run a worker until its process has ended well (True) or failed for the last time (False)."""
        while True:
            await worker.process.wait()
            if not worker.process.failed:
                return True
            pause_s = worker.restarts.ended(time.monotonic())
            if pause_s is None:
                worker.exhausted = True
                return False
            await self._restart(worker, pause_s)

    async def _restart(self, worker: _Worker, pause_s: float) -> None:
        standby = self._next_standby()
        how = "a standby takes its place" if standby else "it is started again"
        ending = worker.process.child.ending
        self._console.print(f"axon-ps: {worker.name} {ending}; {worker.restarts.described(how, pause_s)}")
        if standby:
            await self._hand_over(standby, worker, pause_s)
        else:
            await asyncio.sleep(pause_s)
            worker.process = self._start(worker.name, worker.ranks, worker.restarts.count)
        worker.restarts.began(time.monotonic())

    def _start(self, name: str, ranks: Mapping[str, str], restarts: int) -> Process:
        environment = {**self._environment(), **_rank_environment(ranks, restarts)}
        command = [*PYTHON[:1], *self._launch.program]
        return Process(self._console.source(name), command, environment, is_worker=True)

    # ------------------------------------------------------------------ standbys

    def _start_standby(self) -> None:
        command = [*PYTHON, "-m", "axon_ps.cli.launch.standby", *self._launch.program]
        source = self._console.source("standby")
        self._standbys.append(Process(source, command, self._environment(), is_worker=True, stdin=True))

    def _next_standby(self) -> Process | None:
        """Return a standby that runs; those that have died are dropped, and their output shows why."""
        self._standbys = [p for p in self._standbys if p.is_running]
        return self._standbys.pop(0) if self._standbys else None

    async def _hand_over(self, standby: Process, worker: _Worker, pause_s: float) -> None:
        worker.process = standby  # from here on it is ended with the others, even if the launch ends meanwhile
        await asyncio.sleep(pause_s)
        standby.source = self._console.source(worker.name)
        standby.child.send_line(json.dumps(_rank_environment(worker.ranks, worker.restarts.count)))
        refill = asyncio.ensure_future(self._refill())
        self._refills.add(refill)
        refill.add_done_callback(self._refills.discard)

    async def _refill(self) -> None:
        await asyncio.sleep(REFILL_S)
        if any(worker.restarts.left for worker in self._workers):
            self._start_standby()


def _rank_environment(ranks: Mapping[str, str], restarts: int) -> dict[str, str]:
    """Return the variables of one worker, by torchrun's names."""
    return {**ranks, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
