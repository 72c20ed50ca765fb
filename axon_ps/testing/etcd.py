"""`LocalEtcd`: a real etcd cluster on this machine, for tests and benchmarks of what is stored there."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from axon_ps.errors import AxonError
from axon_ps.host.children import Child
from axon_ps.host.ports import free_ports
from axon_ps.rpc.security import Security

NEEDED = "there is no etcd: apt-get install etcd-server"
"""Why a test of it is skipped where `is_installed()` is False."""

_START_S = 30.0
_POLL_S = 0.02


def is_installed() -> bool:
    """Whether there is a program etcd here."""
    return shutil.which("etcd") is not None


class LocalEtcd:
    """Members of one etcd cluster as real processes on loopback, as a context manager.

    Args:
        members: how many: 1 or 3.
        quota_bytes: how much it stores; 0 = etcd's default.
        security: certificates (its own, and whom it trusts), for TLS; every client needs one, then.

    Attributes:
        endpoints: "host:port" of each, for clients.
    """

    def __init__(self, members: int = 1, *, quota_bytes: int = 0, security: Security | None = None) -> None:
        first = free_ports(2 * members)
        ports = range(first, first + 2 * members)
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self._quota_bytes = quota_bytes
        self._security = security
        self._scheme = "https" if security else "http"
        self._members: list[Child] = []

    @property
    def address(self) -> str:
        """What `--state etcd:` is followed by."""
        return ",".join(self.endpoints)

    def __enter__(self) -> LocalEtcd:
        """Start it; returns when every member answers.

        Raises:
            AxonError: one ended, or did not answer in time; its log is in the message.
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
        """The index of the member that leads the others.

        Raises:
            AxonError: none does.
        """
        for index, endpoint in enumerate(self.endpoints):
            if b"etcd_server_is_leader 1\n" in self._answer(endpoint, "metrics"):
                return index
        raise AxonError("no member of the etcd cluster leads")

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
        """What a member answers; empty when it does not."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if (s := self._security) is not None:
            context = ssl.create_default_context(cafile=s.ca_file)
            context.load_cert_chain(s.cert_file, s.key_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        try:
            with urllib.request.build_opener(*handlers).open(f"{self._scheme}://{endpoint}/{path}", timeout=2.0) as r:
                return bytes(r.read())
        except OSError:
            return b""

    def _end(self) -> None:
        for member in self._members:
            member.end()
        self._members = []
        self._directory.cleanup()
