"""How the ranks of a group on one host find each other's memory, when the group is made.

The first rank makes the control segment and stores its address under `shm/NAME/offer`; the others map it and store
under `shm/NAME/joined/RANK` that they did, or why not. Only the first rank reads those and deletes all of the keys,
so nothing remains in the store. From then on they talk through the segment: each says which process it is and where
some random bytes of its memory lie; each tries to read everybody's, and if all can, arrays are read where they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.collectives.backends.shm.control import FAILURE, NONCE, PID, PROBE_NONCE, STATE, VERDICT, Control, Layout
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout, Unreachable
from axon_ps.host import futex
from axon_ps.host.peer_process import MemoryReader, PeerProcess
from axon_ps.host.shared_memory import Segment, SegmentAddress, nonce

_JOINED, _FAILED = 1, 2
_PROBE_BYTES = 16
_POLL_S = 0.1


def offer_key(name: str) -> str:
    """The key under which the first rank of a group says where its segment is."""
    return f"shm/{name}/offer"


def joined_key(name: str, rank: int) -> str:
    """The key under which a rank says that it mapped the segment, or why it could not."""
    return f"shm/{name}/joined/{rank}"


def meet(context: GroupContext, *, direct: bool, directory: str) -> tuple[Control, bool]:
    """Make or find the control segment. Every rank gets it, or every rank gets an error.

    Args:
        context: the group.
        direct: whether this rank lets others read its memory where it is.
        directory: a tmpfs to take the segment from; "" = the kernel's own memory.

    Returns:
        The control segment, and whether every rank can read every other's memory.

    Raises:
        Unreachable: a rank is on another host, or in another container, or this machine is not Linux.
        Busy: there is not enough memory.
        Timeout: a rank did not come in `context.timeout_s`.
        MemberLost: a rank died meanwhile.
    """
    deadline = time.monotonic() + context.timeout_s
    layout = Layout(len(context.ranks))
    control = _first(context, layout, deadline, directory) if context.rank == 0 else _other(context, layout, deadline)
    try:
        return control, _introduce(control, direct, deadline)
    except BaseException:
        control.close()
        raise


def _first(context: GroupContext, layout: Layout, deadline: float, directory: str) -> Control:
    control = None
    failure: AxonError | None = None
    try:
        _check_machine()
        segment = Segment.create(layout.size_bytes, directory=directory)
        control = Control(segment, layout, 0, context.ranks, context.name, context.ended)
        secret = nonce()
        control.memory[NONCE : NONCE + len(secret)] = secret
        offer = {"address": segment.address.to_json(), "nonce": secret.hex()}
    except AxonError as error:
        failure, offer = error, {"error": str(error)}
    if layout.world_size > 1:
        pids, wrong = _gather(context, json.dumps(offer).encode(), deadline)
        failure = failure or wrong
        if control is not None:  # so that a death is noticed from now on
            control.peers[1:] = [PeerProcess(pid) if pid else None for pid in pids]
    if control is not None:
        if failure:
            control.put_text(FAILURE, str(failure))
        futex.settle()
        control.u32[STATE // 4] = _FAILED if failure else _JOINED
        futex.wake(control.base + STATE)
    if failure or control is None:
        if control is not None:
            control.close()
        raise failure or Unreachable("there is no segment")
    return control


def _gather(context: GroupContext, offer: bytes, deadline: float) -> tuple[list[int], AxonError | None]:
    """Offer the segment (or say that there is none) and hear everybody out: their processes, and what is wrong."""
    store, others = context.store, range(1, len(context.ranks))
    store.put(offer_key(context.name), offer)
    pids: list[int] = []
    failure: AxonError | None = None
    for rank in others:
        try:
            said = json.loads(store.wait(joined_key(context.name, rank), max(0.0, deadline - time.monotonic())))
        except Timeout:
            said = {"pid": 0, "error": ""}
            failure = failure or Timeout(
                f"rank {context.ranks[rank]} did not come to make group {context.name!r} in {context.timeout_s} s"
            )
        pids.append(int(said["pid"]))
        if said["error"]:
            failure = failure or Unreachable(
                f"rank {context.ranks[rank]} shares no memory with rank {context.ranks[0]}: {said['error']}"
            )
    for key in (offer_key(context.name), *(joined_key(context.name, rank) for rank in others)):
        store.delete(key)
    return pids, failure


def _join(context: GroupContext, error: str) -> None:
    """Tell the first rank that we mapped its segment, or why we did not."""
    said = {"pid": os.getpid(), "error": error}
    context.store.put(joined_key(context.name, context.rank), json.dumps(said).encode())


def _other(context: GroupContext, layout: Layout, deadline: float) -> Control:
    store, first = context.store, context.ranks[0]
    try:
        offer = json.loads(store.wait(offer_key(context.name), max(0.0, deadline - time.monotonic())))
    except Timeout as error:
        raise Timeout(f"rank {first} did not come to make group {context.name!r} in {context.timeout_s} s") from error
    if "error" in offer:
        _join(context, "")
        raise Unreachable(f"rank {first} could make no shared memory for group {context.name!r}: {offer['error']}")
    try:
        _check_machine()
        address = SegmentAddress.from_json(offer["address"])
        owner = PeerProcess(address.pid)
        segment = Segment.open(address)
        control = Control(segment, layout, context.rank, context.ranks, context.name, context.ended)
        if control.memory[NONCE : NONCE + _PROBE_BYTES] != bytes.fromhex(offer["nonce"]):
            raise Unreachable(f"segment {address.inode} of process {address.pid} is not the one that was offered")
    except AxonError as error:
        _join(context, str(error))
        raise Unreachable(f"rank {context.ranks[context.rank]} shares no memory with rank {first}: {error}") from error
    control.peers[0] = owner
    _join(context, "")
    try:
        _await(lambda: control.u32[STATE // 4] != 0, control, STATE, owner, first, deadline)
        if control.u32[STATE // 4] == _FAILED:
            raise Unreachable(f"group {context.name!r} shares no memory: {control.text(FAILURE)}")
    except AxonError:
        control.close()
        raise
    return control


def _await(
    ready: Callable[[], bool], control: Control, bell: int, owner: PeerProcess, first: int, deadline: float
) -> None:
    while not ready():
        control.check()
        if not owner.alive() and not ready():
            raise MemberLost(f"rank {first} died while group {control.name!r} was made")
        left = deadline - time.monotonic()
        if left <= 0:
            raise Timeout(f"group {control.name!r} was not made in time; rank {first} still waits for others")
        futex.wait(control.base + bell, 0, min(left, _POLL_S))
    futex.settle()


def _introduce(control: Control, direct: bool, deadline: float) -> bool:
    """Everybody says which process it is and tries to read the others' memory."""
    n, layout = control.layout.world_size, control.layout
    probe = ctypes.create_string_buffer(nonce(), _PROBE_BYTES)
    cell = layout.cell(control.rank)
    control.put_words(cell + PID, "<QQ", os.getpid(), ctypes.addressof(probe))
    control.memory[cell + PROBE_NONCE : cell + PROBE_NONCE + _PROBE_BYTES] = probe.raw
    control.gate(deadline)
    reader, copied = MemoryReader(), ctypes.create_string_buffer(_PROBE_BYTES)
    for rank in range(n):
        pid, address = control.words(layout.cell(rank) + PID, "<QQ")
        if rank != control.rank and control.peers[rank] is None:
            control.peers[rank] = PeerProcess(pid)
        expected = bytes(control.memory[layout.cell(rank) + PROBE_NONCE :][:_PROBE_BYTES])
        try:
            reader.read(pid, address, ctypes.addressof(copied), _PROBE_BYTES)
            direct = direct and copied.raw == expected
        except Broken:
            direct = False
    control.u32[(cell + VERDICT) // 4] = direct
    control.gate(deadline)
    del probe  # nobody reads it any more
    return all(control.u32[(layout.cell(rank) + VERDICT) // 4] for rank in range(n))


def _check_machine() -> None:
    if not futex.AVAILABLE:
        raise Unreachable("shared memory between processes needs Linux on a little-endian 64-bit machine")
