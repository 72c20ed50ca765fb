"""2,000 random faults in one run of one job: `make lab NAME=soak`.

Three workers train on two servers without end; two workers are enough to go on. Again and again a random process is
struck at a random moment; then the job has to commit within the promised time. Every 50 faults a checkpoint is taken
and compared, bit by bit, with plain torch over the workers that took part in each committed step. In the end the times
from fault to next commit are printed, and whether the memory of every process that lived long enough was flat.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.numpy import load_file

from axon_ps.errors import AxonError
from axon_ps.host.children import Child
from axon_ps.storage.export import export_model
from axon_ps.storage.manifest import read_manifest
from axon_ps.testing import preloaded
from axon_ps.testing.workers import WorkerProcess
from axon_ps_lab.campaigns.case import PRELOADED
from axon_ps_lab.campaigns.exact_model import ExactAttempt, Oracle, train
from axon_ps_lab.campaigns.grid import LEASE_S, PATIENCE_S, Strike, Victim
from axon_ps_lab.faults import FaultyCluster, Hit, Moment
from axon_ps_lab.faults.driver import Driver, nothing_stopped
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.notes import Notes

WORKERS, SHARDS, ENOUGH = 3, 2, 2
VERIFY_EVERY = 50
PAUSE_S = 0.02
TIMEOUT_S = 120.0
WEIGHED_EVERY = 5
HANG_S = PATIENCE_S + 30.0
"""Seconds from healing until a job counts as hanging. A job that is merely late is counted, and the soak goes on."""

WEIGHTS = {
    Strike(Fault.KILL): 3, Strike(Fault.FREEZE, 0.3 * LEASE_S): 4, Strike(Fault.FREEZE, 1.5 * LEASE_S): 2,
    Strike(Fault.RESET): 6, Strike(Fault.HALF_CLOSE): 4, Strike(Fault.BLACK_HOLE, 1.5 * LEASE_S): 1,
    Strike(Fault.DELAY, 0.3): 3, Strike(Fault.RESETS, 0.5): 2,
}  # fmt: skip
"""The faults and their frequencies: as in the grid, but short, since their number matters here."""

MOMENTS = (Moment.GATHER, Moment.FORWARD, Moment.BACKWARD, Moment.PUSH, Moment.VOTE, Moment.BETWEEN_STEPS)


@dataclass(kw_only=True)
class Facts:
    """The observations of a soak."""

    to_commit_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    late: list[str] = field(default_factory=list)
    not_judged: int = 0
    problems: list[str] = field(default_factory=list)
    verified: int = 0
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))


class Soak:
    """One run.

    Args:
        cluster: the cluster, which runs.
        strategy: the sharding strategy.
        chance: the source of all random choices.
        faults: number of faults; in the second half some processes are not killed, so that their memory can be judged.
    """

    def __init__(self, cluster: FaultyCluster, strategy: str, chance: random.Random, faults: int) -> None:
        self._cluster, self._strategy, self._chance = cluster, strategy, chance
        self._half = faults // 2
        self._workers: dict[int, WorkerProcess] = {}
        self._files: list[Path] = []
        self._notes, self._driver = Notes(), Driver(cluster)
        self._participants: dict[int, tuple[int, ...]] = {}
        self._oracle = Oracle()
        self._saved = ""
        self._faults = 0
        self._printed = 0
        self._all_committed = 0.0  # when the newest step of all workers was committed
        self.facts = Facts()
        for rank in range(WORKERS):
            self._start(rank)

    def _start(self, rank: int) -> None:
        written = self._cluster.directory / f"attempts-{len(self._files)}"
        self._files.append(written)
        self._workers[rank] = self._cluster.start_worker(
            rank, train, args=(self._strategy, math.inf, TIMEOUT_S, written, 0.0, PAUSE_S)
        )

    # ------------------------------------------------------------------ attempts

    def _attempts(self) -> list[ExactAttempt]:
        """Return the attempts written since the last call, in time order."""
        found = [ExactAttempt(**note) for path in self._files for note in self._notes.new(path)]
        return sorted(found, key=lambda a: a.ended)

    def commit_since(self, moment: float, limit_s: float) -> float:
        """Return the time at which a worker committed a step after `moment`; 0 if none did for `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            first = 0.0
            for a in self._attempts():
                if a.committed:
                    self._participants[a.became - 1] = tuple(a.ranks)
                    if len(a.ranks) == WORKERS:
                        self._all_committed = max(self._all_committed, a.ended)
                    if a.version != a.became - 1:
                        self.facts.problems.append(f"a gradient of version {a.version} counted in {a.became - 1}")
                    first = first or (a.ended if a.ended > moment else 0.0)
            if first:
                return first
            self._replace_who_ended()
            time.sleep(0.01)
        return 0.0

    def _replace_who_ended(self) -> None:
        for rank, worker in list(self._workers.items()):
            if worker.process.exit_code is not None:
                result = worker.end()
                self.facts.problems.append(f"worker {rank} ended: {result.error[-600:]}")
                self._start(rank)

    # ------------------------------------------------------------------ faults

    def fault(self) -> bool:
        """Inject one fault; returns False if the job did not go on."""
        self._faults += 1
        what = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        who = self._chance.choice([Victim.WORKER, Victim.WORKER, Victim.SHARD, Victim.COORDINATOR, Victim.BOTH])
        if who is Victim.SHARD and what.fault is Fault.KILL and self._chance.random() < 0.8:
            who = Victim.WORKER  # a restore takes a second; its oracle must go back
        victim = self._chance.randrange(WORKERS)
        if what.fault is Fault.KILL and self._faults > self._half:
            who, victim = (
                (who if who is Victim.SHARD else Victim.WORKER),
                (0 if who is Victim.SHARD else max(1, victim)),
            )
        name = f"{self._faults}: {who.value} {victim} {what.name}"
        hit = self._moment(victim)
        dealt = time.monotonic()
        self._deal(who, what, victim, hit)
        healed = time.monotonic()
        committed = self.commit_since(dealt, HANG_S)
        if not committed:
            self._cluster.show_stacks()
            self.facts.problems.append(f"hang: {name}: nothing was committed for {HANG_S:g} s after it healed")
            return False
        self.facts.to_commit_s[f"{who.value} {what.name}"].append(committed - dealt)
        everybody = self._all_commit_since(healed)
        stalled = self._cluster.take_stall() > LEASE_S / 3
        self.facts.not_judged += stalled
        if everybody > PATIENCE_S and not stalled:
            self.facts.late.append(f"{name}: {everybody:.1f} s after healing until all had committed")
        if self._faults % WEIGHED_EVERY == 0:
            self._weigh()
        return everybody < HANG_S

    def _all_commit_since(self, healed: float) -> float:
        """Return the seconds from healing until a step of all workers was committed."""
        while (waited_s := time.monotonic() - healed) < HANG_S:
            if self._all_committed > healed:
                return self._all_committed - healed
            self.commit_since(time.monotonic(), 0.2)
        self._cluster.show_stacks()
        self.facts.problems.append(f"hang: fault {self._faults}: not all workers came back within {HANG_S:g} s")
        return waited_s

    def _moment(self, victim: int) -> Hit | None:
        """Return a process that stopped at a random moment; None = none did."""
        moment = self._chance.choice([*MOMENTS, Moment.DECISION])
        process = self._workers[victim].process
        if moment is Moment.DECISION:
            process = self._cluster.process("coordinator")
        return self._driver.stop_at(process, moment, 1.0)

    def _deal(self, who: Victim, what: Strike, victim: int, hit: Hit | None) -> None:
        struck: list[Child] = []
        if who in (Victim.WORKER, Victim.BOTH):
            struck.append(self._workers[victim].process)
        if who in (Victim.COORDINATOR, Victim.BOTH):
            struck.append(self._cluster.process("coordinator"))
        if who is Victim.SHARD:
            struck.append(self._cluster.process("shard", victim % SHARDS))
        release = nothing_stopped if hit is None else hit.release
        if what.fault is not Fault.KILL:
            self._driver.last(what.fault, struck, what.seconds, release=release)
            return
        self._driver.end(what.fault, struck, release=release)
        if who in (Victim.COORDINATOR, Victim.BOTH):
            self._cluster.restart("coordinator")
        if who in (Victim.WORKER, Victim.BOTH):
            self._workers[victim].end()
            self._start(victim)
        if who is Victim.SHARD:
            self.commit_since(time.monotonic(), 0.0)
            self._cluster.restart("shard", victim % SHARDS)
            self._cluster.command("checkpoint", "restore", self._saved)
            version = read_manifest(self._saved).version
            self._oracle.restore(version)
            self._participants = {v: ranks for v, ranks in self._participants.items() if v < version}

    # ------------------------------------------------------------------ bits and bytes

    def verify(self) -> None:
        """Compare a checkpoint with plain torch, and keep it for a restore."""
        uri = f"{self._cluster.directory}/kept-{self.facts.verified}"
        self._cluster.command("checkpoint", "save", uri)
        self.commit_since(time.monotonic(), HANG_S)
        version = read_manifest(uri).version
        export_model(uri, f"{uri}.safetensors")
        missing = [v for v in range(self._oracle.version, version) if v not in self._participants]
        if missing:
            self.facts.problems.append(f"nobody wrote down who took part in {missing[:5]}")
            return
        while self._oracle.version < version:
            self._oracle.step(self._participants[self._oracle.version])
        if differ := self._oracle.differs(load_file(f"{uri}.safetensors")):
            self.facts.problems.append(f"wrong bits: {differ} values at version {version}")
        self._oracle.save()
        self._saved = uri
        self.facts.verified += 1

    def print_problems(self) -> None:
        """Print the problems found since the last call, since a run is long."""
        for problem in self.facts.problems[self._printed :]:
            print(f"WRONG: {problem}", flush=True)
        self._printed = len(self.facts.problems)

    def _weigh(self) -> None:
        """Note the memory that every process needs."""
        self._cluster.trim_memory()
        processes = {f"worker {r}": w.process for r, w in self._workers.items()}
        processes |= {f"shard {i}": self._cluster.process("shard", i) for i in range(SHARDS)}
        processes["coordinator"] = self._cluster.process("coordinator")
        for name, process in processes.items():
            self.facts.memory[f"{name} ({process.pid})"].append((self._faults, _private_bytes(process.pid)))


def _private_bytes(pid: int) -> int:
    """Return the bytes that a process alone has written, and its share of swapped memory; 0 = it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "SwapPss:")))


def report(facts: Facts, faults: int, minutes: float) -> int:
    """Print the results; returns the number of problems and of late commits."""
    times = sorted(t for kind in facts.to_commit_s.values() for t in kind)
    print(f"\n{faults} faults in {minutes:.1f} min; {facts.verified} comparisons with plain torch, bit by bit")
    for kind, some in sorted(facts.to_commit_s.items()):
        print(f"  {kind:36} {len(some):5}  median {statistics.median(some):.2f} s  longest {max(some):.2f} s")
    if times:
        p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        print(
            f"from fault to next commit: median {statistics.median(times):.3f} s, p99 {p99:.3f} s, "
            f"{times[-1]:.3f} s at most"
        )
    for name, weights in facts.memory.items():
        if weights[-1][0] - weights[0][0] >= 200:
            quarter = len(weights) // 4
            early = statistics.median(b for _, b in weights[quarter : 2 * quarter])
            late = statistics.median(b for _, b in weights[-quarter:])
            grown = late > 1.05 * early + (4 << 20)
            print(f"  {name:24} {early / 2**20:7.1f} MiB, then {late / 2**20:7.1f} MiB{'  NOT FLAT' if grown else ''}")
            if grown:
                series = ", ".join(f"{fault}: {b / 2**20:.1f}" for fault, b in weights)
                facts.problems.append(f"memory: {name} grew; MiB after each so many faults: {series}")
    if facts.not_judged:
        print(
            f"in {facts.not_judged} faults this process did not get to run for a third of a lease: not judged by time"
        )
    for line in facts.late:
        print(f"late: {line}")
    for line in facts.problems:
        print(f"WRONG: {line}")
    return len(facts.problems) + len(facts.late)


def main() -> int:
    """Run the campaign; returns 0 if all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--strategy", default="FULL_SHARD", choices=("FULL_SHARD", "SHARD_GRAD_OP"))
    parser.add_argument("--log", type=Path, default=Path("build/faults/soak.log"))
    options = parser.parse_args()
    began = time.monotonic()
    with preloaded(PRELOADED), FaultyCluster(SHARDS, WORKERS, min_workers=ENOUGH, lease_s=LEASE_S) as cluster:
        soak = Soak(cluster, options.strategy, random.Random(options.seed), options.faults)
        try:
            if not soak.commit_since(time.monotonic(), 30.0):
                raise AxonError("the job did not begin")
            soak.verify()
            for number in range(1, options.faults + 1):
                if not soak.fault():
                    break
                if number % VERIFY_EVERY == 0 or number == options.faults:
                    soak.verify()
                    soak.print_problems()
                    print(f"{number} faults, {(time.monotonic() - began) / 60:.1f} min, {len(soak.facts.late)} late, "
                          f"{len(soak.facts.problems)} wrong", flush=True)  # fmt: skip
        except AxonError as error:
            soak.facts.problems.append(str(error)[:2000])
        if soak.facts.problems:
            options.log.parent.mkdir(parents=True, exist_ok=True)
            logs = sorted(cluster.directory.glob("*.log"))
            options.log.write_text("\n".join(f"--- {path.name}\n{path.read_text()[-60_000:]}" for path in logs))
            print(f"what everybody wrote: {options.log}")
    return 1 if report(soak.facts, soak._faults, (time.monotonic() - began) / 60) else 0


if __name__ == "__main__":
    sys.exit(main())
