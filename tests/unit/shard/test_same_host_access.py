"""What a server and the workers of its host share, by which proof, and until when."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.peer_socket import PeerSocket
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.shard.same_host import access, leases
from axon_ps.shard.same_host.access import MAX_STRANGERS, SameHostCallers
from axon_ps.shard.same_host.leases import SumLeases, allocate_sum
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.v1 import lease_pb2, shard_pb2

WORKER = Member(role=Role.WORKER, rank=0, incarnation="a" * 32, node="here")
OTHER = Member(role=Role.WORKER, rank=1, incarnation="b" * 32, node="here")


def membership(*workers: Member) -> Membership:
    return Membership(
        generation=1, step=0, version=0, workers=workers, shards=(), num_replicas=len(workers), complete=True
    )


@pytest.fixture
def server() -> Iterator[SameHostCallers]:
    made = SameHostCallers()
    yield made
    made.close()


@contextlib.contextmanager
def connected(server: SameHostCallers, member: Member = WORKER) -> Iterator[HostPeer]:
    """A worker that has shaken hands."""
    peer = access._connect(server.handshake(member.id))
    yield peer
    peer.close()


def bare(reply: shard_pb2.HandshakeReply) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(f"\0{reply.socket}")
    return made


def test_a_worker_shares_memory_until_it_is_no_member_any_more(server: SameHostCallers) -> None:
    gradient = shared_arrays.buffer(4096)
    gradient[:] = 3
    with connected(server) as worker:
        peer = server.peer(WORKER.id)
        assert peer.pid == worker.pid == os.getpid()
        lease = leases.grant(worker, gradient[16:])
        assert lease is not None
        assert np.all(leases.view(peer, lease).values == 3)
        server.set_members(membership(WORKER))
        assert server.peer(WORKER.id) is peer
        server.set_members(membership(OTHER))
        assert not server._known
        with pytest.raises(Broken, match="send the payload"):
            server.peer(WORKER.id)
        with pytest.raises(Broken, match="hung up"):
            worker.take()


def test_another_handshake_ends_the_connection_before(server: SameHostCallers) -> None:
    with connected(server) as first:
        before = server.peer(WORKER.id)
        with connected(server) as second:
            assert server.peer(WORKER.id) is not before
            with pytest.raises(Broken):
                first.take()
            second.take()


def test_a_new_life_of_a_worker_is_another_member(server: SameHostCallers) -> None:
    with connected(server):
        assert server.find(WORKER.id) is not None
        again = Member(role=Role.WORKER, rank=0, incarnation="c" * 32, node="here")
        server.set_members(membership(again))
        assert server.find(WORKER.id) is None
        assert server.find(again.id) is None


@pytest.mark.parametrize("nonce", [b"", b"x", bytes(16), b"x" * 3000])
def test_a_connection_without_the_nonce_is_nobodys(server: SameHostCallers, nonce: bytes) -> None:
    with bare(server.handshake(WORKER.id)) as stranger:
        if nonce:
            stranger.send(nonce)
        assert server.find(WORKER.id) is None
        if nonce:
            assert stranger.recv(100) == b""  # hung up on
        with connected(server):
            assert server.find(WORKER.id) is not None


def test_a_nonce_is_good_for_one_connection_and_for_its_member(server: SameHostCallers) -> None:
    reply = server.handshake(WORKER.id)
    for round_ in range(2):
        with bare(reply) as one:
            one.send(reply.nonce)
            assert (server.find(WORKER.id) is not None) == (round_ == 0)
            assert server.find(OTHER.id) is None
            server.set_members(membership(OTHER))
            server.set_members(membership(WORKER))


def test_an_older_nonce_is_worth_nothing(server: SameHostCallers) -> None:
    first = server.handshake(WORKER.id)
    server.handshake(WORKER.id)
    with bare(first) as one:
        one.send(first.nonce)
        assert server.find(WORKER.id) is None
    assert len(server._nonces) == 1


def test_a_crowd_of_strangers_is_hung_up_on(server: SameHostCallers) -> None:
    reply = server.handshake(WORKER.id)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(bare(reply)) for _ in range(3 * MAX_STRANGERS)]
        assert server.find(WORKER.id) is None
        assert len(server._strangers) == MAX_STRANGERS
        assert crowd[0].recv(100) == b""
        with connected(server):
            assert server.find(WORKER.id) is not None


def test_where_there_are_no_such_sockets_payloads_are_sent(
    server: SameHostCallers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    assert server.handshake(WORKER.id) == shard_pb2.HandshakeReply()
    assert server.find(WORKER.id) is None


def test_what_was_not_lent_is_refused(server: SameHostCallers) -> None:
    gradient = shared_arrays.buffer(4096)
    with connected(server) as worker, connected(server, OTHER) as other:
        lease = leases.grant(worker, gradient)
        assert lease is not None
        peer, others = server.peer(WORKER.id), server.peer(OTHER.id)
        with pytest.raises(Broken, match="has passed no segment"):
            leases.view(others, lease)  # another worker's segment
        for changes in ({"offset": 8}, {"size_bytes": 1 << 62}, {"offset": (1 << 64) - 8}):
            wrong = lease_pb2.Lease(segment=lease.segment, offset=0, size_bytes=lease.size_bytes)
            for name, value in changes.items():
                setattr(wrong, name, value)
            with pytest.raises(InvalidRequest, match="of segment"):
                leases.view(peer, wrong)
        with pytest.raises(InvalidRequest, match="4096 bytes are leased; the array for them has 8"):
            leases.read(peer, lease, np.zeros(8, np.uint8))
        assert leases.grant(other, np.zeros(4096, np.uint8)) is None  # ordinary memory is sent


def test_the_lease_on_a_sum_holds_until_it_is_revoked(server: SameHostCallers) -> None:
    total, granted = allocate_sum(3000), SumLeases()
    total[:] = 5.0
    out = np.zeros(1000, np.float32)
    with connected(server) as primary:
        backup = server.peer(WORKER.id)
        lease = granted.grant(primary, total[1000:2000], total)
        assert lease is not None
        assert lease.tag
        assert leases.read(backup, lease, out)
        assert np.all(out == 5.0)
        granted.revoke()
        assert not leases.read(backup, lease, out)
        again = granted.grant(primary, total[:1000], total)
        assert again is not None
        assert leases.read(backup, again, out)
        assert granted.grant(primary, np.zeros(1000, np.float32), np.zeros(3000, np.float32)) is None


def test_nothing_remains_of_a_server_that_ends() -> None:
    server = SameHostCallers()
    before = set(os.listdir("/proc/self/fd"))
    with connected(server) as worker:
        assert server.find(WORKER.id) is not None
        strangers = [PeerSocket.connect(server.handshake(OTHER.id).socket)]
        assert server.find(OTHER.id) is None
        server.close()
        for each in strangers:
            with pytest.raises(Broken):
                each.receive()
        with pytest.raises(Broken):
            worker.take()
        for each in strangers:
            each.close()
    assert set(os.listdir("/proc/self/fd")) == before
