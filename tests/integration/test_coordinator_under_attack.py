"""A coordinator as a process, attacked from outside: its memory, its files, and what it says of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

import axon_ps
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import InvalidRequest, Unreachable
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from axon_ps.wire.v1 import common_pb2, coordinator_pb2
from deadlines import HANG_S

MIB = 1 << 20
KV = "/axon_ps.wire.v1.Coordinator/KV"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-More: "
HALF_SENT = 1134


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A job that trains, whose coordinator has an HTTP endpoint."""
    with LocalCluster(shards=1, world_size=1, min_workers=1, environment={"AXON_PS_HTTP_PORT": "0"}) as running:
        yield running


def memory_mib(cluster: LocalCluster) -> float:
    return float(psutil.Process(cluster.process("coordinator").pid).memory_info().rss) / MIB


def puts(cluster: LocalCluster, token: str, number: int, size: int, at_a_time: int) -> set[grpc.StatusCode]:
    """Make puts of `size` bytes; how they end."""
    request = coordinator_pb2.KVRequest(
        op=1, key="k", value=bytes(size), context=common_pb2.CallContext(job=cluster.job)
    ).SerializeToString()
    ended: set[grpc.StatusCode] = set()
    with grpc.insecure_channel(cluster.address, options=UNLIMITED) as channel:
        put = channel.unary_unary(KV)
        waiting: list[Any] = []
        for index in range(number + at_a_time):
            if index < number:
                waiting.append(put.future(request, metadata=(("authorization", f"Bearer {token}"),), timeout=HANG_S))
            if index >= at_a_time and waiting:
                ended.add(waiting.pop(0).code())
    return ended


@pytest.mark.parametrize(
    ("who", "number", "size", "at_a_time", "ends"),
    [
        ("secret", 300, MIB + 1, 64, grpc.StatusCode.INVALID_ARGUMENT),
        ("secret", 12, 60 * MIB, 12, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("nobody", 12, 60 * MIB, 12, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_what_is_refused_leaves_no_memory_behind(
    cluster: LocalCluster, who: str, number: int, size: int, at_a_time: int, ends: grpc.StatusCode
) -> None:
    token = cluster.token if who == "secret" else "wrong"
    puts(cluster, token, 4, 10, 4)  # what is made once
    before = memory_mib(cluster)
    assert puts(cluster, token, number, size, at_a_time) == {ends}
    assert memory_mib(cluster) - before < 64  # of 300 and 720


def join() -> int:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        return world.world_size


@contextlib.contextmanager
def files_for(sockets: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + sockets), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_sent_requests_leave_files_for_status_and_a_new_worker(cluster: LocalCluster) -> None:
    port = int(re.findall(r"HTTP at http://127\.0\.0\.1:(\d+)/", cluster.log("coordinator"))[-1])
    process = psutil.Process(cluster.process("coordinator").pid)
    before = process.num_fds()
    with files_for(2 * HALF_SENT), contextlib.ExitStack() as stack:
        for _ in range(HALF_SENT):
            stack.enter_context(sock := socket.create_connection(("127.0.0.1", port), HANG_S))
            with contextlib.suppress(ConnectionError):  # it was put out
                sock.sendall(HALF)
        assert process.num_fds() - before < 600
        assert cluster.status().job == cluster.job
        assert [result.value for result in cluster.run_workers(join)] == [1]
        with socket.create_connection(("127.0.0.1", port), HANG_S) as healthy:
            healthy.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert healthy.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_json_that_is_too_deep_or_too_long_is_refused_by_name(cluster: LocalCluster, tmp_path: Path) -> None:
    async def main() -> None:
        operator = OperatorClient(cluster.address, job=cluster.job, security=cluster.security)
        try:
            for extra, words in (
                ("[" * 100_000, "extra_json has more than 400 lists or objects inside each other"),
                ('{"a":' * 100_000 + "1" + "}" * 100_000, "extra_json has more than 400 lists"),
                ('{"a": "' + "x" * (4 << 20) + '"}', "at most 4194304 are read as JSON"),
            ):
                with pytest.raises(InvalidRequest, match=words):
                    await operator.save_checkpoint(str(tmp_path / "c"), extra, timeout_s=HANG_S)
        finally:
            await operator.close()

    asyncio.run(main())
    assert "Traceback" not in cluster.log("coordinator")


# ---------------------------------------------------------------------- few files


def coordinator(files: int, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "axon_ps.cli.main", "coordinator", "--port", "0", "--state", "memory", *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )


def test_a_coordinator_with_too_few_files_does_not_start_and_says_what_to_do(tmp_path: Path) -> None:
    with coordinator(100, "--audit-log", "-") as process:
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert "a service needs 128 files at least, and this process may open 100; raise it: `ulimit -n 65536`" in said


def test_a_coordinator_with_few_files_says_how_many_connections_it_takes_and_so_does_its_client() -> None:
    with coordinator(256, "--audit-log", "-") as process:
        assert process.stderr is not None
        try:
            said = ""
            while "listening on" not in said:
                said += (line := process.stderr.readline())
                assert line, said
            assert "at most 64 connections of gRPC at a time" in said
            assert "this process may open no more than 256 files; raise it: `ulimit -n 65536`" in said
            address = said.rpartition("listening on ")[2].split()[0]
            with contextlib.ExitStack() as stack:
                for index in range(64):
                    channel = grpc.insecure_channel(address, options=[*UNLIMITED, ("axon_ps.connection", index)])
                    grpc.channel_ready_future(stack.enter_context(channel)).result(HANG_S)
                with pytest.raises(Unreachable, match=r"as many connections as the number of files .* \(ulimit -n"):
                    asyncio.run(status(address))
            assert asyncio.run(status(address)) == "default"
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


async def status(address: str) -> str:
    operator = OperatorClient(address, job="default", security=Security())
    try:
        async with asyncio.timeout(HANG_S):
            while True:
                try:
                    return (await operator.status(timeout_s=HANG_S)).job
                except Unreachable as error:
                    if "ulimit" in str(error):
                        raise
    finally:
        await operator.close()
