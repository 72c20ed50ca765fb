"""The walks: what a gradient, a parameter, a vote and an all-reduce pass on their way, function by function.

    python tests/walks.py              every walk, as the list of its functions
    python tests/walks.py --summary    only how many functions in how many files
    python tests/walks.py --detour     the same with a function more on the way of a gradient, which must be counted

It fails if a walk is longer than `LONGEST`.

A walk is cut into legs, each up to a function that sends, receives, computes or publishes. A job is traced while it
does one thing. When the last function of a leg is entered, below the function that the leg must pass, the functions of
the package on the stack of its thread are those that were passed. Functions beside the way (checks, properties,
conversions) are not listed.

A step is traced in a job whose coordinator, shard servers and worker are in this process, and talk over sockets as
processes of two hosts do: gRPC, and bulk connections for parameters and gradients. All-reduces are traced in a job
without sockets (`World.mock`), whose transport inside the process is not listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any, NamedTuple

WIDTH = 256
"""Of layers: enough for a chunk to be a large message."""

SETTLED_S = 0.4
"""Seconds after which nothing is under way any more."""


class Leg(NamedTuple):
    """A part of a walk.

    Attributes:
        end: its last function.
        passed: a function that is on the way to that.
    """

    end: str
    passed: str = ""


LEGS: Mapping[str, Sequence[Leg]] = {
    "a gradient, from backward to the master": (
        Leg("rpc/background_loop.py BackgroundLoop.submit", "parallel/fsdp/runtime.py Runtime.grad_ready"),
        Leg("rpc/carriers/bulk/connection.py Connection._send_all", "shard/client/transfers.py Transfers._send"),
        Leg(
            "rpc/carriers/bulk/connection.py Connection._advance",
            "shard/server/servicer.py ShardServicer.reduce_scatter",
        ),
        Leg("compress/cast.py accumulate_last", "shard/server/servicer.py ShardServicer._push"),
        Leg("shard/core/master.py Master.update", "shard/server/apply.py ApplyPool._run"),
    ),
    "a vote, from step() to its result": (
        Leg("coordinator/client/session.py CoordinatorClient.vote"),
        Leg("coordinator/messages.py step_message_to_proto"),
        Leg("coordinator/core/steps/decision.py Tally.decide"),
        Leg("storage/state_store/memory.py MemoryStateStore.apply"),
        Leg("coordinator/server/shell.py MemberSession.send"),
        Leg("worker/steps/stepping.py SynchronousSteps.decided"),
        Leg("worker/steps/stepping.py SynchronousSteps.decision_on"),
    ),
    "a parameter, from the server to the module": (
        Leg("rpc/carriers/bulk/connection.py Connection._send_all", "shard/server/servicer.py ShardServicer._gather"),
        Leg("rpc/carriers/bulk/connection.py Connection._advance", "shard/client/transfers.py Transfers.pull"),
        Leg("parallel/fsdp/flat_unit.py FlatUnit._set_data"),
    ),
    "an all-reduce over grpc": (
        Leg("rpc/background_loop.py BackgroundLoop.run"),
        Leg("wire/frames.py encode_buffers"),
        Leg("reduction/ops.py accumulate"),
        Leg("reduction/ops.py finish"),
        Leg("aggregation/server/shell.py CollectiveStream.next"),
        Leg("aggregation/client/operation_stream.py OperationStream.data"),
    ),
    "an all-reduce over shm": (
        Leg("collectives/backends/shm/control.py Control.barrier"),
        Leg("reduction/ops.py reduce_into"),
        Leg("collectives/backends/shm/exchange.py Exchange.pull"),
    ),
}

LONGEST: Mapping[str, tuple[int, int]] = dict(
    zip(LEGS, ((40, 24), (32, 17), (26, 16), (34, 18), (20, 11)), strict=True)
)
"""How many functions and files a walk may pass; `test_house.py` holds it."""

_BESIDE = ("wire/v1/", "rpc/carriers/in_process.py")

GRADIENT, VOTE, PARAMETER, GRPC, SHM = LEGS


class Trace:
    """The stacks on which the last functions of legs are entered; made before the threads that it is to see."""

    def __init__(self) -> None:
        self._names: dict[CodeType, str] = {}
        self._stacks: dict[Leg, list[str]] | None = None
        self._legs: Sequence[Leg] = ()
        self._ends: set[str] = set()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def walk(self, what: str, *acts: Callable[[], object]) -> list[str]:
        """The functions that `acts` pass, in the order of the walk's legs."""
        legs = LEGS[what]
        self._ends = {leg.end for leg in legs}
        stacks = self._stacks = {}
        self._legs = legs
        for act in acts:
            act()
        time.sleep(SETTLED_S)
        self._stacks = None
        if missing := [f"{leg.end} below {leg.passed or 'anything'}" for leg in legs if leg not in stacks]:
            raise AssertionError(f"{what} does not pass {', '.join(missing)} any more")
        return list(dict.fromkeys(name for leg in legs for name in stacks[leg]))

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        stacks = self._stacks
        if stacks is None or event != "call":
            return
        name = self._name(frame.f_code)
        if name not in self._ends:
            return
        stack = [name]
        while (outer := frame.f_back) is not None:
            frame = outer
            if passed := self._name(frame.f_code):
                stack.append(passed)
        for leg in self._legs:
            if leg.end == name and (not leg.passed or leg.passed in stack):
                stacks.setdefault(leg, stack[::-1])

    def _name(self, code: CodeType) -> str:
        if (name := self._names.get(code)) is None:
            _, package, where = code.co_filename.rpartition("/axon_ps/")
            ours = package and not code.co_name.startswith("<") and not where.startswith(_BESIDE)
            name = self._names[code] = f"{where} {code.co_qualname}" if ours else ""
        return name


@contextlib.contextmanager
def job(shards: int) -> Iterator[str]:
    """Coordinator and shard servers on a loop of their own; the coordinator's address."""
    from axon_ps.coordinator.config import CoordinatorConfig
    from axon_ps.coordinator.server import server as coordinator
    from axon_ps.rpc.security import Security
    from axon_ps.shard.server import server as shard
    from axon_ps.storage.state_store import MemoryStateStore

    started: Future[str] = Future()
    stop, security = asyncio.Event(), Security()

    async def serve() -> None:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        config = CoordinatorConfig(job="walks", world_size=1, num_shards=shards)
        store = MemoryStateStore()
        tasks = [
            asyncio.ensure_future(
                coordinator.serve(config, "127.0.0.1", 0, security, store, listening.set_result, stop)
            )
        ]
        address = f"127.0.0.1:{await listening}"
        of_server = shard.ShardConfig(coordinator=address, job="walks", security=security, threads=1, node="servers")
        tasks += [asyncio.ensure_future(shard.serve(of_server, lambda _: None, stop)) for _ in range(shards)]
        started.set_result(address)
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(*tasks)

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield started.result(60.0)
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60.0)


def training(trace: Trace) -> Iterator[tuple[str, list[str]]]:
    """The walks of a step."""
    import torch
    from torch import nn

    import axon_ps
    from axon_ps.parallel import FSDP, SGD, ShardingStrategy
    from axon_ps.rpc.security import Security
    from axon_ps.worker.environment import WorkerConfig

    torch.set_num_threads(1)
    x = torch.ones(4, WIDTH)

    def model_of(world: axon_ps.World, strategy: ShardingStrategy, name: str) -> FSDP:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        return FSDP(layers, world.default_group, sharding_strategy=strategy, unit_types={nn.Linear}, name=name)

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(job(shards=2))
        config = WorkerConfig(
            coordinator=address, job="walks", world_size=1, node="worker", direct_memory=False, security=Security()
        )
        world = stack.enter_context(axon_ps.World.init(config, timeout_s=60.0))
        model = model_of(world, ShardingStrategy.SHARD_GRAD_OP, "a")  # backward gathers nothing
        optimizer = SGD(model, lr=0.1)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # what is made at its first use is no part of the walks
        yield GRADIENT, trace.walk(GRADIENT, model(x).square().mean().backward, optimizer.step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        yield VOTE, trace.walk(VOTE, optimizer.step)
        full = model_of(world, ShardingStrategy.FULL_SHARD, "b")
        with torch.no_grad():
            full(x)
            again = [lambda: full(x)] * 3  # on a loaded machine the first forward may find its values prefetched
            yield PARAMETER, trace.walk(PARAMETER, *again)


def collectives(trace: Trace) -> Iterator[tuple[str, list[str]]]:
    """The walks of an all-reduce of two ranks."""
    import numpy as np

    import axon_ps

    worlds = axon_ps.World.mock(2, shards=2)
    with ThreadPoolExecutor(2) as threads:
        for what, backend in ((GRPC, "grpc"), (SHM, "shm")):
            groups = list(threads.map(lambda world, b=backend: world.new_group([0, 1], backend=b), worlds))

            def all_reduce(groups: Any = groups) -> None:
                list(threads.map(lambda group: group.all_reduce(np.ones(200_000, np.float32)), groups))

            all_reduce()
            yield what, trace.walk(what, all_reduce)
        list(threads.map(lambda world: world.close(), worlds))


def detour() -> None:
    """Let each gradient pass a function more, of a file more."""
    from axon_ps.shard.core import accumulator

    straight = accumulator.Accumulator.add
    source = "def around(*args, **how): return straight(*args, **how)"
    names: dict[str, Any] = {"straight": straight}
    exec(compile(source, accumulator.__file__.replace("accumulator", "detour"), "exec"), names)
    accumulator.Accumulator.add = names["around"]  # type: ignore[method-assign]


def main() -> None:
    """Print them."""
    if "--detour" in sys.argv:
        detour()
    trace, too_long = Trace(), list[str]()
    for walks in (training, collectives):
        for what, names in walks(trace):
            files = len({name.split()[0] for name in names})
            print(f"{what}: {len(names)} functions in {files} files")
            if len(names) > LONGEST[what][0] or files > LONGEST[what][1]:
                too_long.append(what)
            if "--summary" not in sys.argv:
                print(*(f"    {name}" for name in names), sep="\n")
    if too_long:
        sys.exit(f"longer than LONGEST in {__file__} allows: {'; '.join(too_long)}")


if __name__ == "__main__":
    main()
