"""One case of the grid: a small cluster, a fault at its moment, and the outcome."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from axon_ps.errors import AxonError
from axon_ps.host.children import Child, wait_for_any
from axon_ps.storage import contents
from axon_ps.testing.workers import WorkerProcess
from axon_ps_lab.campaigns.exact_model import ExactAttempt, Values, attempts_in, expected, train
from axon_ps_lab.campaigns.grid import LEASE_S, PATIENCE_S, Case, Victim
from axon_ps_lab.faults import FaultyCluster, Hit, Moment, state_files
from axon_ps_lab.faults.cluster import MODULES as SERVICE_MODULES
from axon_ps_lab.faults.driver import Driver
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.proxy import ProxiesStalled

MODULES = ("torch", "torch.distributed.tensor", "torch._dynamo", "axon_ps.parallel", "axon_ps.worker.world")
PRELOADED = (*MODULES, *SERVICE_MODULES)

STEPS, EARLIER, FATAL = 7, 1, 3
SHARDS = 2
_MOST_RESTARTS = 2
_START_S = 40.0
_SLACK_S = 4.0
"""Seconds beyond `PATIENCE_S` before workers without attempts count as hanging: a busy machine is slow."""

_LOOK_S = 0.25

_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class CaseOutcome:
    """The outcome of a case.

    Attributes:
        name: the case's.
        problems: the broken promises, in words; empty = all is well.
        waited_s: of each worker, seconds from healing to its next committed step.
        stalled_s: the longest time for which this process did not run; it forwards every byte of the case.
        restarts: workers that were started again because they ended with an error.
        seconds: duration of the case.
        logs: the output of all processes.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    waited_s: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    restarts: int = 0
    seconds: float = 0.0
    logs: str = ""

    @property
    def suspect(self) -> bool:
        """True if it may be the machine's fault: workers were only late, or hung while this process did not run."""
        slow = ("late:", "hang:") if self.stalled_s > LEASE_S / 3 else ("late:",)
        return bool(self.problems) and all(p.startswith(slow) for p in self.problems)


def run(case: Case) -> CaseOutcome:
    """Run a case; its errors are problems of the outcome."""
    began = time.monotonic()
    outcome = CaseOutcome(name=case.name)
    try:
        with _cluster(case) as cluster:
            try:
                Scene(case, cluster, outcome).play()
            except ProxiesStalled as error:
                outcome.problems.append(f"hang: {error}")
            finally:
                outcome.stalled_s = round(cluster.take_stall(), 2)
            if outcome.problems:
                raise AxonError("; ".join(outcome.problems))
    except Exception as error:
        if not outcome.problems:
            outcome.problems.append(f"{type(error).__name__}: {str(error)[:2000]}")
        outcome.logs += "\n".join(getattr(error, "__notes__", ()))
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def _cluster(case: Case) -> FaultyCluster:
    return FaultyCluster(
        SHARDS,
        4 if case.hybrid else 3,
        lease_s=LEASE_S,
        environment={} if case.direct else {"AXON_PS_DIRECT_MEMORY": "0"},
        shard_nodes=("a", "b") if case.hybrid else (),
        replication=case.replication,
    )


class Scene:
    """A case while it is played."""

    def __init__(self, case: Case, cluster: FaultyCluster, outcome: CaseOutcome) -> None:
        self._case, self._cluster, self._outcome = case, cluster, outcome
        self._workers: dict[int, WorkerProcess] = {}
        self._lives: list[tuple[int, Path]] = []  # of every started worker: its rank, and the file of its attempts
        self._earlier = ""
        self._save: WorkerProcess | None = None
        self._driver = Driver(cluster)
        self._older: Mapping[Path, bytes] | None = None  # the state of the coordinator at an earlier step
        self._healed = 0.0
        self._dealt = 0.0
        self._saved = f"{cluster.directory}/kept"
        self._written = f"{cluster.directory}/written"

    def play(self) -> None:
        """Start the workers, strike, wait for their end, and judge."""
        for rank in range(self._cluster.world_size):
            self._start(rank)
        hit = self._wait_for_the_moment()
        if hit is not None:
            self._strike(hit)
            self._watch()
            self._judge()
        self._outcome.logs += self._earlier
        for rank, worker in self._workers.items():
            result = worker.end()
            self._outcome.logs += f"--- worker {rank}: {result.error}\n{result.output}\n"

    def _start(self, rank: int) -> None:
        env = {"AXON_PS_NODE": "ab"[rank // 2]} if self._case.hybrid else {}
        written = self._cluster.directory / f"attempts-{len(self._lives)}"
        self._lives.append((rank, written))
        self._workers[rank] = self._cluster.start_worker(
            rank, train, args=(self._case.strategy, STEPS, _TIMEOUT_S, written), env=env
        )

    # ------------------------------------------------------------------ the moment

    def _wait_for_the_moment(self) -> Hit | None:
        """Return the process that stopped at the case's moment, until it is released; None = none did."""
        moments, moment = self._cluster.moments, self._case.moment
        first = self._workers[(self._case.victims or (1,))[0]].process
        if self._case.fault is Fault.OLDER_STATE and not self._copy_state(first):
            return None
        moments.arm(self._cluster.slot_of(first), Moment.BETWEEN_STEPS, version=FATAL)
        if (hit := self._wait("version", _START_S)) is None or moment is Moment.BETWEEN_STEPS:
            self._save_a_checkpoint()
            return hit
        self._save_a_checkpoint()
        process = {Moment.DECISION: self._cluster.process("coordinator"), Moment.CHECKPOINT: self._shard}.get(
            moment, first
        )
        moments.arm(self._cluster.slot_of(process), moment)
        if moment is Moment.CHECKPOINT:
            self._save = self._cluster.begin_command("checkpoint", "save", self._written, "--timeout-s", "30")
        hit.release()
        return self._wait(moment.name, 5.0)

    def _copy_state(self, first: Child) -> bool:
        """Copy the coordinator's state at an earlier step."""
        self._cluster.moments.arm(self._cluster.slot_of(first), Moment.BETWEEN_STEPS, version=EARLIER)
        if (hit := self._wait("an earlier version", _START_S)) is None:
            return False
        self._older = state_files.copy(self._cluster.process("coordinator"), self._cluster.state)
        hit.release()
        return True

    @property
    def _shard(self) -> Child:
        return self._cluster.process("shard", 0)

    def _wait(self, what: str, timeout_s: float) -> Hit | None:
        hit = self._cluster.moments.wait(timeout_s)
        if hit is None:
            self._outcome.problems.append(f"the moment was not reached: {what}")
        return hit

    def _save_a_checkpoint(self) -> None:
        if self._case.restores and not self._outcome.problems:
            self._cluster.command("checkpoint", "save", self._saved)

    # ------------------------------------------------------------------ the fault

    def _strike(self, hit: Hit) -> None:
        self._dealt = time.monotonic()
        fault, seconds = self._case.fault, self._case.strike.seconds
        struck = [self._workers[rank].process for rank in self._case.victims]
        if Victim.COORDINATOR in self._case.struck:
            struck.append(self._cluster.process("coordinator"))
        if Victim.SHARD in self._case.struck:
            struck.append(self._shard)
        if fault.traits.ends:
            self._kill(struck, hit)
        else:
            other = self._cluster.process("shard", 1) if struck[0] is self._shard else self._shard
            self._driver.last(fault, struck, seconds, release=hit.release, other=other)
        self._healed = time.monotonic()

    def _kill(self, struck: Sequence[Child], hit: Hit) -> None:
        try:
            seed = len(self._case.name)
            self._driver.end(self._case.fault, struck, release=hit.release, older=self._older, seed=seed)
        except AxonError as error:
            self._outcome.problems.append(str(error))
        if Victim.COORDINATOR in self._case.struck:
            self._cluster.restart("coordinator")
        if Victim.SHARD in self._case.struck:
            self._cluster.restart("shard", 0)
        if self._case.restores:
            self._cluster.command("checkpoint", "restore", self._saved, "--timeout-s", "30")
        for node in {self._node(rank) for rank in self._case.victims}:
            self._replace(node)

    # ------------------------------------------------------------------ the outcome

    def _node(self, rank: int) -> tuple[int, ...]:
        """Return the workers that fail and are started together."""
        return (rank // 2 * 2, rank // 2 * 2 + 1) if self._case.hybrid else (rank,)

    def _replace(self, node: Sequence[int]) -> None:
        """End the remaining workers of a node and start all of its workers again, as a launcher does."""
        for rank in node:
            self._workers[rank].kill()
        for rank in node:
            result = self._workers[rank].end()
            self._earlier += f"--- worker {rank}, earlier life: {result.error}\n{result.output}\n"
            self._start(rank)

    def _watch(self) -> None:
        """Wait until every worker has ended, or none has made an attempt for too long."""
        running = set(self._workers)
        while running:
            ended = wait_for_any([self._workers[rank].process for rank in running], time.monotonic() + _LOOK_S)
            newest = max((path.stat().st_mtime for _, path in self._lives if path.exists()), default=0.0)
            alive = max(self._healed, time.monotonic() - (time.time() - newest))
            if not ended and time.monotonic() > alive + PATIENCE_S + _SLACK_S:
                self._cluster.show_stacks()
                for rank in running:
                    self._workers[rank].kill()
                hanging = ", ".join(map(str, sorted(running)))
                self._outcome.problems.append(f"hang: {hanging} of {len(self._workers)} workers had not ended")
                return
            for rank in [r for r in running if r in self._workers and self._workers[r].process in ended]:
                running.discard(rank)
                if self._workers[rank].process.exit_code and self._may_restart(rank):
                    self._outcome.restarts += 1
                    self._replace(self._node(rank))
                    self._healed = time.monotonic()
                    running |= set(self._node(rank))

    def _may_restart(self, rank: int) -> bool:
        """Return True if a worker that ended with an error is started again: a node fails as a whole."""
        return self._case.hybrid and bool(self._case.victims) and self._outcome.restarts < _MOST_RESTARTS

    def _judge(self) -> None:
        """Compare the attempts and values with the promises."""
        values: dict[int, Values] = {}
        problems = self._outcome.problems
        for rank, worker in self._workers.items():
            if worker.process.exit_code is None:
                continue
            result = worker.end()
            if result.error:
                problems.append(f"worker {rank} ended: {_last_line(result.error)}")
            else:
                values[rank] = result.value
        attempts = [(rank, attempt) for rank, written in self._lives for attempt in attempts_in(written)]
        for rank in values:
            waited_s = _waited([a for r, a in attempts if r == rank], self._healed)
            self._outcome.waited_s[str(rank)] = round(waited_s, 3)
            if waited_s > PATIENCE_S:
                problems.append(f"late: worker {rank} waited {waited_s:.1f} s after the fault had healed")
            failed = [a.reason for r, a in attempts if r == rank and not a.committed]
            if self._case.most_aborts is not None and len(failed) > self._case.most_aborts:
                problems.append(f"lost: {len(failed)} attempts of worker {rank} did not commit: {'; '.join(failed)}")
        if len(values) == len(self._workers):
            problems += wrong_bits(attempts, values)
        self._judge_checkpoint()

    def _judge_checkpoint(self) -> None:
        """Check that a saved checkpoint is complete, or that saving it failed with a reason."""
        if self._save is None:
            return
        result = self._save.result(5.0)
        if result.value == 0:
            try:
                contents.verify(self._written)
            except AxonError as error:
                self._outcome.problems.append(f"the checkpoint that was written is not whole: {error}")
        elif result.value is None or not result.output.strip():
            self._outcome.problems.append(f"`checkpoint save` ended without a reason: {result.error} {result.output}")


def _last_line(error: str) -> str:
    """Return the exception of a traceback, without its notes."""
    lines = error.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("axon_ps.errors.")), lines[-1])


def _waited(attempts: Iterable[ExactAttempt], healed: float) -> float:
    """Return the seconds from healing to the next committed step; 0 if all were committed before."""
    return min((a.ended - healed for a in attempts if a.committed and a.ended >= healed), default=0.0)


def wrong_bits(attempts: Iterable[tuple[int, ExactAttempt]], found: dict[int, Values]) -> list[str]:
    """Return the mistakes: wrong versions, and differences from plain torch over the ranks of each committed step."""
    problems, participated = [], {}
    for rank, a in sorted(attempts, key=lambda pair: pair[1].ended):
        if a.committed and a.version != a.became - 1:
            problems.append(f"wrong: worker {rank}: a gradient of version {a.version} counted in {a.became - 1}")
        if a.committed:
            participated[a.became - 1] = tuple(a.ranks)
    steps = tuple(participated.get(version, ()) for version in range(STEPS))
    if missing := [version for version, ranks in enumerate(steps) if not ranks]:
        return [*problems, f"no worker saw the steps from {missing} commit"]
    values = expected(steps)
    for rank, theirs in found.items():
        for name, right in values.items():
            differ = int(np.count_nonzero(theirs[name] != right))
            if differ:
                problems.append(f"wrong: worker {rank}: {differ} of {right.size} values of {name} after {steps}")
    return problems


def as_json(outcome: CaseOutcome) -> dict[str, object]:
    """Return an outcome as a line of the results file has it."""
    return dataclasses.asdict(outcome)
