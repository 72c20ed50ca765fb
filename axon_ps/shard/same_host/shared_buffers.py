"""Buffers of a worker that shard servers of its host map, so that gradients are added from where they lie.

Owns: which memory of this process is such a buffer, and where servers find it (`shared_buffer`, `find`, `detach`); and
what a server has mapped (`MappedBuffers`). Refuses: to know what is in them.

Note: [When a gradient may be overwritten]
    A server adds a gradient while its stream is open, and looks at it only when its replica's turn has come. Once it
    has replied it has added everything and never looks again: the buffer is free. When a stream ends in another way it
    may look later still, and a sum with half of something else in it must not commit. So the worker then *detaches*
    the buffer: its own pages become private copies as it writes to them (copy on write), and what the server has mapped
    stays as it was sent.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from axon_ps.errors import Busy, InvalidRequest, Unreachable
from axon_ps.host import fork
from axon_ps.host.leases import address_of
from axon_ps.host.shared_memory import Segment
from axon_ps.shard.same_host.mappings import mapping_from_proto, mapping_to_proto
from axon_ps.types import Array
from axon_ps.wire.v1 import memory_pb2

MAX_MAPPED = 32
"""How many buffers of one worker stay mapped; it has a few, and makes others when units differ in size."""


_shared: dict[int, tuple[Segment, memory_pb2.Mapping]] = {}  # by the address where each begins


def shared_buffer(size_bytes: int) -> Array:
    """u8[size_bytes] that servers of this host can map; ordinary memory where there is no shared memory."""
    try:
        segment = Segment.create(max(1, size_bytes))
    except Busy:
        return np.empty(size_bytes, np.uint8)
    buffer = segment.bytes()
    base = address_of(buffer)
    _shared[base] = segment, mapping_to_proto(segment.address)
    fork.finalize(buffer, _forget, base, segment)
    return buffer[:size_bytes]


def _forget(base: int, segment: Segment) -> None:
    _shared.pop(base, None)
    segment.close()


def find(address: int, size_bytes: int) -> tuple[memory_pb2.Mapping, int] | None:
    """Where servers find these bytes of ours: a segment, and the offset in it. None: they are in no shared buffer."""
    base = _base_of(address, size_bytes)
    return None if base is None else (_shared[base][1], address - base)


def detach(address: int) -> None:
    """If `address` lies in a shared buffer: stop sharing it. What servers have mapped of it changes no more.

    Here the buffer stays as it is, and may be written to. See Note: [When a gradient may be overwritten].
    """
    base = _base_of(address, 1)
    if base is not None:
        _shared.pop(base)[0].make_private()


def _base_of(address: int, size_bytes: int) -> int | None:
    """Where the buffer begins that has all of these bytes."""
    for base, (segment, _) in list(_shared.items()):
        if base <= address and address + size_bytes <= base + segment.size_bytes:
            return base
    return None


class MappedBuffers:
    """The buffers of workers that a server has mapped, by the worker's id as a member."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[tuple[int, int], Array]] = {}

    def retain(self, workers: set[str]) -> None:
        """Drop the buffers of all other workers."""
        self._known = {k: v for k, v in self._known.items() if k in workers}

    def view(self, worker: str, pid: int, mapping: memory_pb2.Mapping, offset: int, size_bytes: int) -> Array | None:
        """u8[size_bytes]: bytes of a worker's buffer where they lie; None where they cannot be mapped.

        Raises:
            InvalidRequest: they are not inside the buffer, or it is another process's.
        """
        if mapping.pid != pid or offset + size_bytes > mapping.size_bytes:
            raise InvalidRequest(
                f"bytes {offset} to {offset + size_bytes} of a buffer of {mapping.size_bytes} in process {mapping.pid} "
                f"were leased by process {pid}"
            )
        buffers = self._known.setdefault(worker, OrderedDict())
        key = (mapping.fd, mapping.inode)
        memory = buffers.get(key)
        if memory is None:
            try:
                memory = Segment.open(mapping_from_proto(mapping)).bytes()
            except Unreachable:
                return None
            buffers[key] = memory
            if len(buffers) > MAX_MAPPED:
                buffers.popitem(last=False)
        buffers.move_to_end(key)
        return memory[offset : offset + size_bytes]
