"""`Span`: something that took a while; `SpanContext`: its name in other processes; `TraceOrder`: who wants some. Pure.

Note: [One trace a step]
    All workers make a step at the same time and none begins it, so none can draw the trace's id first. It is
    a hash of what all of them know: the id of the job's state, the model, the generation and the step attempt. So is
    the id of the trace's root, which the coordinator records when it decides the attempt: workers name it as their
    parent before anybody has made it.
    From there on spans travel with what they cause, as W3C Trace Context writes them. Not in gRPC's metadata: that is
    of a call, and a call here is a pooled stream or a session, on which step follows step. They are a field of the
    request, vote or decision itself; so its receiver knows that the step is traced, and needs no setting.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

Value: TypeAlias = str | float | bool
"""An attribute's."""

MAX_SPANS: Final = 20_000
"""Most spans of an order that a member retains."""

_TRACEPARENT_LENGTH: Final = 55
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The name of a span.

    Attributes:
        trace_id: of the trace, 128 bits.
        span_id: in it, 64 bits, not 0.
    """

    trace_id: int
    span_id: int

    @classmethod
    def of_step(cls, job_id: str, model: int, generation: int, step: int, replica: int = -1) -> Self:
        """The root of a step attempt's trace. See Note: [One trace a step].

        Args:
            job_id: of the job's state.
            model: of which model.
            generation: in which the attempt is made.
            step: its number; where replicas step asynchronously, the replica's clock.
            replica: where replicas step asynchronously: whose step it is; -1 = that of all.
        """
        name = f"{job_id}/{model}/{generation}/{step}/{replica}"
        digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
        return cls(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1)

    def child(self) -> SpanContext:
        """A new span of the same trace."""
        return SpanContext(self.trace_id, _random.getrandbits(64) or 1)

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it, sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """The context that `traceparent` wrote; None where there is no valid one: a trace is no reason to fail."""
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
    """Something that took a while, as recorded.

    Attributes:
        name: a word of the design: "step", "gather", "push", "vote", "commit", "apply".
        context: its own.
        parent_id: the span that it is within, or that caused it; 0 = none.
        start_ns: when it began, in ns since 1970, by this process's clock.
        end_ns: when it ended; 0 = it has not.
        attributes: by name.
        events: what happened meanwhile, and when.
        error: how it failed; empty = it did not.
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
        """Count something; one thread counts at a time."""
        self.attributes[name] = float(self.attributes.get(name, 0)) + amount


@dataclass(frozen=True, kw_only=True)
class TraceOrder:
    """Somebody wants the spans of a few steps.

    Attributes:
        id: of the order.
        model: whose steps.
        first: the first attempt.
        last: the last attempt.
        timeout_s: after so long they are not wanted any more.
    """

    id: int
    model: int
    first: int
    last: int
    timeout_s: float
