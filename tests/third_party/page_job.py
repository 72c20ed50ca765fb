"""A job for the page: a real coordinator in a process of its own, and members that are sessions of this one.

They compute nothing. Workers vote as if they had, some later than others; shard servers report sums and copies. A
membership is decoded once for all of them: each session for itself is cubic in their number, for one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from axon_ps.coordinator.client.session import CoordinatorClient, Event
from axon_ps.rpc.security import Security
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import Decision, DType, Membership, OptimizerSpec, Role
from axon_ps.wire import codec
from axon_ps.wire.events import Copied, JobState, Ready, Vote
from axon_ps.wire.v1 import membership_pb2

UNITS = tuple(build_unit(f"block{n}", [(f"block{n}.weight", (512, 512), DType.F32)]) for n in range(12))
OPTIMIZER = OptimizerSpec(name="adamw", groups=({"lr": 1e-3},), group_of=(0,) * len(UNITS))
SOON_S = 60.0
TOGETHER = 16
"""So many join at once: all at once, they would be too slow in one process for the time-out of a first answer."""

_ports = itertools.count(1)
"""Nobody listens there; no two servers say that they do."""
_decode = codec.membership_from_proto


@functools.lru_cache(maxsize=4)
def _decoded(encoded: bytes) -> Membership:
    return _decode(membership_pb2.MembershipEvent.FromString(encoded))


class FakeMember(CoordinatorClient):
    """A member without arithmetic."""

    def __init__(self, address: str, role: Role, node: str, security: Security, **options: Any) -> None:
        if role is Role.SHARD:
            options["listen_address"] = f"127.0.0.1:{next(_ports)}"
        super().__init__(
            address, job="default", role=role, node=node, security=security, on_event=self._receive_event, **options
        )
        self.random = random.Random(node)
        self.step_s = 0.4
        self.slow_s = 0.0
        self.every_s = 0.0  # when set, a step is completed at each multiple of it
        self.at = (0, 0)
        self.sent_bytes = 0.0

    def _receive_event(self, event: Event) -> None:
        if isinstance(event, Membership):
            self.at = (event.generation, event.step)
        elif isinstance(event, Decision):
            self.at = (self.at[0], event.step + 1)
        elif isinstance(event, JobState) and self.role is Role.SHARD:
            asyncio.get_running_loop().call_later(1.0, self._copy)
        else:
            return
        asyncio.get_running_loop().call_later(self._pause_s(), self._complete, *self.at)

    def _pause_s(self) -> float:
        if self.every_s:
            return self.every_s - asyncio.get_running_loop().time() % self.every_s
        if self.role is Role.SHARD:
            return self.step_s
        return self.step_s * (0.8 + 0.15 * self.random.random()) + self.slow_s * self.random.random()

    def _complete(self, generation: int, step: int) -> None:
        if (generation, step) != self.at:
            return
        self.sent_bytes += 2e7 * (1 + 0.1 * self.random.random())
        if self.role is Role.WORKER:
            self.vote(Vote(generation=generation, step=step, version=step - 1))
        elif (state := self.job_state) is not None and state.placement is not None and state.initialized:
            primaries = sum(h.primary == self.rank for h in state.placement.holders)
            norms = (0.3 + 4 * math.exp(-step / 40),) * primaries
            self.ready(Ready(generation=generation, step=step, sums_of_squares=norms, placement=state.placement.number))

    def _copy(self) -> None:
        if (state := self.job_state) is not None and state.placement is not None:
            slices = tuple(i for i, h in enumerate(state.placement.holders) if self.rank in h.copying)
            if slices:
                self.copied(Copied(model=0, epoch=state.epoch, slices=slices, placement=state.placement.number))
                self.sent_bytes += 1e8


class PageJob:
    """The coordinator's process, and the members on an event loop of a thread of their own.

    Attributes:
        url: of the page.
        pid: of the coordinator.
    """

    def __init__(self, workers: int, servers: int, nodes: int, *arguments: str, token: str = "") -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "axon_ps.cli.main", "coordinator", "--port", "0", "--http-port", "0", "--world-size",
             str(workers), "--shards", str(servers), "--state", "memory", "--min-workers", "1", "--log-level", "error",
             "--ready-fd", str(write), *arguments],
            pass_fds=[write], env={**os.environ, "AXON_PS_TOKEN": token} if token else None,
        )  # fmt: skip
        os.close(write)
        with os.fdopen(read) as line:
            self.address, _, self.url = line.readline().strip().partition(" ")
        self.pid = self.process.pid
        self._counts = workers, servers, nodes
        self._security = Security(token=token)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.servers: list[FakeMember] = []
        self.workers: list[FakeMember] = []
        self._reporting: Any = None
        self.call(self._assemble())

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine where the members are."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SOON_S)

    def step_every(self, seconds: float) -> None:
        """From now on a step is completed at each multiple of that time."""
        for member in (*self.workers, *self.servers):
            member.every_s = seconds

    def kill_server(self, index: int) -> None:
        """One is gone, without a word."""

        async def kill() -> None:
            task = self.servers[index]._task
            assert task is not None
            task.cancel()

        self.call(kill())

    def close(self) -> None:
        """End everything."""

        async def close() -> None:
            self._reporting.cancel()
            await asyncio.gather(*(m.close() for m in (*self.workers, *self.servers)), return_exceptions=True)

        with contextlib.suppress(Exception):
            self.call(close())
        self.process.terminate()
        self.process.wait(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _assemble(self) -> None:
        workers, servers, nodes = self._counts
        at = self.address, self._security
        names = [f"node-{chr(97 + n)}" if nodes <= 8 else f"rack{n // 8}-{n % 8}" for n in range(nodes)]
        self.servers = [FakeMember(at[0], Role.SHARD, f"store-{n % 8}", at[1]) for n in range(servers)]
        self.workers = [FakeMember(at[0], Role.WORKER, names[n * nodes // workers], at[1]) for n in range(workers)]
        for member in (*self.servers, *self.workers):
            member.measure = lambda m=member: {
                "sent_bytes": m.sent_bytes, "received_bytes": 0.9 * m.sent_bytes, "memory_bytes": 2.1e9,
                "cpu_s": time.monotonic(), **{f"counter_{n}": m.sent_bytes / n for n in range(1, 9)},
            }  # fmt: skip
        if workers > 3:
            self.workers[3].slow_s = 0.5
        everybody = [*self.servers, *self.workers]
        for n in range(0, len(everybody), TOGETHER):
            await asyncio.gather(*(member.start(SOON_S) for member in everybody[n : n + TOGETHER]))
        await min(self.workers, key=lambda w: w.rank).register(JobSpec(layout=Layout(units=UNITS)), OPTIMIZER)
        for server in self.servers:
            server.initialized(version=0, epoch=0)
        self._reporting = asyncio.ensure_future(self._report())

    async def _report(self) -> None:
        noise = random.Random(1)
        for second in range(100_000):
            state = self.workers[0].job_state
            step = 0 if self.workers[0].membership is None or state is None else second * 2
            loss = 1.2 + 3.5 * math.exp(-second / 25) + 0.12 * noise.random()
            report = {
                "step": step,
                "steps": 5000,
                "steps_per_s": 2.0,
                "at": time.time(),
                "loss": loss,
                "values": {"tokens_per_s": 41_000 + 2_000 * noise.random()},
            }
            await self.workers[0].kv_put("axon_ps/progress", json.dumps(report).encode())
            await asyncio.sleep(1.0)


@contextlib.contextmanager
def page_job(workers: int, servers: int, nodes: int, *arguments: str, token: str = "") -> Iterator[PageJob]:
    """A job that trains, until the context ends."""
    once = mock.patch.object(codec, "membership_from_proto", lambda message: _decoded(message.SerializeToString()))
    with once, contextlib.closing(PageJob(workers, servers, nodes, *arguments, token=token)) as job:
        yield job
