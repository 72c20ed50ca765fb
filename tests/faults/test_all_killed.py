"""Everything killed at once: a few of the lives of `make lab NAME=all-killed`, of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_ps.observe.moments import Moment
from axon_ps_lab.campaigns.all_killed import Life, Supervisor, undisturbed

STEPS = 24
LIVES = [
    Life("any"),  # a checkpoint was never written
    Life(Moment.CHECKPOINT.name),
    Life(Moment.REMOVE.name, damage="flip data"),
    Life(Moment.RESTORE.name),
    Life("start", 0.5),
]


@pytest.mark.timeout(300)
def test_the_job_goes_on_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed", steps=STEPS, workers=1)
    result = Supervisor(tmp_path, "sqlite", 1, steps=STEPS, workers=1).run(LIVES)
    assert not result.wrong
    assert result.digest == expected
