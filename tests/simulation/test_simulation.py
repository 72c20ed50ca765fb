"""The coordinator, the shard servers and the workers of a job under random faults, in virtual time; see `simulate`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator

import pytest

from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.types import Array
from simulate import simulate
from simulated_job import Violation
from virtual_loop import NothingHappensError, VirtualLoop

SEEDS = 64
AT_A_TIME = 8


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What services log of faults is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def simulate_or_say(seed: int) -> list[str]:
    """Simulate; a failure names the seed, and shows the end of its trace."""
    try:
        return simulate(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}\n" + "\n".join(error.trace[-40:])) from error  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_no_step_is_lost_and_every_wait_ends(first: int) -> None:
    for seed in range(first, first + AT_A_TIME):
        simulate_or_say(seed)


def test_a_seed_gives_the_same_trace_again() -> None:
    traces = [simulate_or_say(seed) for seed in (5, 6, 5, 6)]
    assert traces[:2] == traces[2:]
    assert traces[0] != traces[1]


def finds(seeds: range) -> str:
    """The first violation that these seeds find."""
    for seed in seeds:
        try:
            simulate(seed)
        except Violation as error:
            return str(error)
    return ""


def test_a_backup_that_applies_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = OwnedSlice.apply

    def only_primaries(self: OwnedSlice, first: int, last: int, scratch: Array) -> None:
        if self.primary:
            apply(self, first, last, scratch)

    monkeypatch.setattr(OwnedSlice, "apply", only_primaries)
    assert "gathered" in finds(range(40))


def test_a_wait_that_cannot_end_is_found() -> None:
    loop = VirtualLoop(random.Random(0))
    with pytest.raises(NothingHappensError):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()


def test_time_passes_only_when_nothing_is_left_to_do() -> None:
    loop = VirtualLoop(random.Random(0))
    began_s = loop.time()
    loop.run_until_complete(asyncio.sleep(86_400.0))
    assert loop.time() - began_s == pytest.approx(86_400.0)
    loop.close()
