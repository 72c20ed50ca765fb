"""The rendezvous of a group's ranks on one host: they map the control segment, and connect to each other.

The first rank offers a socket and a secret, the nonce, in the group's store, under `shm/NAME/offer`. The others
connect, present the nonce, and store under `shm/NAME/joined/RANK` that they did, or why not. Only the first rank reads
those keys, and it deletes all of them, so nothing remains in the store. Then it passes every rank the control segment,
and reports whether all have mapped it. The other ranks connect to each other in the same way, by sockets that they name
in the segment. So each rank has a connection to each other one, over which segments are passed (`host.host_peer`). The
kernel, not a message, identifies the other process and reports its death.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import struct
import time
from collections.abc import Iterable

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.collectives.backends.shm.control import SOCKET, Control, ControlLayout
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout, Unreachable
from axon_ps.host import futex, shared_memory
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.peer_socket import MESSAGE_BYTES, Listener, PeerSocket
from axon_ps.host.shared_memory import Access
from axon_ps.texts import value_of_json
from axon_ps.types import Array

NONCE_BYTES = 16

_HELLO = struct.Struct(f"<{NONCE_BYTES}sI")  # nonce, rank
_WELL, _FAILED = b"\0", b"\1"  # first byte of a message; the reason of a failure follows
_POLL_S = 0.1

Sockets = dict[int, PeerSocket]
"""Sockets by rank (position)."""


def offer_key(name: str) -> str:
    """Return the key under which the first rank of a group stores its offer."""
    return f"shm/{name}/offer"


def joined_key(name: str, rank: int) -> str:
    """Return the key under which a rank reports that it has connected, or why it could not."""
    return f"shm/{name}/joined/{rank}"


def rendezvous(context: GroupContext) -> tuple[Control, list[HostPeer | None]]:
    """Make or map the control segment, and connect. Every rank gets it, or every rank gets an error.

    Args:
        context: the group.

    Returns:
        The control segment, and the other ranks by position; None is this one.

    Raises:
        Unreachable: a rank is on another host, or in another container, or another user's, or this is not Linux; or
            it died just when this one was to connect to it.
        Busy: there is not enough memory.
        Timeout: a rank did not come in `context.timeout_s`.
        MemberLost: a rank died meanwhile.
        Broken: a rank is not connected to another one.
    """
    deadline = time.monotonic() + context.timeout_s
    begin = _create if context.rank == 0 else _join
    control, nonce, sockets = begin(context, ControlLayout(len(context.ranks)), deadline)
    try:
        sockets |= _connect_others(control, nonce, deadline)
        _watch(control, sockets)
    except BaseException:
        control.close()
        raise
    return control, [HostPeer(sockets[r], Access.WRITE) if r in sockets else None for r in range(len(context.ranks))]


def _watch(control: Control, sockets: Sockets) -> None:
    """Notice from now on when these ranks die."""
    for rank, connected in sockets.items():
        if control.peers[rank] is None:
            control.peers[rank] = PeerProcess(connected.pid)


# ---------------------------------------------------------------------- the first rank


def _create(context: GroupContext, layout: ControlLayout, deadline: float) -> tuple[Control, bytes, Sockets]:
    nonce = secrets.token_bytes(NONCE_BYTES)
    failure: AxonError | None = None
    sockets: Sockets = {}
    listener = segment = control = None
    try:
        _check_machine()
        segment, memory = shared_memory.create(layout.size_bytes)
        control = Control(memory, layout, 0, context.ranks, context.name, context.ended)
        listener = Listener()
        offer = {"socket": listener.name, "nonce": nonce.hex()}
    except AxonError as error:
        failure, offer = error, {"error": str(error)}
    if layout.world_size > 1:
        failure = failure or _collect_reports(context, offer, deadline)
        if listener is not None and control is not None and segment is not None:
            sockets = _accepted(listener, nonce, range(1, layout.world_size))
            _watch(control, sockets)
            failure = failure or _missing(context, sockets)
            failure = _pass_control(context, sockets, segment.fd, failure, deadline)
    for closing in (listener, segment):
        if closing is not None:
            closing.close()
    if failure or control is None:
        if control is not None:
            control.close()
        raise failure or Unreachable("there is no segment")
    return control, nonce, sockets


def _collect_reports(context: GroupContext, offer: dict[str, str], deadline: float) -> AxonError | None:
    """Publish the offer, and wait for all ranks' reports; return the first error."""
    store, others = context.store, range(1, len(context.ranks))
    store.put(offer_key(context.name), json.dumps(offer).encode())
    failure: AxonError | None = None
    for rank in others:
        try:
            answer = store.wait(joined_key(context.name, rank), max(0.0, deadline - time.monotonic()))
            report = value_of_json(answer, f"the report of rank {context.ranks[rank]}")
        except Timeout:
            report = {"error": ""}
            failure = failure or Timeout(
                f"rank {context.ranks[rank]} did not come to make group {context.name!r} in {context.timeout_s} s"
            )
        if report["error"]:
            failure = failure or Unreachable(
                f"rank {context.ranks[rank]} shares no memory with rank {context.ranks[0]}: {report['error']}"
            )
    for key in (offer_key(context.name), *(joined_key(context.name, rank) for rank in others)):
        store.delete(key)
    return failure


def _accepted(listener: Listener, nonce: bytes, expected: range) -> Sockets:
    """Return the ranks that have connected and presented the nonce; other connections are closed."""
    found: Sockets = {}
    while (connected := listener.next_peer()) is not None:
        with contextlib.suppress(AxonError, struct.error):
            message, _ = connected.receive(descriptor=False) or (b"", -1)
            presented, rank = _HELLO.unpack(message)
            if secrets.compare_digest(presented, nonce) and rank in expected and rank not in found:
                found[rank] = connected
                continue
        connected.close()
    return found


def _missing(context: GroupContext, sockets: Sockets) -> AxonError | None:
    """Return the error for a rank that reported its connection, and is not there."""
    for rank in range(1, len(context.ranks)):
        if rank not in sockets:
            return MemberLost(f"rank {context.ranks[rank]} is gone, while group {context.name!r} was made")
    return None


def _pass_control(
    context: GroupContext, sockets: Sockets, fd: int, failure: AxonError | None, deadline: float
) -> AxonError | None:
    """Pass every rank the control segment, and report whether all have mapped it; return the first error."""
    if failure is None:
        _send_all(sockets.values(), _WELL, fd)
        for rank, connected in sockets.items():
            try:
                _receive(context, connected, context.ranks[rank], deadline, descriptor=False)
            except AxonError as error:
                failure = failure or error
    _send_all(sockets.values(), _WELL if failure is None else _FAILED + str(failure).encode()[: MESSAGE_BYTES - 1])
    return failure


def _send_all(sockets: Iterable[PeerSocket], message: bytes, fd: int = -1) -> None:
    """Send the same to some ranks; a rank that has died meanwhile is found by waiting for it."""
    for connected in sockets:
        with contextlib.suppress(Broken):
            connected.send(message, fd)


# ---------------------------------------------------------------------- the other ranks


def _report_joined(context: GroupContext, error: str) -> None:
    """Report to the first rank that we have connected, or why we have not."""
    context.store.put(joined_key(context.name, context.rank), json.dumps({"error": error}).encode())


def _join(context: GroupContext, layout: ControlLayout, deadline: float) -> tuple[Control, bytes, Sockets]:
    store, first = context.store, context.ranks[0]
    try:
        published = store.wait(offer_key(context.name), max(0.0, deadline - time.monotonic()))
        offer = value_of_json(published, f"the offer of rank {first}")
    except Timeout as error:
        raise Timeout(f"rank {first} did not come to make group {context.name!r} in {context.timeout_s} s") from error
    if "error" in offer:
        _report_joined(context, "")
        raise Unreachable(f"rank {first} could make no shared memory for group {context.name!r}: {offer['error']}")
    nonce = bytes.fromhex(offer["nonce"])
    try:
        _check_machine()
        connected = PeerSocket.connect(offer["socket"])
        connected.send(_HELLO.pack(nonce, context.rank))
    except AxonError as error:
        _report_joined(context, str(error))
        raise Unreachable(f"rank {context.ranks[context.rank]} shares no memory with rank {first}: {error}") from error
    _report_joined(context, "")
    fd = _receive(context, connected, first, deadline)
    try:
        control = Control(_map(fd, layout), layout, context.rank, context.ranks, context.name, context.ended)
    except AxonError as error:
        connected.send(_FAILED + str(error).encode()[: MESSAGE_BYTES - 1])
        raise
    connected.send(_WELL)
    control.peers[0] = PeerProcess(connected.pid)
    try:
        _receive(context, connected, first, deadline, descriptor=False)
    except AxonError:
        control.close()
        raise
    return control, nonce, {0: connected}


def _map(fd: int, layout: ControlLayout) -> Array:
    if fd < 0:
        raise Unreachable("the first rank passed no segment")
    memory = shared_memory.receive(fd, Access.WRITE)
    if memory.nbytes < layout.size_bytes:
        raise Unreachable(
            f"the first rank passed a segment of {memory.nbytes} bytes; {layout.size_bytes} were expected"
        )
    return memory


def _receive(
    context: GroupContext, connected: PeerSocket, rank: int, deadline: float, *, descriptor: bool = True
) -> int:
    """Wait for a rank's next message; return its descriptor, if it may bring one and does.

    Raises:
        Unreachable: the message has the reason why there will be no group.
        MemberLost: it died, or hung up.
        Timeout: no message came in time.
    """
    poll = select.poll()
    poll.register(connected.fileno(), select.POLLIN)
    while True:
        try:
            found = connected.receive(descriptor=descriptor)
        except Broken as error:
            raise MemberLost(f"rank {rank} died while group {context.name!r} was made") from error
        if found is not None:
            message, fd = found
            if message[:1] != _WELL:
                reason = message[1:].decode(errors="replace")
                raise Unreachable(f"group {context.name!r} shares no memory: {reason}")
            return fd
        if (ended := context.ended()) is not None:
            raise ended
        left = deadline - time.monotonic()
        if left <= 0:
            raise Timeout(f"group {context.name!r} was not made in time; rank {rank} still waits for others")
        poll.poll(1000 * min(left, _POLL_S))


# ---------------------------------------------------------------------- all ranks but the first, among themselves


def _connect_others(control: Control, nonce: bytes, deadline: float) -> Sockets:
    """Connect to every rank but the first: the higher one connects, the lower one accepts. All ranks call it.

    Raises:
        Unreachable: two ranks cannot reach each other; the one to accept may just have died.
        Broken: a rank that was to connect is not there.
        MemberLost: a rank died, and another one waited for it.
        Timeout: a rank did not come.
    """
    n, me = control.layout.world_size, control.rank
    if n < 3:
        return {}
    listener = _listen(control) if 0 < me < n - 1 else None
    control.barrier(deadline)
    sockets: Sockets = {}
    try:
        for rank in range(1, me):
            sockets[rank] = PeerSocket.connect(control.text(control.layout.record(rank) + SOCKET))
            sockets[rank].send(_HELLO.pack(nonce, me))
    except AxonError as error:
        raise control.fail(Unreachable(f"rank {control.ranks[me]} shares no memory: {error}")) from error
    control.barrier(deadline)
    if listener is not None:
        sockets |= _accepted(listener, nonce, range(me + 1, n))
        listener.close()
    missing = [control.ranks[rank] for rank in range(1, n) if rank != me and rank not in sockets]
    if me and missing:
        raise control.fail(Broken(f"rank {control.ranks[me]} is not connected to rank {missing[0]}"))
    return sockets


def _listen(control: Control) -> Listener:
    try:
        listener = Listener()
    except AxonError as error:
        raise control.fail(error) from error
    control.put_text(control.layout.record(control.rank) + SOCKET, listener.name)
    return listener


def _check_machine() -> None:
    if not futex.AVAILABLE:
        raise Unreachable("shared memory between processes needs Linux on a little-endian 64-bit machine")
