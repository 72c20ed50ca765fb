"""An S3 server of somebody else (moto) in a process of its own, behind a proxy that makes requests fail.

with s3_server() as s3:
    s3.faults.add("PUT", "partNumber=2", Fault.RESET, times=1)
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deadlines import HANG_S

SECRET = "the-secret-key-that-nobody-logs"


class Fault(Enum):
    """What happens to a request."""

    RESET = "the connection is reset in the middle of the body"
    HANG = "there is no answer, until the client gives up"
    SLOW_DOWN = 503, "SlowDown"
    INTERNAL = 500, "InternalError"
    DENIED = 403, "AccessDenied"
    LOST_ANSWER = "the server performs it, and the connection is reset before the answer"


class Faults:
    """Which requests fail, and those that were made; the proxy is in another process.

    Args:
        proxy: that process.
    """

    def __init__(self, proxy: subprocess.Popen[str]) -> None:
        self._proxy = proxy

    def add(self, method: str, url: str, fault: Fault, *, times: int = 1 << 30) -> None:
        """From now on that many requests of a method whose URL has `url` in it fail."""
        self._ask([method, url, fault.name, times])

    def clear(self) -> None:
        """No request fails any more, and none was made."""
        self._ask("clear")

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Methods and URLs of the requests since then."""
        return [(method, url) for method, url in self._ask("requests")]

    def _ask(self, what: object) -> Any:
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        self._proxy.stdin.write(json.dumps(what) + "\n")
        self._proxy.stdin.flush()
        return json.loads(self._proxy.stdout.readline())


@dataclass(frozen=True)
class S3Server:
    """The address of the proxy, and its faults."""

    endpoint: str
    direct: str
    faults: Faults

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def boto3(self) -> Any:
        """A client of S3's own library, past the proxy."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.direct,
            aws_access_key_id="user",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start both in a process of their own, which ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            proxy, server = (f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline()))
            yield S3Server(proxy, server, Faults(process))
        finally:
            process.kill()


@dataclass
class _Rule:
    method: str
    url: str
    fault: Fault
    times: int


class _Rules:
    """What `Faults` says, in the proxy."""

    def __init__(self) -> None:
        self._requests: list[tuple[str, str]] = []
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()

    def answer(self, what: Any) -> object:
        """Obey."""
        with self._lock:
            if what == "requests":
                return self._requests
            if what == "clear":
                self._rules.clear()
                self._requests.clear()
            else:
                method, url, fault, times = what
                self._rules.append(_Rule(method, url, Fault[fault], times))
        return None

    def of(self, method: str, url: str) -> Fault | None:
        """What happens to a request."""
        with self._lock:
            self._requests.append((method, url))
            for rule in self._rules:
                if rule.times and rule.method == method and rule.url in url:
                    rule.times -= 1
                    return rule.fault
        return None


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, rules: _Rules, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rules, self.upstream = rules, upstream

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closed its connection is no error of ours."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    server: _Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        fault = self.server.rules.of(self.command, self.path)
        if fault is Fault.RESET:
            self.rfile.read(length // 2)
            return self._reset()
        body = self.rfile.read(length)
        if fault is Fault.HANG:
            self._wait_for_the_end()
        elif fault is not None and isinstance(fault.value, tuple):
            self._refuse(*fault.value)
        else:
            self._forward(body, lose=fault is Fault.LOST_ANSWER)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _forward(self, body: bytes, *, lose: bool) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=HANG_S)
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
            if lose:
                return self._reset()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _wait_for_the_end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def main() -> None:
    """In the process: serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    rules = _Rules()
    upstream = server.get_host_and_port()[1]
    proxy = _Proxy(rules, upstream)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(json.dumps([proxy.server_address[1], upstream]), flush=True)
    for line in sys.stdin:
        print(json.dumps(rules.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
