"""`status`, `top`, the page and the metrics say of a job what its workers have counted; in virtual time.

Tests of `coordinator/core/history/status.py`.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field

import pytest
from rich.console import Console, RenderableType

from axon_ps.cli.terminal import status_view, top_view
from axon_ps.cli.terminal.watched_job import WatchedJob
from axon_ps.coordinator.core.history.phase import FIRST_STEP_S, STALLED_STEPS
from axon_ps.coordinator.messages import status_to_proto
from axon_ps.coordinator.server.feed import as_json
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import DType, OptimizerSpec
from axon_ps.wire.events import JobPhase, Status
from axon_ps.wire.report import REPORT_KEY
from coordinator_driver import Peer, Recording

UNITS = 16
SPEC = JobSpec(
    layout=Layout(units=tuple(build_unit(f"u{n}", [(f"u{n}.weight", (64, 256), DType.F32)]) for n in range(UNITS)))
)
OPTIMIZER = OptimizerSpec(name="adamw", groups=({"lr": 0.1},), group_of=(0,) * UNITS)
STEP_BYTES = 1e7
BEAT_S = 1.0
STEPS_ALL = 1000


def printed(picture: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160, height=60, force_terminal=False).print(picture)
    return out.getvalue()


@dataclass
class Said:
    """Everything that there is to read of a job at a moment.

    Attributes:
        status: as the coordinator gives it.
        text: what `axon-ps status` prints.
        top: what `axon-ps top` draws.
        page: the status that the page gets.
        metrics: what Prometheus gets.
    """

    status: Status
    text: str
    top: str
    page: dict[str, object]
    metrics: dict[str, float]

    @property
    def rates(self) -> dict[str, float]:
        """Steps per second as each of them says it; 0 = it says none."""
        found = {
            name: re.search(r"([\d.]+) steps/s", text) for name, text in (("status", self.text), ("top", self.top))
        }
        said = {name: float(match[1]) if match else 0.0 for name, match in found.items()}
        named = [value for name, value in self.metrics.items() if name.endswith("/steps_per_s")]
        return said | {"page": float(str(self.page.get("steps_per_s", 0.0))), "metrics": named[0]}

    @property
    def headlines(self) -> set[str]:
        """The job's state as each of them says it."""
        first = (text.partition("\n")[0].partition(": ")[2].strip() for text in (self.text, self.top))
        return {*first, str(self.page["headline"])}

    @property
    def steps(self) -> set[str]:
        """The number of steps made, in each place where that is said."""
        reported = self.page.get("progress") or {}
        assert isinstance(reported, dict)
        told = self.text.partition("replication")[0] + "\n".join(self.top.split("\n")[:2])
        return {
            *re.findall(r"(?:step|version) (\d+)", told),
            str(self.page.get("version", 0)),
            f"{reported.get('step', 0):g}",
        }


@dataclass
class Job:
    """Workers and servers that take as long for a step as they are told, and count what they do."""

    d: Recording
    workers: list[Peer]
    servers: list[Peer]
    made: int = 0
    sent: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    member_rates: list[float] = field(default_factory=list)
    reports: bool = True

    def pass_time(self, seconds: float, step_s: float = 0.0) -> None:
        """Let time pass, with steps of that length; gradients leave before a decision, parameters after it."""
        start = self.d.clock()
        steps = [(n * step_s, self.step) for n in range(1, round(seconds / step_s) + 1)] if step_s else []
        pulls = [(min(seconds, at_s + min(0.1, step_s / 2)), self.pull) for at_s, _ in steps]
        beats = [(n * BEAT_S, self.beat) for n in range(1, int(seconds / BEAT_S + 1e-9) + 1)]
        for at_s, happen in sorted([*steps, *pulls, *beats], key=lambda each: each[0]):
            self.d.clock.advance(max(0.0, start + at_s - self.d.clock()))
            happen()

    def step(self) -> None:
        """A step is made by everybody, and reported."""
        for worker in self.workers:
            self.send(worker)
            worker.vote()
        for server in self.servers:
            server.ready(*(0.1,) * primaries(server))
        self.made += 1
        if self.reports:
            self.report(steps=STEPS_ALL)

    def report(self, **values: object) -> None:
        """The record of `World.report` when the script gives no step."""
        report = {"step": self.made, "by_version": True, "loss": 0.5, **values}
        value = json.dumps(report).encode()
        self.d.kv(self.workers[0], "put", REPORT_KEY, value)
        self.d.state.history.stored(REPORT_KEY, value, self.d.clock())

    def pull(self) -> None:
        """Parameters leave the servers."""
        for server in self.servers:
            self.send(server)

    def send(self, peer: Peer) -> None:
        self.sent[peer.session] = self.sent.get(peer.session, 0.0) + STEP_BYTES

    def beat(self) -> None:
        """Everybody's heartbeat, with what it has sent."""
        for peer in (*self.workers, *self.servers):
            peer.beat(sent_bytes=self.sent.get(peer.session, 0.0))
        self.d.perform(self.d.state.tick(self.d.clock()))
        status = self.d.state.status(self.d.clock())
        self.rates.append(status.steps_per_s)
        self.member_rates += [load.sent_bytes_per_s for load in self.d.everything().members]

    def said(self) -> Said:
        """All that is said now."""
        status, watched = self.d.state.status(self.d.clock()), WatchedJob()
        feed = self.d.everything()
        feed.status.CopyFrom(status_to_proto(status))
        watched.apply(feed)
        return Said(
            status=status,
            text=printed(status_view.rendered(status, "here", width=160)),
            top=printed(top_view.rendered(watched, "here", 160, 60)),
            page=json.loads(as_json(feed.status)),
            metrics=self.d.state.statistics(status, self.d.clock()),
        )


def primaries(server: Peer) -> int:
    return sum(h.primary == server.given_rank for h in server.placements[0].holders)


def begun(shards: int = 1, workers: int = 2, **config: object) -> Job:
    """A job that is ready for its first step."""
    d = Recording(num_shards=shards, world_size=workers, **config)
    servers = [d.shard(node=f"s{n}") for n in range(shards)]
    members = [d.worker() for _ in range(workers)]
    for worker in members:
        d.register(worker, SPEC, OPTIMIZER)
    for server in servers:
        server.initialized()
    return Job(d, members, servers)


@pytest.mark.parametrize("step_s", [0.05, 0.3, 1.0, 1.4, 2.0, 20.0])
def test_rates_and_steps_are_those_that_the_workers_have_counted(step_s: float) -> None:
    job = begun()
    seconds = step_s * max(4, min(200, round(20.0 / step_s)))
    job.pass_time(seconds, step_s)
    job.rates.clear()
    job.member_rates.clear()
    job.pass_time(seconds, step_s)
    assert len(job.rates) >= 7
    assert job.rates == pytest.approx([1 / step_s] * len(job.rates), rel=0.06), "at every second"
    (curve,) = (c for c in job.d.everything().curves if c.name == "steps_per_s")
    assert list(curve.value) == pytest.approx([1 / step_s] * len(curve.value), rel=0.25), "no comb, and no zeros"
    assert job.member_rates
    assert job.member_rates == pytest.approx([STEP_BYTES / step_s] * len(job.member_rates), rel=0.26)
    now = job.said()
    assert now.rates == pytest.approx(dict.fromkeys(now.rates, 1 / step_s), rel=0.06)
    assert now.steps == {str(job.made)}
    assert now.headlines == {"training"}
    assert now.metrics["training"] == 1.0
    assert f"step {job.made} of {STEPS_ALL}" in now.text
    assert f"step {job.made} of {STEPS_ALL}" in now.top


def test_a_job_that_stands_still_has_no_rate_and_says_so() -> None:
    job = begun()
    job.pass_time(10.0, 0.05)
    assert job.said().headlines == {"training"}
    job.pass_time(9.0)
    assert job.said().headlines == {"training"}, "a moment without a step is none"
    job.pass_time(51.0)
    said = job.said()
    assert said.headlines == {"no step has committed for 60 s"}
    assert (said.status.phase, said.metrics["stalled"], said.metrics["training"]) == (JobPhase.STALLED, 1.0, 0.0)
    assert max(said.rates.values()) < 0.05
    assert job.member_rates[-1] == 0.0


def test_long_steps_are_no_standstill() -> None:
    job = begun()
    job.pass_time(FIRST_STEP_S - 1)
    assert job.said().headlines == {"ready to train"}
    job.pass_time(160.0, 40.0)
    job.pass_time((STALLED_STEPS - 1) * 40.0)
    assert job.said().headlines == {"training"}
    job.pass_time(80.0)
    assert job.said().status.phase is JobPhase.STALLED


def test_each_state_of_a_job_is_said_in_the_same_words_everywhere() -> None:
    d = Recording(num_shards=2, world_size=2, min_workers=2)
    job = Job(d, [], [])
    heads = [job.said().headlines]
    job.servers = [d.shard(node=f"s{n}") for n in range(2)]
    job.workers = [d.worker(), d.worker()]
    heads.append(job.said().headlines)
    for worker in job.workers:
        d.register(worker, SPEC, OPTIMIZER)
    heads.append(job.said().headlines)
    for server in job.servers:
        server.initialized()
    heads.append(job.said().headlines)
    job.pass_time(4.0, 0.5)
    heads.append(job.said().headlines)
    lost = job.servers.pop(0)
    lost.lose()
    job.pass_time(4.0, 0.5)
    heads.append(job.said().headlines)
    job.workers.pop().lose()
    heads.append(job.said().headlines)
    job.workers.append(d.worker())
    heads.append(job.said().headlines)
    job.pass_time(1.0, 0.5)
    for worker in job.workers:
        worker.leave(finished=True)
    heads.append(job.said().headlines)
    slices = len(job.servers[0].placements[0].holders)
    assert heads == [
        {"waiting for 2 of 2 workers and shard server 0, 1 of 2"},
        {"running, no model on the shard servers"},
        {"loading parameters"},
        {"ready to train"},
        {"training"},
        {f"training, {slices} of {slices} slices lack copies"},
        {f"waiting for 1 of 2 workers, {slices} of {slices} slices lack copies"},
        {f"ready to train, {slices} of {slices} slices lack copies"},
        {"finished: all 2 workers have done all there was to do"},
    ]
    assert all(len(said) == 1 for said in heads)
    assert max(job.said().rates.values()) == 0.0


def test_steps_that_were_aborted_are_not_counted_as_steps() -> None:
    job = begun(min_workers=1)
    job.pass_time(2.0, 0.5)
    for _ in range(6):
        job.workers.pop().lose()
        job.workers.append(job.d.worker())
    job.pass_time(2.0, 0.5)
    said = job.said()
    assert said.status.step > said.status.version + 1
    assert said.steps == {str(job.made)}


def test_a_second_run_of_a_job_counts_its_own_steps() -> None:
    job = begun()
    job.reports = False
    for _ in range(5):
        job.step()
    job.report(steps=5)
    assert "step 5 of 5 (100 %)" in job.said().text
    for worker in job.workers:
        worker.leave(finished=True)
    job.workers = [job.d.worker(), job.d.worker()]
    assert job.said().status.progress is None, "the report was of the run before"
    for worker in job.workers:
        job.d.register(worker, SPEC, OPTIMIZER)
    texts = []
    for _ in range(5):
        job.step()
        job.report(steps=5)
        texts.append(job.said().text.split("\n")[1].partition(",")[0])
    assert texts == [f"step {n} of 5 ({20 * n} %)" for n in range(1, 6)]
    job.d.restart()  # the coordinator's state says where this run began
    assert job.d.state.status(job.d.clock()).progress.step == 5  # type: ignore[union-attr]


def test_a_run_that_goes_on_to_a_step_of_all_runs_is_at_the_version() -> None:
    job = begun()
    job.reports = False
    for _ in range(5):
        job.step()
    for worker in job.workers:
        worker.leave(finished=True)
    job.workers = [job.d.worker(), job.d.worker()]
    for worker in job.workers:
        job.d.register(worker, SPEC, OPTIMIZER)
    job.step()
    job.report(steps=10)
    assert "step 6 of 10 (60 %)" in job.said().text


def test_no_report_says_more_than_100_per_cent() -> None:
    job = begun()
    job.reports = False
    job.step()
    job.report(step=6, steps=5, by_version=False)
    said = job.said()
    assert said.text.split("\n")[1] == "step 6, loss 0.5"
    assert "%" not in said.text


def test_what_one_dead_server_causes_does_not_bury_that_it_was_lost() -> None:
    job = begun(shards=3)
    job.pass_time(2.0, 0.5)
    lost = job.servers.pop(0)
    lost.lose()
    for _ in range(UNITS):
        for server in job.servers:
            for number in server.copying()[:1]:
                server.copied(number)
        job.pass_time(0.5, 0.5)
    assert job.said().headlines == {"training"}
    events = [(e.kind, e.text) for e in job.d.everything().events]
    after = events[events.index(("lost", "shard server 0 (node s0) was lost: its connection broke")) :]
    assert [kind for kind, _ in after] == ["lost", "aborted", "promoted", "copied"]
    copied = int(re.findall(r"a backup of (\d+) slices more", after[-1][1])[0])
    assert copied > UNITS // 2
    watched = WatchedJob()
    watched.apply(job.d.everything())
    assert len(watched.events) == len(events)
