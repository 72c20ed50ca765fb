"""Target: real coordinator and shard servers, over real connections, with the job's token, while a job trains beside.

Lawful calls with the job's token are left out: the job's own worker may stop it, and so may an operator. So messages
name no member of the job, and calls that need none to change it (drain, release, restore, join) are for another job.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from axon_ps.errors import AxonError, InternalError
from axon_ps.rpc.carriers.bulk.client import BULK, BulkClient
from axon_ps.rpc.carriers.grpc import GrpcCall
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.status import error_of
from axon_ps.rpc.stream import EOF, Stream
from axon_ps.wire.v1 import bulk_pb2
from axon_ps_lab.fuzz.clocks import LoopClock, paced
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Case, Findings
from axon_ps_lab.fuzz.grown import Facts, Grower, delimited
from axon_ps_lab.fuzz.hostile import bulk as hostile_bulk
from axon_ps_lab.fuzz.hostile import http2
from axon_ps_lab.fuzz.hostile.bulk import Bulk
from axon_ps_lab.fuzz.targets.services import READS, awaited
from axon_ps_lab.fuzz.targets.tapped import METHODS

DEADLINE_S: Final = 0.5
"""Deadline of a call: a lawful call may wait for something that never comes."""

GRACE_S: Final = 8.0
"""Seconds of a `LoopClock` that a call may take to end after its deadline; longer is a hang."""

SIDE_BY_SIDE: Final = 48
"""Calls at a time."""

LAWFUL: Final = frozenset(("Drain", "Release", "SaveCheckpoint", "RestoreCheckpoint", "Register", "Trace"))
"""Calls that an operator may make on any job whose token it has."""

NOBODY: Final = "00000000000000000000000000000bad"
OTHER_JOB: Final = "fuzz-other"


def harmless(kind: Descriptor, rpc: str, data: bytes) -> bytes:
    """Return the message, with the name of another job if it would be lawful. An operator's call may name no job."""
    try:
        message: Message = GetMessageClass(kind).FromString(data)
    except DecodeError:
        return data
    if rpc in LAWFUL:
        return data + delimited(kind.fields_by_name["context"].number, delimited(1, OTHER_JOB.encode()))
    if rpc == "Session" and message.WhichOneof("message") == "join":
        return data + delimited(1, delimited(1, OTHER_JOB.encode()))
    return data


class Sockets:
    """See the module; its coroutines are for one event loop. Use it with `async with`.

    Args:
        findings: gets the findings.
        ports: ports of the services, by name.
        job: name of the job.
        token: token of the job.
    """

    name = "sockets"

    def __init__(self, findings: Findings, ports: dict[str, int], job: str, token: str) -> None:
        self.messages = 0
        self.connections: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.late = 0
        self._findings = findings
        self._ports = ports
        self._token = token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Stub] = {}
        self._clock: LoopClock | None = None
        self._grower = Grower(
            Facts(
                numbers={
                    "generation": [1, 1, 2],
                    "unit": [0],
                    "dtype": [1, 2],
                    "numel": [64],
                    "model": [0],
                    "ranks": [0],
                },
                texts={"job": [job, job, OTHER_JOB], "incarnation": [NOBODY, "", "not hexadecimal"]},
            )
        )

    async def __aenter__(self) -> Sockets:
        self._clock = LoopClock()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.close()
        for stub in self._stubs.values():
            assert stub.bulk is not None
            await stub.bulk.close()
        for channel in self._channels.values():
            await channel.close()

    @property
    def held_up_s(self) -> float:
        """The longest time for which this process's event loop did not run."""
        return 0.0 if self._clock is None else self._clock.longest_s

    async def calls(self, seed: str, count: int, seconds: float = 0.0) -> None:
        """Make calls of `count` messages together, evenly spread over `seconds`; 0 = as fast as possible."""
        entropies = (Entropy(f"{seed}/{number}") for number in itertools.count())
        free = asyncio.Semaphore(SIDE_BY_SIDE)
        begun = 0
        async with asyncio.TaskGroup() as group:
            async for number in paced(count, seconds):
                if begun > number:  # a previous call had several messages
                    continue
                case, service = self._chosen(next(entropies))
                begun += len(case.messages)
                await free.acquire()
                group.create_task(self.perform(case, service)).add_done_callback(lambda _: free.release())

    async def attacks(self, seed: str, count: int, side_by_side: int, seconds: float = 0.0) -> None:
        """Open hostile connections, evenly spread over `seconds`; 0 = as fast as possible."""
        async with contextlib.AsyncExitStack() as stack:
            granted = {
                name: await stack.enter_async_context(self._granted(name)) for name in self._ports if "shard" in name
            }

            async def one(number: int) -> None:
                entropy = Entropy(f"{seed}/{number}")
                service = entropy.pick(list(self._ports))
                if service in granted and entropy.below(2):
                    kind = await hostile_bulk.attack(granted[service], entropy)
                else:
                    kind = await http2.attack(self._ports[service], self._token, entropy)
                self.connections[kind] += 1

            await self._all(one, count, side_by_side, seconds)

    @staticmethod
    async def _all(
        one: Callable[[int], Coroutine[Any, Any, None]], count: int, side_by_side: int, seconds: float
    ) -> None:
        free = asyncio.Semaphore(side_by_side)
        async with asyncio.TaskGroup() as group:
            async for number in paced(count, seconds):
                await free.acquire()
                group.create_task(one(number)).add_done_callback(lambda _: free.release())

    @contextlib.asynccontextmanager
    async def _granted(self, service: str) -> AsyncIterator[Bulk]:
        """Yield the bulk connections of a server, granted for as long as this lasts."""
        async with self._stub(service).open("Open") as stream:
            await stream.write(bulk_pb2.OpenRequest())
            reply = await stream.read()
            yield Bulk(reply.port, reply.capability)

    def grown(self, entropy: Entropy) -> Case:
        """Grow the messages of a call."""
        path = entropy.pick(list(METHODS))
        method = METHODS[path]
        kind = method.input_type
        count = 1 + entropy.below(8) if method.client_streaming else 1
        messages = (self._grower.message(kind, entropy) for _ in range(count))
        return Case(self.name, path, tuple(harmless(kind, method.name, m) for m in messages))

    async def perform(self, case: Case, service: str) -> None:
        """Make a call; it must end, soon after its deadline at most, and not by an unforeseen exception."""
        self.messages += len(case.messages)
        assert self._clock is not None
        began_s = time.monotonic()
        made = asyncio.create_task(self._made(case, service))
        if not await self._clock.ends(made, DEADLINE_S + GRACE_S):
            text = f"it waited for {awaited(made)}"
            ended = await self._clock.ends(made, 4 * GRACE_S)
            text += (
                f" and ended {'later' if ended else 'never'}; longest turn of our loop {self._clock.longest_s:.1f} s"
            )
            self._findings.add(f"hang: {case.what} did not end in time", [case], text)
            made.cancel()
            return
        if time.monotonic() - began_s > DEADLINE_S + GRACE_S:
            self.late += 1
        try:
            made.result()
            self.statuses["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self._ended(case, error_of(error, service, case.what))
        except AxonError as error:
            self._ended(case, error)

    def _ended(self, case: Case, error: AxonError) -> None:
        self.statuses[type(error).__name__] += 1
        if isinstance(error, InternalError):
            self._findings.add(f"{case.what}: {error}", [case])

    def _chosen(self, entropy: Entropy) -> tuple[Case, str]:
        """Choose a call, and the service that gets it."""
        case = self.grown(entropy)
        names = [n for n in self._ports if ("Coordinator" in case.what) == (n == "coordinator")]
        return case, entropy.pick(names)

    async def _made(self, case: Case, service: str) -> None:
        channel = self._channel(service)
        options: Any = {"timeout": DEADLINE_S, "metadata": (("authorization", f"Bearer {self._token}"),)}
        if not METHODS[case.what].client_streaming:
            call: Any = channel.unary_unary(case.what)
            await call(case.messages[0], **options)
            return
        async with await self._opened(case, service, channel.stream_stream(case.what), options) as stream:
            writing = asyncio.create_task(self._write(stream, case))
            try:
                for _ in range(READS):
                    if await stream.read() is EOF:
                        return
            finally:
                writing.cancel()
                await asyncio.wait([writing])

    async def _opened(self, case: Case, service: str, over_grpc: Any, options: Any) -> Stream:
        """Open the stream of a call: about half of a shard server's are bulk calls."""
        if service != "coordinator" and len(case.messages[0]) % 2:
            bulk = self._stub(service).bulk
            assert bulk is not None
            if (call := await bulk.open(case.what)) is not None:
                asyncio.get_running_loop().call_later(DEADLINE_S, call.cancel)
                return Stream(call, service, case.what, DEADLINE_S, bytes)
        return Stream(GrpcCall(over_grpc(**options)), service, case.what, DEADLINE_S, bytes)

    @staticmethod
    async def _write(stream: Stream, case: Case) -> None:
        with contextlib.suppress(AxonError):  # the reader gets it, too
            for message in case.messages:
                await stream.write(message)
            await stream.done_writing()

    def _stub(self, service: str) -> Stub:
        """Return the stub that opens bulk calls to a service."""
        if service not in self._stubs:
            security = Security(token=self._token)
            made = self._stubs[service] = Stub(self._channel(service), BULK, security, peer=service)
            made.bulk = BulkClient(made, "127.0.0.1", None)
        return self._stubs[service]

    def _channel(self, service: str) -> grpc.aio.Channel:
        if service not in self._channels:
            address = f"127.0.0.1:{self._ports[service]}"
            self._channels[service] = grpc.aio.insecure_channel(
                address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
        return self._channels[service]
