"""Addresses of shared memory as messages."""

from __future__ import annotations

from axon_ps.host.shared_memory import SegmentAddress
from axon_ps.wire.v1 import memory_pb2


def mapping_to_proto(address: SegmentAddress) -> memory_pb2.Mapping:
    """Where a segment is, as a message."""
    return memory_pb2.Mapping(**address.to_json())


def mapping_from_proto(mapping: memory_pb2.Mapping) -> SegmentAddress:
    """The inverse of `mapping_to_proto`."""
    return SegmentAddress(
        boot=mapping.boot, pid=mapping.pid, fd=mapping.fd, inode=mapping.inode, size_bytes=mapping.size_bytes
    )
