"""What a caller with the job's token may try against a shard server of its host: refused, and the job goes on."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import shard_fakes
from axon_ps.compress import Int8
from axon_ps.errors import AxonError, Broken, InvalidRequest, PermissionDenied
from axon_ps.host.leases import address_of
from axon_ps.shard.client import transfers
from axon_ps.shard.server import servicer
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2, lease_pb2, shard_pb2
from shard_fakes import TIMEOUT_S, Job, job, spec_of

SPEC = spec_of(3000)
RNG = np.random.default_rng(0)
FIRST, GRAD = RNG.random(3000, np.float32), RNG.random(3000, np.float32)
SECRET = np.frombuffer(b"a secret of the server's process" * 375, np.float32)[:3000].copy()
"""What lies in the memory of the process that is attacked."""


@pytest.fixture(autouse=True)
def on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_fakes, "WORKERS_NODE", "n")
    for module in (servicer, transfers):
        monkeypatch.setattr(module, "MIN_LEASED_BYTES", 1)


class Attacker:
    """Worker 0's token and name, and a connection of its own."""

    def __init__(self, j: Job, own: socket.socket) -> None:
        self.job = j
        self.socket = own

    async def shake_hands(self) -> shard_pb2.HandshakeReply:
        request = shard_pb2.HandshakeRequest(context=self.job.context()())
        reply: shard_pb2.HandshakeReply = await self.job.raw().call("Handshake", request, timeout_s=TIMEOUT_S)
        return reply

    async def connect(self) -> None:
        reply = await self.shake_hands()
        self.socket.connect(f"\0{reply.socket}")
        self.socket.send(reply.nonce)

    def send(self, number: int, *fds: int) -> None:
        """Pass descriptors as a segment."""
        passed: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
        self.socket.sendmsg([struct.pack("<Q", number)], passed if fds else [])
        for fd in fds:
            os.close(fd)

    async def push(self, raw: bytes = b"", **fields: Any) -> None:
        """A gradient without a payload; `raw`: what protobuf appends to it."""
        j = self.job
        header = common_pb2.Chunk(
            context=j.context()(), step=j.step, numel=3000, end=3000, dtype=common_pb2.D_TYPE_F32, **fields
        )
        stream = j.raw().open("ReduceScatter", timeout_s=TIMEOUT_S)
        await stream.write(encode_chunk(header, None) + raw)
        await stream.done_writing()
        await stream.read()


def run(attack: Callable[[Job, Attacker], Awaitable[None]]) -> None:
    """Attack a job's server, and see that the job beside it goes on."""

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.groups[0].upload(0, FIRST, context=j.context(), timeout_s=TIMEOUT_S)
            assert (await j.gather(0, 0))[1].tobytes() == FIRST.tobytes()  # they share memory
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attackers:
                await attack(j, Attacker(j, attackers))
            j.groups[0]._same_host.forget(0)  # the attacker had the worker's name, so its connection has ended
            await j.push(0, 0, GRAD)
            j.commit()
            assert (await j.gather(0, 0))[1].tobytes() == (FIRST - GRAD).tobytes()

    asyncio.run(asyncio.wait_for(scenario(), 50))


def memory_of_the_server(offset: int = 0) -> lease_pb2.Lease:
    """As a lease was once believed: by an address of the server's process."""
    return lease_pb2.Lease(segment=os.getpid(), offset=address_of(SECRET) + offset, size_bytes=SECRET.nbytes)


def test_addresses_that_a_message_names_are_not_read() -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        with pytest.raises(Broken, match="has passed no segment"):  # the worker's own connection
            await attacker.push(lease=memory_of_the_server())
        await attacker.connect()
        for segment in (os.getpid(), 0, 1, 1 << 63):
            with pytest.raises(Broken, match=f"has passed no segment {segment}"):
                await attacker.push(lease=lease_pb2.Lease(segment=segment, offset=0, size_bytes=12_000))

    run(attack)


def test_handshakes_and_leases_of_before_are_no_messages_any_more() -> None:
    """Process id, address and secret in a handshake, and addresses in a chunk, under the field numbers of then."""

    async def attack(j: Job, attacker: Attacker) -> None:
        elf = struct.pack("<QQ16s", os.getpid(), 0x400000, b"\x7fELF\x02\x01\x01" + bytes(9))
        request = shard_pb2.HandshakeRequest(context=j.context()()).SerializeToString()
        old = shard_pb2.HandshakeRequest.FromString(request + b"\x12" + bytes([len(elf)]) + elf)
        reply = await j.raw().call("Handshake", old, timeout_s=TIMEOUT_S)
        assert {field.name for field, _ in reply.ListFields()} == {"socket", "nonce"}
        lease = struct.pack("<QQQQQ", address_of(SECRET), SECRET.nbytes, address_of(SECRET), 0, 0)
        with pytest.raises(InvalidRequest):
            await attacker.push(b"\x5a" + bytes([len(lease)]) + lease)

    run(attack)


@pytest.mark.parametrize("nonce", [b"", bytes(16), b"guess" * 4])
def test_a_forged_nonce_opens_nothing(nonce: bytes) -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        reply = await attacker.shake_hands()
        attacker.socket.connect(f"\0{reply.socket}")
        attacker.socket.send(nonce or b"x")
        known = j.shells[0].same_host
        assert known.find("worker-0 of another job") is None
        await j.gather(0, 0)
        assert attacker.socket.recv(100) == b""

    run(attack)


def test_a_stranger_gets_no_nonce() -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        for changes in ({"incarnation": "stranger"}, {"job": "another"}, {"incarnation": ""}):
            context = j.context()()
            for name, value in changes.items():
                setattr(context, name, value)
            with pytest.raises(PermissionDenied):
                await j.raw().call("Handshake", shard_pb2.HandshakeRequest(context=context), timeout_s=TIMEOUT_S)

    run(attack)


def memfd(size_bytes: int = 12_000, seals: int = 0, *, allocate: bool = True) -> int:
    fd = os.memfd_create("attacker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocate:
        os.posix_fallocate(fd, 0, size_bytes)
    else:
        os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


LEASE = lease_pb2.Lease(segment=5, offset=0, size_bytes=12_000)


def test_a_file_that_can_be_made_shorter_is_refused_before_it_is_mapped() -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        await attacker.connect()
        fd = memfd()
        attacker.send(5, os.dup(fd))
        os.ftruncate(fd, 0)
        with pytest.raises(InvalidRequest, match=r"not sealed against shrinking \(F_SEAL_SHRINK\)"):
            await attacker.push(lease=LEASE)
        os.close(fd)

    run(attack)


def test_a_sealed_file_cannot_be_made_shorter_and_may_be_added() -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        await attacker.connect()
        fd = memfd(12_288, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, np.zeros(3000, np.float32).tobytes(), 0)
        attacker.send(5, os.dup(fd))
        for wrong in ({"offset": 300}, {"offset": 12_288}, {"offset": 1 << 63}):
            lease = lease_pb2.Lease(segment=5, size_bytes=12_000, **wrong)
            with pytest.raises(InvalidRequest, match="of segment 5 of process .* were named; it has 12288"):
                await attacker.push(lease=lease)
        for size_bytes in (1 << 62, 12_001, 0):
            with pytest.raises(InvalidRequest):
                await attacker.push(lease=lease_pb2.Lease(segment=5, size_bytes=size_bytes))
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)

    run(attack)


@pytest.mark.parametrize(
    ("fds", "why"),
    [
        (lambda: [memfd(seals=fcntl.F_SEAL_SHRINK), memfd(seals=fcntl.F_SEAL_SHRINK)], "more descriptors than 1"),
        (lambda: [memfd(1 << 40, fcntl.F_SEAL_SHRINK, allocate=False)], "memory for 0 of them"),
        (lambda: [os.open("/etc/passwd", os.O_RDONLY)], "no memory"),
        (lambda: list(os.pipe())[:1], "no memory"),
    ],
    ids=["surplus", "holes of a TiB", "a file", "a pipe"],
)
def test_other_descriptors_are_refused_and_closed(fds: Callable[[], list[int]], why: str) -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        await attacker.connect()
        attacker.send(5, *fds())
        with pytest.raises(InvalidRequest, match=why):
            await attacker.push(lease=LEASE)
        with pytest.raises(AxonError):  # that connection has ended
            await attacker.push(lease=LEASE)

    run(attack)


def test_a_lease_cannot_stand_for_a_compressed_gradient() -> None:
    """It would be checked and then read again, while its owner changes it."""

    async def attack(j: Job, attacker: Attacker) -> None:
        await attacker.connect()
        attacker.send(5, memfd(12_288, fcntl.F_SEAL_SHRINK))
        size_bytes = Int8().compressed_bytes(3000)
        lease = lease_pb2.Lease(segment=5, size_bytes=size_bytes - size_bytes % 3000)
        with pytest.raises(InvalidRequest, match="compressed gradient, which must be sent"):
            await attacker.push(lease=lease, compressed=True)

    run(attack)


def test_what_a_server_passes_can_be_written_by_nobody() -> None:
    async def attack(j: Job, attacker: Attacker) -> None:
        await attacker.connect()
        request = shard_pb2.AllGatherRequest(
            context=j.context()(), end=3000, dtype=common_pb2.D_TYPE_F32, accept_leases=True
        )
        stream = j.raw().open("AllGather", timeout_s=TIMEOUT_S)
        await stream.write(request)
        await stream.read()
        await stream.done_writing()
        _, found, _, _ = attacker.socket.recvmsg(100, 100)
        (fd,) = struct.unpack("i", found[0][2])
        for change in (
            lambda: os.pwrite(fd, b"mine", 4096),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 20),
            lambda: os.posix_fallocate(fd, 0, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                change()
        os.close(fd)

    run(attack)
