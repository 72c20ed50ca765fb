"""The shared-memory backend in real processes: results, disagreements, deaths, timeouts, and what is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from axon_ps.collectives.backends.shm.rendezvous import joined_key, offer_key
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import COLLECTIVE_DTYPES, ReduceOp
from shm_worker import DirectoryStore, play

NUMELS = [0, 1, 5, 1000, 40_000]
ALL = {"dtypes": [d.value for d in COLLECTIVE_DTYPES], "ops": [op.value for op in ReduceOp]}


def start(path: Path, n: int, scenario: str, ranks: Sequence[int] = (), **options: Any) -> list[WorkerProcess]:
    """Processes of the ranks of a group of `n`, of all if none is named; they meet in the directory."""
    path.mkdir(exist_ok=True)
    return [
        WorkerProcess(
            rank,
            play,
            (path, rank, n, scenario, options),
            {},
            environment=os.environ,
            log=path.with_name(f"{path.name}-{rank}.log"),
        )
        for rank in ranks or range(n)
    ]


def results(path: Path, workers: list[WorkerProcess], killed: tuple[int, ...] = ()) -> list[Any]:
    """What the ranks return, None for those that were to be killed; and that the store is as empty as it was."""
    ended = [worker.result() for worker in workers]
    for one in ended:
        assert one.exit_code == (-signal.SIGKILL if one.rank in killed else 0), (one.error, one.output)
    assert not os.listdir(path), "the store is not empty"
    return [one.value for one in ended]


def run(path: Path, n: int, scenario: str, killed: tuple[int, ...] = (), **options: Any) -> list[Any]:
    store = path / "store"
    return results(store, start(store, n, scenario, **options), killed)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_everything_is_right_to_the_bit_in_ordinary_memory(tmp_path: Path, n: int) -> None:
    run(tmp_path, n, "everything", numels=NUMELS, **ALL)


WAYS = {"slots": {}, "small slots": {"slot_bytes": 8192}, "registered": {}}


def test_everything_is_right_where_slots_are_small(tmp_path: Path) -> None:
    told = run(tmp_path, 3, "everything", numels=NUMELS, **ALL, backend=WAYS["small slots"])
    assert all(t["bytes_mapped"] == 0 for t in told)


@pytest.mark.parametrize("way", WAYS)
def test_arrays_that_no_cache_holds(tmp_path: Path, way: str) -> None:
    numels = [800_001]  # results are written past the caches, in many windows
    of = {"dtypes": ["f32"], "ops": [], "registered": way == "registered", "backend": WAYS[way]}
    told = run(tmp_path, 3, "everything", numels=numels, **of)
    assert all((t["bytes_mapped"] > 0) == (way == "registered") for t in told)


@pytest.mark.parametrize("slot_bytes", [0, 8192])
def test_everything_is_right_in_registered_memory(tmp_path: Path, slot_bytes: int) -> None:
    run(tmp_path, 3, "everything", numels=[5, 40_000], registered=True, **ALL, backend={"slot_bytes": slot_bytes})


def test_sixteen_ranks_on_few_cores(tmp_path: Path) -> None:
    run(tmp_path, 16, "everything", numels=[7, 40_001], dtypes=["f32"], ops=[])


@pytest.mark.parametrize("registered", [False, True])
def test_a_killed_rank_is_named_within_a_second(tmp_path: Path, registered: bool) -> None:
    told = run(tmp_path, 4, "kill", (2,), numel=1_000_000, victim=2, after_s=0.3, registered=registered)
    for one in told[:2] + told[3:]:
        assert one["error"] == one["again"]["error"] == "MemberLost"
        assert "rank 12 of group 'test'" in one["text"]
        assert one["waited_s"] < 1.0


def shared_memory() -> set[str]:
    """Names of all shared memory but semaphores of Python's, which tests beside this one make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def test_nothing_is_left_when_ranks_are_killed_at_random(tmp_path: Path) -> None:
    """A few of what benchmarks/shm_kills.py does 200 times."""
    before = shared_memory()
    chance = random.Random(3)
    for i in range(6):
        victims = tuple(range(2)) if i % 3 == 0 else (chance.randrange(2),)
        path = tmp_path / str(i)
        workers = start(path, 2, "kill", numel=200_000, victim=victims[0], after_s=chance.uniform(0, 0.05))
        if len(victims) == 2:
            for worker in workers:
                worker.kill()
        said = [worker.result().value for worker in workers]
        if len(victims) == 1 and any(said):
            assert said[1 - victims[0]]["error"] == "MemberLost"
        assert shared_memory() == before


@pytest.mark.parametrize("n", [2, 3])
def test_a_disagreement_reaches_every_rank_and_does_no_harm(tmp_path: Path, n: int) -> None:
    told = run(tmp_path, n, "disagree")
    for one in told:
        for i, outcome in enumerate(one):
            assert outcome["error"] == "Disagreement", (i, outcome)
    last = 9 + n
    texts = [outcome["text"] for outcome in told[0]]
    assert f"rank {last}: all_reduce(min) of 4 f32" in texts[0]
    assert f"rank {last}: all_reduce(sum) of 4 i32" in texts[1]
    assert f"rank {last}: all_reduce(sum) of 3 f32" in texts[2]
    assert "as its call 99" in texts[3]
    assert f"rank {last}: broadcast of 4 f32 from rank 1" in texts[4]
    assert f"rank {last}: barrier" in texts[5]
    assert f"rank {last}: all_to_all of f32 that expects 5 from rank 10" in texts[6]
    assert texts == [outcome["text"] for outcome in told[1]][: len(texts) - 1] + texts[-1:]
    assert "rank 10 sends 100000 f32 to rank 11, which expects 99999 f32 (tag 3)" in texts[-1]
    assert "rank 10 sends 4 f32 to rank 11, which expects 3 f32 (tag 3)" in told[1][-2]["text"]


@pytest.mark.parametrize("numel", [4, 50_000])
def test_a_timeout_names_who_is_missing_and_ends_the_group(tmp_path: Path, numel: int) -> None:
    told = run(tmp_path, 3, "late", numel=numel, timeout_s=0.4)
    assert "Timeout" in {one["error"] for one in told[:2]}
    for one in told[:2]:
        assert one["error"] in ("Timeout", "Broken")
        assert "rank 12 did not come" in one["text"]
        assert one["again"]["error"] == one["error"]
        assert one["again"]["waited_s"] < 0.1
    assert told[2]["error"] == "Broken"


def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    told = run(tmp_path, 2, "late_recv", timeout_s=0.2)
    assert told[0]["error"] == "Timeout"
    assert "rank 11 did not come" in told[0]["text"]
    assert told[1]["error"] == "Broken"


def test_an_abort_wakes_everybody_at_once(tmp_path: Path) -> None:
    told = run(tmp_path, 3, "abort")
    for one in told:
        assert one["error"] == "MemberLost"
        assert one["text"] == "rank 77 has left the job"
        assert one["at"] - told[0]["aborted_at"] < 0.09  # not by the looking around of a sleeper


@pytest.mark.parametrize("registered", [False, True])
def test_messages_beside_collectives(tmp_path: Path, registered: bool) -> None:
    told = run(tmp_path, 3, "messages", count=10, registered=registered)
    assert told == [[1, 2], None, None]


@pytest.mark.parametrize("only", [-1, 0])
def test_registered_memory_is_not_copied_and_is_let_go(tmp_path: Path, only: int) -> None:
    for one in run(tmp_path, 2, "registered_memory", registered=True, only=only, backend={"slot_bytes": 4096}):
        assert one["during"] > one["before"]
        assert one["after"] <= one["before"] + 1  # the slots
        assert (one["mapped"] > 0) == (only == -1)


def test_gradient_buffers_serve_collectives_without_a_copy(tmp_path: Path) -> None:
    for one in run(tmp_path, 2, "registered_memory", gradient=True, only=-1, backend={"slot_bytes": 4096}):
        assert one["during"] > one["before"]
        assert one["after"] <= one["before"] + 1
        assert one["mapped"] > 0


def test_too_little_shared_memory_is_said_on_every_rank(tmp_path: Path) -> None:
    for one in run(tmp_path, 2, "too_little", numel=50_000, backend={"slot_bytes": 1 << 48}):
        assert one["error"] == "Busy"
        assert f"needs {1 << 50} bytes" in one["text"]


def test_ranks_that_share_no_memory_all_learn_it(tmp_path: Path) -> None:
    """This process offers the second rank a socket that is not there, as if it were in another container."""
    store = DirectoryStore(tmp_path)
    store.put(offer_key("test"), json.dumps({"socket": "axon-ps-" + 32 * "0", "nonce": 32 * "0"}).encode())
    (second,) = start(tmp_path, 2, "everything", ranks=[1])
    said = second.result().value
    assert said["error"] == "Unreachable"
    assert "rank 11 shares no memory with rank 10" in said["text"]
    assert b"cannot be reached: Connection refused" in store.wait(joined_key("test", 1), 0)
