"""Calls to shard servers end with the generation, epoch or model that they are of. Tests of `worker/steps/calls.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.errors import Broken, Misuse, StepAborted, Timeout
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.events import JobState
from axon_ps.wire.v1.common_pb2 import CallContext
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.calls import ModelCalls
from axon_ps.worker.steps.step_trace import StepTrace
from axon_ps.worker.steps.view import ModelView
from deadlines import HANG_S

MODEL = 3


def members(generation: int = 1, waiting_for: str = "") -> Membership:
    me = Member(role=Role.WORKER, rank=0, incarnation="me", node="n", replica=0)
    return Membership(
        generation=generation,
        step=1,
        version=0,
        workers=(me,),
        shards=(),
        num_replicas=1,
        complete=not waiting_for,
        waiting_for=waiting_for,
    )


class Calls:
    """The calls of a model at epoch 0 of generation 1."""

    def __init__(self) -> None:
        self.job = JobView(lambda: "me", HANG_S)
        self.job.known = members()
        self.view = ModelView(self.job, MODEL)
        self.view.on_state(JobState(model=MODEL))
        session: Any = SimpleNamespace(
            tracer=Tracer(), state_id="", context=lambda: CallContext(job="job", generation=1)
        )
        self.trace = StepTrace(session, self.view)
        self.calls = ModelCalls(session, self.view, self.trace)

    async def begun(self, **options: Any) -> asyncio.Task[object]:
        """A call that waits for ever, under way."""
        begun = asyncio.Event()

        async def call() -> None:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(self.calls.run(lambda span: call(), **options))
        await begun.wait()
        return task

    def restore(self) -> None:
        self.view.on_state(JobState(model=MODEL, epoch=1))
        self.calls.end_stale()


def run(body: Callable[[Calls], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(Calls()), HANG_S))  # type: ignore[arg-type]


async def answer(error: Exception | None = None) -> str:
    if error is not None:
        raise error
    return "values"


def test_a_context_names_the_model_and_the_generation() -> None:
    calls = Calls().calls
    assert calls.context() == CallContext(job="job", generation=1, model=MODEL)
    assert calls.context(generation=7).generation == 7


def test_an_answer_and_an_error_come_back_and_are_measured() -> None:
    async def body(c: Calls) -> None:
        gather = c.trace.call("gather", 0)
        assert await c.calls.run(lambda span: answer(), gather) == "values"
        with pytest.raises(Broken):
            await c.calls.run(lambda span: answer(Broken("gone")), gather)
        assert c.trace.seconds["gather"].count == 2

    run(body)


def test_a_restore_ends_the_calls_of_an_epoch() -> None:
    async def body(c: Calls) -> None:
        of_epoch, of_any = await c.begun(epoch=0), await c.begun()
        c.calls.end_stale()
        assert not of_epoch.cancelling()
        assert not of_any.cancelling()
        c.restore()
        with pytest.raises(StepAborted, match="this is epoch 1, no longer 0"):
            await of_epoch
        assert not of_any.cancelling()
        with pytest.raises(StepAborted):
            await c.calls.run(lambda span: answer(), epoch=0)
        assert await c.calls.run(lambda span: answer(), epoch=1) == "values"
        of_any.cancel()
        await asyncio.wait([of_any])

    run(body)


def test_another_generation_cancels_the_calls_of_one() -> None:
    async def body(c: Calls) -> None:
        of_one, of_any = await c.begun(generation=1), await c.begun()
        c.job.known = members(2)
        c.calls.end_stale()
        await asyncio.wait([of_one])
        assert of_one.cancelled()
        assert not of_any.cancelling()
        of_any.cancel()
        await asyncio.wait([of_any])

    run(body)


def test_every_call_ends_with_the_session_or_the_model() -> None:
    async def body(c: Calls) -> None:
        call = await c.begun()
        c.view.on_state(JobState(model=MODEL, released=True))
        c.calls.end_stale()
        with pytest.raises(Misuse, match="was released"):
            await call
        c.view.released = False
        call = await c.begun()
        c.job.failure = Broken("the session is over")
        c.calls.end_stale()
        with pytest.raises(Broken, match="the session is over"):
            await call

    run(body)


def test_a_server_that_learns_of_a_restore_first_is_an_error_once_the_worker_knows_it() -> None:
    async def body(c: Calls) -> None:
        error = StepAborted("the job was restored")
        with pytest.raises(StepAborted, match="the job was restored"):
            await c.calls.run(lambda span: answer(error), epoch=0)
        retried = asyncio.create_task(c.calls.run(lambda span: answer(error), epoch=0, retried=True))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not retried.done()
        c.restore()
        with pytest.raises(StepAborted, match="the parameters were replaced meanwhile"):
            await retried

    run(body)


def test_a_time_out_names_the_members_that_the_job_waits_for() -> None:
    async def body(c: Calls) -> None:
        with pytest.raises(Timeout, match=r"^too late$"):
            await c.calls.run(lambda span: answer(Timeout("too late")))
        c.job.known = members(waiting_for="1 of 2 shard servers")
        with pytest.raises(Timeout, match="too late; the job is waiting for 1 of 2 shard servers"):
            await c.calls.run(lambda span: answer(Timeout("too late")))

    run(body)
