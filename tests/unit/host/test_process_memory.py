"""Reading another process's memory: only the right process's, and only while the lease holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import axon_ps
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host import process_memory
from axon_ps.host.leases import ReadLease, ReadLeases, address_of
from axon_ps.host.process_memory import Handshake, LeaseReader, own_handshake

OWNER = """
import numpy as np
from axon_ps.host.leases import ReadLeases, address_of
from axon_ps.host.process_memory import own_handshake
data, leases = np.arange(1000, dtype=np.uint8), ReadLeases()
who, lease = own_handshake(), leases.grant(address_of(data), data.nbytes)
print(who.pid, who.address, who.secret.hex(), end=' ')
print(lease.address, lease.size_bytes, lease.number_address, lease.number, flush=True)
input()
leases.revoke()
data[:] = 0
print("revoked", flush=True)
input()
"""


def test_leased_memory_is_read_until_the_lease_is_revoked() -> None:
    root = Path(axon_ps.__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        pid, address, secret, *numbers = owner.stdout.readline().split()
        who = Handshake(pid=int(pid), address=int(address), secret=bytes.fromhex(secret))
        start, size, number_address, number = map(int, numbers)
        lease = ReadLease(address=start, size_bytes=size, number_address=number_address, number=number)
        reader = LeaseReader(who)
        out = np.empty(1000, np.uint8)
        reader.read([lease], out)
        assert out.tobytes() == np.arange(1000, dtype=np.uint8).tobytes()
        for other in (out[:999], np.empty(2000, np.uint8)[::2]):
            with pytest.raises(InvalidRequest, match="1000 bytes are leased; the array"):
                reader.read([lease], other)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "revoked\n"
        with pytest.raises(Broken, match="revoked the lease"):
            reader.read([lease], out)
        owner.stdin.write("\n")
        owner.stdin.flush()
        owner.wait(30)
        with pytest.raises(Broken, match="cannot be read"):
            reader.read([lease], out)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": bytes(16)}, "not the one"),
        ({"secret": b""}, "not the one"),
        ({"address": 8}, "cannot be read"),
        ({"pid": 2**22 + 1}, "cannot be read"),
    ],
)
def test_a_process_that_did_not_send_the_handshake_is_not_trusted(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Broken, match=message):
        LeaseReader(replace(own_handshake(), **changed))


def test_revoking_ends_every_lease() -> None:
    data, leases, reader = np.ones(8, np.uint8), ReadLeases(), LeaseReader(own_handshake())
    out = np.zeros((2, 4), np.uint8)
    granted = [leases.grant(address_of(data), 4), leases.grant(address_of(data) + 4, 4)]
    for lease, row in zip(granted, out, strict=True):
        reader.read([lease], row)
    assert (out == 1).all()
    leases.revoke()
    for lease in granted:
        with pytest.raises(Broken):
            reader.read([lease], out[0])
    out[:] = 0
    reader.read([leases.grant(address_of(data), 8)], out)
    assert (out == 1).all()


def test_many_ranges_are_read_together_in_their_order() -> None:
    data, leases, reader = np.arange(9000, dtype=np.uint8), ReadLeases(), LeaseReader(own_handshake())
    order = np.random.default_rng(0).permutation(3000)  # more than one system call takes
    granted = [leases.grant(address_of(data) + 3 * int(i), 3) for i in order]
    out = np.zeros(9000, np.uint8)
    reader.read(granted, out)
    assert out.tobytes() == data.reshape(3000, 3)[order].tobytes()
    with pytest.raises(InvalidRequest, match="granted together"):
        reader.read([granted[0], ReadLeases().grant(address_of(data), 3)], out[:6])
    gone = [replace(granted[0], address=8), granted[1]]
    with pytest.raises(Broken, match="cannot be read"):
        reader.read(gone, out[:6])


def test_ranges_are_read_one_by_one_where_the_kernel_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    readv = process_memory._readv

    def stops_early(pid: int, local: int, locals_: int, remote: int, remotes: int, flags: int) -> int:
        return int(readv(pid, local, locals_, remote, 1, flags))

    monkeypatch.setattr(process_memory, "_readv", stops_early)
    data, leases = np.arange(100, dtype=np.uint8), ReadLeases()
    out = np.zeros(100, np.uint8)
    LeaseReader(own_handshake()).read([leases.grant(address_of(data) + 10 * i, 10) for i in range(10)], out)
    assert out.tobytes() == data.tobytes()
