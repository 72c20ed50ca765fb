"""200 random kills of ranks that share memory: `make lab NAME=shm-kills`, about a minute.

Each round forks 2 to 4 ranks, which do collectives and messages on ordinary or on registered arrays, and kills one of
them or all with SIGKILL, at a random moment from before they met to long after. Each survivor has to name the dead rank
within a second. Afterwards no file may be left in /dev/shm, and no key in the store unless the first rank died.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.collectives.backends.base import Operation, Request
from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend
from axon_ps.errors import AxonError
from axon_ps.types import DType, ReduceOp
from axon_ps_lab.campaigns.shm_ranks import DirectoryStore, Rank, context


def work(path: str, rank: int, n: int, numel: int, registered: bool, slot_bytes: int, reports: Connection) -> None:
    """Make collectives and messages without end; reports the error that ends them."""
    try:
        backend = SharedMemoryBackend(
            context(DirectoryStore(Path(path)), rank, n, timeout_s=5.0), slot_bytes=slot_bytes
        )
        me = Rank(backend, registered)
        data, other = (me.array(np.ones(numel, np.float32), DType.F32) for _ in range(2))
        while True:
            backend.run(
                Request(call=me.call(Operation.ALL_REDUCE, DType.F32, (numel,), op=ReduceOp.MAX), data=data), 20.0
            )
            exchanges: list[Callable[[], object]] = [
                lambda: backend.send(data, DType.F32, (rank + 1) % n, 1, 20.0),
                lambda: backend.recv(other, DType.F32, (rank - 1) % n, 1, 20.0),
            ]
            for exchange in exchanges if rank == 0 else reversed(exchanges):
                exchange()
            backend.run(Request(call=me.call(Operation.BROADCAST, DType.F32, (numel,), root=n - 1), data=data), 20.0)
    except AxonError as error:
        reports.send((type(error).__name__, str(error), time.monotonic()))


def one_round(chance: random.Random) -> str:
    """Run one group and kill ranks of it; returns a description of the mistake, "" without one."""
    n = chance.randint(2, 4)
    numel = chance.choice([10, 50_000, 1_000_000])
    registered, slot_bytes = chance.random() < 0.5, chance.choice([0, 8192])
    victims = chance.sample(range(n), chance.choice([1, 1, 1, n]))
    fork = multiprocessing.get_context("fork")
    pipes: list[tuple[Any, Any]] = [fork.Pipe(duplex=False) for _ in range(n)]
    with tempfile.TemporaryDirectory() as path:
        ranks = [
            fork.Process(target=work, args=(path, r, n, numel, registered, slot_bytes, pipes[r][1]), daemon=True)
            for r in range(n)
        ]
        for process in ranks:
            process.start()
        time.sleep(chance.choice([0.0, 0.02, 0.1]) + chance.uniform(0, 0.1))
        killed_at = time.monotonic()
        for rank in victims:
            os.kill(ranks[rank].pid or 0, signal.SIGKILL)
        wrong = ""
        for rank, process in enumerate(ranks):
            if rank in victims:
                process.join(10)
                continue
            reader = pipes[rank][0]
            if not reader.poll(10):
                wrong = f"rank {rank} of {n} heard nothing in 10 s"
                process.kill()
                continue
            name, text, at = reader.recv()
            process.join(10)
            if name == "MemberLost" and (at - killed_at > 1.0 or f"rank {10 + victims[0]}" not in text):
                wrong = f"rank {rank} of {n} after {at - killed_at:.2f} s: {text}"
            elif name not in ("MemberLost", "Timeout", "Unreachable"):  # the last two: it died before they met
                wrong = f"rank {rank} of {n}: {name}: {text}"
        if not wrong and 0 not in victims and os.listdir(path):
            wrong = f"left in the store: {os.listdir(path)}"
    for pair in pipes:
        for end in pair:
            end.close()
    return wrong


def main() -> int:
    """Run all rounds; returns 1 if anything went wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    before, wrong = set(os.listdir("/dev/shm")), []
    began = time.monotonic()
    for i in range(arguments.rounds):
        problem = one_round(random.Random(arguments.seed + i))
        left = set(os.listdir("/dev/shm")) - before
        if problem or left:
            wrong.append({"seed": arguments.seed + i, "what": problem, "left in /dev/shm": sorted(left)})
            print(json.dumps(wrong[-1]), flush=True)
    print(
        f"{arguments.rounds} rounds in {time.monotonic() - began:.0f} s, {len(wrong)} went wrong; /dev/shm is as before"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
