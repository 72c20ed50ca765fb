"""A pairwise sample of the grid of faults; all of it is `make lab NAME=faults`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fault_cell import run
from fault_grid import all_cells, cannot_occur, pairwise, possible_cells

SIDE_BY_SIDE = 4
"""Half of a cell is waiting. Of eight at once on two cores, every fifth was late and had to run again, alone."""


def test_the_sample_has_every_pair_and_the_grid_every_combination() -> None:
    cells = all_cells()
    assert len(cells) == len({c.name for c in cells}) == 6 * 12 * 8 * 3 * 2 * 2
    assert all(c.promise for c in cells if not cannot_occur(c))
    sample = pairwise(possible_cells())
    assert len(sample) < 80
    assert {(c.target, c.fault) for c in sample} == {(c.target, c.fault) for c in possible_cells()}
    assert {(c.moment, c.fault) for c in sample} == {(c.moment, c.fault) for c in possible_cells()}


@pytest.mark.timeout(900)  # for all of its cells, each of which has deadlines of its own
def test_after_every_fault_of_the_sample_all_go_on_in_time_and_every_bit_is_right() -> None:
    cells = pairwise(possible_cells())
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        outcomes = list(pool.map(run, cells))
    outcomes = [run(cell) if o.suspect else o for cell, o in zip(cells, outcomes, strict=True)]
    wrong = [o for o in outcomes if o.problems]
    assert not wrong, "\n\n".join(
        f"{o.name}: {'; '.join(o.problems)}\n{o.logs[-20_000:]}" for o in wrong[:3]
    ) + "".join(f"\n{o.name}: {'; '.join(o.problems)[:300]}" for o in wrong)
