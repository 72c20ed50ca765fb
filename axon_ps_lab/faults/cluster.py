"""`FaultyCluster`, for fault injection: connections go through proxies, processes have an injector.

The services are those of the command line, run by forks of the process that `testing.preloaded` starts. Otherwise a
grid of two thousand small clusters would spend most of its time on imports. So enter `preloaded(MODULES)` first.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from axon_ps.errors import AxonError, InvalidRequest, Misuse
from axon_ps.host.children import Child
from axon_ps.testing.cluster import LocalCluster
from axon_ps.testing.environment import of_process
from axon_ps.testing.fork_server import run_command
from axon_ps.testing.processes import COORDINATOR
from axon_ps.testing.worker_main import ByName
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import Role
from axon_ps_lab.faults import clock_jumps, injector, stacks, trimming
from axon_ps_lab.faults.clock_jumps import Clocks
from axon_ps_lab.faults.injector import ArmedMoments
from axon_ps_lab.faults.proxy import Disturbance, Proxies, TcpProxy, listening_ports

MODULES = (
    "axon_ps.cli.main",
    "axon_ps.cli.serve",
    "axon_ps.cli.settings",
    "axon_ps.coordinator.server.server",
    "axon_ps.shard.server.server",
    "axon_ps_lab.faults.cluster",
    "axon_ps_lab.faults.warm",
)
"""The modules of the services, for `testing.preloaded`; add those of the workers."""

_COMMAND_S = 60.0
_POLL_S = 0.005
_SHOW_S = 1.0
_TRIM_S = 0.2


class FaultyCluster(LocalCluster):
    """A `LocalCluster` for faults. Its workers are functions, run in forks; `preloaded` must be entered.

    Args:
        shards, world_size, min_workers, lease_s, environment, replication: as for `LocalCluster`.
        checkpoint_dir, checkpoint_every, checkpoint_limit: likewise.
        shard_nodes: the node of each shard server; () = this host's name.
        shard_environment: further variables for the shard servers.
        state_dir: directory of the coordinator's state; None = the cluster's own directory.

    Attributes:
        moments: arms moments, and waits for processes that stop at them.
        clocks: sets the wall clocks of processes.
        state: the file of the coordinator's state.
    """

    def __init__(
        self,
        shards: int,
        world_size: int,
        *,
        min_workers: int | None = None,
        lease_s: float = 1.0,
        environment: Mapping[str, str] | None = None,
        shard_nodes: Sequence[str] = (),
        replication: int = 0,
        checkpoint_dir: str | Path = "",
        checkpoint_every: str = "",
        checkpoint_limit: int = 3,
        shard_environment: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        super().__init__(
            shards,
            world_size,
            min_workers=min_workers,
            lease_s=lease_s,
            environment={"AXON_PS_DEBUGGABLE": "1", **(environment or {})},  # for reading their sockets
            durable=True,
            replication=replication,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            checkpoint_limit=checkpoint_limit,
        )
        own = [{"AXON_PS_NODE": node} for node in shard_nodes] or [{}] * shards
        self._nodes = [{**node, **(shard_environment or {})} for node in own]
        self._state_dir = state_dir
        self._numbers = 0
        self._slots: dict[int, int] = {}  # by process id
        self._forks: list[WorkerProcess] = []
        self._running: frozenset[int] = frozenset()  # process ids; some may have ended since the last start
        self._proxies = Proxies()

    def __enter__(self) -> FaultyCluster:
        """Start proxies, coordinator and shard servers.

        Raises:
            AxonError: a service ended, or did not listen in time; its log is in the message.
        """
        self.directory = self._processes.open()
        self.moments = ArmedMoments(self.directory)
        self.clocks = Clocks(self.directory)
        self.state = (self._state_dir or self.directory) / "coordinator.sqlite"
        self._proxies.__enter__()
        self._to_coordinator = self._proxies.open()
        self._to_shards = [(self._proxies.open(), self._proxies.open()) for _ in range(self._num_shards)]
        self._address = self._to_coordinator.address
        try:
            self._begin_coordinator()
            for index in range(self._num_shards):
                self._begin_shard(index)
            for index in range(self._num_shards):
                self._wait_for_shard(index)
        except BaseException:
            self._end_all()
            raise
        return self

    # ------------------------------------------------------------------ workers

    def start_worker(
        self,
        rank: int,
        target: Callable[..., object],
        *,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start a worker that runs a function; its slot is known at once.

        Args:
            rank: the worker's rank.
            target: a function at the top of a module.
            args: its arguments.
            env: further variables.

        Raises:
            InvalidRequest: the function is not at the top of a module.
        """
        environment = self.env(rank) | dict(env or {})
        if (found := ByName.of(target)) is None:
            raise InvalidRequest(f"{target.__qualname__} is not at the top of a module, where a fork could find it")
        worker = self._fork(f"worker-{rank}", environment, _run_worker, found, tuple(args), rank=rank)
        self._processes.workers.append(worker)
        return worker

    def begin_command(self, *argv: str) -> WorkerProcess:
        """Start `axon-ps ARGV` for the coordinator's own address, not its proxy's: an operator has another network."""
        environment = self._environment.common() | {"AXON_PS_COORDINATOR": self.operator_address}
        return self._fork(argv[0], environment, _run_command, list(argv), None)

    def command(self, *argv: str, timeout_s: float = _COMMAND_S) -> str:
        """Run `axon-ps ARGV` for this cluster's coordinator; returns the output.

        Raises:
            AxonError: the command failed; its output is in the message.
        """
        result = self.begin_command(*argv).result(timeout_s)
        if result.error or result.value:
            raise AxonError(f"axon-ps {' '.join(argv)} failed: {result.error}\n{result.output}")
        return result.output

    # ------------------------------------------------------------------ faults

    def show_stacks(self) -> None:
        """Make every running process write its stacks to its log."""
        self._ask_all(stacks.SHOW, _SHOW_S)

    def trim_memory(self) -> None:
        """Make every running process return its free memory to the kernel."""
        self._ask_all(trimming.TRIM, _TRIM_S)

    def _ask_all(self, number: int, grace_s: float) -> None:
        """Send a signal to every running process, and wait a little."""
        running = [fork.process for fork in self._forks if fork.process.exit_code is None]
        for process in running:
            process.send_signal(number)
        for process in running:
            process.wait(grace_s / len(running))

    def take_stall(self) -> float:
        """Return the longest time since the last call in which the proxies did not run: this process had no CPU."""
        stalled_s, self._proxies.stalled_s = self._proxies.stalled_s, 0.0
        return stalled_s

    def slot_of(self, process: Child) -> int:
        """Return the slot of a process, for `moments.arm`."""
        return self._slots[process.pid]

    def disturb(self, what: Disturbance, process: Child) -> None:
        """Disturb all connections of a process, in both directions."""
        own = self._proxies_of(process)
        for proxy in (self._to_coordinator, *itertools.chain(*self._to_shards)):
            proxy.disturb(what, None if proxy in own else {process.pid})

    def partition(self, what: Disturbance, side: Collection[Child]) -> None:
        """Disturb all connections between the processes of one side and all others, in both directions."""
        inside = {process.pid for process in side}
        outside = self._running - inside
        for service in (*self._processes.coordinators, *self._processes.shards):
            for proxy in self._proxies_of(service):
                proxy.disturb(what, outside if service.pid in inside else inside)

    def cut(self, what: Disturbance, one: Child, other: Child) -> None:
        """Disturb all connections between two processes, in both directions."""
        for server, client in ((one, other), (other, one)):
            for proxy in self._proxies_of(server):
                proxy.disturb(what, {client.pid})

    @property
    def operator_address(self) -> str:
        """The coordinator's own address, not its proxy's: an operator has another network."""
        host, port = self._to_coordinator.upstream or ("127.0.0.1", 1)
        return f"{host}:{port}"

    def restart(self, role: Role | str, index: int = 0) -> None:
        """Restart a service that was killed, behind the same address.

        Raises:
            Misuse: the process still runs, or is a worker.
        """
        old = self.process(role, index)
        own = self._proxies_of(old)
        if old.exit_code is None or not own:
            raise Misuse(f"{old.name} still runs, or is a worker; only a service that was killed is restarted")
        old.end()
        for proxy in own:
            proxy.upstream = None
        if self._to_coordinator in own:
            self._begin_coordinator()
        else:
            self._begin_shard(index)
            self._wait_for_shard(index)

    # ------------------------------------------------------------------ internals

    def _proxies_of(self, process: Child) -> tuple[TcpProxy, ...]:
        """Return a service's proxies: a shard server has two, to gRPC and to bulk connections; a worker has none."""
        if process in self._processes.coordinators:
            return (self._to_coordinator,)
        return self._to_shards[self._processes.shards.index(process)] if process in self._processes.shards else ()

    def _begin_coordinator(self) -> None:
        argv = ["coordinator", *self._coordinator_options, "--port", "0", "--state", str(self.state)]
        coordinator = self._service(COORDINATOR, argv, {})
        self._processes.coordinators = [coordinator]
        self._to_coordinator.upstream = self._listening_at(coordinator)

    def _begin_shard(self, index: int) -> None:
        argv = ["shard", "--coordinator", self._address, "--port", "0", "--rank", str(index), "--threads", "1"]
        to_grpc, to_bulk = (proxy.address for proxy in self._to_shards[index])
        argv += ["--advertise", to_grpc, "--advertise-bulk-port", to_bulk.rpartition(":")[2]]
        self._processes.shards[index : index + 1] = [self._service(f"shard-{index}", argv, self._nodes[index])]

    def _wait_for_shard(self, index: int) -> None:
        to_grpc, to_bulk = self._to_shards[index]
        host, port = to_grpc.upstream = self._listening_at(self._processes.shards[index])
        (bulk_port,) = listening_ports(self._processes.shards[index].pid) - {port}
        to_bulk.upstream = (host, bulk_port)

    def _service(self, name: str, argv: list[str], environment: Mapping[str, str]) -> Child:
        values = self._environment.of_service(self.directory) | dict(environment)
        return self._fork(name, values, _run_command, argv, self._ready_file(name)).process

    def _ready_file(self, name: str) -> Path:
        path = self.directory / f"{name}.ready"
        path.unlink(missing_ok=True)
        return path

    def _listening_at(self, service: Child) -> tuple[str, int]:
        """Wait until a service listens; returns its address."""
        deadline = time.monotonic() + self._start_timeout_s
        path = self.directory / f"{service.name}.ready"
        while not (path.exists() and (line := path.read_text()).endswith("\n")):
            if service.exit_code is not None or time.monotonic() > deadline:
                raise AxonError(f"{service.name} did not start (exit code {service.end()}):\n{service.output}")
            service.wait(_POLL_S)
        host, _, port = line.strip().rpartition(":")
        return host, int(port)

    def _fork(
        self, name: str, environment: Mapping[str, str], call: Callable[..., object], *args: Any, rank: int = -1
    ) -> WorkerProcess:
        slot = self._numbers
        self._numbers += 1
        process = WorkerProcess(
            rank,
            call,
            (self.directory, slot, *args),
            {},
            environment=of_process(environment),
            log=self._processes.new_log(name),
        )
        process.process.name = name
        self._slots[process.process.pid] = slot
        self._forks.append(process)
        self._running = frozenset(f.process.pid for f in self._forks if f.process.exit_code is None)
        return process

    def _end_all(self) -> tuple[list[str], str]:
        for fork in self._forks:
            if fork.process not in (*self._processes.shards, *self._processes.coordinators):
                fork.end()
        ended = super()._end_all()
        self._proxies.__exit__(None, None, None)
        self.moments.close()
        self.clocks.close()
        return ended


def _run_worker(directory: Path, slot: int, target: ByName, args: tuple[Any, ...]) -> object:
    """Run a worker's function in a fork."""
    injector.install(directory, slot)
    clock_jumps.install(directory, slot)
    stacks.install()
    trimming.install()
    return target.load()(*args)


def _run_command(directory: Path, slot: int, argv: list[str], ready: Path | None) -> int:
    """Run the command line in a fork, as `python -m` does; returns its exit code."""
    injector.install(directory, slot)
    clock_jumps.install(directory, slot)
    stacks.install()
    trimming.install()
    if ready is not None:
        argv = [*argv, "--ready-fd", str(os.open(ready, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))]
    return run_command(argv)
