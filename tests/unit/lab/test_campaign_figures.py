"""What observed events amount to: detection, commits, what was lost; and the report and its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest

from axon_ps_lab.chaos.campaign import Campaign
from axon_ps_lab.chaos.figures import (
    LEAST_WEIGHINGS,
    Commit,
    ComputedAttempt,
    Dealt,
    Events,
    Sign,
    memory,
    outcomes,
    right_samples,
    samples,
    table,
)
from axon_ps_lab.chaos.page import page
from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.chaos.report import report
from axon_ps_lab.chaos.runner import Result
from axon_ps_lab.faults.fault import Fault


def dealt(number: int, began: float, complete: float, kind: Fault = Fault.KILL) -> Dealt:
    fault = PlannedFault(number=number, kind=kind, role="shard", index=0)
    return Dealt(fault=fault, target="shard-0 (7)", began=began, ended=began + 0.25, complete=complete)


def commits(*times: float, first: int = 0, generation: int = 1) -> list[Commit]:
    return [Commit(version=first + i, generation=generation, at=at) for i, at in enumerate(times)]


def attempts(*given: Sequence[int], process: int = 1, generation: int = 1) -> list[ComputedAttempt]:
    return [
        ComputedAttempt(process=process, version=version, generation=generation, epoch=0, samples=tuple(some))
        for version, some in enumerate(given)
    ]


EVENTS = Events(
    dealt=[dealt(1, 10.0, 11.0), dealt(2, 20.0, 0.0)],
    signs=[
        Sign(at=9.0, kind="lost", text="before"),
        Sign(at=10.125, kind="saved", text="no fault's"),
        Sign(at=10.25, kind="lost", text="shard server 0 was lost"),
        Sign(at=10.5, kind="joined", text="later"),
    ],
    commits=commits(9.5, 10.5, 10.75, 13.0),
    aborted=[10.3, 10.4, 30.0],
)


def test_a_fault_is_told_of_and_the_next_step_commits() -> None:
    first, second = outcomes(EVENTS)
    assert (first.detection_s, first.sign) == (0.25, "lost: shard server 0 was lost")
    assert (first.next_commit_s, first.complete_s, first.aborted) == (0.5, 1.0, 2)
    assert first.longest_s == 7.0  # from 13 until the second fault
    assert (second.detection_s, second.next_commit_s, second.complete_s) == (None, None, None)


def test_a_job_that_is_at_an_older_version_again_has_lost_steps() -> None:
    events = Events(
        dealt=[dealt(1, 4.5, 5.0), dealt(2, 7.5, 8.0)],
        commits=[*commits(1, 2, 3, 4), *commits(5, 6, 7, first=2, generation=2), *commits(8, first=5, generation=2)],
    )
    assert [outcome.steps_lost for outcome in outcomes(events)] == [2, 0]


def test_every_sample_of_a_committed_step_once() -> None:
    events = Events(commits=commits(1, 2), attempts=attempts([0, 1], [2, 3]))
    right = {0: [1, 0], 1: [2, 3]}
    found = samples(events, 2, right.__getitem__)
    assert (found.steps, found.used, found.lost, found.doubled, found.missing_steps) == (2, 4, 0, 0, 0)


def test_a_lost_and_a_doubled_sample_are_counted() -> None:
    events = Events(commits=commits(1, 2), attempts=attempts([0, 1], [0, 3]))
    found = samples(events, 2, {0: [0, 1], 1: [2, 3]}.__getitem__)
    assert (found.lost, found.doubled) == (1, 1)


def test_what_was_not_committed_does_not_count_and_the_last_attempt_does() -> None:
    again = attempts([5, 6], generation=1)  # was aborted, and tried again with the same members
    other = attempts([0], process=2, generation=2)
    events = Events(commits=commits(1), attempts=[*again, *attempts([0, 1]), *other])
    found = samples(events, 2, {0: [0, 1]}.__getitem__)
    assert (found.used, found.lost, found.doubled) == (2, 0, 0)


def test_a_worker_that_died_has_given_its_samples() -> None:
    events = Events(commits=commits(1), attempts=[*attempts([0], process=1), *attempts([1], process=2)])
    assert samples(events, 2, {0: [0, 1]}.__getitem__).lost == 0


def test_a_step_of_which_nobody_knows_has_lost_its_samples() -> None:
    events = Events(commits=[*commits(1), *commits(3, first=2)], attempts=attempts([0], [], [2]))
    found = samples(events, 1, lambda version: [version])
    assert (found.missing_steps, found.lost) == (1, 1)


def test_the_right_samples_are_each_once_an_epoch() -> None:
    right = right_samples(12, 4, seed=3)
    for epoch in range(2):
        assert sorted(i for version in range(3) for i in right(3 * epoch + version)) == list(range(12))
    assert right(0) != right(3)


def test_memory_is_flat_if_the_last_quarter_is_as_the_second() -> None:
    count = LEAST_WEIGHINGS
    rising = [(i, 1000 + 20 * i) for i in range(count)]
    flat = [(i, 1000 + (i % 3)) for i in range(count)]
    warm = [(i, 1000 if i > count // 4 else 10) for i in range(count)]
    found = {m.process: m for m in memory({"a": rising, "b": flat, "c": warm, "d": flat[:-1]})}
    assert {name: m.is_flat for name, m in found.items()} == {"a": False, "b": True, "c": True}
    assert found["a"].faults == count - 1


def test_a_row_for_each_kind_and_role() -> None:
    events = dataclasses.replace(EVENTS, dealt=[*EVENTS.dealt, dealt(3, 40.0, 41.0, Fault.FREEZE)])
    freeze, kill = table(outcomes(events))
    assert (kill["kind"], kill["faults"], kill["detected"], kill["next_commit_worst_s"]) == ("kill", 2, 1, 0.5)
    assert (freeze["detection_median_s"], freeze["next_commit_median_s"]) == (None, None)


@pytest.fixture
def result() -> Result:
    found = Result(campaign=Campaign(faults=2), events=EVENTS, began=9.0, seconds=20.0)
    found.samples = samples(Events(), 2, right_samples(4, 2, seed=0))
    found.bits_different = 0
    return found


def test_a_report_has_what_was_lost(result: Result) -> None:
    content = report(result)
    assert (content["steps_lost"], content["samples_lost"], content["bits_different"]) == (0, 0, 0)
    assert content["next_commit_worst_s"] == 0.5
    assert [entry["at_s"] for entry in content["timeline"]] == [1.0, 11.0]
    assert content["is_good"]
    result.bits_different = 1
    assert not report(result)["is_good"]


@pytest.mark.parametrize("what", ["samples", "stopped", "problems"])
def test_what_makes_a_campaign_bad(what: str, result: Result) -> None:
    if what == "samples":
        result.samples = samples(Events(commits=commits(1)), 1, lambda _: [0])
    elif what == "stopped":
        result.stopped = "it was interrupted"
    else:
        result.problems.append("a service ended")
    assert not result.is_good


class Balanced(HTMLParser):
    """Which tags are open, and what a page asks of others."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(result: Result) -> None:
    result.problems.append("<b>a service ended</b>")
    text = page(report(result))
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert {"svg", "rect", "table"} <= parser.seen
    assert not {"script", "link", "img", "b"} & parser.seen
    assert "prefers-color-scheme: dark" in text
