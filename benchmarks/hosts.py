"""The load of many hosts, for `members.py`: real host sessions, each for the members of one host, in this process.

A member is simulated as its host's proxy sees it: as a call with messages. The members' own work on an event, on the
CPUs of their hosts, is left out; each distinct event is parsed once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.messages import event_from_proto, join_to_proto, step_message_to_proto
from axon_ps.rpc.channels import connect
from axon_ps.rpc.multiplex.frames import FrameQueue
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import EOF
from axon_ps.types import Decision, Membership, Role
from axon_ps.wire import codec
from axon_ps.wire.events import JobState, JoinRequest, Ready, ServerEvent, Vote, Welcome
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, membership_pb2, multiplex_pb2, session_pb2
from coordinator_decision import HYPER, Bench, model_of

BEAT_S = 1.0
LIMIT_S = 300.0


class Events:
    """Parsed events, by the message and the membership known before."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[bytes, int], ServerEvent | None] = {}

    def event(self, message: bytes, known: Membership | None) -> ServerEvent | None:
        """Return the event of a message."""
        key = message, -1 if known is None else known.generation
        if key not in self._parsed:
            if len(self._parsed) > 1 << 16:
                self._parsed.clear()
            self._parsed[key] = event_from_proto(session_pb2.SessionEvent.FromString(message), known)
        return self._parsed[key]


class Host:
    """One host's session; its members' sessions are the calls 0 to size - 1."""

    def __init__(self, load: Hosts, number: int, size: int) -> None:
        self.load, self.node, self.size = load, f"host-{number}", size
        self.incarnations = [uuid.uuid4().hex for _ in range(size)]
        self.known: list[Membership | None] = [None] * size
        self.replies: dict[int, asyncio.Future[bytes]] = {}
        self.outbox = FrameQueue()
        self.numbers = itertools.count(size)
        self.channel = connect(load.address, Security())
        self.stream = Stub(self.channel, SERVICE).open("HostSession")
        self.tasks = [asyncio.ensure_future(self.read()), asyncio.ensure_future(self.write())]
        for task in self.tasks:
            task.add_done_callback(load.failed)

    def join(self) -> None:
        """Let all members join, each as fast as it can."""
        for call, incarnation in enumerate(self.incarnations):
            request = JoinRequest(job="bench", incarnation=incarnation, node=self.node, address="", requested_rank=-1)
            message = join_to_proto(request, Role.WORKER).SerializeToString()
            self.outbox.add_frame(multiplex_pb2.Frame(calls=(call,), method="Session", message=message))
        self.tasks.append(asyncio.ensure_future(self.beat()))

    async def beat(self) -> None:
        """Send the members' heartbeats."""
        message = session_pb2.SessionRequest(heartbeat=membership_pb2.Heartbeat()).SerializeToString()
        while True:
            await asyncio.sleep(BEAT_S)
            self.send(message)

    def send(self, message: bytes) -> None:
        """Send a message of each member."""
        for call, incarnation in enumerate(self.incarnations):
            if incarnation:
                self.outbox.add(call, message)

    async def write(self) -> None:
        """Write the outgoing messages."""
        await self.stream.write(multiplex_pb2.Frames())
        await self.outbox.write_to(self.stream)

    async def read(self) -> None:
        """Read the incoming messages."""
        while (frames := await self.stream.read()) is not EOF:
            for frame in frames.frames:
                if frame.HasField("status"):
                    raise RuntimeError(f"call {frame.calls}: {frame.status.details}")
                if frame.calls[0] >= self.size:
                    for call in frame.calls:
                        self.replies.pop(call).set_result(frame.message)
                    continue
                event = self.load.events.event(frame.message, self.known[frame.calls[0]])
                if isinstance(event, Decision):
                    self.load.decided(len(frame.calls))
                    continue
                for call in frame.calls:
                    self.take(call, frame.message)

    def take(self, call: int, message: bytes) -> None:
        """Process an event for a member."""
        event = self.load.events.event(message, self.known[call])
        if isinstance(event, Membership):
            self.known[call] = event
            self.load.news.set()
        elif isinstance(event, JobState):
            self.load.job_state = event
            self.load.news.set()
        elif isinstance(event, Welcome):
            self.load.state_id = event.state_id

    async def call(self, method: str, request: bytes) -> bytes:
        """Make a unary call of a member; returns the reply."""
        number = next(self.numbers)
        reply = self.replies[number] = asyncio.get_running_loop().create_future()
        self.outbox.add_frame(multiplex_pb2.Frame(calls=(number,), method=method, message=request))
        return bytes(await reply)

    def context(self, call: int) -> common_pb2.CallContext:
        """Return the context of a member's calls."""
        known = self.known[call]
        return common_pb2.CallContext(
            job="bench",
            generation=0 if known is None else known.generation,
            incarnation=self.incarnations[call],
            state_id=self.load.state_id,
        )

    async def close(self) -> None:
        """End the session, as the host's death would."""
        for task in self.tasks:
            task.cancel()
        self.stream.cancel()
        await asyncio.wait(self.tasks)
        await self.channel.close()


class Hosts:
    """All members of one job: shard servers with their own sessions, workers on hosts."""

    def __init__(self, port: int, workers: int, hosts: int, shards: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.servers = Bench(port, 0, shards)
        self.events = Events()
        self.news = asyncio.Event()
        self.state_id = ""
        self.job_state: JobState | None = None
        self.missing = 0
        self.newest_s = 0.0
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sizes = [workers * (i + 1) // hosts - workers * i // hosts for i in range(hosts)]
        self.hosts = [Host(self, i, size) for i, size in enumerate(sizes)]

    def failed(self, task: asyncio.Task[None]) -> None:
        """Note the error of a host's session that has ended."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.error.done():
            self.error.set_exception(error)

    def decided(self, count: int) -> None:
        """Count members that have a decision."""
        self.missing -= count
        if not self.missing:
            self.newest_s = time.perf_counter()
            self.news.set()

    async def until(self, reached: Callable[[Membership], bool]) -> float:
        """Return the seconds until every member's membership meets the condition."""
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            while not all(
                known is not None and reached(known)
                for host in self.hosts
                for known, incarnation in zip(host.known, host.incarnations, strict=True)
                if incarnation
            ):
                self.news.clear()
                await self.news.wait()
        return time.perf_counter() - began

    async def join(self) -> float:
        """Let all members join; returns seconds until every member has the complete membership."""
        began = time.perf_counter()
        for host in self.hosts:
            host.join()
        await asyncio.gather(*(m.start(LIMIT_S) for m in self.servers.members))
        await self.until(lambda known: known.complete)
        return time.perf_counter() - began

    async def barrier(self, name: str) -> float:
        """Return the seconds until all workers have passed a barrier."""
        began = time.perf_counter()
        await asyncio.gather(
            *(
                host.call(
                    "Barrier",
                    coordinator_pb2.BarrierRequest(
                        context=host.context(i), name=name, timeout_s=LIMIT_S
                    ).SerializeToString(),
                )
                for host in self.hosts
                for i in range(host.size)
            )
        )
        return time.perf_counter() - began

    async def register(self) -> None:
        """Register a model, and wait until the servers have its values."""
        spec, optimizer = model_of(len(self.servers.shards))
        known = self.hosts[0].known[0]
        assert known is not None
        lowest = known.workers[0].incarnation  # the others' registrations wait for this one's
        first = next(host for host in self.hosts if lowest in host.incarnations)
        context = first.context(first.incarnations.index(lowest))
        for part in ({"spec": codec.job_spec_to_proto(spec)}, {"optimizer": codec.optimizer_to_proto(optimizer)}):
            request = coordinator_pb2.RegisterRequest(context=context, **part)
            await first.call("Register", request.SerializeToString())
        for shard in self.servers.shards:
            shard.initialized(version=0, epoch=0)
        async with asyncio.timeout(LIMIT_S):
            while self.job_state is None or not self.job_state.initialized:
                self.news.clear()
                await self.news.wait()

    async def decided_s(self, number: int, before_s: float = 0.0) -> float:
        """Return the seconds until all members have a step's decision, from the vote of all, or of the last host.

        Args:
            number: number of the step.
            before_s: seconds that all other hosts vote earlier.
        """
        generation = self.hosts[0].known[0].generation  # type: ignore[union-attr]
        for shard in self.servers.shards:
            state = shard.job_state
            assert state is not None
            assert state.placement is not None
            shard.ready(
                Ready(
                    generation=generation,
                    step=number,
                    sums_of_squares=(1.0,) * 2,
                    placement=state.placement.number,
                )
            )
        vote = Vote(generation=generation, step=number, max_norm=1.0, hyper=(HYPER,))
        message = step_message_to_proto(vote).SerializeToString()
        self.missing = sum(host.size for host in self.hosts)
        self.news.clear()
        began = time.perf_counter()
        for host in self.hosts[:-1]:
            host.send(message)
        if before_s:
            await asyncio.sleep(before_s)
            began = time.perf_counter()
        self.hosts[-1].send(message)
        async with asyncio.timeout(LIMIT_S):
            while self.missing:
                self.news.clear()
                await self.news.wait()
        return self.newest_s - began

    async def death(self) -> float:
        """End a worker's call; returns seconds until all others know that the worker is not a member any more."""
        known = self.hosts[0].known[0]
        assert known is not None
        last = self.hosts[-1]
        last.incarnations[-1] = ""
        last.outbox.add_frame(multiplex_pb2.Frame(calls=(last.size - 1,), cancel=True))
        return await self.until(lambda now: now.generation > known.generation)

    async def close(self) -> None:
        """Let all members leave."""
        await asyncio.gather(*(host.close() for host in self.hosts))
        await asyncio.gather(*(m.close() for m in self.servers.members))
