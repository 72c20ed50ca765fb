"""A pairwise sample of the grid of faults; all of it is `make lab NAME=faults`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from axon_ps_lab.campaigns.case import run
from axon_ps_lab.campaigns.grid import all_cases, cannot_occur, pairwise, possible_cases

SIDE_BY_SIDE = 4
"""Half of a cell is waiting. Of eight at once on two cores, every fifth was late and had to run again, alone."""


def test_the_sample_has_every_pair_and_the_grid_every_combination() -> None:
    cases = all_cases()
    assert len(cases) == len({c.name for c in cases}) == 6 * 12 * 8 * 3 * 2 * 2
    assert all(c.promise for c in cases if not cannot_occur(c))
    sample = pairwise(possible_cases())
    assert len(sample) < 80
    assert {(c.target, c.struck_by) for c in sample} == {(c.target, c.struck_by) for c in possible_cases()}
    assert {(c.moment, c.struck_by) for c in sample} == {(c.moment, c.struck_by) for c in possible_cases()}


@pytest.mark.timeout(900)  # for all of its cells, each of which has deadlines of its own
def test_after_every_fault_of_the_sample_all_go_on_in_time_and_every_bit_is_right() -> None:
    cases = pairwise(possible_cases())
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        outcomes = list(pool.map(run, cases))
    outcomes = [run(case) if o.suspect else o for case, o in zip(cases, outcomes, strict=True)]
    wrong = [o for o in outcomes if o.problems]
    assert not wrong, "\n\n".join(
        f"{o.name}: {'; '.join(o.problems)}\n{o.logs[-20_000:]}" for o in wrong[:3]
    ) + "".join(f"\n{o.name}: {'; '.join(o.problems)[:300]}" for o in wrong)
