"""`LocalCluster`: a coordinator and shard servers as real processes on this machine, and workers to use them.

It is meant for tests and notebooks. The services are those of the command line, started in parallel; each writes to a
pipe when it listens. On leaving, all processes are reaped by their process ids. If a service has died by itself,
leaving raises an error with its log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from axon_ps.errors import AxonError, Misuse
from axon_ps.host.children import Child
from axon_ps.rpc.security import Security
from axon_ps.shard import loops
from axon_ps.storage.files import absolute
from axon_ps.testing.environment import ClusterEnvironment, of_process
from axon_ps.testing.processes import COORDINATOR, DRAIN_S, ClusterProcesses
from axon_ps.testing.workers import WorkerProcess, WorkerResult, fork_server, results_of
from axon_ps.types import Role

if TYPE_CHECKING:
    from axon_ps.coordinator.client.operator import OperatorClient
    from axon_ps.wire.events import Status

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class LocalCluster:
    """A cluster for one job, as a context manager.

    Args:
        shards: shard servers.
        world_size: workers that the job starts with.
        job: name of the job.
        token: the job's token; None = a random one, "" = none.
        security: the security of connections; its token is not used.
        min_workers: the fewest workers to continue with; None = all.
        lease_s: seconds of silence after which a member is lost.
        step_timeout_s: seconds that workers wait in a step for an absent worker; None = without limit.
        durable: store the coordinator's state in a file, so that it can be restarted.
        coordinators: number of coordinators; several need `state`: one leads, the others stand by.
        state: the shared state of the coordinators, as `axon-ps coordinator --state` takes it, in place of a file.
        resume: checkpoint to start from.
        checkpoint_dir: directory of the checkpoints that the job writes, and resumes from, by itself; empty = none.
        checkpoint_every: interval of checkpoints: steps, as "500", or a time, as "10m"; empty = the job only resumes.
        checkpoint_limit: number of them that is retained.
        replication: number of shard servers that hold each slice; 0 = two, if there are as many.
        plugins: modules that the services import, found as this process finds them; see docs/extending.md.
        environment: further variables for every process.
        start_timeout_s: seconds that starting may take.

    Attributes:
        directory: a directory for the test's own files, removed on leaving.
        observer_token: a client with this token can only read; empty if the job has no token.
    """

    def __init__(
        self,
        shards: int = 2,
        world_size: int = 1,
        *,
        job: str = "test",
        token: str | None = None,
        security: Security | None = None,
        min_workers: int | None = None,
        lease_s: float = 5.0,
        step_timeout_s: float | None = None,
        durable: bool = False,
        coordinators: int = 1,
        state: str = "",
        resume: str = "",
        checkpoint_dir: str | Path = "",
        checkpoint_every: str = "",
        checkpoint_limit: int = 3,
        replication: int = 0,
        plugins: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.world_size, self.job = world_size, job
        self._environment = ClusterEnvironment(job, token, security=security, plugins=plugins, variables=environment)
        self.token, self.observer_token = self._environment.token, self._environment.observer_token
        self._num_shards = shards
        options: dict[str, object] = {"--world-size": world_size, "--shards": shards, "--lease-s": lease_s}
        options["--replication"] = replication
        if min_workers is not None:
            options["--min-workers"] = min_workers
        if step_timeout_s is not None:
            options["--step-timeout-s"] = step_timeout_s
        if resume:
            options["--resume"] = absolute(resume)
        if checkpoint_dir:
            options |= {"--checkpoint-dir": absolute(str(checkpoint_dir)), "--checkpoint-limit": checkpoint_limit}
        if checkpoint_every:
            options["--checkpoint-every"] = checkpoint_every
        self._coordinator_options = [str(item) for option in options.items() for item in option]
        self._durable, self._state = durable, state
        self._num_coordinators = coordinators
        self._start_timeout_s = start_timeout_s
        self._processes = ClusterProcesses()
        self._address = ""
        self._addresses: dict[int, str] = {}  # by process id of the service

    # ------------------------------------------------------------------ starting and ending

    def __enter__(self) -> LocalCluster:
        """Start coordinators and shard servers; returns when all of them listen.

        The first cluster on a machine compiles the servers' loops first; see `shard.loops`.

        Raises:
            AxonError: one of them ended, or did not listen in time; its log is in the message.
            Misuse: this cluster is running already.
        """
        loops.compile_missing(_logger.warning)
        self.directory = self._processes.open()
        try:
            coordinators = [self._spawn_coordinator(i, port=0) for i in range(self._num_coordinators)]
            for i in range(self._num_shards):
                self._spawn_shard(i, "-")
            deadline = time.monotonic() + self._start_timeout_s
            self._address = ",".join(self._listening(coordinator, deadline) for coordinator in coordinators)
            for shard in self._processes.shards:
                shard.send_line(self._address)
            for shard in self._processes.shards:
                self._listening(shard, deadline)
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes.

        Raises:
            AxonError: a service died by itself, or did not drain when asked to. On leaving by an error it is not
                raised; the logs of all services are added to that error as a note instead.
        """
        troubles, logs = self._end_all()
        if error is not None:
            error.add_note(logs)
        elif troubles:
            raise AxonError("; ".join(troubles) + "\n" + logs)

    def _end_all(self) -> tuple[list[str], str]:
        """End all processes; return the errors of services, and their logs."""
        return self._processes.end()

    # ------------------------------------------------------------------ for workers

    @property
    def address(self) -> str:
        """The coordinator's "host:port" while it runs; with several coordinators, theirs, separated by commas."""
        if not self._processes.is_open:
            raise Misuse("this LocalCluster is not running; use it as a context manager")
        return self._address

    @property
    def security(self) -> Security:
        """Token and certificates for a client of this cluster."""
        return self._environment.security

    def env(self, rank: int, world_size: int | None = None) -> dict[str, str]:
        """Return the variables by which a worker joins this cluster, as `axon-ps run` sets them.

        Args:
            rank: the rank it requests; -1 = any free one.
            world_size: workers of the job; None = that of the cluster.
        """
        world_size = self.world_size if world_size is None else world_size
        return self._environment.of_worker(self.address, rank, world_size)

    def start_workers(
        self,
        target: Callable[..., object] | str | Path,
        n: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[WorkerProcess]:
        """Start `n` worker processes and return at once.

        Args:
            target: a function, or the path of a script. A function that is in no file (typed in a notebook) is sent by
                value, with arguments and result; without cloudpickle (`axon-ps[notebook]`) that is an InvalidRequest.
            n: number of workers; None = the cluster's world size.
            args: positional arguments of the function, or the script's arguments.
            kwargs: keyword arguments of the function.
            env: further variables.
            ranks: the ranks they request; None = 0 to n - 1.
        """
        ranks = range(self.world_size if n is None else n) if ranks is None else ranks
        workers = [
            WorkerProcess(
                rank,
                target,
                args,
                kwargs or {},
                environment=of_process(self.env(rank) | dict(env or {})),
                log=self._processes.new_log(f"worker-{rank}"),
            )
            for rank in ranks
        ]
        self._processes.workers += workers
        return workers

    def run_workers(
        self,
        target: Callable[..., object] | str | Path,
        n: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 240.0,
        check: bool = True,
    ) -> list[WorkerResult]:
        """Start `n` worker processes, wait for all of them and return their results, by rank.

        Args:
            target, n, args, kwargs, env: as for `start_workers`.
            timeout_s: seconds for all of them; those that still run then are killed, with their stacks in their output.
            check: raise soon after a worker fails, without waiting for the others.

        Raises:
            WorkerFailed: `check` is set and a worker raised, died or did not end in time; the message has errors
                and outputs.
        """
        workers = self.start_workers(target, n, args=args, kwargs=kwargs, env=env)
        return results_of(workers, timeout_s=timeout_s, check=check)

    # ------------------------------------------------------------------ faults

    def process(self, role: Role | str, index: int = 0) -> Child:
        """Return a process of the cluster.

        Args:
            role: "coordinator", "shard", "proxy" or "worker".
            index: its number, in the order in which they were started.

        Raises:
            InvalidRequest: there is none.
        """
        return self._processes.get(role, index)

    def address_of(self, role: Role | str, index: int = 0) -> str:
        """Return the "host:port" of a service of the cluster."""
        return self._addresses[self.process(role, index).pid]

    def kill(self, role: Role | str, index: int = 0, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of the cluster (SIGKILL, unless another is given; SIGSTOP freezes it)."""
        process = self.process(role, index)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(DRAIN_S)

    def restart(self, role: Role | str, index: int = 0) -> None:
        """Restart a service that was killed: a coordinator or a proxy on its port, a shard server with its rank.

        Raises:
            Misuse: it still runs, or it is a worker.
            AxonError: the new one does not listen in time; its log is in the message.
        """
        old = self.process(role, index)
        if old.exit_code is None:
            raise Misuse(f"{old.name} still runs; kill it before you restart it")
        old.end()
        if old in self._processes.coordinators:
            new = self._spawn_coordinator(index, port=int(self._address.split(",")[index].rpartition(":")[2]))
        elif old in self._processes.shards:
            new = self._spawn_shard(index, self._address)
        elif old in self._processes.host_proxies:
            new = self._spawn_proxy(index, port=int(self._addresses[old.pid].rpartition(":")[2]))
        else:
            raise Misuse("a worker is not restarted; start another with start_workers")
        self._listening(new, time.monotonic() + self._start_timeout_s)

    def add_shard(self) -> int:
        """Start one more shard server, which the running job takes; returns its index."""
        index = len(self._processes.shards)
        self._listening(self._spawn_shard(index, self._address, rank=-1), time.monotonic() + self._start_timeout_s)
        return index

    def add_proxy(self) -> str:
        """Start a host's proxy; returns its address, which members use in place of the coordinator's."""
        index = len(self._processes.host_proxies)
        return self._listening(self._spawn_proxy(index, port=0), time.monotonic() + self._start_timeout_s)

    def drain(self, index: int, timeout_s: float = 60.0) -> None:
        """Take a shard server out of the running job; returns when it has ended.

        Args:
            index: its number, in the order in which they were started.
            timeout_s: seconds that it may take: slices move while the job trains.

        Raises:
            AxonError: the coordinator refused, or it took longer.
        """
        process = self.process(Role.SHARD, index)
        self._processes.drained.add(process)

        async def drain(operator: OperatorClient) -> None:
            members = (await operator.status()).membership.shards
            await operator.drain(next(m.rank for m in members if m.address == self._addresses[process.pid]))

        self._operate(drain)
        if process.wait(timeout_s) is None:
            raise AxonError(f"{process.name} had not been drained after {timeout_s:g} s:\n{process.output}")

    def status(self) -> Status:
        """Return the coordinator's status of the job.

        Raises:
            AxonError: it does not answer.
        """
        return self._operate(lambda operator: operator.status())

    def log(self, role: Role | str, index: int = 0) -> str:
        """Return the end of the output of a process."""
        return self.process(role, index).output

    # ------------------------------------------------------------------ internals

    def _operate(self, call: Callable[[OperatorClient], Coroutine[Any, Any, T]]) -> T:
        """Make a call of an operator on a thread with its own event loop: in a notebook, ours already runs one."""
        from axon_ps.coordinator.client.operator import OperatorClient

        async def ask() -> T:
            async with OperatorClient(self.address, security=self.security, job=self.job) as operator:
                return await call(operator)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result()

    def _spawn_coordinator(self, index: int, port: int) -> Child:
        state = self._state_of(index) or (str(self.directory / "coordinator.sqlite") if self._durable else "memory")
        options = [*self._coordinator_options, "--port", str(port), "--state", state]
        name = COORDINATOR if self._num_coordinators == 1 else f"{COORDINATOR} {index}"
        process = self._spawn(name, "coordinator", options)
        self._processes.coordinators[index : index + 1] = [process]
        return process

    def _state_of(self, index: int) -> str:
        """Return the state that a coordinator is given; empty for a file or memory."""
        return self._state

    def _spawn_shard(self, index: int, coordinator: str, rank: int | None = None) -> Child:
        rank = index if rank is None else rank
        options = ["--coordinator", coordinator, "--port", "0", "--rank", str(rank), "--threads", "1"]
        process = self._spawn(f"shard {index}", "shard", options)
        self._processes.shards[index : index + 1] = [process]
        return process

    def _spawn_proxy(self, index: int, port: int) -> Child:
        process = self._spawn(f"proxy {index}", "proxy", ["--coordinator", self._address, "--port", str(port)])
        self._processes.host_proxies[index : index + 1] = [process]
        return process

    def _spawn(self, name: str, command: str, options: Sequence[str]) -> Child:
        log = self._processes.new_log(name.replace(" ", "-"))
        environment = of_process(self._environment.of_service(self.directory))
        if (server := fork_server()) is not None:
            return server.run(name, [command, *options], environment, log)
        argv = [sys.executable, "-P", "-m", "axon_ps.cli.main", command, *options]
        return Child.start(name, argv, environment, last_signal=signal.SIGKILL, output=log, stdin=True, ready=True)

    def _listening(self, process: Child, deadline: float) -> str:
        if not (line := process.ready_line(deadline)):
            exit_code = process.end()
            raise AxonError(f"{process.name} did not start (exit code {exit_code}):\n{process.output}")
        self._addresses[process.pid] = address = line.partition(" ")[0]  # the URL of an HTTP endpoint may follow
        return address
