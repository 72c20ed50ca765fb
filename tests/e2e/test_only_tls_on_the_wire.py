"""A job on two hosts (network namespaces) with nothing configured but a secret: all that passes between them is TLS.

The whole run is captured at the card of one host, from before it begins: every TCP stream is TLS records from its first
byte to its last, nothing else than TCP carries anything, and what must not be readable is nowhere.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import AXON_PS, environment
from deadlines import HANG_S
from namespaces import network_of
from packet_capture import frames, is_tls, tcp_streams

HERE = Path(__file__).parent
MARK = 1234.5678
NUMEL = 20_000
STEPS = 5
PORT = 29501
SCRIPT = f"""
import os, sys, time
import torch
import axon_ps
from axon_ps import parallel

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight_that_nobody_may_see = torch.nn.Parameter(torch.full(({NUMEL},), {MARK}))
    def forward(self):
        return (self.weight_that_nobody_may_see * {MARK}).sum()

torch.set_num_threads(1)
with axon_ps.World.init(timeout_s=120, join_timeout_s=120) as world:
    model = parallel.FSDP(Model(), world.default_group)
    optimizer = parallel.SGD(model, lr=2.0**-40)
    for step in range({STEPS}):
        model().backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
    print(world.gather_json([world.rank, {{"what passes between": "the workers, as objects"}}]), flush=True)
    world.kv_put("ready", b"1") if world.rank == 0 else None
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
"""
PICKLE = re.compile(
    rb"\x80[\x02-\x05](?:\x95..\x00{6}|c[a-z_.]+\n)|cnumpy[a-z._]*\n|cbuiltins\n|c__builtin__\n", re.DOTALL
)


def listening(network: Any, host: str) -> set[tuple[str, int]]:
    """Addresses and ports at which something on a host listens, in hex as the kernel shows them."""
    found = set()
    for table in ("tcp", "tcp6"):
        command = ["cat", f"/proc/net/{table}"]
        text = network.popen(host, command, stdout=subprocess.PIPE, text=True).communicate(timeout=10)[0]
        for line in text.splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, _, port = place.rpartition(":")
                found.add((address, int(port, 16)))
    return found


@pytest.mark.netns
def test_a_job_on_two_hosts_is_nothing_but_tls(tmp_path: Path) -> None:
    if shutil.which("ip") is None:
        pytest.skip("there is no iproute2 here")
    with contextlib.ExitStack() as stack:
        network = network_of("a", "b")
        stack.callback(network.close)
        _run(network, tmp_path, stack)


def _run(network: Any, directory: Path, stack: contextlib.ExitStack) -> None:
    (directory / "train.py").write_text(SCRIPT)
    secret_file, captured = directory / "secret", directory / "captured"
    subprocess.run([*AXON_PS, "auth", "init", str(secret_file)], check=True, env=environment({}), capture_output=True)
    secret = secret_file.read_text().strip()
    capturing = network.popen(
        "b", [sys.executable, str(HERE / "packet_capture.py"), str(captured)], stdout=subprocess.PIPE
    )
    stack.enter_context(capturing.stdout)
    assert capturing.stdout.readline() == b"capturing\n"
    job = ["run", "--nnodes", "2", "--master-addr", network.address("a"), "--shards", "2", "--job", "known-job"]
    launched = []
    for rank, host in enumerate(("a", "b")):
        own = ["--node-rank", str(rank), "--advertise", network.address(host), "--token-file", str(secret_file)]
        command = [*AXON_PS, *job, *own, str(directory / "train.py"), str(directory / "end")]
        launched.append(
            network.popen(
                host, command, env=environment({}), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
        stack.enter_context(launched[-1].stdout)
    lines = [_until(process, "what passes between") for process in launched]
    assert all("[0, " in line and "[1, " in line for line in lines)
    status = [*AXON_PS, "status", "--json", "--coordinator", f"{network.address('a')}:{PORT}", "--job", "known-job"]
    asked = network.popen("b", [*status, "--token-file", str(secret_file)], env=environment({}), stdout=subprocess.PIPE)
    shards = json.loads(asked.communicate(timeout=HANG_S)[0])["membership"]["shards"]
    open_ports = {host: {port for _, port in listening(network, host)} for host in ("a", "b")}
    (directory / "end").touch()
    assert [process.wait(60) for process in launched] == [0, 0]
    capturing.terminate()
    capturing.wait(10)

    places = [member["address"].rpartition(":") for member in shards]
    of = {host: {int(port) for at, _, port in places if at == network.address(host)} for host in ("a", "b")}
    bulk = {"a": open_ports["a"] - {PORT, *of["a"]}, "b": open_ports["b"] - of["b"]}
    assert {host: len(ports) for host, ports in bulk.items()} == {"a": 1, "b": 1}  # as docs/cluster.md has them
    assert all(of.values())
    found = frames(captured)
    streams = tcp_streams(found)
    bytes_passed = sum(map(len, streams.values()))
    assert bytes_passed > 2 * STEPS * NUMEL * 4  # it was all there: parameters and gradients
    assert [stream for stream, content in streams.items() if not is_tls(content)] == []
    everything = b"".join(found) + b"".join(streams.values())
    value = struct.pack("<f", MARK)
    hidden = {
        "the secret": secret.encode(),
        "parameter values": value * 4,
        "a parameter's name": b"weight_that_nobody_may_see",
        "the job's name": b"known-job",
        "protobuf's and gRPC's names": b"axon_ps.wire",
        "objects of the workers": b"what passes between",
    }
    assert [what for what, content in hidden.items() if content in everything] == []
    assert PICKLE.search(everything) is None
    assert PICKLE.search(pickle.dumps({"a": 1})) is not None
    print(f"{len(found)} frames, {len(streams)} streams, {bytes_passed} bytes")


def _until(process: Any, words: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return str(line)
    raise AssertionError(said)
