"""Bits of servers' memory change while a job trains: `make lab NAME=flips`, and benchmarks/results/bit_flips.json.

One bit at a time, anywhere in values, moments and summed gradients of one of three servers. Each must be found by the
next commit, and the server, the slice, the unit, the array and the range named. Then as many steps as wanted without
one, in which nothing must be found; and the values must be those of a job in which nothing failed, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests" / "faults")]

from axon_ps.coordinator.client.operator import OperatorClient  # noqa: E402
from axon_ps.errors import AxonError  # noqa: E402
from axon_ps.testing import LocalCluster  # noqa: E402
from axon_ps.types import Role  # noqa: E402
from axon_ps_lab.faults import bit_flips  # noqa: E402
from axon_ps_lab.faults.bit_flips import Flip, flip  # noqa: E402
from test_server_deaths import SENT, Job, assert_same_bits  # noqa: E402

SERVERS: Final = 3
ARRAYS: Final = (("param",), ("exp_avg",), ("exp_avg_sq",), ())
"""In which of a slice's arrays the bits are, in turn; none: in any, and a summed gradient if there is one."""
FOUND_S: Final = 20.0
"""How long a flip may take to be told: a commit takes some ten milliseconds here."""

TEXT: Final = re.compile(
    r"memory of shard server (?P<rank>\d+) .*is corrupt: (?P<blocks>.*) of unit '(?P<unit>.*)', slice (?P<slice>\d+), "
    r"found at version (?P<version>\d+)"
)
BLOCK: Final = re.compile(r"(?P<array>\w+) from element (?P<begin>\d+) to (?P<end>\d+)")


class Feed:
    """What the coordinator tells of corruption, as it does. Enter it.

    Args:
        cluster: with the job.

    Attributes:
        told: the texts.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.told: list[str] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def _watch(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        cluster, seen = self._cluster, 0.0
        with contextlib.suppress(asyncio.CancelledError):
            operator = OperatorClient(cluster.address, security=cluster.security, job=cluster.job)
            async with operator, contextlib.aclosing(operator.watch()) as feed:
                async for event in feed:
                    if isinstance(event, AxonError):
                        continue
                    news = [e for e in event.events if e.number > seen]
                    seen = max((e.number for e in news), default=seen)
                    with self._changed:
                        self.told += [e.text for e in news if e.kind == "corrupt"]
                        self._changed.notify_all()

    def wait(self, number: int) -> str:
        """The text of that number, once it is told; empty when it is not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.told) > number, FOUND_S)
            return self.told[number] if len(self.told) > number else ""

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


def wrong(flipped: Flip, rank: int, text: str) -> str:
    """What is wrong with what was told of a flip; empty when nothing is."""
    if not text:
        return "not found"
    if (found := TEXT.search(text)) is None:
        return f"told as {text!r}"
    blocks = BLOCK.findall(found["blocks"])
    if len(blocks) != 1 or blocks[0][0] != flipped.array:
        return f"{flipped} was named as {found['blocks']}"
    if not int(blocks[0][1]) <= flipped.element < int(blocks[0][2]):
        return f"{flipped} was found in {found['blocks']}"
    if (int(found["rank"]), int(found["slice"])) != (rank, flipped.slice):
        return f"{flipped} of server {rank} was named as {text}"
    if int(found["version"]) > flipped.version + 1:
        return f"{flipped} was found at version {found['version']}"
    return ""


@contextlib.contextmanager
def job(directory: Path) -> Iterator[tuple[Job, Feed]]:
    """Two workers that train on three servers, whose bits may be flipped."""
    plugin = bit_flips.__name__
    environment = {**SENT, bit_flips.DIRECTORY: str(directory)}
    with LocalCluster(
        shards=SERVERS, world_size=2, replication=2, plugins=[plugin], environment=environment
    ) as cluster:
        trained = Job(cluster, "FULL_SHARD", directory / "end")
        with Feed(cluster) as feed:
            yield trained, feed


def ranks(cluster: LocalCluster) -> dict[int, int]:
    """By the index of a server, its rank."""
    members = {m.address: m.rank for m in cluster.status().membership.shards}
    return {index: members[cluster.address_of(Role.SHARD, index)] for index in range(SERVERS)}


def run(flips: int, steps: int, seed: int, directory: Path, *, say: bool = False) -> dict[str, Any]:
    """Flip so many bits one after the other, then make so many steps without; see the module."""
    choice = random.Random(seed)
    arrays: Counter[str] = Counter()
    faults: list[str] = []
    took_s: list[float] = []
    with job(directory) as (trained, feed):
        rank_of = ranks(trained.cluster)
        for number in range(flips):
            flipped, index = None, 0
            while flipped is None:
                trained.settle(SERVERS)
                index = choice.randrange(SERVERS)
                process = trained.cluster.process(Role.SHARD, index)
                flipped = flip(directory, process.pid, choice.getrandbits(32), ARRAYS[number % len(ARRAYS)])
            began_s = time.monotonic()
            if problem := wrong(flipped, rank_of[index], feed.wait(number)):
                faults.append(problem)
                feed.told += [""] * (number + 1 - len(feed.told))
            took_s.append(time.monotonic() - began_s)
            arrays[flipped.array] += 1
            if say and number % 50 == 49:
                print(f"{number + 1} flips, {len(faults)} not as they must be", flush=True)
        trained.settle(SERVERS)
        told, first = len(feed.told), trained.version
        while trained.version < first + steps:
            time.sleep(0.05)
        falsely = len(feed.told) - told
        results = trained.finish()
        if len({r.version for r in results}) != 1:
            faults.append("the workers ended at different versions")
    assert_same_bits(results, "FULL_SHARD", directory, timeout_s=60.0 + results[0].version)
    return {
        "flips": flips,
        "by array": dict(arrays),
        "not found or not named rightly": len(faults),
        "which": faults[:10],
        "told after, ms, median": round(1e3 * sorted(took_s)[len(took_s) // 2], 1) if took_s else 0.0,
        "steps without a flip": steps,
        "found in them": falsely,
        "steps aborted": len(results[0].aborted),
        "values": "bit-equal to those of a job in which nothing failed",
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000, help="without a flip, afterwards")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        row = run(options.flips, options.steps, options.seed, Path(directory), say=True)
    for name, value in row.items():
        print(f"{name:32} {value}")
    from axon_ps_lab import report

    print("wrote", report.write("bit_flips", [row], seed=options.seed))
    return 1 if row["not found or not named rightly"] or row["found in them"] else 0


if __name__ == "__main__":
    sys.exit(main())
