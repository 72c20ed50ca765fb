"""Target: the coordinator and two shard servers inside this process, called as any client with the job's token may.

A round sends the messages of a few calls, lets the services work, and resets the calls that still wait, since a lawful
call may wait for its deadline. Then nothing of those calls may be left on the services.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import ExitStack
from typing import Any, Final

import grpc

from axon_ps.errors import AxonError
from axon_ps.rpc.calls.protocol import EOF, CallOver
from axon_ps.rpc.calls.status import OK, CallStatus
from axon_ps.rpc.carriers.in_process import InProcessCall, InProcessChannel
from axon_ps_lab.fuzz.clocks import ProcessClock
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Case, Findings, LoggedTracebacks, where
from axon_ps_lab.fuzz.grown import Grower
from axon_ps_lab.fuzz.targets.small_job import SmallJob, small_job
from axon_ps_lab.fuzz.targets.tapped import METHODS, Tap

CALLS: Final = 8
"""Calls of a round, side by side."""

READS: Final = 16
"""Messages read of a stream."""

END_S: Final = 10.0
"""Seconds that a service may take to end a call that is over; longer is a hang."""

CHECKED_EVERY: Final = 40
"""Rounds between two training steps of the job."""

LIFE_ROUNDS: Final = 1000
"""Rounds after which a new job begins."""

RARE: Final = {"SaveCheckpoint": 30, "RestoreCheckpoint": 10, "Drain": 20, "Release": 20, "Trace": 5}
"""RPCs that are called only once in so many times: they write files, or end something that the others need."""

UNFORESEEN: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


CLOCK: Final = ProcessClock()
"""The clock of the limits of waits."""


class _Channel(InProcessChannel):
    """A channel that records the calls made on it."""

    def __init__(self, address: str, made: list[Any]) -> None:
        super().__init__(address)
        self._calls_made = made

    def _made(self, path: str, timeout_s: float | None) -> InProcessCall:
        call = super()._made(path, timeout_s)
        self._calls_made.append(call)
        return call


class ServiceCalls:
    """See the module.

    Args:
        findings: gets the findings.
        directory: directory for checkpoints of the job.
    """

    name = "services"

    def __init__(self, findings: Findings, directory: str) -> None:
        self.statuses: Counter[str] = Counter()
        self.messages = 0
        self.jobs = 0
        self.steps = 0
        self._findings = findings
        self._directory = directory
        self._rounds = 0
        self._recent: deque[Case] = deque(maxlen=2 * CALLS)
        self._stack = ExitStack()
        self._logged = LoggedTracebacks()
        self._job: SmallJob | None = None

    def close(self) -> None:
        """End the job."""
        self._stack.close()
        self._job = None

    # ------------------------------------------------------------------ rounds

    def run(self, entropy: Entropy) -> None:
        """Perform a round."""
        job = self._opened()
        grower = Grower(job.facts)
        cases = [self._grown(grower, entropy) for _ in range(1 + entropy.below(CALLS))]
        self.perform(job, cases, 0.05 if entropy.once_in(16) else 0.004)
        self._rounds += 1
        if self._rounds % CHECKED_EVERY == 0:
            self._check(job)

    def replay(self, case: Case) -> None:
        """Send the messages of a file."""
        job = self._opened()
        self.perform(job, [case.among(job.names())], 0.5)
        self._check(job)

    def perform(self, job: SmallJob, cases: list[Case], patience_s: float) -> None:
        """Send all messages of `cases`, and check the results."""
        self._recent.extend(cases)
        began_s = CLOCK.now_s
        try:
            left = job.world._loop.run(self._round(job, cases, patience_s), 30 * END_S)
        except AxonError as error:
            self._findings.add(f"hang: {type(error).__name__}", list(self._recent), str(error))
            self.close()
            return
        if left:
            self._findings.add(f"hang: {left[0]} is not over", list(self._recent), "\n".join(left))
        if (took_s := CLOCK.now_s - began_s) > END_S:
            self._findings.add("hang: a round took long", list(self._recent), f"{took_s:.1f} s")
        for location, text in self._logged.take():
            self._findings.add(f"traceback: {location}", list(self._recent), text)

    def _grown(self, grower: Grower, entropy: Entropy) -> Case:
        paths = list(METHODS)
        path = entropy.pick(paths)
        while not entropy.once_in(RARE.get(METHODS[path].name, 1)):
            path = entropy.pick(paths)
        method = METHODS[path]
        count = 1 + entropy.below(4) if method.client_streaming else 1
        kind = method.input_type if not entropy.once_in(200) else METHODS[entropy.pick(paths)].input_type
        return Case(self.name, path, tuple(grower.message(kind, entropy) for _ in range(count)))

    async def _round(self, job: SmallJob, cases: list[Case], patience_s: float) -> list[str]:
        """Make the calls; returns the waits of those that are not over in time."""
        made: list[Any] = []
        calls = [asyncio.create_task(self._call(job, case, index, made)) for index, case in enumerate(cases)]
        await asyncio.wait(calls, timeout=patience_s)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        stuck = {call._task for call in made if call._task is not None and not call._task.done()}
        if stuck:
            until_s = CLOCK.now_s + END_S
            while stuck and CLOCK.now_s < until_s:
                _, stuck = await asyncio.wait(stuck, timeout=END_S)
        return [awaited(task) for task in stuck]

    async def _call(self, job: SmallJob, case: Case, index: int, made: list[Any]) -> None:
        method = METHODS[case.what]
        addresses = job.addresses[method.containing_service.name]
        channel = _Channel(addresses[(index + len(case.messages)) % len(addresses)], made)
        try:
            if method.client_streaming:
                self._ended(case, await self._stream(channel, case))
            else:
                reply = await channel.call(case.what, case.messages[0], None, None)
                self._ended(case, reply if isinstance(reply, CallStatus) else OK)
        except asyncio.CancelledError:
            self.statuses["reset by us"] += 1
        except CallOver:
            self.statuses["over before all was written"] += 1
        finally:
            self.messages += len(case.messages)
            await channel.close()

    async def _stream(self, channel: InProcessChannel, case: Case) -> CallStatus:
        call = channel.open(case.what, None, None)
        for message in case.messages:
            await call.write(message)
        if len(case.messages[0]) % 2:
            await call.done_writing()
        for _ in range(READS):
            if await call.read() is EOF:
                return await call.status()
        return OK

    def _ended(self, case: Case, status: CallStatus) -> None:
        self.statuses[status.code.name] += 1
        is_known = status.code is grpc.StatusCode.UNKNOWN and status.error
        if status.code in UNFORESEEN and not is_known:  # an `AxonError` of no other class is UNKNOWN, too
            self._findings.add(f"{status.code.name} of {case.what}: {status.details[:80]}", [case], status.details)

    # ------------------------------------------------------------------ the job

    def _opened(self) -> SmallJob:
        """Return the job; a new one after a while, or when it can train no more (its model was released, say)."""
        if self._job is not None and self._rounds % LIFE_ROUNDS == 0:
            self.close()
        if self._job is None:
            self._stack.enter_context(self._logged)
            self._job = self._stack.enter_context(small_job(Tap(), self._directory))
            self._job.world._loop.run(_on_errors(self._findings, self._recent))
            self.jobs += 1
        return self._job

    def _check(self, job: SmallJob) -> None:
        """Train a step: a job that has lost its model, its worker or a server cannot, and ends."""
        try:
            self.steps += job.step()
            job.refresh()
        except AxonError:
            self.close()
        except Exception as error:
            self._findings.add(f"training: {where(error)}", list(self._recent), repr(error))
            self.close()
        for end in job.ended():
            if not isinstance(end, AxonError):
                self._findings.add(f"a service died: {where(end)}", list(self._recent), repr(end))
        if job.ended():
            self.statuses["services that ended"] += 1
            self.close()


def awaited(task: asyncio.Task[Any]) -> str:
    """Return the awaitables that a task waits for, from the outside in."""
    names: list[str] = []
    waits: Any = task.get_coro()
    while waits is not None and len(names) < 20:
        frame = getattr(waits, "cr_frame", None)
        line = f":{frame.f_lineno}" if frame is not None else ""
        names.append(f"{getattr(waits, '__qualname__', type(waits).__name__)}{line}")
        waits = getattr(waits, "cr_await", None)
    return " > ".join(names)


async def _on_errors(findings: Findings, recent: Any) -> None:
    """Make findings of the errors that the event loop's exception handler gets."""

    def handle(_: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, AxonError) and "coro=<serve()" in repr(context.get("future")):
            return  # the reason why a service has ended; a job of threads does not read it
        location = where(error) if error is not None else context["message"]
        findings.add(f"event loop: {location}", list(recent), str(context))

    asyncio.get_running_loop().set_exception_handler(handle)
