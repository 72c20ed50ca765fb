"""One worker of the collectives benchmark: the same operations over gloo, or over the shard servers.

It is started by collectives_netns.py. All ranks run on one machine and so have the same clock. A round begins at one
moment on all of them, so neither side's time depends on the accuracy of its barrier. For every operation rank 0 prints
READY before the timed rounds and DONE after them, and waits for a line on its standard input each time, so that the
parent reads counters while no rank works. The last line of every rank is its result as JSON: seconds of every round, by
operation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
TIMEOUT_S = 120.0
LEAD_S = 0.005
"""Seconds between the moment at which the last rank is ready and the begin of a round."""

POLL_S = 0.0005


@dataclass(frozen=True)
class Side:
    """The interface of a system: every operation on ready buffers, and a barrier."""

    rank: int
    operations: dict[str, Callable[[], None]]
    barrier: Callable[[], None]
    close: Callable[[], None]


def gloo(numel: int) -> Side:
    """Make the side of torch.distributed's gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = torch.full((numel,), float(rank + 1)), torch.full((numel // size,), float(rank + 1))
    out, mine = torch.empty(numel), torch.empty(numel // size)

    def all_reduce() -> None:
        dist.all_reduce(whole)
        assert float(whole[0]) == float(whole[-1]) >= size

    def all_gather() -> None:
        dist.all_gather_into_tensor(out, part)
        assert float(out[-1]) == size

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(mine, whole)
        assert float(mine[0]) == float(mine[-1]) >= size

    return Side(
        rank,
        {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter},
        dist.barrier,
        dist.destroy_process_group,
    )


def axon(numel: int) -> Side:
    """Make the side of axon_ps: the calls of the gRPC backend, without a World."""
    from itertools import count

    from axon_ps.aggregation.client.client import CollectiveClient
    from axon_ps.collectives.backends.base import Call, GroupContext, Operation, Request
    from axon_ps.collectives.backends.grpc import GrpcBackend, GrpcCalls
    from axon_ps.coordinator.client.session import CoordinatorClient
    from axon_ps.rpc.background_loop import BackgroundLoop
    from axon_ps.types import Array, DType, Membership, ReduceOp, Role
    from axon_ps.worker.environment import worker_config

    config, size, loop = worker_config(os.environ), int(os.environ["WORLD_SIZE"]), BackgroundLoop()

    def on_event(event: object) -> None:
        if isinstance(event, Membership):
            client.set_members(event)

    coordinator = CoordinatorClient(
        config.coordinator,
        job=config.job,
        role=Role.WORKER,
        node=config.node,
        security=config.security,
        requested_rank=config.rank,
        world_size=size,
        on_event=on_event,
    )

    async def make() -> CollectiveClient:
        return CollectiveClient(config.security, coordinator.context)

    client = loop.run(make())
    loop.run(coordinator.start(TIMEOUT_S))
    while coordinator.membership is None or not coordinator.membership.complete:
        time.sleep(0.01)
    members = coordinator.membership.workers
    rank = coordinator.rank
    context = GroupContext(
        name="bench",
        rank=rank,
        ranks=tuple(range(size)),
        members=members,
        store=None,  # type: ignore[arg-type]  # this backend needs no store
    )
    backend = GrpcBackend(context, GrpcCalls(loop=loop, client=client))
    sequence = count()
    whole, part = np.full(numel, rank + 1.0, np.float32), np.full(numel // size, rank + 1.0, np.float32)
    out, mine = np.empty(numel, np.float32), np.empty(numel // size, np.float32)
    parts = (numel // size,) * size

    def run(
        operation: Operation,
        counts: tuple[int, ...] = (),
        data: Array | None = None,
        output: Array | None = None,
        op: ReduceOp | None = None,
    ) -> None:
        call = Call(sequence=next(sequence), operation=operation, dtype=DType.F32, counts=counts, op=op)
        backend.run(Request(call=call, data=data, output=output), TIMEOUT_S)

    def all_reduce() -> None:
        run(Operation.ALL_REDUCE, (numel,), whole, op=ReduceOp.SUM)
        assert float(whole[0]) == float(whole[-1]) >= size

    def all_gather() -> None:
        run(Operation.ALL_GATHER, parts, part, out)
        assert float(out[-1]) == size

    def reduce_scatter() -> None:
        run(Operation.REDUCE_SCATTER, parts, whole, mine, ReduceOp.SUM)
        assert float(mine[0]) == float(mine[-1]) >= size

    def close() -> None:
        backend.close()
        loop.run(client.close())
        loop.run(coordinator.close("done"))
        loop.close()

    return Side(
        rank,
        {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter},
        lambda: run(Operation.BARRIER),
        close,
    )


class Start:
    """The moment at which all ranks begin, agreed in a file that they share.

    Args:
        path: path of the file, with the ranks' moments f64[n], zeros at first.
        rank: this rank.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._ready_s = np.memmap(path, np.float64, "r+")
        self._rank = rank
        self._last_s = 0.0

    def wait(self) -> float:
        """Wait until all ranks are ready and a little longer; returns that moment, of `time.perf_counter`."""
        self._ready_s[self._rank] = time.perf_counter()
        while self._ready_s.min() <= self._last_s:
            time.sleep(POLL_S)
        self._last_s = float(self._ready_s.max()) + LEAD_S
        time.sleep(max(0.0, self._last_s - time.perf_counter()))
        return self._last_s


def ask(side: Side, word: str) -> None:
    """Stop all ranks, print `word` for the parent, and wait until it answers."""
    side.barrier()
    if side.rank == 0:
        print(word, flush=True)
        sys.stdin.readline()
    side.barrier()


def timed(side: Side, start: Start, do: Callable[[], None], rounds: int) -> list[float]:
    """Return the seconds of this rank from the begin of every round."""
    times_s = []
    for _ in range(rounds):
        side.barrier()
        begin_s = start.wait()
        do()
        times_s.append(round(time.perf_counter() - begin_s, 4))
    return times_s


def main() -> None:
    """Run one worker to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("gloo", "axon"))
    parser.add_argument("--start", required=True, help="a file of n zeros f64; see Start")
    parser.add_argument("--mib", type=int, default=64, help="of the larger buffer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    side = {"gloo": gloo, "axon": axon}[options.side]((options.mib << 20) // 4)
    start = Start(options.start, side.rank)
    result = {}
    for name in OPERATIONS:
        timed(side, start, side.operations[name], options.warmup)
        ask(side, "READY")
        result[name] = timed(side, start, side.operations[name], options.rounds)
        ask(side, "DONE")
    side.close()
    print(json.dumps({"rank": int(os.environ["RANK"]), "times_s": result}), flush=True)


if __name__ == "__main__":
    main()
