"""Long work of a shard server stands in the way of nothing: it runs in a thread, and events wait for it in order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import AxonError, CheckpointError, GenerationChanged
from axon_ps.host import shared_memory
from axon_ps.rpc.security import Security
from axon_ps.rpc.stream import EOF
from axon_ps.shard.core.digests import SliceDigests
from axon_ps.shard.core.master import Master
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.core.wire_copy import WireCopy
from axon_ps.shard.server import copying, model_shell, model_values
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.model_capacity import RELEASED_NUMEL, free
from axon_ps.shard.server.shell import ShardShell
from axon_ps.sharding.placement import Placement, Server, new_placement
from axon_ps.types import Decision, DType, Member, Membership, Outcome, Role
from axon_ps.wire.events import JobState, Ready, RestoreOrder
from axon_ps.wire.v1.common_pb2 import CallContext
from engine_driver import Servers, job_of, layout_of, one_group

HANG_S = 120.0
LAYOUT = layout_of([20_000], [20_000])
SPEC = job_of(LAYOUT, chunk_numel=16_384, min_slice_numel=1 << 20)
BOTH = [Server(0, node="n"), Server(1, node="n")]
CALLER = CallContext(job="j", generation=1, incarnation="w")


class Reports:
    rank = 0

    def __init__(self) -> None:
        self.initialized_at: list[tuple[int, int]] = []
        self.readied: list[int] = []

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        self.readied.append(ready.step)

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        self.initialized_at.append((model, version))

    def copied(self, copied: Any) -> None:
        pass

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        pass


@dataclass
class Long:
    """Work that lasts until it is let go, and may not be done by the event loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    thread: int = field(default_factory=threading.get_ident)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            assert threading.get_ident() != self.thread, f"the event loop does {original.__qualname__} itself"
            self.loop.call_soon_threadsafe(self.began.set)
            assert self.over.wait(HANG_S)
            return original(*args, **kwargs)

        return work


class Job:
    """A server with a model, 0, that the test makes, and another one, 1, that is served all the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.shell, self.reports = ShardShell("j", threads=1), Reports()
        self.shell.reports = self.reports  # type: ignore[assignment]
        self.shell.links = Links(Security(), "n", "j", "s0")
        worker = Member(role=Role.WORKER, rank=0, incarnation="w", node="n", replica=0)
        servers = tuple(
            Member(role=Role.SHARD, rank=r, incarnation=f"s{r}", node="n", address="127.0.0.1:1") for r in (0, 1)
        )
        self.membership = Membership(
            generation=1, step=1, version=0, workers=(worker,), shards=servers, num_replicas=1, complete=True
        )
        self.shell.on_event(self.membership)

    @property
    def model(self) -> model_shell.ModelShell:
        return self.shell.model(0)

    def placement(self, copies: int = 2, number: int = 0) -> Placement:
        made = new_placement(SPEC.plan(2), BOTH, copies)
        return replace(made, number=number or made.number)

    def state(self, model: int, copies: int = 2, **changes: Any) -> JobState:
        made = {"spec": SPEC, "optimizer": one_group(LAYOUT, lr=1.0), "placement": self.placement(copies), **changes}
        return JobState(model=model, name=f"m{model}", **made)

    async def configured(self, model: int = 0, **changes: Any) -> None:
        self.shell.on_event(self.state(model, **changes))
        await self.shell.model(model).order.idle.wait()

    async def upload(self, model: int = 0) -> None:
        for owned in self.shell.model(model).engine.slices.values():
            for begin, end in owned.chunks.bounds:
                values = np.arange(begin, end, dtype=np.float32)
                await self.shell.model(model).values.upload(0, owned.chunks.unit, begin, values)

    async def push(self, model: int, step: int) -> None:
        for owned in self.shell.model(model).engine.slices.primaries:
            for begin, end in owned.chunks.bounds:
                grad = np.ones(end - begin, np.float32)
                await self.shell.model(model).gradients.push((step, owned.chunks.unit, begin, 0), DType.F32, grad)

    async def others_are_served(self) -> None:
        """Do what goes on beside: a heartbeat's figures, a fenced call, a push to the other model."""
        assert "slice_bytes" in self.shell.measures()
        engine = self.shell.model(1).engine
        context = CallContext(job="j", generation=engine.generation, incarnation="w", model=1)
        model, member = await self.shell.fence.worker(context)
        assert (model.number, member.rank) == (1, 0)
        await self.push(1, engine.step)

    @contextlib.asynccontextmanager
    async def long(self, owner: Any, name: str) -> AsyncIterator[Long]:
        """`owner.name` is long work: the context begins with it when it has begun, and ends it."""
        work = Long()
        with self.patch.context() as patch:
            patch.setattr(owner, name, work.instead_of(getattr(owner, name)))
            yield work
            await asyncio.wait_for(work.began.wait(), HANG_S)
            await self.others_are_served()
            work.over.set()
            await asyncio.wait_for(self.model.order.idle.wait(), HANG_S)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Job], Awaitable[None]]], None]:
    def runs(body: Callable[[Job], Awaitable[None]]) -> None:
        async def main() -> None:
            job = Job(monkeypatch)
            try:
                await job.configured(1)
                await job.upload(1)
                await asyncio.wait_for(body(job), HANG_S)
                assert not job.shell.failure.done()
            finally:
                await job.shell.close()

        asyncio.run(main())

    return runs


Run = Callable[[Callable[[Job], Awaitable[None]]], None]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(shared_memory, "_populate", id="memory of sums that are forwarded"),
        pytest.param(model_shell, "warm_up", id="loops to compile"),
        pytest.param(Master, "add_moments", id="the optimizer's state"),
    ],
)
def test_a_model_is_made_beside_what_else_a_server_does(run: Run, owner: Any, name: str) -> None:
    async def body(job: Job) -> None:
        async with job.long(owner, name) as work:
            job.shell.on_event(job.state(0))
            await work.began.wait()
            assert job.model.order.is_busy
            caller = asyncio.ensure_future(job.shell.fence.worker(CALLER))
            await asyncio.sleep(0)
            if name != "add_moments":  # before that, nothing is known to callers
                assert not caller.done(), "it is not there yet"
        assert (await caller)[0] is job.model
        assert job.model.engine.configured
        assert job.model.engine.optimizer.updater is not None

    run(body)


def test_a_caller_waits_for_a_model_that_is_being_made_as_long_as_that_takes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axon_ps.shard.server.calls.fence.FENCE_S", 0.0)

    async def body(job: Job) -> None:
        async with job.long(shared_memory, "_populate") as work:
            job.shell.on_event(job.state(0))
            await work.began.wait()
            caller = asyncio.ensure_future(job.shell.fence.worker(CALLER))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not caller.done()
        assert (await caller)[0] is job.model

    run(body)


def test_what_is_decided_about_a_model_that_is_being_made_waits_in_order(run: Run) -> None:
    async def body(job: Job) -> None:
        called = []
        async with job.long(shared_memory, "_populate") as work:
            job.shell.on_event(job.state(0))
            await work.began.wait()
            job.shell.on_event(replace(job.membership, generation=2, step=2))
            job.model.order.call(lambda: called.append(job.model.engine.generation))
            job.shell.on_event(replace(job.membership, generation=3, step=3))
            assert job.model.engine.generation == 1
            assert not called
            with pytest.raises(GenerationChanged):
                await job.shell.fence.worker(CALLER)
        assert called == [2]
        assert job.model.engine.generation == 3

    run(body)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(SliceDigests, "record", id="hash"),
        pytest.param(WireCopy, "replace", id="encode"),
    ],
)
def test_first_values_are_published_beside_what_else_a_server_does(run: Run, owner: Any, name: str) -> None:
    async def body(job: Job) -> None:
        await job.configured()
        async with job.long(owner, name) as work:
            uploading = asyncio.ensure_future(job.upload())
            await work.began.wait()
            assert (0, 0) not in job.reports.initialized_at
            assert not job.model.engine.parameters.available(0, 0, 0)
        await uploading
        assert job.reports.initialized_at.count((0, 0)) == 1
        frames = await job.model.reads.frames(0, 0, 20_000, 1)
        assert len(frames) == 2

    run(body)


def test_a_backup_makes_the_frames_that_somebody_asks_for_beside_what_else_it_does(run: Run) -> None:
    async def body(job: Job) -> None:
        await job.configured()
        await job.upload()
        owned = next(s for s in job.model.engine.slices.values() if not s.primary)
        unit, end = owned.chunks.unit, owned.chunks.end
        asked = []
        async with job.long(WireCopy, "encode_all") as work:
            asked = [asyncio.ensure_future(job.model.reads.frames(unit, 0, end, 1)) for _ in range(2)]
            await work.began.wait()
        first, second = await asyncio.gather(*asked)
        assert first == second
        assert len(first) == len(owned.chunks.bounds)
        assert job.model.engine.counters["encodings"] == 4  # of a primary's two chunks, and these

    run(body)


def test_a_unit_is_mapped_beside_what_else_a_server_does_and_no_step_begins_meanwhile(run: Run) -> None:
    async def body(job: Job) -> None:
        await job.configured(copies=1, placement=new_placement(SPEC.plan(1), [BOTH[0]], 1))
        await job.upload()
        owned = job.model.engine.slices[0]
        before = owned.master.values.copy()
        async with job.long(shared_memory, "_populate") as work:
            mapped = [asyncio.ensure_future(job.model.values.mapped(owned)) for _ in range(2)]
            await work.began.wait()
            await job.push(0, 1)
            assert job.reports.readied.count(1) == 1
            job.shell.on_event(Decision(step=1, generation=1, outcome=Outcome.COMMIT, version=1, model=0))
            assert not owned.applying
            assert owned.wire.mapped is None
        first, second = await asyncio.gather(*mapped)
        assert first is second is owned.wire.mapped
        assert owned.reached == 1
        np.testing.assert_array_equal(owned.master.values, before - 1.0)

    run(body)


@pytest.mark.parametrize("param", [DType.F32, DType.BF16], ids=lambda dtype: dtype.value)
def test_what_a_mapping_replaces_is_freed_beside_what_else_a_server_does(run: Run, param: DType) -> None:
    spec = job_of(LAYOUT, chunk_numel=16_384, min_slice_numel=1 << 20, param=param)

    async def body(job: Job) -> None:
        await job.configured(copies=1, spec=spec, placement=new_placement(spec.plan(1), [BOTH[0]], 1))
        await job.upload()
        owned = job.model.engine.slices[0]
        before = [*owned.wire.frames, *([owned.master.values] if param is DType.F32 else [])]
        freed: list[Any] = []

        def free(memory: list[Any]) -> None:
            freed.extend(memory)

        job.patch.setattr(model_values, "free", free)
        async with job.long(model_values, "free"):
            mapping = asyncio.ensure_future(job.model.values.mapped(owned))
        assert await mapping is owned.wire.mapped
        assert [id(each) for each in freed] == [id(each) for each in before]

    run(body)


class Counted:
    """An array that counts how much of it is freed at a time."""

    def __init__(self, numel: int) -> None:
        self.size = numel
        self.freed: list[int] = []

    def resize(self, numel: int) -> None:
        self.freed.append(self.size - numel)
        self.size = numel


def test_memory_is_freed_a_piece_at_a_time_however_much_it_is() -> None:
    large, small = Counted(5 * RELEASED_NUMEL + 1), Counted(RELEASED_NUMEL)
    memory: list[Any] = [large, small, b"a frame"]
    free(memory)
    assert not memory
    assert large.freed == [RELEASED_NUMEL] * 5
    assert (large.size, small.freed) == (1, [])


def test_memory_that_is_read_elsewhere_is_not_freed() -> None:
    values = np.ones(2 * RELEASED_NUMEL, np.float32)
    free([values[:], values])
    assert values.size == 2 * RELEASED_NUMEL
    assert values[-1] == 1.0


def test_a_slice_gives_all_its_memory_to_be_freed() -> None:
    made = Servers(job_of(LAYOUT), optimizer=one_group(LAYOUT, "adam", lr=1.0))
    made.upload([np.zeros(20_000, np.float32)] * 2)
    (engine,) = made.engines
    owned = engine.slices[0]
    sizes = owned.memory()
    assert sum(each.nbytes if isinstance(each, np.ndarray) else len(each) for each in owned.close()) == sum(
        sizes.values()
    )
    assert not owned.wire.frames


class Stream:
    """The chunks of a slice as a primary sends them."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def write(self, _: Any) -> None:
        pass

    async def read(self) -> Any:
        return self.chunks.pop(0) if self.chunks else EOF


def test_a_slice_that_was_copied_is_hashed_beside_what_else_a_server_does(run: Run) -> None:
    async def body(job: Job) -> None:
        await job.configured()
        await job.upload()
        owned = next(s for s in job.model.engine.slices.values() if not s.primary)
        values = owned.master.values.copy()
        chunks = [chunk async for chunk in copying.chunks(job.model.engine, owned)]

        class Stub:
            async def open_bulk(self, _: str) -> Stream:
                return Stream(chunks)

        async def stub(_: int) -> Any:
            return Stub()

        owned.copying = True
        owned.master.values[:] = 0.0
        job.patch.setattr(job.shell.links, "stub", stub)
        async with job.long(OwnedSlice, "digests_of_copy") as work:
            assert job.model._copying is not None
            job.model._copying.on_placement()
            await work.began.wait()
            assert owned.copying
        while owned.copying:
            await asyncio.sleep(0)
        np.testing.assert_array_equal(owned.master.values, values)

    run(body)


def test_slices_that_come_with_a_placement_are_made_and_those_that_go_are_freed_beside(run: Run) -> None:
    async def body(job: Job) -> None:
        await job.configured(copies=1)
        mine = set(job.model.engine.slices)
        async with job.long(shared_memory, "_populate") as work:
            job.shell.on_event(job.state(0, placement=job.placement(2, number=5)))
            await work.began.wait()
            assert set(job.model.engine.slices) == mine
        assert len(job.model.engine.slices) == 2
        async with job.long(OwnedSlice, "close"):
            job.shell.on_event(job.state(0, placement=job.placement(1, number=6)))
        assert set(job.model.engine.slices) == mine

    run(body)


def test_a_model_that_is_released_is_freed_beside_what_else_a_server_does(run: Run) -> None:
    async def body(job: Job) -> None:
        await job.configured()
        model = job.model
        work = Long()
        with job.patch.context() as patch:
            patch.setattr(OwnedSlice, "close", work.instead_of(OwnedSlice.close))
            job.shell.on_event(JobState(model=0, name="m0", released=True))
            await work.began.wait()
            await job.others_are_served()
            work.over.set()
            while job.shell._tasks:
                await asyncio.sleep(0)
        assert not model.engine.slices

    run(body)


def test_a_call_that_is_cancelled_ends_when_the_thread_has(run: Run) -> None:
    """Until then somebody writes to the memory, so nothing else may begin."""

    async def body(job: Job) -> None:
        await job.configured()
        await job.upload()
        owned = next(s for s in job.model.engine.slices.values() if not s.primary)
        async with job.long(WireCopy, "encode_all") as work:
            asked = asyncio.ensure_future(job.model.reads.frames(owned.chunks.unit, 0, owned.chunks.end, 1))
            await work.began.wait()
            job.shell.on_event(replace(job.membership, generation=2))
            for _ in range(2):
                asked.cancel()
                await asyncio.sleep(0)
            assert not asked.done()
            assert job.model.order.is_busy
            assert job.model.engine.generation == 1
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not job.model.order.is_busy
        assert owned.wire.frames
        assert job.model.engine.generation == 2, "an event that waited is not lost with the call"

    run(body)


def test_restores_are_made_in_the_order_in_which_they_came(run: Run) -> None:
    """The first waits for the model to be idle when the second one comes, at the moment at which it is."""

    async def body(job: Job) -> None:
        await job.configured()
        order, made = job.model.order, list[int]()

        def prepare(_: object, uri: str, version: int, *rest: object, **more: object) -> None:
            made.append(version)
            raise CheckpointError(f"{uri} is none")

        with job.patch.context() as patch:
            patch.setattr(model_values.snapshot, "prepare", prepare)
            async with order.begin_work():
                job.shell.on_event(RestoreOrder(epoch=1, uri="u", version=5))
            async with order.begin_work():
                job.shell.on_event(RestoreOrder(epoch=2, uri="u", version=1))
                await asyncio.sleep(0)
            while job.shell._tasks:
                await asyncio.sleep(0)
        assert made == [5, 1]
        assert job.model.values.served == 2

    run(body)
