"""What a server retains of the workers whose memory it reads."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import Broken
from axon_ps.host.leases import ReadLease, ReadLeases, address_of
from axon_ps.host.process_memory import Handshake, grant, own_handshake
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.shard.same_host.access import SameHostCallers
from axon_ps.types import Member, Membership, Role

WORKER = Member(role=Role.WORKER, rank=0, incarnation="a" * 32, node="here")


def membership(*workers: Member) -> Membership:
    return Membership(
        generation=1, step=0, version=0, workers=workers, shards=(), num_replicas=len(workers), complete=True
    )


def test_a_worker_is_read_and_mapped_until_it_is_no_member_any_more() -> None:
    server, gradient = SameHostCallers(), shared_arrays.buffer(4096)
    gradient[:] = 3
    reply = server.handshake(WORKER.id, own_handshake().pack())
    assert reply.readable
    Handshake.unpack(reply.handshake).verify()
    reader, lease = server.reader(WORKER.id), ReadLease.unpack(grant(ReadLeases(), address_of(gradient), 4096))
    view = reader.view(lease)
    assert view is not None
    assert np.all(view == 3)
    server.set_members(membership(WORKER))
    assert server.reader(WORKER.id) is reader
    server.set_members(membership())
    assert not server._known
    with pytest.raises(Broken, match="send the payload"):
        server.reader(WORKER.id)


@pytest.mark.parametrize("handshake", [b"", bytes(32), b"x" * 33])
def test_who_cannot_be_read_sends_payloads(handshake: bytes) -> None:
    server = SameHostCallers()
    assert not server.handshake(WORKER.id, handshake).readable
    with pytest.raises(Broken, match="send the payload"):
        server.reader(WORKER.id)
