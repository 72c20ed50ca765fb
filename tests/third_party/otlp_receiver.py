"""A collector of OTLP over HTTP: a server of the standard library around OpenTelemetry's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span, with the names of the process that it is of."""

    role: str
    rank: str
    span: Any

    @property
    def attributes(self) -> dict[str, Any]:
        return {a.key.removeprefix("axon_ps."): value(a.value) for a in self.span.attributes}


def value(of: Any) -> Any:
    """What an `AnyValue` holds."""
    return getattr(of, of.WhichOneof("value"))


@dataclass
class Receiver:
    """What was received, and how it answers: at once, or not before `answers` is set."""

    endpoint: str = ""
    requests: list[bytes] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    @property
    def spans(self) -> list[Received]:
        found = []
        for body in list(self.requests):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {a.key: value(a.value) for a in resource.resource.attributes}
                role, rank = about["service.name"].removeprefix("axon_ps."), about.get("axon_ps.rank", "")
                found += [Received(role, rank, span) for scope in resource.scope_spans for span in scope.spans]
        return found


@contextmanager
def receiving(*, hangs: bool = False) -> Iterator[Receiver]:
    """A collector; one that `hangs` takes requests and never answers them."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hangs:
                receiver.answers.wait(120)
                return
            receiver.requests.append(body)
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.answers.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
