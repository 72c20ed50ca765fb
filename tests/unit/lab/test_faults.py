"""The tools that deal faults: the proxy does to a connection what it says, and a process stops where it was told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.observe import moments
from axon_ps.observe.moments import Moment, reached
from axon_ps_lab.faults import ArmedMoments, Proxies, TcpProxy, stacks
from axon_ps_lab.faults.clock_jumps import Clocks
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.injector import MAX_PROCESSES, Injector
from axon_ps_lab.faults.proxy import Disturbance, connections_of, owner_of


class Ends:
    """A client's socket through a proxy, and the server's end of the same connection."""

    def __init__(self, proxy: TcpProxy, listener: socket.socket) -> None:
        self.proxy = proxy
        host, _, port = proxy.address.rpartition(":")
        self.client = socket.create_connection((host, int(port)), timeout=5.0)
        self.server, _ = listener.accept()
        self.server.settimeout(5.0)
        self.client.sendall(b"hello")
        assert self.server.recv(5) == b"hello"


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Proxies() as proxies, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        found = Ends(proxies.open(listener.getsockname()), listener)
        with found.client, found.server:
            yield found


def test_bytes_pass_both_ways_and_so_does_the_end(ends: Ends) -> None:
    ends.client.sendall(b"a" * 1_000_000)
    ends.client.shutdown(socket.SHUT_WR)
    received = b"".join(iter(lambda: ends.server.recv(65536), b""))
    assert received == b"a" * 1_000_000
    ends.server.sendall(b"bye")
    assert ends.client.recv(3) == b"bye"


def test_a_reset_is_seen_on_both_sides_and_a_new_connection_is_whole(ends: Ends) -> None:
    ends.proxy.disturb(Disturbance(kind=Fault.RESET))
    for end in (ends.client, ends.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_after_a_half_close_the_server_sees_the_end_and_may_still_send(ends: Ends) -> None:
    ends.proxy.disturb(Disturbance(kind=Fault.HALF_CLOSE))
    assert ends.server.recv(1) == b""
    ends.client.sendall(b"lost")
    ends.server.sendall(b"heard")
    assert ends.client.recv(5) == b"heard"


def test_a_slow_link_passes_so_many_bytes_a_second(ends: Ends) -> None:
    began = time.monotonic()
    ends.proxy.disturb(Disturbance(kind=Fault.SLOW_LINK, seconds=5.0, bytes_per_s=1e6), {os.getpid()})
    ends.client.sendall(b"s" * 200_000 + b"!")
    received = b""
    while not received.endswith(b"!"):
        received += ends.server.recv(1 << 16)
    assert time.monotonic() - began >= 0.1
    assert len(received) == 200_001


def test_a_wall_clock_jumps_and_a_monotonic_one_does_not(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from axon_ps_lab.faults import clock_jumps\n"
        "clock_jumps.install(Path(sys.argv[1]), 3)\n"
        "for _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    )
    clocks = Clocks(tmp_path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for jump_s in (0.0, 3600.0, -3600.0):
            clocks.jump(3, jump_s)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            assert wall - time.time() == pytest.approx(jump_s, abs=5.0)
            assert monotonic == pytest.approx(time.monotonic(), abs=5.0)
    with pytest.raises(InvalidRequest, match="must be below"):
        clocks.jump(1 << 20, 1.0)
    clocks.close()


@pytest.mark.parametrize("kind", [Fault.KILL, Fault.FREEZE, Fault.PARTITION, Fault.CUT])
def test_what_a_proxy_cannot_do_is_refused(ends: Ends, kind: Fault) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot disturb connections by {kind.value}"):
        ends.proxy.disturb(Disturbance(kind=kind, seconds=0.1))


@pytest.mark.parametrize("kind", [Fault.BLACK_HOLE, Fault.DELAY])
def test_what_is_late_arrives_in_order_and_whole(ends: Ends, kind: Fault) -> None:
    began = time.monotonic()
    ends.proxy.disturb(Disturbance(kind=kind, seconds=0.2), {os.getpid()})
    ends.client.sendall(b"late")
    assert ends.server.recv(4) == b"late"
    assert time.monotonic() - began >= 0.2
    assert Disturbance(kind=kind, seconds=0.2).heals_after_s == (0.2 if kind is Fault.BLACK_HOLE else 0.4)


def test_other_connections_are_not_disturbed(ends: Ends) -> None:
    ends.proxy.disturb(Disturbance(kind=Fault.RESET), {os.getppid()})
    ends.client.sendall(b"still")
    assert ends.server.recv(5) == b"still"
    assert ends.proxy.connections == 1


def test_whose_connections_are_disturbed_is_read_once_for_each_and_not_for_what_they_send(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Collection[int]] = []

    def counted(processes: Collection[int]) -> set[tuple[int, int]]:
        looks.append(processes)
        return connections_of(processes)

    monkeypatch.setattr("axon_ps_lab.faults.proxy.connections_of", counted)
    ends.proxy.disturb(Disturbance(kind=Fault.SLOW_LINK, seconds=5.0, bytes_per_s=1e9), {os.getppid()})
    ends.proxy.disturb(Disturbance(kind=Fault.SLOW_LINK, seconds=5.0, bytes_per_s=1e9), {os.getpid()})
    for _ in range(20):
        ends.client.sendall(b"a" * 1000)
        assert len(ends.server.recv(1000, socket.MSG_WAITALL)) == 1000
    assert len(looks) == 2


def test_a_server_that_is_not_there_refuses(ends: Ends) -> None:
    ends.proxy.upstream = None
    host, _, port = ends.proxy.address.rpartition(":")
    with pytest.raises(ConnectionResetError), socket.create_connection((host, int(port)), timeout=5.0) as late:
        late.recv(1)


def test_whose_a_port_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert owner_of(listener.getsockname()[1], (1, os.getpid())) == os.getpid()
        assert owner_of(listener.getsockname()[1], ()) == -1


@pytest.fixture
def injected(tmp_path: Path) -> Iterator[ArmedMoments]:
    arms = ArmedMoments(tmp_path)
    moments.watch(Injector(tmp_path, slot=3))
    try:
        yield arms
    finally:
        moments.watch(None)
        arms.close()


def test_a_process_stops_at_an_armed_moment_once_until_it_is_released(injected: ArmedMoments) -> None:
    reached(Moment.PUSH)
    injected.arm(3, Moment.PUSH, version=5)
    passed = threading.Event()

    def work() -> None:
        reached(Moment.VOTE)
        reached(Moment.PUSH, 4)
        reached(Moment.PUSH, 5)
        passed.set()
        reached(Moment.PUSH, 6)

    thread = threading.Thread(target=work)
    thread.start()
    hit = injected.wait(5.0)
    assert hit is not None
    assert (hit.slot, hit.pid, hit.moment, hit.version) == (3, os.getpid(), Moment.PUSH, 5)
    assert not passed.is_set()
    hit.release()
    thread.join(5.0)
    assert passed.is_set()
    assert injected.wait(0.01) is None


def test_a_process_goes_on_when_the_test_is_gone(injected: ArmedMoments, tmp_path: Path) -> None:
    injected.arm(3, Moment.GATHER)
    (tmp_path / "moments.sock").unlink()
    reached(Moment.GATHER)


def test_what_does_not_fit_the_table_is_refused(injected: ArmedMoments) -> None:
    with pytest.raises(InvalidRequest, match=f"slot {MAX_PROCESSES} and version 0"):
        injected.arm(MAX_PROCESSES, Moment.GATHER)
    with pytest.raises(InvalidRequest, match="slot 0 and version 256"):
        injected.arm(0, Moment.GATHER, version=256)


_WAITING = """
import asyncio, sys
from axon_ps_lab.faults import stacks
stacks.install()
async def waits_for_ever():
    print("here", flush=True)
    await asyncio.Event().wait()
asyncio.run(waits_for_ever())
"""


_KEEPING = """
import signal
from pathlib import Path
from axon_ps.host.malloc import retain_message_memory
from axon_ps_lab.faults import trimming
def private_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
retain_message_memory()
trimming.install()
messages = [b"x" * (1 << 20) for _ in range(40)]
del messages
kept = private_kib()
signal.raise_signal(trimming.TRIM)
print(kept - private_kib())
"""


def test_a_process_gives_back_what_it_only_keeps() -> None:
    run = subprocess.run([sys.executable, "-c", _KEEPING], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 35 << 10


def test_a_process_writes_its_stacks() -> None:
    command = [sys.executable, "-E", "-c", _WAITING]  # no thread beside its own (`--longest-hold`)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(stacks.SHOW)
        lines = []
        while not lines or not lines[-1].strip().startswith("<string>:"):
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGKILL)
    assert lines[0].startswith("Current thread")
    assert "waits_for_ever" in lines[-1]
