"""Every third case of `make lab NAME=cases`, once: families, wrappers, mapping and numbers of workers meet in pairs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from case_table import SHARDED, WORKERS, WRAPPERS, Case, Configuration, load_all, run_case, sample
from cases_run import TIMEOUT_S
from shared_workers import SharedWorkers

SAMPLE = sample(list(load_all().values()), every=3)


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedWorkers]:
    """Workers for all of them."""
    with tempfile.TemporaryDirectory() as logs, SharedWorkers(3, Path(logs), timeout_s=TIMEOUT_S) as made:
        yield made


@pytest.mark.parametrize(("case", "how"), SAMPLE, ids=[f"{case.name}, {how}" for case, how in SAMPLE])
def test_a_script_has_torchs_values_or_is_refused_where_a_page_says_so(
    shared: SharedWorkers, case: Case, how: Configuration
) -> None:
    outcome = run_case(case, how, shared)
    assert outcome.is_right, f"{outcome.what}: {outcome.text}"


def test_the_sample_has_every_family_and_every_pair_of_how_cases_are_run() -> None:
    families = {case.family for case in load_all().values()}
    assert {case.family for case, _ in SAMPLE} == families
    met = {how for _, how in SAMPLE}
    for wrapper, mapped in itertools.product(WRAPPERS, (True, False)):
        assert any(h.wrapper == wrapper and h.mapped == mapped for h in met), (wrapper, mapped)
    for wrapper, workers in itertools.product(WRAPPERS, WORKERS):
        assert any(h.wrapper == wrapper and h.workers == workers for h in met), (wrapper, workers)
    for family, wrapper in itertools.product(families, SHARDED):
        taken = [(c, h) for c, h in SAMPLE if c.family == family]
        if len([c for c, _ in taken if wrapper in c.wrappers]) >= len(WRAPPERS):
            assert any(h.wrapper == wrapper for _, h in taken), (family, wrapper)
