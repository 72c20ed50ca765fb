"""`LocalEtcd`: a real etcd cluster on this machine, for tests and benchmarks of the state that is stored there."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from axon_ps.errors import AxonError
from axon_ps.host.children import Child
from axon_ps.host.ports import free_ports
from axon_ps.rpc.security import Security

NEEDED = "there is no etcd: apt-get install etcd-server"
"""The reason for skipping a test that needs etcd, where `is_installed()` is False."""

_START_S = 30.0
_POLL_S = 0.02
_FILLER = "/axon-ps-filler/"
_FILLER_BYTES = 256 << 10


def is_installed() -> bool:
    """Return True if the program etcd is installed."""
    return shutil.which("etcd") is not None


class LocalEtcd:
    """Members of one etcd cluster as real processes on loopback, as a context manager.

    Args:
        members: number of members: 1 or 3.
        quota_bytes: the most bytes that it stores; 0 = etcd's default.
        security: the members' certificate and their trusted CA, for TLS; every client needs a certificate then.

    Attributes:
        endpoints: "host:port" of each member, for clients.
        oldest: the oldest revision that the cluster still has; see `compact`.
    """

    def __init__(self, members: int = 1, *, quota_bytes: int = 0, security: Security | None = None) -> None:
        first = free_ports(2 * members)
        ports = range(first, first + 2 * members)
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self.oldest = 1
        self._quota_bytes = quota_bytes
        self._security = security
        self._scheme = "https" if security else "http"
        self._members: list[Child] = []

    @property
    def address(self) -> str:
        """The text after `--state etcd:`."""
        return ",".join(self.endpoints)

    def __enter__(self) -> LocalEtcd:
        """Start the cluster; returns when every member answers.

        Raises:
            AxonError: a member ended, or did not answer in time; its log is in the message.
        """
        self._directory = tempfile.TemporaryDirectory(prefix=f"axon-ps-etcd-{os.getpid()}-", ignore_cleanup_errors=True)
        try:
            self._members = [self._start(number) for number in range(len(self.endpoints))]
            deadline = time.monotonic() + _START_S
            for member, endpoint in zip(self._members, self.endpoints, strict=True):
                while b'"true"' not in self._answer(endpoint, "health"):
                    if member.exit_code is not None or time.monotonic() > deadline:
                        raise AxonError(f"{member.name} did not start:\n{member.output}")
                    member.wait(_POLL_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def kill(self, index: int) -> None:
        """Kill a member."""
        self._members[index].end()

    def leader(self) -> int:
        """Return the index of the member that leads the others.

        Raises:
            AxonError: no member leads.
        """
        for index, endpoint in enumerate(self.endpoints):
            if b"etcd_server_is_leader 1\n" in self._answer(endpoint, "metrics"):
                return index
        raise AxonError("no member of the etcd cluster leads")

    def compact(self) -> None:
        """Forget all revisions but the newest, and free their space, as etcd's operators do now and then."""
        status = self._call(self.endpoints[0], "v3/maintenance/status", {})
        self.oldest = int(status["header"]["revision"])
        self._call(self.endpoints[0], "v3/kv/compaction", {"revision": self.oldest, "physical": True})
        for endpoint in self.endpoints:
            self._call(endpoint, "v3/maintenance/defragment", {})

    def fill(self) -> None:
        """Store keys until the cluster's quota is used up, so that it refuses to write."""
        value = base64.b64encode(os.urandom(_FILLER_BYTES)).decode()
        with contextlib.suppress(AxonError):
            while True:
                key = base64.b64encode(f"{_FILLER}{time.monotonic_ns()}".encode()).decode()
                self._call(self.endpoints[0], "v3/kv/put", {"key": key, "value": value})

    def empty(self) -> None:
        """Remove the keys that `fill` has stored; the cluster accepts writes again."""
        first, end = (base64.b64encode(key.encode()).decode() for key in (_FILLER, f"{_FILLER}~"))
        self._call(self.endpoints[0], "v3/kv/deleterange", {"key": first, "range_end": end})
        self.compact()
        alarms = self._call(self.endpoints[0], "v3/maintenance/alarm", {"action": "GET"})
        for alarm in alarms.get("alarms", []):
            self._call(self.endpoints[0], "v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    @contextlib.contextmanager
    def slow_disks(self, delay_s: float) -> Iterator[None]:
        """Delay every `fdatasync` of the members in a `with` block; needs the program strace."""
        inject = f"inject=fdatasync:delay_exit={delay_s * 1e6:.0f}"
        tracers = []
        try:
            for member in self._members:
                command = ["strace", "-f", "-o", os.devnull, "-e", "trace=fdatasync", "-e", inject, "-p"]
                log = Path(self._directory.name) / f"{member.name}.strace"
                tracers.append(
                    Child.start(
                        f"strace of {member.name}",
                        [*command, str(member.pid)],
                        {"PATH": os.defpath},
                        last_signal=signal.SIGTERM,
                        output=log,
                    )
                )
                deadline = time.monotonic() + _START_S
                while "attached" not in tracers[-1].output:
                    if tracers[-1].wait(_POLL_S) is not None or time.monotonic() > deadline:
                        raise AxonError(f"{tracers[-1].name} did not start: {tracers[-1].output}")
            yield
        finally:
            for tracer in tracers:
                tracer.end((signal.SIGTERM, _START_S))

    def _call(self, endpoint: str, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """Call a method of a member's JSON gateway; returns the reply.

        Raises:
            AxonError: the member refuses, or does not answer.
        """
        try:
            reply = json.loads(self._open(endpoint, path, json.dumps(content).encode(), timeout_s=_START_S))
        except urllib.error.HTTPError as error:
            raise AxonError(f"etcd refuses {path}: {error.read().decode()}") from error
        except OSError as error:
            raise AxonError(f"etcd does not answer {path}: {error}") from error
        assert isinstance(reply, dict)
        return reply

    def _start(self, number: int) -> Child:
        client, peer = f"{self._scheme}://{self.endpoints[number]}", self._peers[number]
        directory = Path(self._directory.name)
        argv = [shutil.which("etcd") or "etcd", "--name", f"m{number}", "--data-dir", str(directory / f"m{number}")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        argv += ["--initial-cluster", ",".join(f"m{i}={url}" for i, url in enumerate(self._peers))]
        argv += ["--quota-backend-bytes", str(self._quota_bytes), "--logger", "zap", "--log-level", "warn"]
        if (s := self._security) is not None:
            argv += ["--cert-file", s.cert_file, "--key-file", s.key_file]
            argv += ["--trusted-ca-file", s.ca_file, "--client-cert-auth"]
        environment = {"PATH": os.defpath, "HOME": str(directory)}
        log = directory / f"m{number}.log"
        return Child.start(f"etcd {number}", argv, environment, last_signal=signal.SIGKILL, output=log)

    def _answer(self, endpoint: str, path: str) -> bytes:
        """Return a member's reply to a page request; empty if it does not answer."""
        try:
            return self._open(endpoint, path)
        except OSError:
            return b""

    def _open(self, endpoint: str, path: str, content: bytes | None = None, timeout_s: float = 2.0) -> bytes:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if (s := self._security) is not None:
            context = ssl.create_default_context(cafile=s.ca_file)
            context.load_cert_chain(s.cert_file, s.key_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        url = f"{self._scheme}://{endpoint}/{path}"
        with urllib.request.build_opener(*handlers).open(url, content, timeout=timeout_s) as reply:
            return bytes(reply.read())

    def _end(self) -> None:
        for member in self._members:
            member.end()
        self._members = []
        self._directory.cleanup()
