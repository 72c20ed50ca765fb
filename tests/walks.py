"""The walks: what a gradient, a parameter, a vote and an all-reduce pass on their way, function by function.

    python tests/walks.py              every walk, as the list of its functions
    python tests/walks.py --summary    only how many functions in how many files

It fails if a walk is longer than `LONGEST`.

A walk is cut into legs, each up to a function that sends, receives, computes or publishes. A job in one process
(`World.mock`, with the real coordinator and servers) is traced while it does one thing; when such a function is first
entered, the functions of the package on its thread's stack are what was passed to get there. What these call beside
the way (checks, properties, conversions) is not listed, and the transport inside the process, which stands for gRPC,
neither.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

SETTLED_S = 0.4
"""After which nothing is under way any more."""

LEGS: Mapping[str, Sequence[str]] = {
    "a gradient, from backward to the master": (
        "rpc/background_loop.py BackgroundLoop.submit",
        "wire/frames.py encode_chunk",
        "compress/cast.py accumulate_last",
        "shard/core/master.py Master.update",
    ),
    "a vote, from step() to its result": (
        "coordinator/client/session.py CoordinatorClient.vote",
        "coordinator/messages.py vote_to_proto",
        "coordinator/core/steps/decision.py Tally.decide",
        "storage/state_store/memory.py MemoryStateStore.apply",
        "coordinator/server/shell.py Session.send",
        "worker/steps/stepping.py SynchronousSteps.decided",
        "worker/steps/stepping.py SynchronousSteps.decision_on",
    ),
    "a parameter, from the server to the module": (
        "rpc/service.py ServerStream.write",
        "shard/client/transfers.py _copy",
        "parallel/fsdp/flat_unit.py FlatUnit._set_data",
    ),
    "an all-reduce over grpc": (
        "rpc/background_loop.py BackgroundLoop.run",
        "wire/frames.py encode_chunk",
        "reduction/ops.py accumulate",
        "reduction/ops.py finish",
        "rpc/service.py ServerStream.write",
        "aggregation/client/operation_stream.py OperationStream.data",
    ),
    "an all-reduce over shm": (
        "collectives/backends/shm/control.py Control.barrier",
        "reduction/ops.py reduce_into",
        "collectives/backends/shm/exchange.py Exchange.pull",
    ),
}

LONGEST: Mapping[str, tuple[int, int]] = dict(
    zip(LEGS, ((32, 20), (32, 17), (20, 13), (36, 20), (26, 13)), strict=True)
)
"""How many functions and files a walk may pass; `test_house.py` holds it."""

_BESIDE = ("wire/v1/", "rpc/in_process.py")

GRADIENT, VOTE, PARAMETER, GRPC, SHM = LEGS


class Trace:
    """The stacks on which the last functions of legs are entered; made before the threads that it is to see."""

    def __init__(self) -> None:
        self._names: dict[CodeType, str] = {}
        self._stacks: dict[str, list[str]] | None = None
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def walk(self, what: str, *acts: Callable[[], object]) -> list[str]:
        """The functions that `acts` pass, in the order of the walk's legs."""
        self._ends, self._stacks = frozenset(LEGS[what]), {}
        for act in acts:
            act()
        time.sleep(SETTLED_S)
        stacks, self._stacks = self._stacks, None
        if missing := self._ends - stacks.keys():
            raise AssertionError(f"{what} does not pass {', '.join(sorted(missing))} any more")
        return list(dict.fromkeys(name for end in LEGS[what] for name in stacks[end]))

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        stacks = self._stacks
        if stacks is None or event != "call":
            return
        name = self._name(frame.f_code)
        if name not in self._ends or name in stacks:
            return
        stack = [name]
        while (outer := frame.f_back) is not None:
            frame = outer
            if passed := self._name(frame.f_code):
                stack.append(passed)
        stacks[name] = stack[::-1]

    def _name(self, code: CodeType) -> str:
        if (name := self._names.get(code)) is None:
            _, package, where = code.co_filename.rpartition("/axon_ps/")
            ours = package and not code.co_name.startswith("<") and not where.startswith(_BESIDE)
            name = self._names[code] = f"{where} {code.co_qualname}" if ours else ""
        return name


def training(trace: Trace) -> Iterator[tuple[str, list[str]]]:
    """The walks of a step."""
    import torch
    from torch import nn

    import axon_ps
    from axon_ps.parallel import FSDP, SGD, ShardingStrategy

    torch.set_num_threads(1)
    x = torch.ones(4, 64)

    def model_of(world: axon_ps.World, strategy: ShardingStrategy) -> FSDP:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return FSDP(layers, world.default_group, sharding_strategy=strategy, unit_types={nn.Linear})

    with axon_ps.World.mock(shards=2) as world:
        model = model_of(world, ShardingStrategy.SHARD_GRAD_OP)  # backward gathers nothing
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
    with axon_ps.World.mock(shards=2) as world, torch.no_grad():
        model = model_of(world, ShardingStrategy.FULL_SHARD)
        model(x)
        yield PARAMETER, trace.walk(PARAMETER, lambda: model(x))


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


def main() -> None:
    """Print them."""
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
