"""Within a protocol version messages are only added to, and docs/upgrading.md says what goes with what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.wire import build
from axon_ps.wire.build import Build
from protocol_fields import fields, reserved

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "upgrading.md"
ROW = re.compile(r"^\| (?P<ours>[a-z ,]+) \| (?P<theirs>[a-z ,]+) \| (?P<number>\d+) \| (?P<what>.+) \|$", re.MULTILINE)


def lost(before: list[str], now: list[str], given_up: set[str]) -> list[str]:
    """The lines of a schema that are not there any more, and were not given up for good."""
    types = {line.partition(" ")[0] for line in now}
    return [
        line
        for line in before
        if line not in now and line.partition(" ")[0] in types and line.partition(" =")[0] not in given_up
    ]


def test_what_the_protocol_began_with_means_the_same() -> None:
    began = (HERE / f"protocol_{build.PROTOCOL}.txt").read_text(encoding="utf-8").splitlines()
    assert len(began) > 500
    assert not lost(began, fields(), reserved()), "raise PROTOCOL (axon_ps.wire.build), or keep these fields"


def test_a_number_that_means_something_else_is_found() -> None:
    now = ["a.M 1 = type 9", "a.M 2 = type 5"]
    assert lost(["a.M 1 = type 5"], now, set()) == ["a.M 1 = type 5"]
    assert lost(["a.M 3 = type 5", "a.Gone 1 = type 5"], now, {"a.M 3"}) == []


def test_the_page_says_what_goes_together() -> None:
    rows = [
        (m["ours"], m["theirs"], int(m["number"]), m["what"]) for m in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    ]
    both = ("coordinator", "worker, shard server"), ("worker, shard server", "coordinator")
    numbers = range(build.PROTOCOL + 1)
    assert [(ours, theirs, number) for ours, theirs, number, _ in rows] == [(*b, n) for b in both for n in numbers]
    for ours, theirs, number, what in rows:
        together = what.startswith("go together")
        assert together or what.startswith("refused"), what
        try:
            build.check(Build(version="x", protocol=number), f"the {theirs}", f"this {ours}")
        except InvalidRequest:
            assert not together, (ours, number)
        else:
            assert together, (ours, number)


def test_the_page_names_the_version_of_now() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"protocol version is {build.PROTOCOL}" in text
    assert f"goes together with {build.OLDEST} and later" in text


@pytest.mark.parametrize("newer", [1, 7])
def test_the_newer_of_two_decides(newer: int) -> None:
    build.check(Build(version="x", protocol=build.PROTOCOL + newer), "the coordinator", "this worker")
