"""A campaign's own job: its processes on this machine, the faults that strike them, and the notes of its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from axon_ps.errors import AxonError
from axon_ps.host.children import Child
from axon_ps.testing.threads import run_threads
from axon_ps.testing.workers import WorkerProcess, fork_server, preloaded
from axon_ps_lab.chaos import disks, training
from axon_ps_lab.chaos.campaign import Campaign
from axon_ps_lab.chaos.figures import Events, Samples, right_samples, samples
from axon_ps_lab.chaos.memory import resident_bytes
from axon_ps_lab.chaos.observer import Observer
from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.chaos.strikes import Strikes
from axon_ps_lab.chaos.worker_notes import WorkerNotes
from axon_ps_lab.faults import FaultyCluster, bit_flips
from axon_ps_lab.faults.cluster import MODULES
from axon_ps_lab.faults.fault import Fault

PRELOADED: Final = (
    "torch", "torch.distributed.tensor", "torch._dynamo", "axon_ps.parallel", "axon_ps.worker.world",
    "axon_ps_lab.chaos.training", *MODULES,
)  # fmt: skip

Values = training.Values

_STATE_DISK_BYTES: Final = 48 << 20
_CHECKPOINT_DISK_BYTES: Final = 64 << 20
_START_S: Final = 60.0
_END_S: Final = 60.0
_LAST_STEPS: Final = 20
_STEP_S: Final = 1.0
"""The longest duration of a step in a job without faults."""

_POLL_S: Final = 0.03


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
        base = Path(stack.enter_context(_directory()))
        self._base = str(base)
        self._written, flips = base / "notes", base / "flips"
        self._disks = {"coordinator": base / "state", "shard": base / "checkpoints"}
        for directory in (self._written, flips):
            directory.mkdir()
        self._notes = WorkerNotes(self._written, self.events)
        self._make_disks(stack)
        checkpoints = self._disks["shard"] / "checkpoints"
        if fork_server() is None:
            stack.enter_context(preloaded(PRELOADED))
        self._cluster = stack.enter_context(
            FaultyCluster(
                options.shards,
                options.workers,
                min_workers=options.workers,
                lease_s=options.lease_s,
                replication=options.replication,
                checkpoint_dir=checkpoints,
                checkpoint_every=options.checkpoint_every,
                state_dir=self._disks["coordinator"],
                shard_nodes=[f"shard-{rank}" for rank in range(options.shards)],
                shard_environment={"AXON_PS_PLUGINS": bit_flips.__name__, bit_flips.DIRECTORY: str(flips)}
                if Fault.BIT_FLIP in self._campaign.kinds
                else {},
            )
        )
        cluster = self._cluster
        self.observer = stack.enter_context(Observer(lambda: cluster.operator_address, cluster.security, cluster.job))
        self._strikes = Strikes(
            cluster, self.observer, self._process, folders=self._disks, checkpoints=checkpoints, flips=flips
        )
        for rank in range(options.workers):
            self._start_worker(rank)
        self.wait(lambda: self._notes.newest > 0.0, _START_S, "the job did not begin")
        for _ in range(options.standbys):
            self._start_worker(-1)

    def _make_disks(self, stack: contextlib.ExitStack) -> None:
        """Make the directories of state and checkpoints, on small disks if these are to be filled."""
        disk = Path(self._options.disk) if self._options.disk else None
        if Fault.FULL_DISK not in self._campaign.kinds:
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
        arguments = (str(self._written), self._started, self._recipe)
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
            self._notes.read(self._workers[worker])
            if has_ended:
                self._replace(worker)

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
        return self._notes.is_working(self._workers[worker])

    @property
    def newest(self) -> float:
        """The time of the newest commit that is known."""
        return self._notes.newest

    def is_complete(self) -> bool:
        """Return True if the job has all members and copies, and its standbys wait."""
        options = self._options
        working = [w for w in self._workers if self._is_working(w)]
        ready = [w for w in self._workers if self._notes.is_ready(self._workers[w])]
        if len(working) != options.workers or len(ready) != options.workers + options.standbys:
            return False
        status = self.observer.status()
        return (
            status is not None
            and len(status.membership.workers) == options.workers
            and len(status.membership.shards) == options.shards
            and status.initialized
            and not any(model.lacking for model in status.models)
            and not any(member.incarnation in self._strikes.killed for member in status.membership.shards)
        )

    # ------------------------------------------------------------------ faults

    def deal(self, fault: PlannedFault) -> tuple[str, float, str]:
        """Inject a fault, and return when it is over; see `Strikes.deal`."""
        target, began, note = self._strikes.deal(fault)
        return target, began, self._without_base(note)

    def _without_base(self, text: str) -> str:
        """Return a text without the path of this run's directory."""
        return text.replace(f"{self._base}/", "")

    def _process(self, role: str, index: int) -> Child:
        if role != "worker":
            return self._cluster.process(role, index)
        working = [w for w in self._workers if self._is_working(w)] or list(self._workers)
        return working[index % len(working)].process

    # ------------------------------------------------------------------ memory, and the end

    def weigh(self, number: int) -> None:
        """Note the resident bytes of services and of workers that train, after the fault of that number."""
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
        version = self._notes.end_at(_LAST_STEPS)
        working = [w for w in self._workers if self._is_working(w)]
        results = [worker.result(_END_S) for worker in working]
        for worker in working:
            self._notes.read(self._workers[worker])
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
        self.events.commits = self._notes.commits()
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
