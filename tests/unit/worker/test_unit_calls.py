"""A worker's calls about one unit: what it asks for, and what it has mapped.

Tests of `worker/steps/gradients.py` and `worker/steps/parameters.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import Broken, Closed, GenerationChanged, Misuse
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.policy import Asynchronous
from axon_ps.types import Array, Decision, DType, Member, Membership, Outcome, ReplicaClock, Role
from axon_ps.wire.events import JobState, Registered
from axon_ps.wire.v1.common_pb2 import CallContext
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.calls import ModelCalls
from axon_ps.worker.steps.gradients import Gradients
from axon_ps.worker.steps.parameters import Parameters
from axon_ps.worker.steps.step_trace import StepTrace
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.steps.view import ModelView
from deadlines import HANG_S

GRAD = np.ones(8, np.float32)


def members(generation: int = 1) -> Membership:
    me = Member(role=Role.WORKER, rank=0, incarnation="me", node="n", replica=0)
    return Membership(generation=generation, step=1, version=0, workers=(me,), shards=(), num_replicas=1, complete=True)


class Copy:
    """A unit's mapped memory, at some version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.values = GRAD

    def is_at(self, version: int) -> bool:
        return version <= self.version


class Worker:
    """A worker whose calls to the servers are recorded, and answered as given."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self.loop = loop
        self.job = JobView(lambda: "me", HANG_S)
        self.job.known = members()
        self.view = ModelView(self.job, 3)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.under_way = threading.Event()
        self.answer: Any = None
        session: Any = SimpleNamespace(
            tracer=Tracer(), state_id="", context=lambda: CallContext(generation=self.job.membership.generation)
        )
        trace = StepTrace(session, self.view)
        self.calls = ModelCalls(session, self.view, trace)
        shards: Any = SimpleNamespace(
            reduce_scatter=self._call("push"),
            gather=self._call("gather"),
            gather_speculative=self._call("speculative"),
            upload=self._call("upload"),
            mappings=SimpleNamespace(map=self._call("map")),
        )
        self.gradients = Gradients(loop, shards, self.view, self.calls, trace)
        self.parameters = Parameters(loop, shards, self.view, self.calls, trace)

    def _call(self, kind: str) -> Any:
        async def call(unit: int, *arrays: Array, context: Any, **options: Any) -> Any:
            self.asked.append((kind, {"context": context(), **options}))
            self.under_way.set()
            if self.answer == "never":
                await asyncio.Event().wait()
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return call

    def ticket(self) -> Ticket:
        return self.view.stepping.ticket(0, self.view.membership, 0)

    def change_members(self) -> None:
        async def change() -> None:
            self.job.known = members(2)
            self.calls.end_stale()

        self.loop.run(change())

    def commit(self, version: int) -> None:
        self.view.on_decision(Decision(step=version, generation=1, outcome=Outcome.COMMIT, version=version))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with BackgroundLoop("test") as loop:
        yield Worker(loop)


def test_a_push_carries_its_ticket_and_frees_the_buffer(worker: Worker) -> None:
    freed: list[bool] = []
    worker.gradients.push(0, GRAD, worker.ticket(), lambda: freed.append(True), begin=2, end=8).wait(HANG_S)
    ((kind, options),) = worker.asked
    assert (kind, options["step"], options["replica"]) == ("push", 1, 0)
    assert (options["begin"], options["end"], freed) == (2, 8, [True])
    assert options["context"] == CallContext(generation=1, model=3)


def test_a_push_that_is_cancelled_before_it_begins_frees_the_buffer(worker: Worker) -> None:
    freed: list[bool] = []
    busy, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        busy.set()
        go_on.wait(HANG_S)

    blocking = worker.loop.submit(block())
    assert busy.wait(HANG_S)
    work = worker.gradients.push(0, GRAD, worker.ticket(), lambda: freed.append(True))
    work._cancelled = True  # as `cancel` does, which then waits
    go_on.set()
    blocking.result(HANG_S)
    work.cancel()
    assert (freed, worker.asked) == ([True], [])


def test_a_push_on_a_closed_loop_frees_the_buffer(worker: Worker) -> None:
    freed: list[bool] = []
    worker.loop.close()
    with pytest.raises(Closed):
        worker.gradients.push(0, GRAD, worker.ticket(), lambda: freed.append(True))
    assert freed == [True]


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_push_ends_with_its_generation_and_frees_the_buffer(moment: str, worker: Worker) -> None:
    freed: list[bool] = []
    ticket, worker.answer = worker.ticket(), "never"
    if moment == "before":
        worker.change_members()
    work = worker.gradients.push(0, GRAD, ticket, lambda: freed.append(True))
    if moment == "during":
        assert worker.under_way.wait(HANG_S)
        worker.change_members()
    with pytest.raises(GenerationChanged, match=f"the membership changed {moment} the push"):
        work.wait(HANG_S)
    assert freed == [True]
    assert len(worker.asked) == (moment == "during")


def test_an_error_of_a_push_is_the_callers_and_frees_the_buffer(worker: Worker) -> None:
    freed: list[bool] = []
    worker.answer = Broken("gone")
    with pytest.raises(Broken, match="gone"):
        worker.gradients.push(0, None, worker.ticket(), lambda: freed.append(True)).wait(HANG_S)
    assert freed == [True]


def test_a_gather_asks_for_this_workers_version_and_an_exact_one_for_the_newest(worker: Worker) -> None:
    spec = JobSpec(layout=Layout(units=(build_unit("u", [("w", (8,), DType.F32)]),)), policy=Asynchronous())
    worker.view.registered(spec, Registered(first=True, initialized=True, version=4, upload=False), "m")
    assert worker.view.version == 4, "its step begins"
    clock = ReplicaClock(replica=1, clock=0, slowest_clock=0)
    worker.view.on_decision(Decision(step=5, generation=1, outcome=Outcome.COMMIT, version=5, replica_clock=clock))
    worker.answer = 5
    for exact in (False, True):
        assert worker.parameters.gather(0, GRAD, begin=2, exact=exact).wait(HANG_S) == 5
    asked = [(options["min_version"], options["compressed"], options["begin"]) for _, options in worker.asked]
    assert asked == [(4, True, 2), (5, False, 2)]


def test_a_speculative_gather_names_the_step_and_its_hyperparameters(worker: Worker) -> None:
    ticket, worker.answer = worker.ticket(), 1
    worker.change_members()
    worker.parameters.gather_speculative(0, GRAD, ticket, [{"lr": 0.5}], end=4).wait(HANG_S)
    ((kind, options),) = worker.asked
    assert (kind, options["step"], options["hyper"], options["end"]) == ("speculative", 1, ({"lr": 0.5},), 4)
    assert options["context"].generation == 1, "that of the step"


def test_first_values_are_of_an_epoch(worker: Worker) -> None:
    worker.parameters.upload(0, GRAD, epoch=2)
    ((kind, options),) = worker.asked
    assert (kind, options["epoch"], options["timeout_s"]) == ("upload", 2, HANG_S)


def test_mapped_memory_is_read_again_while_it_is_at_this_workers_version(worker: Worker) -> None:
    assert worker.parameters.mapped(0) is None
    worker.answer = copy = Copy(version=1)
    assert worker.parameters.map(0, DType.F32).wait(HANG_S) is copy
    assert worker.parameters.mapped(0) is copy
    assert worker.parameters.mapped(1) is None
    worker.commit(1)
    assert worker.parameters.mapped(0) is copy
    assert worker.parameters.mapped_bytes == 3 * GRAD.nbytes
    worker.commit(2)
    assert worker.parameters.mapped(0) is None, "the servers are not there yet"
    copy.version = 2
    assert worker.parameters.mapped(0) is copy


@pytest.mark.parametrize("change", ["members", "epoch"])
def test_mapped_memory_is_mapped_again_after_a_change(change: str, worker: Worker) -> None:
    worker.view.on_state(JobState())
    worker.answer = Copy(version=9)
    worker.parameters.map(0, DType.F32).wait(HANG_S)
    if change == "members":
        worker.change_members()
    else:
        worker.view.on_state(JobState(epoch=1))
    assert worker.parameters.mapped(0) is None
    worker.parameters.map(0, DType.F32).wait(HANG_S)
    assert worker.parameters.mapped(0) is worker.answer


def test_memory_of_a_released_model_is_not_read(worker: Worker) -> None:
    worker.answer = Copy(version=9)
    worker.parameters.map(0, DType.F32).wait(HANG_S)
    worker.view.on_state(JobState(released=True))
    with pytest.raises(Misuse, match="was released"):
        worker.parameters.mapped(0)


def test_a_unit_that_cannot_be_mapped_is_not_remembered(worker: Worker) -> None:
    assert worker.parameters.map(0, DType.F32).wait(HANG_S) is None
    assert worker.parameters.mapped(0) is None
    assert worker.parameters.mapped_bytes == 0
