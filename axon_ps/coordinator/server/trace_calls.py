"""`axon-ps trace`: all members record the next steps, and the caller gets their spans.

The order is sent among the events of the sessions, so every member has it before the decision on the previous step.
Members send their spans when the last step is over for them. The reply names members that have left, or have not
answered in time. One order is under way at a time, and the next caller waits for its end.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from axon_ps.coordinator.core.actions import SendEvent
from axon_ps.coordinator.core.roster import NOUN
from axon_ps.coordinator.server.shell import Shell
from axon_ps.coordinator.span_messages import report_to_proto
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.observe.tracing.span import MAX_SPANS, TraceOrder
from axon_ps.observe.tracing.tracer import Collection
from axon_ps.rpc.limits import MAX_NEWER
from axon_ps.wire.v1 import trace_pb2

MAX_STEPS: Final = 100
"""Most steps of an order."""

MAX_TIMEOUT_S: Final = 3600.0
MAX_REPLY_BYTES: Final = 48 << 20
"""Most bytes of a reply: below the limit of a message."""


class TraceCalls:
    """The orders of one leadership. Everything happens on the shell's event loop.

    Args:
        shell: sends them.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._lock = asyncio.Lock()
        self._number = 0
        self._reply: trace_pb2.TraceReply | None = None
        self._waited_for: dict[int, str] = {}  # members by session
        self._bytes = 0
        self._answered = asyncio.Event()

    async def run(self, request: trace_pb2.TraceRequest) -> trace_pb2.TraceReply:
        """Perform an order.

        Raises:
            InvalidRequest: there is no such model, the first step has begun, or the request exceeds a limit.
            Timeout: the steps did not begin, or are not over, in time, or another trace took all of it.
        """
        if not 0 < request.timeout_s <= MAX_TIMEOUT_S or not 1 <= request.steps <= MAX_STEPS:
            raise InvalidRequest(
                f"{request.steps} steps in {request.timeout_s} s were asked for; a trace has 1 to {MAX_STEPS} steps, "
                f"and takes at most {MAX_TIMEOUT_S:g} s"
            )
        deadline_s = time.monotonic() + request.timeout_s
        try:
            async with asyncio.timeout(request.timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise Timeout(f"another trace is being taken, for {request.timeout_s:g} s already; try again") from None
        try:
            return await self._perform(request, deadline_s)
        finally:
            self._reply, self._waited_for = None, {}
            self._lock.release()

    async def _perform(self, request: trace_pb2.TraceRequest, deadline_s: float) -> trace_pb2.TraceReply:
        model, step = self._shell.state.models.step_of(request.model)
        first = request.first or step + 1
        if first <= step:
            raise InvalidRequest(f"step {first} has begun; the first one that can be traced is {step + 1}")
        if first > step + MAX_NEWER:
            raise InvalidRequest(
                f"step {first} is more than {MAX_NEWER} steps ahead; trace one up to {step + MAX_NEWER}"
            )
        self._number += 1
        left_s = max(0.0, deadline_s - time.monotonic())
        order = TraceOrder(
            id=self._number, model=model, first=first, last=first + request.steps - 1, timeout_s=math.ceil(left_s) + 1
        )
        reply = self._reply = trace_pb2.TraceReply(first=order.first, last=order.last)
        self._waited_for, self._bytes = {0: "coordinator"}, 0
        for session, member in self._shell.state.roster.by_session().items():
            self._waited_for[session] = f"{NOUN[member.role]} {member.rank}"
        self._answered.clear()
        self._shell.tracer.order(order, self._own)
        self._shell.perform([SendEvent(tuple(session for session in self._waited_for if session), order)])
        await self._wait(left_s)
        if not any(report.spans for report in reply.reports):
            pending = "; ".join(self._shell.status().pending)
            raise Timeout(
                f"step {order.last} was not over after {request.timeout_s:g} s; the job is at step "
                f"{self._shell.state.models.step_of(request.model)[1]}"
                + (f" and waits for {pending}" if pending else "")
            )
        reply.missing.extend(f"{name} did not answer" for name in self._waited_for.values())
        reply.reports.sort(key=lambda report: report.member != "coordinator")
        return reply

    async def _wait(self, timeout_s: float) -> None:
        """Wait until all members that still have a session have answered."""
        deadline_s = time.monotonic() + timeout_s
        while self._waited_for and (left_s := deadline_s - time.monotonic()) > 0:
            sessions = {0, *self._shell.state.roster.by_session()}
            for session in self._waited_for.keys() - sessions:
                assert self._reply is not None
                self._reply.missing.append(f"{self._waited_for.pop(session)} left, or lost its session")
            await self._event(min(left_s, 0.5))
        self._shell.tracer.finish()

    async def _event(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()
        except TimeoutError:
            pass
        self._answered.clear()

    def report(self, session: int, report: trace_pb2.SpanReport) -> None:
        """Take a member's spans; drop those of an order that is over.

        Raises:
            InvalidRequest: there are too many.
        """
        if len(report.spans) > MAX_SPANS:
            raise InvalidRequest(f"a report has {len(report.spans)} spans; at most {MAX_SPANS} are allowed")
        if report.order != self._number or session not in self._waited_for or self._reply is None:
            return
        report.member = self._waited_for.pop(session)
        member = self._shell.state.roster.by_session().get(session)
        report.node = "" if member is None else member.node
        report.offset_s = (time.time_ns() - report.sent_ns) / 1e9
        self._bytes += report.ByteSize()
        if self._bytes <= MAX_REPLY_BYTES:
            self._reply.reports.append(report)
        else:
            self._reply.missing.append(f"{report.member}: its {len(report.spans)} spans did not fit any more")
        self._answered.set()

    def close(self) -> None:
        """End the order under way, since the coordinator stops. Its caller gets the reports so far."""
        self._waited_for = {}
        self._answered.set()

    def _own(self, collection: Collection) -> None:
        if self._reply is not None and self._waited_for.pop(0, ""):
            report = report_to_proto(collection, time.time_ns())
            report.member = "coordinator"
            self._reply.reports.append(report)
            self._answered.set()
