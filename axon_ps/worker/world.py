"""`World`: a worker's membership in a job, from joining to leaving, and the groups of workers in it.

A process has one background loop, one session with the coordinator and one set of connections to the shard servers.
`World` owns all three (`worker.connections`) and closes them. It is made by `World.init()`, which returns once every
member that the job needs has joined.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

from axon_ps.collectives import current_world
from axon_ps.collectives.backends.base import Backend
from axon_ps.collectives.encoding import decode, encode
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.group_calls import LINGER_S
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.selection import BackendMaker
from axon_ps.collectives.work import LoopWork
from axon_ps.coordinator.client.attachments import Attachments
from axon_ps.coordinator.client.session import Event, JobState, SessionLost
from axon_ps.errors import Closed, InvalidRequest, Misuse
from axon_ps.host import fork
from axon_ps.observe.loggers.base import Logger
from axon_ps.observe.metrics.sources import Source
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import EACH_NODE, Array, Decision, Grouping, Member, Membership
from axon_ps.wire.events import VoteRequest
from axon_ps.worker.bootstrap.job import FormedJob, find_job
from axon_ps.worker.checkpoints import CheckpointInfo, Checkpoints
from axon_ps.worker.connections import Connections
from axon_ps.worker.curves import CurveLoggers
from axon_ps.worker.ending import no_error_handled, present_error, process_succeeded, record_exit
from axon_ps.worker.environment import WorkerConfig, launch_info
from axon_ps.worker.groups import Groups
from axon_ps.worker.job_view import JobView
from axon_ps.worker.models import Models
from axon_ps.worker.progress import KEY as PROGRESS
from axon_ps.worker.progress import ProgressReporter
from axon_ps.worker.refusal import explain
from axon_ps.worker.rendezvous import Rendezvous
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.worker import ProcessWorker, Worker

V = TypeVar("V")

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds that an operation may wait for slow peers. It fails earlier if a member is lost."""

MOCK_TIMEOUT_S = 60.0
"""The same, where all workers are threads of a process."""


class World:
    """One worker's membership in a job. It is made by `World.init()`, and is a context manager.

    Args:
        worker: the worker that joins the job; closed with the world.
        timeout_s: default time-out of every operation, in seconds.

    Raises:
        Misuse: no `worker` was given: `World.init()` makes a world and joins.

    Attributes:
        view: the members, as this worker knows them.
        models: the models of the job in this process, and this worker's part in their steps.
        attachments: the buffers that this worker attaches to checkpoints.
        recorder: the last collectives.
    """

    def __init__(self, worker: Worker | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if worker is None:
            raise Misuse(
                "World() joins no job; World.init() joins the one that the environment names, and World.mock() makes "
                "one of this process alone"
            )
        self._worker = worker
        self._config = config = worker.config
        self._timeout_s = timeout_s
        self._closed = False
        self._connections = connections = Connections(worker, partial(_on_event, weakref.ref(self)))
        self._loop = loop = connections.loop
        self._coordinator = coordinator = connections.coordinator
        self.view = JobView(lambda: coordinator.incarnation, timeout_s)  # not `self`: no reference cycle
        self.models = Models(loop, coordinator, connections.shards, self.view)
        coordinator.measure = partial(_measures, weakref.ref(self.models))
        self.recorder = Recorder()
        self._rendezvous = Rendezvous(loop, coordinator, self.view)
        self.attachments = Attachments(loop, coordinator, timeout_s)
        self._checkpoints = Checkpoints(loop, coordinator, self.view, self.models, self._rendezvous, self.attachments)
        self._progress = ProgressReporter(lambda report: loop.submit(coordinator.kv_put(PROGRESS, report)))
        models, recorder = self.models, self.recorder  # not `self`: no reference cycle
        self._curves = CurveLoggers(lambda: models.statistics() | recorder.statistics())
        self._groups = Groups(
            self,
            BackendMaker(connections.make_grpc, threads=worker.threads),
            worker.make_store(coordinator, timeout_s),
            backend=config.backend,
            timeout_s=timeout_s,
            recorder=self.recorder,
            incarnation=lambda: coordinator.incarnation,
        )

    @classmethod
    def init(
        cls,
        config: WorkerConfig | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        join_timeout_s: float = 300.0,
    ) -> World:
        """Join the job and wait until every member it needs has joined.

        Args:
            config: this worker's configuration; None = from the environment (docs/environment.md). If that names no
                coordinator, as under torchrun, the workers start one, and shard servers.
            timeout_s: default time-out of every operation on this world, in seconds.
            join_timeout_s: most seconds to wait for the coordinator and for the other members.

        Raises:
            ConfigurationError: the environment does not say how to join.
            Broken: the job's services could not be started.
            Misuse: this process is a fork of a worker, or `multiprocessing` has started it and it is importing the main
                module again.
            Unreachable: no process answers at the coordinator's address.
            PermissionDenied: wrong job name or token, or a process of another user serves the workers' store.
            Timeout: members are missing. The message says which.

        After an error: this process is not a member.
        """
        fork.check_may_join()
        try:
            job = FormedJob(config) if config is not None else find_job(os.environ, join_timeout_s)
            limit_s = None if job.config.standby else join_timeout_s  # a standby may never be needed
            (world,) = _joined([ProcessWorker(job)], timeout_s, limit_s, join_timeout_s, cls)
        except BaseException as error:
            explain(error)
            raise
        fork.at_exit(world._at_exit)
        record_exit()
        current_world.enter(world)
        world._loop.submit(world._connections.report_hangs(world.recorder))
        return world

    new = init

    def __repr__(self) -> str:
        members = self.membership
        state = "complete" if members.complete else f"waiting for {members.waiting_for}"
        return (
            f"<{type(self).__name__} of job {self._config.job!r}: rank {self.rank} of {len(members.workers)} workers, "
            f"{len(members.shards)} shard servers, generation {members.generation}, {state}>"
        )

    @property
    def rank(self) -> int:
        """This worker's rank, which does not change while the process runs."""
        return self._coordinator.rank

    @property
    def world_size(self) -> int:
        """Workers in the current generation."""
        return len(self.membership.workers)

    @property
    def initial_world_size(self) -> int:
        """Workers that the job starts with."""
        return self._coordinator.world_size

    @property
    def num_shards(self) -> int:
        """Number of shard servers that the parameters are sharded over, also while one of them is missing."""
        return self._coordinator.num_shards

    @property
    def local_rank(self) -> int:
        """Position among the workers of this node, as the launcher gave it."""
        return self._config.local_rank

    @property
    def replica(self) -> int:
        """Position of this worker's replica, dense from 0, by which a sampler shards the data.

        It is -1 while another worker of the replica is missing, if replicas are the columns of a mesh.
        """
        return self.view.me().replica

    @property
    def num_replicas(self) -> int:
        """The number of replicas that contribute gradients."""
        return self.membership.num_replicas

    @property
    def generation(self) -> int:
        """Number of the current membership."""
        return self.membership.generation

    @property
    def version(self) -> int:
        """Committed steps of the job's model.

        Raises:
            Misuse: there are several models. Each has its own version.
        """
        return self.steps.view.latest_version

    @property
    def steps(self) -> StepClient:
        """This worker's part in the training steps of the job's model.

        Raises:
            Misuse: there are several models.
        """
        return self.models.only()

    @property
    def lease_s(self) -> float:
        """The time for which a member may be silent before it is lost, in seconds."""
        return self._coordinator.lease_s

    @property
    def membership(self) -> Membership:
        """All members of the current generation."""
        return self.view.membership

    @property
    def is_main_process(self) -> bool:
        """True if this is the worker of lowest rank of those in a replica, which logs and saves."""
        first = self.membership.first_worker
        return first is not None and first.rank == self.rank

    @property
    def default_group(self) -> ProcessGroup:
        """All workers of the current generation.

        Raises:
            MemberLost: this worker is not a member any more.
            Closed: the world was closed.
        """
        self._limit(None)
        return self._groups.default()

    def new_group(self, ranks: Sequence[int], *, backend: str = "auto") -> ProcessGroup:
        """Make a group of some workers. Every worker must call it, with the same world ranks.

        Args:
            ranks: world ranks, in their order in the group.
            backend: a name of `axon_ps.Backend`; "auto" = by the nodes of the workers.

        Returns:
            The group. On workers that are not in it, its collectives raise `Misuse`.

        Raises:
            InvalidRequest: a rank does not exist, or is given twice; or none is given.
            Disagreement: the workers gave different ranks.
        """
        group = self.default_group
        with group.calls.preparing("new_group", False, None, False):  # the others do not wait for this worker
            if unknown := [r for r in ranks if not group.contains(r)]:
                raise InvalidRequest(f"new_group was given rank {unknown[0]}; the workers are {list(group.ranks)}")
        return group.new_group([group.ranks.index(r) for r in ranks], backend=backend)

    def node_group(self, grouping: Grouping = EACH_NODE) -> ProcessGroup:
        """Make a group of the workers on this worker's node. Only they need to call it.

        Args:
            grouping: with a size, the group has only those of a part of the node.

        Raises:
            MemberLost: this worker is not a member any more.
            Closed: the world was closed.
        """
        self._limit(None)
        return self._groups.node(grouping)

    @staticmethod
    def current() -> World | None:
        """Return the world that this process has joined last and not closed; None when there is none.

        In a thread that has entered a world of `mock`, it is that world.
        """
        return cast("World | None", current_world.current())

    @overload
    @staticmethod
    def mock(*, shards: int = 1, timeout_s: float = MOCK_TIMEOUT_S) -> World: ...

    @overload
    @staticmethod
    def mock(world_size: int, *, shards: int = 1, nodes: int = 1, timeout_s: float = MOCK_TIMEOUT_S) -> list[World]: ...

    @staticmethod
    def mock(
        world_size: int | None = None, *, shards: int = 1, nodes: int = 1, timeout_s: float = MOCK_TIMEOUT_S
    ) -> World | list[World]:
        """Start a job inside this process, in milliseconds and without sockets: for tests, and for trying things out.

        Coordinator and shard servers are the real ones, so all features work: sharding strategies, optimizers,
        checkpoints. Its workers are threads of this process and share the interpreter, so a worker has no device of its
        own and cannot crash alone.

            with World.mock() as world: ...               # one worker, in this thread
            for world in World.mock(2): start a thread that does `with world: train()`

        Args:
            world_size: number of workers; None = one, which is this thread's current world at once.
            shards: number of shard servers.
            nodes: number of nodes that the workers appear to be on.
            timeout_s: default time-out of every operation, in seconds.

        Returns:
            The world, or a list of them by rank. Each has to be closed.

        Raises:
            InvalidRequest: `world_size` is less than 1, or not a multiple of `nodes`.
            ConfigurationError: `shards` is less than 1.
        """
        worlds = _mock_worlds(1 if world_size is None else world_size, shards, nodes, timeout_s)
        return worlds if world_size is not None else worlds[0].__enter__()

    def barrier(self, name: str = "world", timeout_s: float | None = None) -> None:
        """Block until every worker has called it.

        Args:
            name: distinguishes concurrent barriers.
            timeout_s: most seconds to wait.

        Raises:
            Timeout: workers are missing. The message names them.
            GenerationChanged: a worker left or joined meanwhile, or joined since this worker's last step: it is at the
                beginning of its program, and the next step synchronizes with it.
            Disagreement: the missing workers wait in a step for this worker.
        """
        self._rendezvous.barrier(name, self._limit(timeout_s))

    def _limit(self, timeout_s: float | None) -> float:
        fork.check()
        if self._closed:
            raise Closed("this World is closed; make another with World.init()")
        return self._timeout_s if timeout_s is None else timeout_s

    def statistics(self) -> dict[str, float]:
        """Return the counters of this worker: bytes and streams to the servers, collectives and their durations."""
        return self.models.statistics() | self.recorder.statistics()

    def report(
        self, *, step: int | None = None, steps: int | None = None, loss: float | None = None, **values: float
    ) -> None:
        """Report the progress of training, for `axon-ps status`. Call it as often as you like.

        Only the main process reports, at most once a second and at the last of `steps`. The call does not block.

        Args:
            step: steps made; None = the version, of which `axon-ps status` shows the present value.
            steps: the number of steps planned, if it is known: in all, or in this run of the job's workers.
            loss: the loss.
            values: further values to show, by name: `tokens_per_s=12_000.0`.

        Raises:
            InvalidRequest: on the main process, a value is not a number, or there are too many.
            Misuse: on the main process, there are several models and no `step`.
        """
        self._limit(None)
        if self.is_main_process:
            by_version = step is None
            self._progress.report(self.version if step is None else step, steps, loss, values, by_version=by_version)
            self._curves.log(loss, values, lambda: self.models.client(0).view.latest_version)

    def log_to(
        self, make: Callable[[], Logger], *, hyperparams: Mapping[str, Any] | None = None, statistics: bool = False
    ) -> None:
        """Pass the values of `report` to a logger, too, from now on, at the committed version.

        All workers call it. The main process makes the logger. If it dies, the next main process makes another. A
        version is logged once, so an aborted step leaves no second point. Training is not delayed by a logger, and a
        later error of the logger is logged as a warning.

        Args:
            make: returns a logger of `axon_ps.observe.loggers`, or your own: `lambda: TensorBoardLogger("runs/one")`.
            hyperparams: the settings of the run.
            statistics: True to log the main process's counters, too, as "worker/NAME".

        Raises:
            ConfigurationError: on the main process, the logger's library is not installed.
            InvalidRequest: on the main process, `make` does not return a logger.
        """
        self._limit(None)
        self._curves.add(make, hyperparams or {}, statistics=statistics, is_main=self.is_main_process)

    def server_statistics(self, server: int, timeout_s: float = 10.0) -> dict[str, float]:
        """Return the counters of a shard server: memory by kind, bytes, chunks, encodings, steps.

        Args:
            server: its rank.
            timeout_s: limit of the call, in seconds.

        Raises:
            Unreachable: no process listens at its address.
            Timeout: it did not reply in time, or is not a member.
        """
        self._limit(None)
        shards, context = self._connections.shards, self._coordinator.context
        return self._loop.run(shards.stats(server, context=context, timeout_s=timeout_s))

    # ------------------------------------------------------------------ the key-value store

    def kv_put(self, key: str, value: bytes) -> None:
        """Store a value (at most 1 MiB) under a key of the job."""
        self._loop.run(self._coordinator.kv_put(key, value, timeout_s=self._limit(None)))

    def kv_get(self, key: str) -> bytes | None:
        """Return the value of a key; None when there is none."""
        return self._loop.run(self._coordinator.kv_get(key, timeout_s=self._limit(None)))

    def kv_wait(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored within `timeout_s` seconds; None = the world's default.
        """
        return self._loop.run(self._coordinator.kv_wait(key, timeout_s=self._limit(timeout_s)))

    def kv_add(self, key: str, amount: int) -> int:
        """Add to an integer (0 when absent) and return the sum."""
        return self._loop.run(self._coordinator.kv_add(key, amount, timeout_s=self._limit(None)))

    def kv_compare_and_set(self, key: str, expected: bytes, value: bytes) -> bool:
        """Store `value` if the present one equals `expected` (empty = absent); return True if it was stored."""
        return self._loop.run(self._coordinator.kv_compare_and_set(key, expected, value, timeout_s=self._limit(None)))

    def kv_delete(self, key: str) -> bool:
        """Remove a key; return True if it existed."""
        return self._loop.run(self._coordinator.kv_delete(key, timeout_s=self._limit(None)))

    def agree(self, name: str, value: V) -> V:
        """Return the value that the first worker gave for `name`: the same on every worker, without waiting for any.

        Workers use it to agree on a value although a worker may join late: the seed, how long to train. The value is
        stored in the job. Put anything that may change into the name: `world.agree(f"steps/{version}", ...)`.

        Args:
            name: at most 500 bytes.
            value: a value that `all_gather_object` takes, at most 1 MiB.

        Raises:
            InvalidRequest: `value` cannot be sent. The message says what can.
        """
        first = self._coordinator.kv_first(f"agree/{name}", encode(value, "agree"), timeout_s=self._limit(None))
        return cast("V", decode(self._loop.run(first), "agree"))

    def gather_json(self, value: V, *, name: str = "gather_json", timeout_s: float | None = None) -> list[V]:
        """All-gather a value of every worker, in rank order. It is for small values: losses, settings.

        All workers wait for each other, as at a `barrier`. For a value without waiting use `agree` or the key-value
        store. The values go through the coordinator, so workers that have just joined take part, too. For larger values
        in a group, `all_gather_object` is faster.

        Args:
            value: a value that `all_gather_object` takes, at most 1 MiB.
            name: distinguishes concurrent gathers.
            timeout_s: most seconds to wait for the others in each of three steps.

        Raises:
            InvalidRequest: `value` cannot be sent. The message says what can.
            Timeout: a worker is missing. The message names it.
            GenerationChanged, Disagreement, MemberLost: as for `barrier`.
        """
        gathered = self._rendezvous.all_gather(name, encode(value, "gather_json"), self._limit(timeout_s))
        return [decode(text, "gather_json") for text in gathered]

    # ------------------------------------------------------------------ checkpoints

    @overload
    def save_checkpoint(
        self,
        uri: str,
        *,
        extra: Mapping[str, Any] | None = None,
        states: Mapping[int, FileEntry] | None = None,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> CheckpointInfo: ...

    @overload
    def save_checkpoint(
        self,
        uri: str,
        *,
        extra: Mapping[str, Any] | None = None,
        states: Mapping[int, FileEntry] | None = None,
        timeout_s: float | None = None,
        async_op: Literal[True],
    ) -> LoopWork[CheckpointInfo]: ...

    @overload
    def save_checkpoint(
        self,
        uri: str,
        *,
        extra: Mapping[str, Any] | None = None,
        states: Mapping[int, FileEntry] | None = None,
        timeout_s: float | None = None,
        async_op: bool,
    ) -> CheckpointInfo | LoopWork[CheckpointInfo]: ...

    def save_checkpoint(
        self,
        uri: str,
        *,
        extra: Mapping[str, Any] | None = None,
        states: Mapping[int, FileEntry] | None = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> CheckpointInfo | LoopWork[CheckpointInfo]:
        """Have the shard servers write parameters and optimizer state of all models. Training may go on.

        Each model is written at one version. Call it on one worker. It returns when the checkpoint is complete, or with
        `async_op` at once. This worker may then train on, too: the checkpoint has the version of each model at the time
        of the call.

        Args:
            uri: directory or fsspec URI that every shard server can write to.
            extra: JSON values that a restore returns (sampler, schedule).
            states: by the rank of a worker, the file of its own state, which it has written to `uri`; see
                `axon_ps.parallel.checkpoints.own_state`.
            timeout_s: most seconds for it.
            async_op: return a `Work` whose `wait()` returns the `CheckpointInfo`. Wait for it before closing the world.
                The writing is throttled: steps are hardly slower, and it takes longer.

        Raises:
            CheckpointError: it could not be written; `StorageFull` when there is no space. An incomplete one
                is not listed as a checkpoint.
            InvalidRequest: `extra` is not JSON values.
            MemberLost: a shard server was lost before it had written its files.

        After an error: earlier checkpoints are untouched.
        """
        saving = self._checkpoints.save(uri, extra, self._limit(timeout_s), states=states, background=async_op)
        return LoopWork(self._loop, saving, f"saving {uri}") if async_op else self._loop.run(saving)

    def restore_checkpoint(
        self, uri: str, *, models: Sequence[str] = (), timeout_s: float | None = None
    ) -> CheckpointInfo:
        """Have the shard servers load a checkpoint. The current steps abort on every worker.

        All models are restored together. Call it on one worker, after they have been wrapped.

        Args:
            uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
            models: names of the models to restore; empty = all of the job's, and then the checkpoint must have exactly
                these.
            timeout_s: most seconds for it.

        Raises:
            CheckpointError: it cannot be read. If this was found before anything was overwritten (as for a missing,
                truncated or altered file), the parameters are unchanged. Else the job needs another restore.
            InvalidRequest: it was saved from other models.
            Misuse: this process has not wrapped one of `models`.
            Timeout: it was not restored in time.
        """
        return self._checkpoints.restore(uri, models, self._limit(timeout_s))

    def resume_checkpoint(self, uri: str, *, timeout_s: float | None = None) -> None:
        """Begin the job at a checkpoint. Every worker calls it, after all models have been wrapped.

        The worker of lowest rank restores, and the others wait for that. If the parameters were restored before, as
        when this worker was restarted, it returns at once.

        Args:
            uri: as for `restore_checkpoint`.
            timeout_s: most seconds for it; None = the world's default.

        Raises:
            CheckpointError, InvalidRequest: as for `restore_checkpoint`, on the worker that restores.
            Timeout: it was not restored in time.
        """
        self._checkpoints.resume(uri, self._limit(timeout_s))

    def replace_parameters(
        self, units: Iterable[tuple[int, Array]], *, model: str = "", timeout_s: float | None = None
    ) -> None:
        """Replace the values of every unit. Optimizer state and version stay. Every worker calls it.

        Args:
            units: per unit of the layout, its number and f32[unit_numel]. Only the worker of lowest rank reads them.
            model: name of the model; empty = the only one.
            timeout_s: most seconds for it.

        Raises:
            InvalidRequest: a unit does not fit the layout.
            Misuse: this process has no such model, or several models and none is named.
            Broken: the worker of lowest rank failed. The message has its error.
            Timeout: a worker or a server is missing.

        After an error: the values on the servers may be incomplete. Call it again, or restore a checkpoint.
        """
        self._checkpoints.replace(units, model, self._limit(timeout_s))

    # ------------------------------------------------------------------ close

    def close(self, *, finished: bool | None = None) -> None:
        """Leave the job. The others are notified at once. Repeated calls do nothing.

        Args:
            finished: True if this worker has done all its work. Then the others go on without it and without a
                replacement. Messages that it sent in the background are waited for, at most 10 s. None = True, unless
                an error is being handled.

        A worker that has started the job's services and has finished waits here until the other workers are done.

        Raises:
            Misuse: this process is a fork of the process that joined, which is still a member.
        """
        fork.check()
        if self._closed:
            return
        self._closed = True
        fork.not_at_exit(self._at_exit)
        current_world.leave(self)
        finished = no_error_handled() if finished is None else finished
        if not finished and (error := present_error()) is not None and self._coordinator.log is not None:
            self._coordinator.log.failed(error)
        self._curves.close()
        self._groups.close(LINGER_S if finished else 0.0)
        self._connections.close(finished=finished)

    def _at_exit(self) -> None:
        self.close(finished=process_succeeded())

    def __enter__(self) -> World:
        if self._worker.threads:
            current_world.enter_thread(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not fork.is_fork():  # a fork leaves the block, and not the job
            self.close(finished=no_error_handled())


def _joined(
    workers: Sequence[Worker],
    timeout_s: float,
    start_timeout_s: float | None,
    join_timeout_s: float,
    make: type[World] = World,
) -> list[World]:
    """Return the worlds of workers that share a loop, once all members of their job have joined."""
    worlds: list[World] = []

    async def start() -> None:
        await asyncio.gather(*(world._coordinator.start(start_timeout_s) for world in worlds))

    try:
        for worker in workers:
            worlds.append(make(worker, timeout_s=timeout_s))
        workers[0].loop.run(start(), start_timeout_s and start_timeout_s + 5.0)
        for world in worlds:
            own = Source(kind="worker", read=world.statistics, histograms=world.models.histograms)
            world._connections.observe(own)
        for world in worlds:
            world.view.wait_complete(join_timeout_s)
            world.view.newcomers()
    except BaseException:
        for world in worlds:
            world.close()
        for worker in workers[len(worlds) :]:
            worker.close()
        raise
    return worlds


def _measures(models: weakref.ref[Models]) -> Mapping[str, float]:
    found = models()
    return {} if found is None else found.measures()


def _on_event(reference: weakref.ref[World], event: Event) -> None:
    """Pass an event on. Threads that wait for a membership wake up only when every part of the world has it.

    The reference is weak, so that an unused world can be freed.
    """
    if (world := reference()) is None:
        return
    if isinstance(event, (JobState, Decision, VoteRequest)):
        world.models.client(event.model).on_event(event)
        return
    lost: Sequence[Member] = ()
    if isinstance(event, Membership):
        world._connections.collectives.set_members(event)
        lost = world._groups.set_members(event)
    world.models.on_event(event)
    if isinstance(event, Membership):
        world._groups.end_with(lost, event)
    elif isinstance(event, SessionLost) and event.final:
        world._groups.abort(event.error)


def current_or_launched() -> World | None:
    """Return the current world. A process of a launcher that has none joins its job; the world closes when it ends.

    Raises:
        AxonError: as of `World.init`.
    """
    launched = os.environ.get("AXON_PS_COORDINATOR") or launch_info(os.environ).launcher
    return World.init() if World.current() is None and launched else World.current()


def world_of(group: ProcessGroup) -> World:
    """Return the world that a group belongs to.

    Raises:
        Misuse: it has none, since it was made of a backend.
    """
    return cast("World", group.world)


def _mock_worlds(
    world_size: int, shards: int, nodes: int | Sequence[str], timeout_s: float = MOCK_TIMEOUT_S
) -> list[World]:
    from axon_ps.worker.mock_job import START_S, thread_workers

    return _joined(thread_workers(world_size, shards=shards, nodes=nodes), timeout_s, START_S, START_S)


def _mock_world(backend: Backend) -> World:
    """Return the world of a `MockBackend`'s rank. The first call starts the job, in this process.

    After an error: the next call tries again.
    """
    from axon_ps.collectives.backends.mock import MockBackend

    assert isinstance(backend, MockBackend)
    nodes = [member.node for member in backend.context.members]
    worlds = backend.get_or_make("mock/worlds", lambda: _mock_worlds(len(nodes), 1, nodes))
    return worlds[backend.rank]


current_world.register_mock_worlds(_mock_world)
