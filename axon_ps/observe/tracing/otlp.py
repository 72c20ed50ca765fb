"""Spans for an OpenTelemetry collector: converted to the SDK's spans, then queued, batched and sent by the SDK.

This uses OpenTelemetry for sending: its batch processor and OTLP exporter, with their `OTEL_` variables. It does not
use it for recording: a span here begins in one thread and ends in another, and is used by `axon-ps trace`, too.

Training never waits for a collector: when the queue is full a span is dropped and counted. At the end the queued spans
are sent for at most `FLUSH_S`. OpenTelemetry is imported only here, when an exporter is made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from axon_ps.errors import ConfigurationError
from axon_ps.observe.tracing.span import Span, SpanContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

FLUSH_S: Final = 2.0
"""Seconds for sending the queued spans at the end."""

QUEUE_SPANS: Final = 8192
"""Most spans that wait to be sent."""

_logger = logging.getLogger(__name__)


class OtlpExporter:
    """Sends spans to the collector that the `OTEL_` variables name. Any thread may use it.

    Args:
        service: name of the service, such as "axon_ps.worker"; `OTEL_SERVICE_NAME` wins.
        attributes: attributes of the process: job, rank, node.
        protocol: "http/protobuf" or "grpc".

    Raises:
        ConfigurationError: the extra `otel` is not installed, or there is no such protocol.
    """

    def __init__(self, service: str, attributes: Mapping[str, str], protocol: str) -> None:
        exporter = _exporter(protocol)
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        own = Resource.create({"service.name": service, **attributes})
        self._resource = own.merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("axon_ps")
        self._counted = _Counted(exporter)
        self._processor = BatchSpanProcessor(self._counted, max_queue_size=QUEUE_SPANS)
        self._given = self._dropped = 0
        self._closed = False

    def __call__(self, span: Span) -> None:
        """Queue a span that has ended; drop it if the queue is full."""
        if self._closed or self._given - self._counted.taken >= QUEUE_SPANS:
            self._dropped += 1
            return
        self._given += 1
        self._processor.on_end(self._converted(span))

    def statistics(self) -> dict[str, float]:
        """Return the numbers of spans exported, of those refused or lost on the way, and of those dropped."""
        counted = self._counted
        return {
            "spans_exported": float(counted.exported),
            "spans_failed": float(counted.failed),
            "spans_dropped": float(self._dropped),
        }

    def close(self) -> None:
        """Send the queued spans, for at most `FLUSH_S`; the rest is lost."""
        if self._closed:
            return
        self._closed = True
        flushing = threading.Thread(target=self._shut_down, name="axon-ps-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if left := self._given - self._counted.exported - self._counted.failed:
            _logger.warning("%d spans were not exported: the collector did not take them in %g s", left, FLUSH_S)

    def _shut_down(self) -> None:
        with contextlib.suppress(Exception):  # errors of the exporter about a collector that is gone
            self._processor.shutdown()

    def _converted(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        parent = SpanContext(span.context.trace_id, span.parent_id) if span.parent_id else None
        is_server = "server" in span.attributes  # it is the work of a shard server for a worker
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if parent is None else _context(parent),
            resource=self._resource,
            attributes={f"axon_ps.{name}": value for name, value in span.attributes.items()},
            events=[Event(name, timestamp=at_ns) for at_ns, name in span.events],
            kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class _Counted:
    """An exporter that counts spans, and logs once that it fails. It has the methods of the SDK's `SpanExporter`."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._fails = False
        self.taken = self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            _logger.debug("exporting spans failed", exc_info=error)
            result = SpanExportResult.FAILURE
        succeeded = result is SpanExportResult.SUCCESS
        if succeeded:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        if not succeeded and not self._fails:
            _logger.warning("spans cannot be exported, training goes on without: is there a collector?")
        elif succeeded and self._fails:
            _logger.info("spans can be exported again")
        self._fails = not succeeded
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _context(context: SpanContext) -> Any:
    from opentelemetry.trace import SpanContext as OtelContext
    from opentelemetry.trace import TraceFlags

    sampled = TraceFlags(TraceFlags.SAMPLED)
    return OtelContext(context.trace_id, context.span_id, is_remote=True, trace_flags=sampled)


def _exporter(protocol: str) -> SpanExporter:
    try:
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

            _quiet(http.__name__)
            return http.OTLPSpanExporter()
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            _quiet(grpc.__name__.removesuffix(".trace_exporter") + ".exporter")
            return grpc.OTLPSpanExporter()
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise ConfigurationError(
            f"traces are exported by OpenTelemetry, and {package} is not installed ({error}): pip install "
            "'axon-ps[otel]', or unset AXON_PS_TRACE_EVERY"
        ) from error
    raise ConfigurationError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; it must be http/protobuf or grpc")


def _quiet(name: str) -> None:
    """Silence the exporter's logger, which logs every attempt of every batch, unless the user has set its level.

    A failure is logged here, once.
    """
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
