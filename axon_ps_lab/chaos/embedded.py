"""A campaign's own job: its processes on this machine, the faults that strike them, and the notes of its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from axon_ps.errors import AxonError
from axon_ps.host.children import Child
from axon_ps.observe.moments import Moment
from axon_ps.testing.threads import run_threads
from axon_ps.testing.workers import WorkerProcess, fork_server, preloaded
from axon_ps_lab.chaos import disks, state_files, training
from axon_ps_lab.chaos.campaign import END_THE_COORDINATOR, Campaign, Kind
from axon_ps_lab.chaos.checkpoints import truncated
from axon_ps_lab.chaos.figures import Attempt, Commit, Events, Samples, right_samples, samples
from axon_ps_lab.chaos.memory import resident_bytes
from axon_ps_lab.chaos.observer import Observer
from axon_ps_lab.chaos.plan import Fault
from axon_ps_lab.faults import FaultyCluster, Hit, bit_flips
from axon_ps_lab.faults import proxy as proxies
from axon_ps_lab.faults.cluster import MODULES
from axon_ps_lab.faults.proxy import Disturbance

PRELOADED: Final = (
    "torch", "torch.distributed.tensor", "torch._dynamo", "axon_ps.parallel", "axon_ps.worker.world",
    "axon_ps_lab.chaos.training", *MODULES,
)  # fmt: skip

Values = training.Values

_STATE_DISK_BYTES: Final = 48 << 20
_CHECKPOINT_DISK_BYTES: Final = 64 << 20
_START_S: Final = 60.0
_MOMENT_S: Final = 0.7
_END_S: Final = 60.0
_LAST_STEPS: Final = 20
_STEP_S: Final = 1.0
"""The longest duration of a step in a job without faults."""

_POLL_S: Final = 0.03
_RESTORE_S: Final = 15.0
_FLIP_S: Final = 10.0

_DISTURBANCES: Final = {
    Kind.RESET: proxies.Kind.RESET,
    Kind.BLACK_HOLE: proxies.Kind.BLACK_HOLE,
    Kind.DELAY: proxies.Kind.DELAY,
    Kind.SLOW_LINK: proxies.Kind.SLOW,
    Kind.PARTITION: proxies.Kind.BLACK_HOLE,
    Kind.CUT: proxies.Kind.BLACK_HOLE,
}


class EmbeddedJob:
    """The job of a campaign, as a context manager.

    Args:
        campaign: the campaign.

    Attributes:
        observer: follows the coordinator's feed.
        events: the observed events.
    """

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._options = options = campaign.embedded
        self._recipe = training.Recipe.of(options)
        self._stack = contextlib.ExitStack()
        self._workers: dict[WorkerProcess, int] = {}  # in the order of their start, with their numbers
        self._started = 0
        self._offsets: dict[Path, int] = {}
        self._commits: dict[tuple[int, int], float] = {}
        self._newest = 0.0
        self._killed: set[str] = set()  # incarnations of shard servers that were killed
        self.events = Events()

    def __enter__(self) -> EmbeddedJob:
        """Start all processes.

        Raises:
            AxonError: a process did not start.
        """
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        options = self._options
        flips = Kind.BIT_FLIP in self._campaign.kinds
        base = Path(stack.enter_context(_directory()))
        self._base = str(base)
        self._notes, self._flips = base / "notes", base / "flips"
        self._disks = {"coordinator": base / "state", "shard": base / "checkpoints"}
        for directory in (self._notes, self._flips):
            directory.mkdir()
        self._make_disks(stack)
        self._checkpoints = self._disks["shard"] / "checkpoints"
        if fork_server() is None:
            stack.enter_context(preloaded(PRELOADED))
        self._cluster = stack.enter_context(
            FaultyCluster(
                options.shards,
                options.workers,
                min_workers=options.workers,
                lease_s=options.lease_s,
                replication=options.replication,
                checkpoint_dir=self._checkpoints,
                checkpoint_every=options.checkpoint_every,
                state_dir=self._disks["coordinator"],
                shard_nodes=[f"shard-{rank}" for rank in range(options.shards)],
                shard_environment={"AXON_PS_PLUGINS": bit_flips.__name__, bit_flips.DIRECTORY: str(self._flips)}
                if flips
                else {},
            )
        )
        cluster = self._cluster
        self.observer = stack.enter_context(Observer(lambda: cluster.operator_address, cluster.security, cluster.job))
        for rank in range(options.workers):
            self._start_worker(rank)
        self.wait(lambda: self._newest > 0.0, _START_S, "the job did not begin")
        for _ in range(options.standbys):
            self._start_worker(-1)

    def _make_disks(self, stack: contextlib.ExitStack) -> None:
        """Make the directories of state and checkpoints, on small disks if these are to be filled."""
        disk = Path(self._options.disk) if self._options.disk else None
        if Kind.FULL_DISK not in self._campaign.kinds:
            for directory in self._disks.values():
                directory.mkdir()
        elif disk is None:
            sizes = (_STATE_DISK_BYTES, _CHECKPOINT_DISK_BYTES)
            for directory, size in zip(self._disks.values(), sizes, strict=True):
                stack.enter_context(disks.small_disk(directory, size))
        else:
            self._disks = {role: disk / role for role in self._disks}
            for directory in self._disks.values():
                directory.mkdir(parents=True, exist_ok=True)

    def _start_worker(self, rank: int) -> None:
        """Start a worker with a rank, or, for -1, a standby."""
        self._started += 1
        environment = {"AXON_PS_NODE": f"worker-{self._started}"} | ({"AXON_PS_STANDBY": "1"} if rank < 0 else {})
        arguments = (str(self._notes), self._started, self._recipe)
        worker = self._cluster.start_worker(rank, training.worker, args=arguments, env=environment)
        self._workers[worker] = self._started

    # ------------------------------------------------------------------ watching

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for a condition; workers that end meanwhile are replaced.

        Raises:
            AxonError: the condition did not hold in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            if done():
                return
            if time.monotonic() > deadline:
                raise AxonError(f"{what} within {limit_s:g} s")
            time.sleep(_POLL_S)

    def look(self) -> None:
        """Read the workers' new notes, and replace the workers that have ended."""
        for worker in list(self._workers):
            has_ended = worker.process.exit_code is not None
            self._read(worker)
            if has_ended:
                self._replace(worker)

    def _read(self, worker: WorkerProcess) -> None:
        path = self._path(training.NOTES, worker)
        if path.exists():
            for line in self._new_lines(path):
                self._take(self._workers[worker], json.loads(line))

    def _path(self, kind: str, worker: WorkerProcess) -> Path:
        """Return the path of a worker's file, named by the worker's number, since process ids are used again."""
        return self._notes / f"{kind}{self._workers[worker]}"

    def _new_lines(self, path: Path) -> list[bytes]:
        with open(path, "rb") as file:
            file.seek(self._offsets.get(path, 0))
            lines = file.read().split(b"\n")[:-1]
        self._offsets[path] = self._offsets.get(path, 0) + sum(len(line) + 1 for line in lines)
        return lines

    def _take(self, process: int, found: dict[str, Any]) -> None:
        """Process a line of a worker's notes."""
        if "attempt" in found:
            version, generation = found["attempt"]
            self.events.attempts.append(
                Attempt(
                    process=process,
                    version=version,
                    generation=generation,
                    epoch=found["epoch"],
                    samples=tuple(found["samples"]),
                )
            )
        elif "committed" in found:
            version, generation = found["committed"]
            self._newest = max(self._newest, found["at"])
            self._commits[version, generation] = min(found["at"], self._commits.get((version, generation), found["at"]))
        elif "aborted" in found:
            self.events.aborted.append(time.monotonic())

    def _replace(self, worker: WorkerProcess) -> None:
        """Start a standby for a worker that has ended, or was killed."""
        killed = worker.process.exit_code == -signal.SIGKILL
        result = worker.end()
        del self._workers[worker]
        if not killed:
            last = result.error.strip().splitlines()[-1:] or ["it ended well"]
            self.events.ends.append(f"{worker.process.name} ({worker.process.pid}): {last[0][:300]}")
        self._start_worker(-1)

    def _is_working(self, worker: WorkerProcess) -> bool:
        return self._path(training.NOTES, worker).exists()

    @property
    def newest(self) -> float:
        """The time of the newest commit that is known."""
        return self._newest

    def is_complete(self) -> bool:
        """Return True if the job has all members and copies, and its standbys wait."""
        options = self._options
        working = [w for w in self._workers if self._is_working(w)]
        ready = [w for w in self._workers if self._path(training.WAITING, w).exists()]
        if len(working) != options.workers or len(ready) != options.workers + options.standbys:
            return False
        status = self.observer.status()
        return (
            status is not None
            and len(status.membership.workers) == options.workers
            and len(status.membership.shards) == options.shards
            and status.initialized
            and not any(model.lacking for model in status.models)
            and not any(member.incarnation in self._killed for member in status.membership.shards)
        )

    # ------------------------------------------------------------------ faults

    def deal(self, fault: Fault) -> tuple[str, float, str]:
        """Inject a fault, and return when it is over.

        Returns:
            The name of the process that was struck, the time at which the fault began, and a note for the report.
        """
        process = self._process(fault.role, fault.index)
        hit = self._moment(fault, process)
        began = time.monotonic()
        try:
            note = self._strike(fault, process, hit)
        finally:
            if hit is not None:
                hit.release()
        return f"{process.name} ({process.pid})", began, self._without_base(note)

    def _without_base(self, text: str) -> str:
        """Return a text without the path of this run's directory."""
        return text.replace(f"{self._base}/", "")

    def _process(self, role: str, index: int) -> Child:
        if role != "worker":
            return self._cluster.process(role, index)
        working = [w for w in self._workers if self._is_working(w)] or list(self._workers)
        return working[index % len(working)].process

    def _moment(self, fault: Fault, process: Child) -> Hit | None:
        """Wait until a process stops at the fault's moment; None = the fault has no moment, or no process stopped."""
        if not fault.moment:
            time.sleep(fault.after_s)
            return None
        moment = Moment[fault.moment]
        stopping = process if fault.role == "worker" else self._process("worker", fault.index)
        if moment is Moment.DECISION:
            stopping = self._process("coordinator", 0)
        slot = self._cluster.slot_of(stopping)
        self._cluster.moments.arm(slot, moment)
        hit = self._cluster.moments.wait(_MOMENT_S)
        self._cluster.moments.arm(slot, None)
        return hit

    def _strike(self, fault: Fault, process: Child, hit: Hit | None) -> str:
        if fault.kind is Kind.KILL:
            return self._kill(fault, process, hit)
        if fault.kind is Kind.FREEZE:
            process.send_signal(signal.SIGSTOP)
            try:
                self._last(fault, hit)
            finally:
                process.send_signal(signal.SIGCONT)
        elif fault.kind in _DISTURBANCES:
            self._disturb(fault, process, hit)
        elif fault.kind is Kind.FULL_DISK:
            return self._fill_disk(fault, hit)
        elif fault.kind in END_THE_COORDINATOR:
            return self._end_coordinator(fault, hit)
        elif fault.kind is Kind.CLOCK_JUMP:
            slot = self._cluster.slot_of(process)
            self._cluster.clocks.jump(slot, fault.amount)
            self._last(fault, hit)
            self._cluster.clocks.jump(slot, 0.0)
        elif fault.kind is Kind.TRUNCATED_FILE:
            if hit is not None:
                hit.release()
            return truncated(str(self._checkpoints), fault, lambda uri: self.observer.restore(uri, _RESTORE_S))
        else:
            return self._flip(fault, process, hit)
        return ""

    def _last(self, fault: Fault, hit: Hit | None) -> None:
        """Wait for the duration of the fault."""
        if hit is not None:
            hit.release()
        time.sleep(fault.seconds)

    def _kill(self, fault: Fault, process: Child, hit: Hit | None) -> str:
        self._end(fault, process)
        if hit is not None:
            hit.release()
        if fault.role == "worker":
            self.look()
        else:
            self._cluster.restart(fault.role, fault.index)
        return ""

    def _end(self, fault: Fault, process: Child) -> None:
        if fault.role == "shard" and (status := self.observer.status()) is not None:
            self._killed.update(m.incarnation for m in status.membership.shards if m.rank == fault.index)
        process.send_signal(signal.SIGKILL)
        process.wait(_END_S)

    def _end_coordinator(self, fault: Fault, hit: Hit | None) -> str:
        """End the coordinator, alone or with a shard server, and restart it with the remains of its state."""
        process, state, note = self._process("coordinator", 0), self._cluster.state, ""
        if fault.kind is Kind.FAILING_DISK:
            state_files.cannot_write(process)
        elif fault.kind is Kind.OLDER_STATE:
            copy = state_files.copy(process, state)
            self._last(fault, hit)
        elif fault.kind is Kind.KILL_TOGETHER:
            self._end(fault, self._process("shard", fault.index))
        if fault.kind is not Kind.FAILING_DISK:
            process.send_signal(signal.SIGKILL)
        if hit is not None:
            hit.release()
        process.was_signalled = True
        if process.wait(_END_S) is None:
            return "WRONG: the coordinator runs on, and cannot write"
        if fault.kind is Kind.OLDER_STATE:
            note = state_files.put_back(copy, state)
        elif fault.kind is Kind.TRUNCATED_JOURNAL:
            note = state_files.cut_journal(state, fault.seed)
        self._cluster.restart("coordinator", 0)
        if fault.kind is Kind.KILL_TOGETHER:
            self._cluster.restart("shard", fault.index)
        return note

    def _disturb(self, fault: Fault, process: Child, hit: Hit | None) -> None:
        what = Disturbance(kind=_DISTURBANCES[fault.kind], seconds=fault.seconds)
        if fault.kind is Kind.PARTITION:
            self._cluster.partition(what, [self._process(role, index) for role, index in fault.side])
        elif fault.kind is Kind.CUT:
            self._cluster.cut(what, process, self._process(*fault.side[0]))
        elif fault.kind is Kind.SLOW_LINK:
            self._cluster.disturb(dataclasses.replace(what, bytes_per_s=fault.amount), process)
        else:
            self._cluster.disturb(what, process)
        if hit is not None:
            hit.release()
        time.sleep(what.heals_after_s)

    def _fill_disk(self, fault: Fault, hit: Hit | None) -> str:
        disk = self._disks[fault.role]
        filled = disks.fill(disk)
        try:
            self._last(fault, hit)
        finally:
            disks.empty(disk)
        return f"{filled >> 10} KiB were free"

    def _flip(self, fault: Fault, process: Child, hit: Hit | None) -> str:
        """Change a bit, and wait until the corruption is reported: a fault before that could remove the other copy."""
        before = len(self._corruptions())
        flipped: bit_flips.Flip | None = None
        deadline = time.monotonic() + _FLIP_S
        while flipped is None and time.monotonic() < deadline:
            flipped = bit_flips.flip(self._flips, process.pid, fault.seed)
            if hit is not None:
                hit.release()
            time.sleep(0.0 if flipped else _POLL_S)
        if flipped is None:
            return "there was nothing that a commit reads"
        deadline = time.monotonic() + _FLIP_S
        while len(self._corruptions()) == before and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        what = f"bit {flipped.bit} of element {flipped.element} of {flipped.array}, slice {flipped.slice}"
        found = self._corruptions()[before:]
        right = len(found) == 1 and flipped.array in found[0] and f"slice {flipped.slice}," in found[0]
        return what if right else f"WRONG: {what}; the coordinator told {found or 'nothing'}"

    def _corruptions(self) -> list[str]:
        """Return the texts of the corruptions that the coordinator has reported."""
        return [sign.text for sign in list(self.observer.signs) if sign.kind == "corrupt"]

    # ------------------------------------------------------------------ memory, and the end

    def weigh(self, number: int) -> None:
        """Note the resident bytes of every process, after the fault of that number."""
        self._cluster.trim_memory()
        services = [self._process("coordinator", 0), *(self._process("shard", i) for i in range(self._options.shards))]
        for process in (*services, *(w.process for w in self._workers if self._is_working(w))):
            if (resident := resident_bytes(process.pid)) > 0:
                self.events.memory[f"{process.name} ({process.pid})"].append((number, resident))

    def finish(self) -> tuple[int, Values]:
        """Let the workers end some steps later; returns the version at which they ended, and the values.

        Raises:
            AxonError: the workers do not end, or their values differ.
        """
        self.look()
        version = max((version for version, _ in self._commits), default=0) + _LAST_STEPS
        new = self._notes / "new"
        new.write_text(str(version), encoding="ascii")
        new.rename(self._notes / training.LAST)
        working = [w for w in self._workers if self._is_working(w)]
        results = [worker.result(_END_S) for worker in working]
        for worker in working:
            self._read(worker)
            del self._workers[worker]
        if failed := [result.error for result in results if result.error]:
            raise AxonError(f"a worker did not end well: {failed[0].strip().splitlines()[-1]}")
        if not results:
            raise AxonError("no worker is left")
        first = results[0].value
        for other in results[1:]:
            if bits_different(first, other.value):
                raise AxonError("workers ended with different values")
        return version, first

    def collected(self) -> Events:
        """Return all observed events."""
        self.events.commits = sorted(
            (Commit(version=v, generation=g, at=at) for (v, g), at in self._commits.items()), key=lambda c: c.at
        )
        signs = (dataclasses.replace(sign, text=self._without_base(sign.text)) for sign in self.observer.signs)
        self.events.signs = sorted(signs, key=lambda sign: sign.at)
        return self.events

    def samples(self) -> Samples:
        """Return the use of the samples of the committed steps."""
        options = self._options
        return samples(self.events, options.batch, right_samples(options.samples, options.batch, training.SEED))

    def unfailed(self, version: int) -> Values:
        """Return the values of the same job without faults, at a version. Other processes should have ended."""
        recipe, options = dataclasses.replace(self._recipe, pause_s=0.0), self._options
        limit_s = _START_S + _STEP_S * version
        return run_threads(
            training.undisturbed, options.workers, args=(recipe, version), shards=options.shards, timeout_s=limit_s
        )[0]


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="axon-ps-chaos-", ignore_cleanup_errors=True) as directory:
        yield directory


def bits_different(ours: Values, theirs: Values) -> int:
    """Count the bits in which two sets of values differ."""
    return sum(
        int(np.bitwise_count(ours[name].view(np.uint32) ^ value.view(np.uint32)).sum())
        for name, value in theirs.items()
    )
