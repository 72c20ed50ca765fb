"""Workers that are threads of this process: training code is tested in milliseconds, with the real engines.

Owns: one thread for each world of `World.mock(n)`, and the choice of the error to raise. `World.mock` describes such a
job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from axon_ps.errors import Broken, GenerationChanged, MemberLost, Timeout
from axon_ps.worker.world import World

T = TypeVar("T")


def run_threads(
    target: Callable[..., T],
    n: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    shards: int = 1,
    nodes: int = 1,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `target(world, *args, **kwargs)` on each of `n` workers that are threads of this process.

    In the function the world is the thread's current one. It is closed when the function has ended on every worker, or
    has failed on one of them. A worker that is to leave before the others calls `world.close()`.

    Args:
        target: the function that every worker runs.
        n: number of workers.
        args: its further arguments.
        kwargs: its keyword arguments.
        shards: as for `World.mock`.
        nodes: as for `World.mock`.
        timeout_s: limit for all of them together, in seconds; also the default time-out of every operation.

    Returns:
        Their return values, by rank.

    Raises:
        Timeout: some did not end in time. Their threads end at their next operation.
        BaseException: the error of the first worker that failed by itself, and not because another had failed.
    """
    worlds = World.mock(n, shards=shards, nodes=nodes, timeout_s=timeout_s)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    ended = threading.Event()  # set when all have ended, or by an error
    ends = time.monotonic() + timeout_s

    def run(rank: int, world: World) -> None:
        try:
            with world:
                results[rank] = target(world, *args, **(kwargs or {}))
                if len(results) == n:
                    ended.set()
                ended.wait(max(0.0, ends - time.monotonic()))
        except BaseException as error:
            errors.append((rank, error))
            ended.set()

    threads = [
        threading.Thread(target=run, args=pair, name=f"worker-{pair[0]}", daemon=True) for pair in enumerate(worlds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    if errors:
        raise next((e for _, e in errors if not isinstance(e, _OF_OTHERS)), errors[0][1])
    if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        for rank in late:
            worlds[rank].close(finished=False)
        raise Timeout(f"rank {', '.join(map(str, late))} did not end within {timeout_s:g} s")
    return [results[rank] for rank in range(n)]


_OF_OTHERS = (MemberLost, GenerationChanged, Broken, Timeout)
"""The errors that a worker gets when another has failed."""
