"""`Notes`: lines of JSON that other processes append to files."""

from __future__ import annotations

from pathlib import Path

from axon_ps_lab.faults.notes import Notes


def test_each_line_is_read_once_and_an_incomplete_one_when_it_is_complete(tmp_path: Path) -> None:
    notes, path = Notes(), tmp_path / "notes"
    assert notes.new(path) == [], "there is no file yet"
    path.write_text('{"a": 1}\n[2]\n{"a"')
    assert notes.new(path) == [{"a": 1}, [2]]
    assert notes.new(path) == []
    with open(path, "a") as file:
        file.write(": 3}\n")
    assert notes.new(path) == [{"a": 3}]


def test_files_are_read_apart(tmp_path: Path) -> None:
    notes = Notes()
    for name in ("one", "other"):
        (tmp_path / name).write_text(f'"{name}"\n')
    assert [notes.new(tmp_path / name) for name in ("one", "other", "one")] == [["one"], ["other"], []]
