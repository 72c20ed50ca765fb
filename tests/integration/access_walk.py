"""Walks the table of who may call what against a coordinator and a shard server, cell by cell, and writes it as a page.

    python tests/integration/access_walk.py        writes docs/access.md

Every RPC (health and reflection, too) and every HTTP path is called with every kind of credentials, as a token and as a
certificate; a cell is "yes" when the call reached the servicer, whatever that thought of its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import server as coordinator_server
from axon_ps.rpc.access import MAY_CALL, PAGE, short
from axon_ps.rpc.auth.authority import JobAuthority
from axon_ps.rpc.auth.identity import Identity, Principal, server_name
from axon_ps.rpc.auth.tokens import mint, new_secret
from axon_ps.rpc.http import HttpServer
from axon_ps.rpc.security import Security
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.server import ShardConfig
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.wire.v1 import bulk_pb2, coordinator_pb2, shard_pb2
from deadlines import HANG_S

PAGE_FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "access.md"
MEANS: Final = ("token", "certificate")
NOT_RIGHT: Final = ("none", "wrong", "expired", "another job's")
"""Credentials of a role that may, if they were right; the roles themselves follow."""

JOB: Final = "walked"
LIMIT_S: Final = HANG_S
_ROLE_MAY_NOT: Final = "the role of these credentials is "
_NOT_REACHED: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)
_WRITE_FAILED: Final = "Internal error from Core"
"""What gRPC makes of the status when a stream is refused just while a message is written to it: it is asked again."""

_DESCRIPTORS: Final = [
    coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    shard_pb2.DESCRIPTOR.services_by_name["Shard"],
    bulk_pb2.DESCRIPTOR.services_by_name["Bulk"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
]
METHODS: Final = {f"/{s.full_name}/{m.name}": m for s in _DESCRIPTORS for m in s.methods}
HTTP_PATHS: Final = {PAGE: "/", "POST /api/servers/RANK/drain": "/api/servers/0/drain"}
"""What to ask for, for rows that are not a path themselves."""


@dataclass
class Shown:
    """Credentials that are shown: a token, or a certificate and its key (PEM)."""

    token: str = ""
    certificate: bytes = b""
    key: bytes = b""


@dataclass
class Job:
    """A coordinator and a shard server that serve, by TLS or not."""

    means: str
    secret: str = field(default_factory=new_secret)
    other: str = field(default_factory=new_secret)
    grpc: dict[str, str] = field(default_factory=dict)  # by "coordinator" and "shard", the address
    http: dict[str, str] = field(default_factory=dict)

    @property
    def security(self) -> Security:
        """That of the services."""
        return Security(token=self.secret, tls=self.means == "certificate")

    def shown(self, kind: str, role: Principal) -> Shown:
        """Credentials of a kind."""
        secret = self.other if kind == "wrong" else self.secret
        identity = Identity(role, "another" if kind == "another job's" else JOB)
        lifetime_s = -1.0 if kind == "expired" else 600.0
        if kind == "none":
            return Shown()
        if self.means == "token":
            return Shown(token=mint(secret, identity, lifetime_s))
        issued = JobAuthority(secret).issue(identity, lifetime_s)
        return Shown(certificate=issued.chain, key=issued.key)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """While both serve."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        ready = [loop.create_future(), loop.create_future()]
        config = CoordinatorConfig(job=JOB, world_size=1, num_shards=1)
        http = [HttpServer("127.0.0.1", 0, self.security.acting(role, JOB)) for role in (_COORDINATOR, _SHARD)]
        running = [
            loop.create_task(
                coordinator_server.serve(
                    config, "127.0.0.1", 0, self.security, MemoryStateStore(), ready[0].set_result, stop, http[0]
                )
            )
        ]
        self.grpc["coordinator"] = f"127.0.0.1:{await asyncio.wait_for(ready[0], LIMIT_S)}"
        shard = ShardConfig(
            coordinator=self.grpc["coordinator"], job=JOB, threads=1, security=self.security, grace_s=0.5
        )
        running.append(loop.create_task(shard_server.serve(shard, ready[1].set_result, stop, http[1])))
        self.grpc["shard"] = f"127.0.0.1:{await asyncio.wait_for(ready[1], LIMIT_S)}"
        self.http = {"coordinator": http[0].url.rstrip("/"), "shard": http[1].url.rstrip("/")}
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)


_COORDINATOR, _SHARD = Principal.COORDINATOR, Principal.SHARD


async def walk() -> dict[str, dict[str, dict[str, bool]]]:
    """By row and column, whether the call was let through, by each of `MEANS`."""
    found: dict[str, dict[str, dict[str, bool]]] = {row: {} for row in MAY_CALL}
    for means in MEANS:
        job = Job(means)
        async with job.serving():
            for column in (*NOT_RIGHT, *(role.value for role in Principal), *(("secret",) if means == "token" else ())):
                for row, reached in (await _column(job, column)).items():
                    found[row].setdefault(column, {})[means] = reached
    return found


async def _column(job: Job, column: str) -> dict[str, bool]:
    """Whether calls to all rows are let through, with the same kind of credentials."""
    found = {}
    for row, roles in MAY_CALL.items():
        if column in NOT_RIGHT:
            role = next(r for r in Principal if roles is None or r in roles)
            shown = job.shown(column, role)
        else:
            shown = Shown(token=job.secret) if column == "secret" else job.shown("right", Principal(column))
        service = "shard" if row.startswith(("/axon_ps.wire.v1.Shard/", "/axon_ps.wire.v1.Bulk/")) else "coordinator"
        found[row] = await (_asked if " " in row else _called)(job, service, row, shown)
    return found


async def _called(job: Job, service: str, row: str, shown: Shown) -> bool:
    """Whether an RPC reaches its servicer."""
    method, metadata = METHODS[row], ((("authorization", f"Bearer {shown.token}"),) if shown.token else ())
    async with _channel(job, service, shown) as channel:
        try:
            await _first_reply(channel, row, method, metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED or (error.details() or "").startswith(_ROLE_MAY_NOT):
                return False
            if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or ""):
                return False
            if error.details() == _WRITE_FAILED:
                return await _called(job, service, row, shown)
            if error.code() in _NOT_REACHED:
                raise
    return True


async def _first_reply(channel: Any, row: str, method: MethodDescriptor, metadata: Any) -> None:
    """Call an RPC with a message that names the job, and get its first reply, or its error."""
    request: Any = GetMessageClass(method.input_type)()
    if "context" in method.input_type.fields_by_name:
        request.context.job = JOB
    options: dict[str, Any] = {"request_serializer": lambda m: m.SerializeToString(), "response_deserializer": bytes}
    if method.client_streaming:
        call = channel.stream_stream(row, **options)(timeout=LIMIT_S, metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):  # the read has the reason
            await call.write(request)
        await call.read()
        call.cancel()
    elif method.server_streaming:
        call = channel.unary_stream(row, **options)(request, timeout=LIMIT_S, metadata=metadata)
        await call.read()
        call.cancel()
    else:
        await channel.unary_unary(row, **options)(request, timeout=LIMIT_S, metadata=metadata)


def _channel(job: Job, service: str, shown: Shown) -> grpc.aio.Channel:
    if job.means == "token":
        return grpc.aio.insecure_channel(job.grpc[service])
    roots = JobAuthority(job.secret).certificate
    credentials = grpc.ssl_channel_credentials(roots, shown.key or None, shown.certificate or None)
    options = [
        ("grpc.ssl_target_name_override", server_name(Principal(service))),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.secure_channel(job.grpc[service], credentials, options=options)


async def _asked(job: Job, service: str, row: str, shown: Shown) -> bool:
    """Whether an HTTP request reaches its handler."""
    method, path = row.split(" ")
    headers = {"Authorization": f"Bearer {shown.token}"} if shown.token else {}
    url = job.http[service] + HTTP_PATHS.get(row, path)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session,
            session.request(method, url, headers=headers, ssl=_context(job, shown)) as response,
        ):
            assert response.status != 404, row
            return response.status not in (401, 403)
    except (aiohttp.ClientError, ssl.SSLError):
        return False


def _context(job: Job, shown: Shown) -> ssl.SSLContext | bool:
    if job.means == "token":
        return True
    context = ssl.create_default_context(cadata=JobAuthority(job.secret).certificate.decode())
    if shown.certificate:
        with tempfile.NamedTemporaryFile() as file:
            file.write(shown.certificate + shown.key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def page(found: dict[str, dict[str, dict[str, bool]]]) -> str:
    """The page of the docs."""
    columns = [*NOT_RIGHT, *(role.value for role in Principal), "secret"]
    lines = [f"| {' | '.join(['call', *columns])} |", f"|---{'|---' * len(columns)}|"]
    for row, cells in found.items():
        lines.append(f"| `{short(row)}` | {' | '.join(_cell(cells[column]) for column in columns)} |")
    return _INTRODUCTION + "\n".join(lines) + "\n"


def _cell(by_means: dict[str, bool]) -> str:
    if len(set(by_means.values())) == 1:
        return "yes" if next(iter(by_means.values())) else ""
    return ", ".join(f"{means}: {'yes' if reached else 'no'}" for means, reached in by_means.items())


_INTRODUCTION: Final = """# Who may call what

`axon-ps auth table` prints the rules of this table. `tests/integration/access_walk.py` makes every call and writes this
page. A test compares the page with the calls. Each call is made with each kind of credentials: as a token over
plaintext, and as a certificate over mutual TLS. `yes` means that the call was performed. An empty cell means that it
was refused, and the error gives the reason. In the first four columns the credentials are missing or invalid. The next
ones are the roles. *secret* is a caller with the job's secret. [security.md](security.md) says how to get credentials.

Over mutual TLS a connection of gRPC needs a certificate of the job's authority, also to ask for the health of a
service. The HTTP endpoint does not ask browsers for a certificate. An invalid certificate ends the connection.

Joining has finer rules than this table. Only a worker may join as a worker, and only a shard server as a shard server.
If the credentials name a rank, the member must have that rank. A shard server may drain only itself. The coordinator's
[audit log](security.md) has every refused attempt to change the job, if the caller is known.

"""


if __name__ == "__main__":
    PAGE_FILE.write_text(page(asyncio.run(walk())))
    sys.stdout.write(f"{PAGE_FILE}\n")
