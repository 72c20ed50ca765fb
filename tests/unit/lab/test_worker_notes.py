"""`WorkerNotes`: the attempts, commits and aborts of a campaign's workers."""

from __future__ import annotations

import json
from pathlib import Path

from axon_ps_lab.chaos import training
from axon_ps_lab.chaos.figures import ComputedAttempt, Events
from axon_ps_lab.chaos.worker_notes import WorkerNotes


def write(directory: Path, number: int, *lines: dict[str, object]) -> None:
    with open(directory / f"{training.NOTES}{number}", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_commit_has_the_time_of_the_first_worker_that_noted_it(tmp_path: Path) -> None:
    events = Events()
    notes = WorkerNotes(tmp_path, events)
    write(tmp_path, 1, {"attempt": [4, 2], "epoch": 0, "samples": [7, 8]}, {"committed": [5, 2], "at": 3.0})
    write(tmp_path, 2, {"committed": [5, 2], "at": 2.5}, {"committed": [6, 2], "at": 4.0}, {"aborted": "no"})
    for number in (1, 2):
        notes.read(number)
    assert events.attempts == [ComputedAttempt(process=1, version=4, generation=2, epoch=0, samples=(7, 8))]
    assert [(c.version, c.at) for c in notes.commits()] == [(5, 2.5), (6, 4.0)]
    assert (notes.newest, len(events.aborted)) == (4.0, 1)


def test_workers_are_told_the_version_at_which_they_end(tmp_path: Path) -> None:
    notes = WorkerNotes(tmp_path, Events())
    write(tmp_path, 1, {"committed": [5, 1], "at": 1.0})
    notes.read(1)
    assert notes.end_at(20) == 25
    assert (tmp_path / training.LAST).read_text() == "25"


def test_a_worker_works_once_it_has_notes_and_is_ready_once_it_waits(tmp_path: Path) -> None:
    notes = WorkerNotes(tmp_path, Events())
    assert not notes.is_working(1)
    assert not notes.is_ready(1)
    write(tmp_path, 1)
    (tmp_path / f"{training.WAITING}1").touch()
    assert notes.is_working(1)
    assert notes.is_ready(1)
