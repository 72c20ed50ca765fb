"""Leases on shared memory in messages: granting them, and using received ones. See `host.leases`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Broken, Busy, InvalidRequest
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.leases import TAG_BYTES, address_of, tag_of
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.host.shared_memory import PAGE_BYTES
from axon_ps.types import Array, DType
from axon_ps.wire.v1 import lease_pb2


def grant(peer: HostPeer, array: Array) -> lease_pb2.Lease | None:
    """Grant a lease on an array that does not change before the call is over; None = it must be sent."""
    address = address_of(array)
    shared = shared_arrays.find(address, array.nbytes)
    if shared is None or not peer.offer(shared.segment):
        return None
    return lease_pb2.Lease(segment=shared.segment.number, offset=address - shared.base, size_bytes=array.nbytes)


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased bytes in the other process's memory.

    Attributes:
        values: u8[size_bytes].
    """

    values: Array
    _tag: Array | None
    _expected: int

    @property
    def is_valid(self) -> bool:
        """True if the lease was not revoked. To be read after copying the values."""
        return self._tag is None or int(self._tag[0]) == self._expected

    def check(self) -> None:
        """Check that the lease still holds, after copying the values.

        Raises:
            Broken: it was revoked meanwhile.
        """
        if not self.is_valid:
            raise Broken("the lease was revoked before everything was read")


def view(peer: HostPeer, lease: lease_pb2.Lease) -> Leased:
    """Return the leased memory.

    Raises:
        InvalidRequest: the lease exceeds the segment, or the passed segment is refused.
        Broken: the peer has not passed the segment, has closed it, or has left.
    """
    try:
        peer.take()  # so segments that it has closed are not retained
        values = peer.view(lease.segment, lease.offset, lease.size_bytes)
        tag = tag_of(peer.view(lease.segment, 0, TAG_BYTES)) if lease.tag else None
    except Busy as error:
        raise Broken(str(error)) from error
    return Leased(values, tag, lease.tag)


def read(peer: HostPeer, lease: lease_pb2.Lease, out: Array) -> bool:
    """Copy leased bytes; returns False if the lease was revoked meanwhile. Raises as `view` does.

    Raises:
        InvalidRequest: `out` has another size.

    After an error, or if it returns False: the content of `out` is arbitrary.
    """
    if out.nbytes != lease.size_bytes:
        raise InvalidRequest(f"{lease.size_bytes} bytes are leased; the array for them has {out.nbytes}")
    leased = view(peer, lease)
    out.view(np.uint8)[:] = leased.values
    return leased.is_valid


# ---------------------------------------------------------------------- sums that are forwarded


def allocate_sum(numel: int) -> Array:
    """Return zeros, f32[numel], in shared memory behind a page with a tag.

    Raises:
        Busy: there is not enough memory.
    """
    memory = shared_arrays.empty((PAGE_BYTES + 4 * numel,), DType.U8)
    tag_of(memory)[0] = 1
    return memory[PAGE_BYTES:].view(np.float32)


class SumLeases:
    """The leases on sums from `allocate_sum`, which are revoked all at once."""

    def __init__(self) -> None:
        self._granted: dict[
            int, tuple[Array, ctypes.c_uint64]
        ] = {}  # by segment: the sum, which lives as long; its tag

    def grant(self, peer: HostPeer, array: Array, total: Array) -> lease_pb2.Lease | None:
        """Grant a lease on elements that do not change before `revoke`; None = they must be sent.

        Args:
            peer: the reader.
            array: f32[c], part of `total`.
            total: f32[n], from `allocate_sum`, or in ordinary memory.
        """
        lease = grant(peer, array)
        if lease is None:
            return None
        if lease.segment not in self._granted:
            self._granted[lease.segment] = total, ctypes.c_uint64.from_address(address_of(total) - PAGE_BYTES)
        lease.tag = self._granted[lease.segment][1].value
        return lease

    def revoke(self) -> None:
        """End every lease. Call it before any of the memory changes."""
        for _, tag in self._granted.values():
            tag.value += 1
        self._granted.clear()
