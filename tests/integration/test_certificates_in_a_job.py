"""A job over mutual TLS while it trains: certificates are renewed unnoticed; one that is revoked ends its worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509

from axon_ps.coordinator.client.operator import SERVICE, OperatorClient
from axon_ps.coordinator.proxy.server import serve
from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.authority import authority_of
from axon_ps.rpc.auth.credentials import GRACE_S
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.channels import connect
from axon_ps.rpc.multiplex.client import MultiplexedClient
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerFailed, results_of
from axon_ps_lab.campaigns.failover_job import plain, steps_of, train, until
from deadlines import HANG_S
from tables import Record, add

LIFETIME_S = 3.0
RENEWALS = 5  # what was open at first would have ended
EJECTED_S = 1.0
SHORT_S = 8.0
PAUSE_S = 0.05  # between the steps of a worker; what happens here takes seconds
OVER_GRPC = {"AXON_PS_DIRECT_MEMORY": "0"}  # the bytes themselves, too
SOON_S = HANG_S
AT_ONCE = 8


def observer(secret: str, directory: Path) -> ssl.SSLContext:
    """What connects to servers of the job."""
    authority = authority_of(secret)
    made = authority.issue(Identity(Principal.OBSERVER, "test"), 600.0)
    file = directory / "observer.pem"
    file.touch(mode=0o600)
    file.write_bytes(made.chain + made.key)
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    context.load_cert_chain(file)
    context.set_alpn_protocols(["h2"])
    return context


def serial_at(address: str, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a server shows to a new connection.

    A certificate lasts for seconds here, and so may a handshake on a loaded machine: one that is refused is
    tried again, as gRPC does.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            with (
                socket.create_connection((host, int(port)), timeout=SOON_S) as plain_socket,
                context.wrap_socket(plain_socket, server_hostname=host) as connection,
            ):
                der = connection.getpeercert(binary_form=True)
        except ssl.SSLCertVerificationError:
            assert time.monotonic() < deadline
        else:
            assert der is not None
            return x509.load_der_x509_certificate(der).serial_number


def serials_at(address: str, context: ssl.SSLContext, count: int) -> set[int]:
    """The serial numbers of the certificates that a server shows, until there are `count`."""
    serials: set[int] = set()
    deadline = time.monotonic() + SOON_S
    while len(serials) < count and time.monotonic() < deadline:
        serials.add(serial_at(address, context))
    return serials


def shards_of(cluster: LocalCluster) -> list[str]:
    return [member.address for member in cluster.status().membership.shards]


def test_certificates_are_renewed_and_nobody_notices(tmp_path: Path, record_property: Record) -> None:
    """Worker 1 reaches the coordinator through a proxy of its host."""
    security = Security(tls=True, lifetime_s=LIFETIME_S)
    lifetime = {"AXON_PS_TLS_LIFETIME_S": f"{LIFETIME_S}"}
    with LocalCluster(shards=2, world_size=2, security=security, environment=lifetime) as cluster:
        through_proxy = OVER_GRPC | {"AXON_PS_COORDINATOR": cluster.add_proxy()}
        workers = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[0], env=OVER_GRPC)
        workers += cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[1], env=through_proxy)
        until(lambda: steps_of(tmp_path, 0))
        places, context = [cluster.address, *shards_of(cluster)], observer(cluster.token, tmp_path)
        seen: dict[str, set[int]] = {place: set() for place in places}
        generation = cluster.status().membership.generation
        while any(len(serials) <= RENEWALS for serials in seen.values()):
            for place in places:
                seen[place].add(serial_at(place, context))
            for worker in workers:
                assert worker.process.exit_code is None, worker.process.output
            time.sleep(0.3)
        assert cluster.status().membership.generation == generation
        (tmp_path / "stop").write_text(str(steps_of(tmp_path, 0)[-1][1] + 20))
        values = [result.value for result in results_of(workers, timeout_s=SOON_S, check=True)]
    made = steps_of(tmp_path, 0)
    assert all(committed for _, _, committed, _ in made)
    expected = plain([2] * made[-1][1])
    assert all(np.array_equal(value, expected) for value in values)
    took_s = made[-1][0] - made[0][0]
    add(record_property, "Certificates renewed", times=RENEWALS, within_s=f"{took_s:.1f}", steps=len(made), aborted=0)


def test_many_handshakes_at_once_while_certificates_are_renewed(tmp_path: Path) -> None:
    """gRPC frees the certificate before while handshakes begin with it; see `security.UNDER_WAY_S`."""
    with LocalCluster(shards=1, world_size=1, security=Security(tls=True, lifetime_s=LIFETIME_S)) as cluster:
        context = observer(cluster.token, tmp_path)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [threads.submit(serials_at, cluster.address, context, 3) for _ in range(AT_ONCE)]
            serials = [future.result() for future in asked]
        assert all(seen == serials[0] and len(seen) == 3 for seen in serials)
        assert cluster.status().membership.generation >= 0  # it is still there


Issue = Callable[..., dict[str, str]]


@pytest.fixture
def issued(tmp_path: Path) -> Issue:
    """Variables of a worker that has a certificate and nothing else."""

    def issue(secret: str, rank: int, lifetime_s: float = 600.0) -> dict[str, str]:
        authority = authority_of(secret)
        made = authority.issue(Identity(Principal.WORKER, "test", rank), lifetime_s)
        directory = tmp_path / f"identity-{rank}"
        directory.mkdir()
        for name, content in (("svid.pem", made.chain), ("svid.key", made.key), ("bundle.pem", authority.certificate)):
            (directory / name).write_bytes(content)
            (directory / name).chmod(0o600)
        return {"AXON_PS_TOKEN": "", "AXON_PS_TLS_DIR": str(directory), **OVER_GRPC}

    return issue


def test_a_worker_whose_certificate_is_revoked_is_ended_and_the_job_goes_on(
    tmp_path: Path, issued: Issue, record_property: Record
) -> None:
    async def revoke(cluster: LocalCluster, target: str) -> Any:
        async with OperatorClient(cluster.address, security=cluster.security, job=cluster.job) as operator:
            return await operator.revoke(target, "the laptop was stolen")

    with LocalCluster(shards=2, world_size=2, min_workers=1, security=Security(tls=True)) as cluster:
        env = issued(cluster.token, 1)
        ours = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[0], env=OVER_GRPC)
        theirs = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[1], env=env)
        until(lambda: len(steps_of(tmp_path, 0)) > 5 and len(steps_of(tmp_path, 1)) > 5)
        began_s = time.monotonic()
        reply = asyncio.run(revoke(cluster, "worker/1"))
        assert len(reply.names) == 2  # the id of its process, and the serial number of its certificate
        assert [name.partition(" (")[0] for name in reply.members] == ["worker 1"]
        assert not reply.has_secret
        members = until(lambda: [m.rank for m in cluster.status().membership.workers] == [0] and time.monotonic())
        with pytest.raises(WorkerFailed, match="revoked: the laptop was stolen"):
            results_of(theirs, timeout_s=SOON_S, check=True)
        after = until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 1])
        assert members - began_s <= EJECTED_S
        alone = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[1], env=env)  # it comes back
        with pytest.raises(WorkerFailed, match="revoked: the laptop was stolen"):
            results_of(alone, timeout_s=SOON_S, check=True)
        (tmp_path / "stop").write_text(str(steps_of(tmp_path, 0)[-1][1] + 20))
        results_of(ours, timeout_s=SOON_S, check=True)
    gone_s, commits_s = f"{members - began_s:.2f}", f"{after[0][0] - began_s:.2f}"
    add(record_property, "A worker whose certificate is revoked", gone_after_s=gone_s, next_commit_after_s=commits_s)


def test_a_worker_whose_certificate_is_not_renewed_is_ended_soon_after_its_end_and_the_job_goes_on(
    tmp_path: Path, issued: Issue, record_property: Record
) -> None:
    with LocalCluster(shards=2, world_size=2, min_workers=1, security=Security(tls=True)) as cluster:
        ours = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[0], env=OVER_GRPC)
        env = issued(cluster.token, 1, SHORT_S)
        ends_s = time.time() + SHORT_S
        theirs = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[1], env=env)
        until(lambda: len(steps_of(tmp_path, 0)) > 5 and len(steps_of(tmp_path, 1)) > 5)
        with pytest.raises(WorkerFailed, match="the certificate expired at"):
            results_of(theirs, timeout_s=SOON_S, check=True)
        until(lambda: [m.rank for m in cluster.status().membership.workers] == [0])
        gone_s = time.time() - ends_s
        assert gone_s > GRACE_S - 1
        until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 1])
        (tmp_path / "stop").write_text(str(steps_of(tmp_path, 0)[-1][1] + 20))
        results_of(ours, timeout_s=SOON_S, check=True)
    add(record_property, "A worker whose certificate is not renewed", gone_s_after_its_end=f"{gone_s:.1f}")


async def host_session(security: Security, address: str) -> None:
    channel = connect(address, security, to=Principal.COORDINATOR)
    try:
        await MultiplexedClient(Stub(channel, SERVICE, security).open("HostSession"), address).run()
    finally:
        await channel.close()


def test_a_certificate_is_good_for_its_rank_and_role_only(tmp_path: Path, issued: Issue) -> None:
    async def drain(security: Security, cluster: LocalCluster) -> None:
        async with OperatorClient(cluster.address, security=security, job=cluster.job) as operator:
            await operator.drain(0)

    with LocalCluster(shards=1, world_size=1, security=Security(tls=True)) as cluster:
        other = cluster.start_workers(train, args=(tmp_path, PAUSE_S), ranks=[0], env=issued(cluster.token, 1))
        with pytest.raises(WorkerFailed, match=r"worker of rank 1 of job 'test' may not join as worker 0"):
            results_of(other, timeout_s=SOON_S, check=True)
        directory = tmp_path / "identity-1"
        worker = Security(
            ca_file=str(directory / "bundle.pem"),
            cert_file=str(directory / "svid.pem"),
            key_file=str(directory / "svid.key"),
            spiffe=True,
        )
        with pytest.raises(PermissionDenied, match=r"role of these credentials is worker, .* Coordinator\.Drain needs"):
            asyncio.run(drain(worker, cluster))
        with pytest.raises(PermissionDenied, match="a host's session needs the job's secret"):
            asyncio.run(host_session(worker, cluster.address))
        with pytest.raises(ConfigurationError, match="the certificate of --tls-dir is one member's"):
            asyncio.run(serve(cluster.address, "test", "127.0.0.1", 0, worker, print, asyncio.Event()))
