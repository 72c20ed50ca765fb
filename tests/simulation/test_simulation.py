"""The coordinator, the shard servers and the workers of a job under random faults, in virtual time; see `simulate`."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps_lab.interleavings.planted import PLANTS, find
from axon_ps_lab.interleavings.simulate import as_text, shortest, simulate
from axon_ps_lab.interleavings.virtual_loop import NothingHappensError, TimeStandsStillError, VirtualLoop

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "planted.json"
FINDERS = {int(row["by"].split()[1].rstrip(":")) for row in json.loads(RECORD.read_text("utf-8"))["rows"]}
"""The first seed that finds each of the bugs that `make lab NAME=planted` plants."""
SEEDS = sorted({*range(100), *FINDERS})
"""They find as many planted bugs as the first 2,000 do; `make lab NAME=simulate` takes any others."""
ROWS = (*range(30), 190, 282, 404, 496)
"""Seeds of jobs with rows. In the last ones a joiner once got a rank that is in no row."""
AT_A_TIME = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What services log of faults is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def simulate_or_say(seed: int, *, rows: bool = False) -> list[str]:
    """Simulate; a failure names the seed, and shows its shortest trace."""
    try:
        return simulate(seed, rows=rows)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {as_text(*shortest(seed, error, rows=rows))}") from error


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_A_TIME))
def test_no_step_is_lost_and_every_wait_ends(first: int) -> None:
    for seed in SEEDS[first : first + AT_A_TIME]:
        simulate_or_say(seed)


def test_replicas_whose_workers_have_different_units() -> None:
    for seed in ROWS:
        simulate_or_say(seed, rows=True)


def test_a_seed_gives_the_same_trace_again() -> None:
    traces = [simulate_or_say(seed) for seed in (5, 6, 5, 6)]
    assert traces[:2] == traces[2:]
    assert traces[0] != traces[1]


@pytest.mark.parametrize("number", range(len(PLANTS)), ids=lambda n: PLANTS[n].name.replace(" ", "-"))
def test_a_bug_can_be_planted(number: int) -> None:
    """Its text is where it was; `make lab NAME=planted` finds all of them."""
    compile(PLANTS[number].source(), PLANTS[number].path, "exec")


def test_a_planted_bug_is_found() -> None:
    (number,) = (n for n, p in enumerate(PLANTS) if p.name == "a backup applies nothing")
    said, _ = find(number, "0:100")
    assert "members that can make a step" in said, "copies that differ end the job's steps"


def test_a_wait_that_cannot_end_is_found() -> None:
    loop = VirtualLoop(random.Random(0))
    with pytest.raises(NothingHappensError):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()


def test_a_loop_that_cannot_end_is_found() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    loop = VirtualLoop(random.Random(0))
    with pytest.raises(TimeStandsStillError):
        loop.run_until_complete(spin())
    loop.close()


def test_time_passes_only_when_nothing_is_left_to_do() -> None:
    loop = VirtualLoop(random.Random(0))
    began_s = loop.time()
    loop.run_until_complete(asyncio.sleep(86_400.0))
    assert loop.time() - began_s == pytest.approx(86_400.0)
    loop.close()


def test_a_loop_closes_while_a_thread_that_is_done_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 949706 of the record waited for ever so: for a turn of a thread that was between its work and its end."""
    done: list[int] = []
    loop = VirtualLoop(random.Random(0))
    loop.threads = True
    loop.in_thread(lambda: done.append(1))
    monkeypatch.setattr(threading.Thread, "is_alive", lambda self: True)
    loop.close()
    assert done == [1]
