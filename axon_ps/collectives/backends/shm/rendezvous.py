"""The rendezvous of a group's ranks on one host: they map the control segment, and try to read each other's memory.

The first rank makes the control segment and stores its address under `shm/NAME/offer`; the others map it and store
under `shm/NAME/joined/RANK` that they did, or why not. Only the first rank reads those, and it deletes all of the keys,
so nothing remains in the store. Then the ranks exchange handshakes (`host.process_memory`) through the segment. If all
can read each other's memory, arrays are read where they are.
"""

from __future__ import annotations

import json
import os
import time

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.collectives.backends.shm.control import (
    FAILURE,
    HANDSHAKE,
    NONCE,
    READABLE,
    STATE,
    Control,
    ControlLayout,
)
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout, Unreachable
from axon_ps.host import futex
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.process_memory import HANDSHAKE_BYTES, SECRET_BYTES, Handshake, own_handshake
from axon_ps.host.shared_memory import Segment, SegmentAddress

_JOINED, _FAILED = 1, 2
_POLL_S = 0.1


def offer_key(name: str) -> str:
    """The key under which the first rank of a group stores the address of its segment."""
    return f"shm/{name}/offer"


def joined_key(name: str, rank: int) -> str:
    """The key under which a rank reports that it mapped the segment, or why it could not."""
    return f"shm/{name}/joined/{rank}"


def rendezvous(context: GroupContext, *, direct: bool, directory: str) -> tuple[Control, bool]:
    """Make or map the control segment. Every rank gets it, or every rank gets an error.

    Args:
        context: the group.
        direct: whether this rank lets peers read its memory where it is.
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
    layout = ControlLayout(len(context.ranks))
    control = _create(context, layout, deadline, directory) if context.rank == 0 else _join(context, layout, deadline)
    try:
        return control, _handshake(control, direct, deadline)
    except BaseException:
        control.close()
        raise


def _create(context: GroupContext, layout: ControlLayout, deadline: float, directory: str) -> Control:
    control = None
    failure: AxonError | None = None
    try:
        _check_machine()
        segment = Segment.create(layout.size_bytes, directory=directory)
        control = Control(segment, layout, 0, context.ranks, context.name, context.ended)
        secret = own_handshake().secret
        control.memory[NONCE : NONCE + SECRET_BYTES] = secret
        offer = {"address": segment.address.pack().hex(), "nonce": secret.hex()}
    except AxonError as error:
        failure, offer = error, {"error": str(error)}
    if layout.world_size > 1:
        pids, wrong = _collect_reports(context, json.dumps(offer).encode(), deadline)
        failure = failure or wrong
        if control is not None:  # so that the death of a rank is noticed from now on
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


def _collect_reports(context: GroupContext, offer: bytes, deadline: float) -> tuple[list[int], AxonError | None]:
    """Publish the offer, and wait for all ranks' reports: their process ids, and the first error."""
    store, others = context.store, range(1, len(context.ranks))
    store.put(offer_key(context.name), offer)
    pids: list[int] = []
    failure: AxonError | None = None
    for rank in others:
        try:
            report = json.loads(store.wait(joined_key(context.name, rank), max(0.0, deadline - time.monotonic())))
        except Timeout:
            report = {"pid": 0, "error": ""}
            failure = failure or Timeout(
                f"rank {context.ranks[rank]} did not come to make group {context.name!r} in {context.timeout_s} s"
            )
        pids.append(int(report["pid"]))
        if report["error"]:
            failure = failure or Unreachable(
                f"rank {context.ranks[rank]} shares no memory with rank {context.ranks[0]}: {report['error']}"
            )
    for key in (offer_key(context.name), *(joined_key(context.name, rank) for rank in others)):
        store.delete(key)
    return pids, failure


def _report_joined(context: GroupContext, error: str) -> None:
    """Report to the first rank that we mapped its segment, or why we did not."""
    report = {"pid": os.getpid(), "error": error}
    context.store.put(joined_key(context.name, context.rank), json.dumps(report).encode())


def _join(context: GroupContext, layout: ControlLayout, deadline: float) -> Control:
    store, first = context.store, context.ranks[0]
    try:
        offer = json.loads(store.wait(offer_key(context.name), max(0.0, deadline - time.monotonic())))
    except Timeout as error:
        raise Timeout(f"rank {first} did not come to make group {context.name!r} in {context.timeout_s} s") from error
    if "error" in offer:
        _report_joined(context, "")
        raise Unreachable(f"rank {first} could make no shared memory for group {context.name!r}: {offer['error']}")
    try:
        _check_machine()
        address = SegmentAddress.unpack(bytes.fromhex(offer["address"]))
        owner = PeerProcess(address.pid)
        segment = Segment.open(address)
        control = Control(segment, layout, context.rank, context.ranks, context.name, context.ended)
        if control.memory[NONCE : NONCE + SECRET_BYTES] != bytes.fromhex(offer["nonce"]):
            raise Unreachable(f"segment {address.inode} of process {address.pid} is not the one that was offered")
    except AxonError as error:
        _report_joined(context, str(error))
        raise Unreachable(f"rank {context.ranks[context.rank]} shares no memory with rank {first}: {error}") from error
    control.peers[0] = owner
    _report_joined(context, "")
    try:
        _await_state(control, owner, first, deadline)
        if control.u32[STATE // 4] == _FAILED:
            raise Unreachable(f"group {context.name!r} shares no memory: {control.text(FAILURE)}")
    except AxonError:
        control.close()
        raise
    return control


def _await_state(control: Control, owner: PeerProcess, first: int, deadline: float) -> None:
    """Wait until the first rank has written whether all ranks share its segment."""
    while not control.u32[STATE // 4]:
        control.check()
        if not owner.alive() and not control.u32[STATE // 4]:
            raise MemberLost(f"rank {first} died while group {control.name!r} was made")
        left = deadline - time.monotonic()
        if left <= 0:
            raise Timeout(f"group {control.name!r} was not made in time; rank {first} still waits for others")
        futex.wait(control.base + STATE, 0, min(left, _POLL_S))
    futex.settle()


def _handshake(control: Control, direct: bool, deadline: float) -> bool:
    """Exchange handshakes; returns whether all ranks can read each other's memory."""
    records = [control.layout.record(rank) for rank in range(control.layout.world_size)]
    mine = records[control.rank]
    control.memory[mine + HANDSHAKE : mine + HANDSHAKE + HANDSHAKE_BYTES] = own_handshake().pack()
    control.barrier(deadline)
    for rank, record in enumerate(records):
        theirs = Handshake.unpack(bytes(control.memory[record + HANDSHAKE : record + HANDSHAKE + HANDSHAKE_BYTES]))
        control.pids[rank] = theirs.pid
        if rank != control.rank and control.peers[rank] is None:
            control.peers[rank] = PeerProcess(theirs.pid)
        try:
            theirs.verify()
        except Broken:
            direct = False
    control.u32[(mine + READABLE) // 4] = direct
    control.barrier(deadline)
    return all(control.u32[(record + READABLE) // 4] for record in records)


def _check_machine() -> None:
    if not futex.AVAILABLE:
        raise Unreachable("shared memory between processes needs Linux on a little-endian 64-bit machine")
