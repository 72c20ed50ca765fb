"""`Span`: a timed part of a step; `SpanContext`: its name in other processes; `TraceOrder`: a request for spans.

Note: [One trace a step]
    All workers make a step at the same time and none begins it, so none can draw the trace's id first. The id is a hash
    of values that all of them know: the id of the job's state, the model, the generation and the step attempt. The id
    of the trace's root is such a hash, too. The coordinator records the root when it decides the attempt, and workers
    name it as the parent of their spans before it exists. Other span contexts are sent with the messages that their
    spans cause, in the format of W3C Trace Context. They are not in gRPC's metadata, which belongs to a call: a call
    here is a pooled stream or a session with many steps. They are a field of the request, vote or decision itself. So
    its receiver knows that the step is traced, and needs no setting.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

Value: TypeAlias = str | float | bool
"""The value of an attribute."""

MAX_SPANS: Final = 20_000
"""Most spans of an order that a member retains."""

_TRACEPARENT_LENGTH: Final = 55
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The name of a span.

    Attributes:
        trace_id: the trace's id, 128 bits.
        span_id: the span's id in the trace, 64 bits, not 0.
    """

    trace_id: int
    span_id: int

    @classmethod
    def of_step(cls, job_id: str, model: int, generation: int, step: int, replica: int = -1) -> Self:
        """Return the root of a step attempt's trace. See Note: [One trace a step].

        Args:
            job_id: the id of the job's state.
            model: the model.
            generation: the generation of the attempt.
            step: its number; for asynchronous replicas, the replica's clock.
            replica: for asynchronous replicas: the replica that makes the step; -1 = all make it.
        """
        name = f"{job_id}/{model}/{generation}/{step}/{replica}"
        digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
        return cls(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1)

    def child(self) -> SpanContext:
        """Return the context of a new span of the same trace."""
        return SpanContext(self.trace_id, _random.getrandbits(64) or 1)

    @property
    def traceparent(self) -> str:
        """The context in the format of W3C Trace Context, sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """Return the context in a `traceparent`; None if it is not valid, since a trace must not make a call fail."""
        fields = traceparent.split("-") if len(traceparent) == _TRACEPARENT_LENGTH else ()
        if tuple(map(len, fields)) != (2, 32, 16, 2):
            return None
        try:
            trace_id, span_id, flags = (int(each, 16) for each in fields[1:])
        except ValueError:
            return None
        return cls(trace_id, span_id) if trace_id and span_id and flags & 1 else None


@dataclass(slots=True)
class Span:
    """A timed part of a step.

    Attributes:
        name: its kind: "step", "gather", "push", "vote", "commit", "apply".
        context: its context.
        parent_id: the span that contains or caused it; 0 = none.
        start_ns: its begin, in ns since 1970, by this process's clock.
        end_ns: its end; 0 = it has not ended.
        attributes: its attributes, by name.
        events: times and names of events in it.
        error: the error with which it failed; empty = it did not fail.
    """

    name: str
    context: SpanContext
    parent_id: int
    start_ns: int
    end_ns: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    error: str = ""

    @property
    def duration_ns(self) -> int:
        """Its duration."""
        return max(0, self.end_ns - self.start_ns)

    def add(self, name: str, amount: float) -> None:
        """Add to a numeric attribute; one thread adds at a time."""
        self.attributes[name] = float(self.attributes.get(name, 0)) + amount


@dataclass(frozen=True, kw_only=True)
class TraceOrder:
    """A request for the spans of a few steps.

    Attributes:
        id: the order's id.
        model: the model whose steps are traced.
        first: the first attempt.
        last: the last attempt.
        timeout_s: seconds after which the order expires.
    """

    id: int
    model: int
    first: int
    last: int
    timeout_s: float
