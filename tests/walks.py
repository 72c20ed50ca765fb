"""What a gradient, a parameter, a vote and an all-reduce pass on their way, function by function.

    python tests/walks.py              every walk, as the list of its functions
    python tests/walks.py --summary    only how many functions in how many files

A job in one process (`World.mock`, with the real coordinator and servers) is traced while it does one thing. Listed are
the functions of the package that were entered, on any thread, in the order of their first call, but for those that run
in an idle job, too. Helpers and properties count, so a walk is longer here than the path that a reader follows; it says
which way it changes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

SETTLED_S = 0.4
"""After which nothing is under way any more."""

IDLE_S = 1.2
"""How long an idle job is watched: some heartbeats."""


class Trace:
    """Functions of the package that are entered while it is on; made before the threads that it is to see."""

    def __init__(self) -> None:
        self._seen: dict[CodeType, None] | None = None
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    @contextmanager
    def on(self) -> Iterator[list[str]]:
        """The names of the functions, once the block is left."""
        names: list[str] = []
        self._seen = seen = {}
        yield names
        time.sleep(SETTLED_S)
        self._seen = None
        names += [name for code in seen if (name := _name(code))]

    def idle(self) -> set[str]:
        """The functions that run without being asked to."""
        with self.on() as names:
            time.sleep(IDLE_S)
        return set(names)

    def of(self, act: Callable[[], object]) -> list[str]:
        """The functions of what `act` does."""
        with self.on() as names:
            act()
        return names

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if (seen := self._seen) is not None and event == "call":
            seen.setdefault(frame.f_code)


def _name(code: CodeType) -> str:
    _, package, where = code.co_filename.rpartition("/axon_ps/")
    if not package or code.co_name.startswith("<") or where.startswith("wire/v1/"):
        return ""
    return f"{where} {code.co_qualname}"


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
        for _ in range(2):  # what is made at its first use is no part of the walk
            loss = model(x).square().mean()
            backward = trace.of(loss.backward)
            step = trace.of(optimizer.step)
            optimizer.zero_grad()
        idle = trace.idle()
        yield "a gradient, from backward() to the servers", [name for name in backward if name not in idle]
        yield "a vote, from optimizer.step() to its result", [name for name in step if name not in idle]
    with axon_ps.World.mock(shards=2) as world, torch.no_grad():
        model = model_of(world, ShardingStrategy.FULL_SHARD)
        model(x)
        forward, idle = trace.of(lambda: model(x)), trace.idle()
        yield "a parameter, from the servers to the module", [name for name in forward if name not in idle]


def collectives(trace: Trace) -> Iterator[tuple[str, list[str]]]:
    """The walks of an all-reduce of two ranks."""
    import numpy as np

    import axon_ps

    worlds = axon_ps.World.mock(2, shards=2)
    with ThreadPoolExecutor(2) as threads:
        for backend in ("grpc", "shm"):
            groups = list(threads.map(lambda world, b=backend: world.new_group([0, 1], backend=b), worlds))

            def all_reduce(groups: Any = groups) -> None:
                list(threads.map(lambda group: group.all_reduce(np.ones(5000, np.float32)), groups))

            all_reduce()
            names, idle = trace.of(all_reduce), trace.idle()
            yield f"an all-reduce over {backend}", [name for name in names if name not in idle]
        list(threads.map(lambda world: world.close(), worlds))


def main() -> None:
    """Print them."""
    trace = Trace()
    for walks in (training, collectives):
        for what, names in walks(trace):
            print(f"{what}: {len(names)} functions in {len({name.split()[0] for name in names})} files")
            if "--summary" not in sys.argv:
                print(*(f"    {name}" for name in names), sep="\n")


if __name__ == "__main__":
    main()
