"""Cost of mutual TLS: processor time per byte of the data plane, over plaintext, alternating on the same machine.

One worker and one shard server transfer by gRPC in two places: between two hosts (network namespaces with a card each,
`netns.py`), as in the acceptance, and on loopback, where plaintext costs the kernel least. The same runs again with
mutual TLS by the job's own authority. Each round gathers and pushes one unit. Processor time is that of both processes,
in user mode and in the kernel. Reported are medians over the rounds, and the median of the rounds' ratios.

Raw streams of gRPC without axon_ps (raw_stream.py) alternate with them. axon_ps sends the same bytes through the same
library, so TLS must add the same cost to it. ReduceScatter is a push and the gather after the update, so two bytes are
sent for each of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from axon_ps.host.ports import free_ports
from axon_ps.rpc.auth.tokens import new_secret
from axon_ps.rpc.security import Security
from axon_ps.sharding.plan import DEFAULT_CHUNK_NUMEL
from axon_ps.testing.cluster import LocalCluster
from axon_ps.types import DType, Role, parse_dtype
from axon_ps.worker.environment import worker_config
from axon_ps.worker.world import World
from axon_ps_lab import report
from cluster import cpu_s
from data_plane import MIB, Ours
from netns import Network, stop

HERE = Path(__file__).parent
BOUND = 1.25
"""The most that mutual TLS may cost between hosts, over plaintext."""

Took = dict[str, tuple[float, float]]
"""CPU seconds and seconds, by call."""


class Used:
    """Measures CPU seconds of a worker and its server during the worker's calls."""

    def __init__(self, worker: Ours, server_pid: int) -> None:
        self._worker, self._server_pid = worker, server_pid

    def round(self) -> Took:
        """Gather and push; returns CPU seconds and seconds, by call."""
        return {"AllGather": self._used(self._worker.gather), "ReduceScatter": self._used(self._worker.push)}

    def _used(self, action: Callable[[], float]) -> tuple[float, float]:
        before_s = cpu_s(os.getpid()) + cpu_s(self._server_pid)
        spent_s = action()
        return cpu_s(os.getpid()) + cpu_s(self._server_pid) - before_s, spent_s


@contextmanager
def on_loopback(numel: int, dtype: DType, *, tls: bool) -> Iterator[Callable[[], Took]]:
    """Start a cluster, with this process as its worker; yields a function that runs a round."""
    with LocalCluster(shards=1, world_size=1, security=Security(tls=tls)) as cluster:
        world = World.init(replace(worker_config(cluster.env(0)), direct_memory=False))
        try:
            yield Used(Ours(world, numel, dtype), cluster.process(Role.SHARD, 0).pid).round
        finally:
            world.close()


@contextmanager
def between_hosts(network: Network, numel: int, dtype: DType, *, tls: bool) -> Iterator[Callable[[], Took]]:
    """Start services on one host, and a worker on another that runs a round for every line; yields such a function."""
    port, secret = free_ports(), {**os.environ, "AXON_PS_TOKEN": new_secret()}
    address, insecure = f"{network.address('server')}:{port}", [] if tls else ["--insecure"]
    command = [sys.executable, "-P", "-m", "axon_ps.cli.main"]
    own = ["--host", network.address("server"), "--log-level", "error", *insecure]
    coordinator = [*command, "coordinator", "--port", str(port), "--state", "memory", "--world-size", "1", *own]
    network.popen("server", coordinator, env=secret)
    shard = network.popen("server", [*command, "shard", "--port", "0", "--coordinator", address, *own], env=secret)
    asked = ["--worker", address, "--server-pid", str(shard.pid), "--numel", str(numel), "--dtype", dtype.value]
    worker = network.popen(
        "worker",
        [sys.executable, __file__, *asked],
        env=secret | ({} if tls else {"AXON_PS_INSECURE": "1"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    assert worker.stdin is not None
    assert worker.stdout is not None
    written, read = worker.stdin, worker.stdout

    def round_() -> Took:
        written.write("round\n")
        return {name: tuple(took) for name, took in json.loads(read.readline()).items()}

    yield round_
    written.close()
    worker.wait(20)


def work(options: argparse.Namespace) -> None:
    """Run the worker: a round for every line of standard input."""
    env = {**os.environ, "AXON_PS_COORDINATOR": options.worker, "RANK": "0", "WORLD_SIZE": "1"}
    with World.init(replace(worker_config(env), direct_memory=False)) as world:
        used = Used(Ours(world, options.numel, parse_dtype(options.dtype)), options.server_pid)
        for _ in sys.stdin:
            print(json.dumps(used.round()), flush=True)


@contextmanager
def raw(network: Network | None, directory: Path, total_bytes: int, *, tls: bool) -> Iterator[Callable[[], Took]]:
    """Start a raw server and its client, on two hosts or on loopback; yields a function that runs a round."""
    host = network.address("server") if network else "127.0.0.1"
    sizes = ["--total-bytes", str(total_bytes), "--chunk-bytes", str(DEFAULT_CHUNK_NUMEL * 4)]
    command = [sys.executable, str(HERE / "raw_stream.py"), *sizes, "--retain-message-memory"]
    if tls:
        make_certificate(directory, host)
        command += ["--tls", str(directory)]

    def start(where: str, *more: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        return (
            network.popen(where, [*command, *more], **pipes)
            if network
            else subprocess.Popen([*command, *more], **pipes)
        )

    server = start("server", "--host", host)
    assert server.stdout is not None
    client = start("worker", "--client", f"{host}:{server.stdout.readline().strip()}")

    def told(line: str) -> tuple[float, float]:
        assert client.stdin is not None
        assert client.stdout is not None
        before_s = cpu_s(client.pid) + cpu_s(server.pid)
        client.stdin.write(line + "\n")
        spent_s = float(client.stdout.readline())
        return cpu_s(client.pid) + cpu_s(server.pid) - before_s, spent_s

    try:
        yield lambda: {"raw pull": told("pull"), "raw push": told("push")}
    finally:
        stop([client, server])


def make_certificate(directory: Path, host: str) -> None:
    """Make a key and a self-signed certificate for an address."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raw")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (directory / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (directory / "cert.pem").write_bytes(certificate.public_bytes(pem))


def rounds_of(
    ways: dict[str, list[Callable[[], Took]]], rounds: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return what each round took, by way and by call; the ways alternate, and the first round warms up."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {way: {} for way in ways}
    for number in range(-1, rounds):
        for way, all_of in ways.items():
            for name, took in [each for once in all_of for each in once().items()]:
                if number >= 0:
                    found[way].setdefault(name, []).append(took)
    return found


def measure(where: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one place."""
    dtype, total_bytes = parse_dtype(options.dtype), options.mib * MIB
    numel = total_bytes // dtype.itemsize
    with ExitStack() as stack:
        ways: dict[str, list[Callable[[], Took]]] = {}
        for way in ("plaintext", "mutual TLS"):
            tls = way == "mutual TLS"
            directory = Path(stack.enter_context(TemporaryDirectory()))
            if where == "loopback":
                network, ours = None, on_loopback(numel, dtype, tls=tls)
            else:
                network = stack.enter_context(Network(["server", "worker"], rate_mbit=options.mbit))
                ours = between_hosts(network, numel, dtype, tls=tls)
            both = ours, raw(network, directory, total_bytes, tls=tls)
            ways[way] = [stack.enter_context(each) for each in both]
        found = rounds_of(ways, options.rounds)
    rows = []
    for name in found["plaintext"]:
        of_plain = [t[0] / p[0] for t, p in zip(found["mutual TLS"][name], found["plaintext"][name], strict=True)]
        added = [t[0] - p[0] for t, p in zip(found["mutual TLS"][name], found["plaintext"][name], strict=True)]
        for way, by_name in found.items():
            cpu, wall = (statistics.median(took[i] for took in by_name[name]) for i in (0, 1))
            rows.append(
                {
                    "where": where,
                    "what": name,
                    "way": way,
                    "cpu_ns_per_byte": round(cpu / total_bytes * 1e9, 3),
                    "tls_adds_ns": round(statistics.median(added) / total_bytes * 1e9, 3)
                    if way != "plaintext"
                    else 0.0,
                    "gb_per_s": round(total_bytes / wall / 1e9, 2),
                    "cpu_of_plaintext": round(statistics.median(of_plain), 3) if way != "plaintext" else 1.0,
                }
            )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each host's card")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 5 rounds")
    for name, kind in (("--worker", str), ("--server-pid", int), ("--numel", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    if options.quick:
        options.mib, options.rounds = 64, 5
    rows = [row for where in ("hosts", "loopback") for row in measure(where, options)]
    columns = ("where", "what", "way", "cpu_ns_per_byte", "tls_adds_ns", "gb_per_s", "cpu_of_plaintext")
    report.table("What mutual TLS costs", columns, [[row[c] for c in columns] for row in rows])
    about = {"mib": options.mib, "rounds": options.rounds, "chunk_numel": DEFAULT_CHUNK_NUMEL, "mbit": options.mbit}
    report.write("tls_cost", rows, **about, bound=BOUND)


if __name__ == "__main__":
    main()
