"""Performing a launch: coordinator, shard servers and workers as child processes, watched until the end.

It ends in one of three ways:
- every worker exits with 0: the services are asked to drain; the exit code is 0.
- a worker fails without a restart left (see `workers`), or a service fails: everything else is ended. The command has
  the exit code of the failed process. Its traceback, and below it a line that names it and its error, are the last on
  the screen. A service that fails is started again if the job can go on with it; see `_Launcher._watch_service`.
- Ctrl-C, SIGTERM or SIGHUP: workers are ended first (after Ctrl-C by SIGINT, as `KeyboardInterrupt`), then services by
  SIGTERM; the exit code is 128 plus the signal, such as 130 or 143. A second signal kills all.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from axon_ps.cli.launch.console import Console
from axon_ps.cli.launch.network import wait_until_listening
from axon_ps.cli.launch.plan import Launch
from axon_ps.cli.launch.processes import PYTHON, Process
from axon_ps.cli.launch.restarts import Restarts
from axon_ps.cli.launch.workers import WorkerProcesses
from axon_ps.cli.settings import DEFAULT_JOB, Settings, child_environment, variable_is_set
from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.host import loop_cache
from axon_ps.host.ports import free_ports
from axon_ps.observe.variables import misspelt
from axon_ps.rpc.auth.loopback import is_private
from axon_ps.storage.roots import roots_of_children
from axon_ps.storage.state_store.sqlite import UNSYNCED

WORKER_GRACE_S = 5.0
SERVICE_GRACE_S = 10.0
SERVICE_RESTARTS = 5
"""Most restarts of a service in a row; see `restarts`."""


async def perform(launch: Launch, settings: Settings) -> int:
    """Run a launch to its end and return the exit code."""
    console = Console(sys.stdout, sys.stderr, colour=sys.stderr.isatty())
    launcher = _Launcher(launch, settings, console)
    try:
        return await launcher.run()
    finally:
        await launcher.end_everything()


class _Launcher:
    def __init__(self, launch: Launch, settings: Settings, console: Console) -> None:
        self._launch, self._settings, self._console = launch, settings, console
        self._services: list[Process] = []  # the coordinator, if this node starts it, comes first
        self._workers = WorkerProcesses(launch, console, self._worker_environment)
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._master_port = launch.master_port or free_ports()
        self._cpus = len(os.sched_getaffinity(0))
        self._address = ""  # of the coordinator, once it is known
        self._workers_address = ""  # of the process that workers take for the coordinator
        self._url = ""  # of the coordinator's HTTP endpoint, if it is this node's
        self._starts_coordinator = not settings.coordinator and launch.node_rank <= 0
        self._private: Path | None = None  # directory for files that other users must not read, once there are any

    async def run(self) -> int:
        self._catch_signals()
        work = asyncio.ensure_future(self._work())
        await asyncio.wait((work, self._signal), return_when=asyncio.FIRST_COMPLETED)
        if self._signal.done():
            work.cancel()
            await asyncio.wait((work,))
            return await self._interrupted()
        failure = work.exception()
        await self._await_causes()
        await self.end_everything()
        if failed := self._failed():
            self._report(failed[0])
            return failed[0].exit_code or 1
        if failure is not None:
            raise failure
        return 0

    async def end_everything(self) -> None:
        """End the workers first, then the shard servers, which leave the job, then the coordinator."""
        steps = [(signal.SIGTERM, WORKER_GRACE_S)]
        if self._console.interrupted:
            steps.insert(0, (signal.SIGINT, WORKER_GRACE_S))
        await _all(p.end(*steps) for p in self._workers.processes)
        await _all(p.end((signal.SIGTERM, SERVICE_GRACE_S)) for p in self._services[1:])
        await _all(p.end((signal.SIGTERM, SERVICE_GRACE_S)) for p in self._services[:1])
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    # ------------------------------------------------------------------ starting

    async def _work(self) -> None:
        if self._settings.coordinator:
            address = self._settings.coordinator
            await wait_until_listening(address, self._launch.connect_timeout_s, self._console.print)
            await self._start_shards(address)
        else:
            address = await self._start_services()
        self._address = self._workers_address = address
        if self._launch.proxy:
            proxy = self._start_proxy(port=0)
            self._services.insert(self._first_shard, proxy)
            self._workers_address = await proxy.address()
        self._print_how_to_watch()
        self._workers.start()
        await self._watch()

    async def _start_services(self) -> str:
        """Start this node's services, all at once: shard servers import while the coordinator opens its port."""
        launch = self._launch
        if not self._starts_coordinator:
            address = f"{launch.master_addr}:{launch.coordinator_port}"
            await wait_until_listening(address, launch.connect_timeout_s, self._console.print)
            await self._start_shards(address)
            return address
        coordinator = self._start_coordinator(launch.coordinator_port, launch.http_port)
        self._services.append(coordinator)
        await self._start_shards("-")
        at, _, self._url = (await coordinator.address()).partition(" ")
        port = at.rpartition(":")[2]
        address = f"{launch.master_addr}:{port}"
        for shard in self._services[1:]:
            shard.child.send_line(address)
        return address

    def _start_coordinator(self, port: int, http_port: int | None) -> Process:
        launch = self._launch
        command = ["coordinator", "--host", launch.host, "--port", str(port)]
        command += ["--world-size", str(launch.world_size), "--shards", str(launch.shards)]
        if launch.state:
            command += ["--state", launch.state]
        else:  # a file that goes with the launch
            command += ["--state", f"sqlite:{self._private_file('state.sqlite')}{UNSYNCED}"]
        if launch.min_workers is not None:
            command += ["--min-workers", str(launch.min_workers)]
        if launch.step_timeout_s is not None:
            command += ["--step-timeout-s", str(launch.step_timeout_s)]
        command += ["--replication", str(launch.replication)]
        if launch.resume:
            command += ["--resume", launch.resume]
        if http_port is not None:
            command += ["--http-port", str(http_port)]
        if launch.checkpoint_every:
            command += ["--checkpoint-dir", launch.checkpoint_dir, "--checkpoint-every", launch.checkpoint_every]
            command += ["--checkpoint-limit", str(launch.checkpoint_limit)]
        return self._start_service("coordinator", command, ready=True)

    async def _start_shards(self, coordinator: str) -> None:
        if self._launch.shards_here:
            await _compile_loops(self._console)
        for index in range(self._launch.shards_here):
            self._services.append(self._start_shard(index, coordinator))

    def _start_shard(self, index: int, coordinator: str) -> Process:
        launch = self._launch
        rank = max(launch.node_rank, 0) + index * launch.nnodes
        threads = max(1, self._cpus // launch.shards_here)
        command = ["shard", "--coordinator", coordinator, "--host", launch.host, "--port", "0"]
        command += ["--rank", str(rank), "--threads", str(threads)]
        if launch.advertise:
            command += ["--advertise", launch.advertise]
        if (http_port := launch.http_port_of(index)) is not None:
            command += ["--http-port", str(http_port)]
        return self._start_service(f"shard {rank}", command, self._roots())

    def _start_proxy(self, port: int) -> Process:
        command = ["proxy", "--coordinator", self._address, "--port", str(port)]
        return self._start_service("proxy", command, ready=True)

    @property
    def _first_shard(self) -> int:
        """The index of this node's first shard server among its services; a proxy comes before them."""
        return len(self._services) - self._launch.shards_here

    def _roots(self) -> Mapping[str, str]:
        """Return the variable that lets shard servers open checkpoints where the coordinator does."""
        launch, settings = self._launch, self._settings
        if settings.checkpoint_roots:
            return {}
        private = is_private(launch.host, token=bool(launch.token))
        return roots_of_children(private=private, configured=(settings.checkpoint_dir, launch.resume))

    def _start_service(
        self, name: str, command: list[str], variables: Mapping[str, str] | None = None, *, ready: bool = False
    ) -> Process:
        settings = self._settings
        security = ["--insecure"] if settings.insecure else []
        environment = child_environment(
            self._settings_of_children()
            | self._node()
            | {"AXON_PS_LOG": settings.log.value, "AXON_PS_LOG_LEVEL": settings.log_level or "WARNING"}
            | dict(variables or {})
        )
        for reported in misspelt(environment):
            del environment[reported]
        return Process(
            self._console.source(name),
            [*PYTHON, "-m", "axon_ps.cli.main", *command, "--job", settings.job, *security],
            environment,
            is_worker=False,
            stdin=True,
            ready=ready,
        )

    def _print_how_to_watch(self) -> None:
        """Print the `axon-ps status` command, and the page's URL."""
        if self._launch.node_rank > 0:
            return  # node 0 prints it
        settings, command = self._settings, ["axon-ps status --coordinator", self._address]
        if settings.job != DEFAULT_JOB:
            command += ["--job", settings.job]
        token_file = settings.token_file or self._new_token_file()
        if token_file is not None:
            command += ["--token-file", str(token_file)]
        if settings.tls_ca:
            command += ["--tls-ca", settings.tls_ca]
        if settings.tls_dir:
            command += ["--tls-dir", settings.tls_dir]
        if self._launch.tls:
            command += ["--tls"]
        self._console.print(f"axon-ps: to watch it from another terminal: {' '.join(command)}")
        if self._url:
            asks = f" (it asks for the token in {token_file})" if token_file else ""
            self._console.print(f"axon-ps: to watch it in a browser: {self._url}{asks}")

    def _new_token_file(self) -> Path | None:
        """Make a file with the token that the launcher generated, for this user only; None if it generated none."""
        if not self._launch.token or self._settings.resolved_token:
            return None
        path = self._private_file("token")
        path.touch(mode=0o600)
        path.write_text(self._launch.token)
        return path

    def _private_file(self, name: str) -> Path:
        """Return a path in a directory of this user that is removed with the launch.

        Raises:
            ConfigurationError: the directory cannot be made.
        """
        if self._private is None:
            try:
                self._private = Path(tempfile.mkdtemp(prefix="axon-ps-"))
            except OSError as error:
                raise ConfigurationError(f"{error}; set TMPDIR to a directory that can be written") from error
        return self._private / name

    def _worker_environment(self) -> dict[str, str]:
        """Return the variables that all workers of this node get; each gets its ranks in addition."""
        launch = self._launch
        variables = {
            "MASTER_ADDR": launch.master_addr,
            "MASTER_PORT": str(self._master_port),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_WORLD_SIZE": str(launch.nproc_per_node),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
            "AXON_PS_COORDINATOR": self._workers_address,
            "PYTHONUNBUFFERED": "1",
        }
        if (http_port := launch.http_port_of(launch.shards_here)) is not None:
            variables["AXON_PS_HTTP_PORT"] = str(http_port)
        if not variable_is_set("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(max(1, self._cpus // launch.nproc_per_node))
        if sys.stderr.isatty():
            variables["COLUMNS"] = str(max(40, os.get_terminal_size(sys.stderr.fileno()).columns - len("[worker 00] ")))
        return child_environment(self._settings_of_children() | self._node() | variables)

    def _settings_of_children(self) -> dict[str, str]:
        return self._settings.environment(token=self._launch.token) | ({"AXON_PS_TLS": "1"} if self._launch.tls else {})

    def _node(self) -> dict[str, str]:
        """Return the variable of the node; none if the host name is the node.

        Launches on one host with several --node-rank are several nodes.
        """
        if self._settings.node or self._launch.nnodes == 1 or self._launch.node_rank < 0:
            return {}
        return {"AXON_PS_NODE": f"{socket.gethostname()}/{self._launch.node_rank}"}

    # ------------------------------------------------------------------ watching and ending

    async def _watch(self) -> None:
        """Return when every worker has ended well, one has failed without a restart left, or a service has failed."""
        working = asyncio.ensure_future(self._workers.watch())
        services = [asyncio.ensure_future(self._watch_service(at)) for at in range(len(self._services))]
        try:
            await asyncio.wait((working, *services), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            for end, process in zip(services, self._services, strict=True):
                if end.done() and not working.done() and not process.failed:
                    raise AxonError(f"{process.source.name} {process.child.ending} while workers were running")
        finally:
            for task in (working, *services):
                task.cancel()
            await asyncio.wait((working, *services))

    async def _watch_service(self, at: int) -> None:
        """Return when a service has ended for good. If it fails and the job can go on, it is started again.

        The job can go on with a coordinator that has its state. It can go on with a shard server if others hold its
        slices, or checkpoints are restored. It can always go on with a proxy. A drained shard server is not replaced.
        """
        restarts = Restarts(SERVICE_RESTARTS, time.monotonic(), in_a_row=True)
        while True:
            process = self._services[at]
            await process.wait()
            if at >= self._first_shard and not process.failed:
                self._console.print(f"axon-ps: {process.source.name} was drained")
                await asyncio.get_running_loop().create_future()  # cancelled when the workers have ended
            goes_on = self._goes_on(at) if process.failed else ""
            pause_s = restarts.ended(time.monotonic()) if goes_on else None
            if pause_s is None:
                return
            how = restarts.described(f"it is started again: {goes_on}", pause_s)
            self._console.print(f"axon-ps: {process.source.name} {process.child.ending}; {how}")
            await asyncio.sleep(pause_s)
            self._services[at] = self._start_again(at)
            restarts.began(time.monotonic())

    def _goes_on(self, at: int) -> str:
        """Return the way in which the job goes on with another process in the place of a service; "" = it cannot."""
        launch = self._launch
        if at >= self._first_shard:
            if launch.shards > 1 and launch.replication != 1:
                return "the others go on, and it gets copies"
            return "the job restores its newest checkpoint" if launch.checkpoint_every else ""
        if at == 0 and self._starts_coordinator:
            return "" if launch.state == "memory" else "it has its state, and all others come back to it"
        return "its workers come back"

    def _start_again(self, at: int) -> Process:
        """Start another process for a service; a coordinator or proxy gets the port of its predecessor."""
        if at >= self._first_shard:
            return self._start_shard(at - self._first_shard, self._address)
        if at == 0 and self._starts_coordinator:
            http_port = urlsplit(self._url).port if self._url else None
            return self._start_coordinator(int(self._address.rpartition(":")[2]), http_port)
        return self._start_proxy(port=int(self._workers_address.rpartition(":")[2]))

    def _catch_signals(self) -> None:
        def on_signal(number: int) -> None:
            if self._signal.done():
                for process in (*self._workers.processes, *self._services):
                    process.child.signal_group(signal.SIGKILL)
            else:
                self._signal.set_result(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        self._console.on_broken_pipe = lambda: None if self._signal.done() else on_signal(signal.SIGPIPE)

    async def _interrupted(self) -> int:
        number = self._signal.result()
        self._console.interrupted = number == signal.SIGINT
        self._console.print(
            f"axon-ps: {'interrupted' if number == signal.SIGINT else 'terminated'}; ending all processes"
        )
        await self.end_everything()
        return 128 + number

    async def _await_causes(self) -> None:
        """Wait for a while for workers that are dying, or that wrote an error before the failed process did. They are
        the cause. A worker that the launcher signals before it ends counts as ended by the launcher.
        """
        failed_at = min((p.source.failed_at or 0 for p in self._failed()), default=0)
        running = [p for p in self._workers.exhausted() if p.is_running]
        causes = [p for p in running if p.child.is_ending or (p.source.failed_at or failed_at) < failed_at]
        if causes:
            await asyncio.wait([asyncio.ensure_future(p.wait()) for p in causes], timeout=WORKER_GRACE_S)

    def _failed(self) -> list[Process]:
        """Return the processes that failed, in the order of their errors on the screen: the first caused the others.

        A process that a signal has ended without an error comes before them: an error does not kill other processes. (A
        worker that was restarted failed by itself, or it would be running.)
        """
        failed = [p for p in (*self._services, *self._workers.exhausted()) if p.failed]
        return sorted(failed, key=lambda p: (not p.was_killed, p.source.failed_at or 0))

    def _report(self, culprit: Process) -> None:
        """Print its last errors, unless they are there already, and then, last of all, its name and the reason."""
        for line in culprit.source.last_errors() if self._console.last_writer is not culprit.source else ():
            self._console.line(culprit.source, line, error=True)
        ending = f"it {culprit.child.ending}{self._workers.history(culprit)}"
        why = f": {error}" if (error := culprit.source.error()) else ""
        self._console.print(f"axon-ps: {culprit.source.name} failed first: {ending}{why}", error=True)


async def _all(awaitables: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*awaitables)


async def _compile_loops(console: Console) -> None:
    """Compile the loops, once on a machine and before they are called: no server or worker waits for a compiler."""
    if loop_cache.is_complete():
        return
    loops = await asyncio.to_thread(importlib.import_module, "axon_ps.shard.loops")
    console.print(loops.NOTICE)
    compiler = Process(console.source("compiler"), loops.COMMAND, loop_cache.compiler_environment(), is_worker=True)
    try:
        await asyncio.wait_for(compiler.wait(), loops.LIMIT_S)
    except TimeoutError:
        console.print(f"they are not compiled after {loops.LIMIT_S:g} s; each is compiled when it is called")
    finally:
        await compiler.end()
