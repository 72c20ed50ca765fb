"""The Ray actors in which a job's services run: a coordinator or a shard server, on an event loop of its own thread.

Ray starts an actor again whose process or node has died, with the arguments it had. A shard server then joins the job
as a new one and gets copies. A coordinator runs on one node only: it finds its state and its port in a directory there
(or its state in etcd), and members reconnect.

A service ends by `stop`. If it fails later than at its first start, the actor's process ends and Ray starts it again. A
failure at the first start is raised by `port`, since the next start would fail as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray

from axon_ps import plugins
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import audit
from axon_ps.coordinator.server import server as coordinator_server
from axon_ps.errors import Broken, ConfigurationError, Timeout, again
from axon_ps.observe.logging import LogStyle, configure
from axon_ps.rpc.auth.loopback import is_loopback, is_private
from axon_ps.rpc.security import Security
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.server import ShardConfig
from axon_ps.storage import roots
from axon_ps.storage.state_store import open_state

STOP_S: Final = 10.0
"""Seconds that a service gets to leave the job and end its calls."""

RETRY_S: Final = 1.0
"""Seconds that a process waits before it ends, if it is to be started again."""

_logger = logging.getLogger(__name__)
Ready = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The settings that the actors of all services need.

    Attributes:
        host: address to listen on.
        ip: address of the node of that loopback; empty = it is not loopback.
        security: TLS and token.
        plugins: modules to import.
        log_level: the lowest level that is logged.
        roots: the directories in which checkpoints are opened; empty = see `directories`.
        directories: those of the configuration: they and the actor's own are the roots, unless `host` is loopback.
    """

    host: str
    ip: str = ""
    security: Security
    plugins: tuple[str, ...] = ()
    log_level: str = "WARNING"
    roots: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()


class ServiceActor(ABC):
    """One service in this process. It starts with the actor.

    Args:
        name: in messages.
        config: the settings of all services.
    """

    def __init__(self, name: str, config: ServiceConfig) -> None:
        self._name, self._config = name, config
        self._listening, self._ended = threading.Event(), threading.Event()
        self._port = 0
        self._failure: BaseException | None = None
        self._restarted = _was_restarted()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    @abstractmethod
    async def _serve(self, ready: Ready, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Call `ready` with the port."""

    def port(self, timeout_s: float) -> int:
        """Return the port at which it listens, once it does.

        Raises:
            AxonError: it could not start.
            Timeout: it has not started in that time.
        """
        if not self._listening.wait(timeout_s):
            raise Timeout(f"the {self._name} did not start within {timeout_s:g} s")
        if self._failure is not None:
            raise again(self._failure)
        return self._port

    def pid(self) -> int:
        """Return the id of the process that it runs in."""
        return os.getpid()

    def stop(self) -> None:
        """End it in order, within `STOP_S` seconds. A repeated call is harmless."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._ended.wait(STOP_S)

    def wait(self) -> None:
        """Return when it has ended in order. The call fails when the actor dies."""
        self._ended.wait()

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        except BaseException as error:
            self._failure = again(error)
            _logger.error("the %s failed: %s", self._name, error)
            if self._port or self._restarted:
                time.sleep(RETRY_S)
                os._exit(1)  # and Ray starts it again
        finally:
            self._listening.set()
            self._ended.set()

    async def _run(self) -> None:
        configure(self._name, style=LogStyle.PLAIN, level=self._config.log_level)
        here = ray.util.get_node_ip_address()
        if self._config.ip not in ("", here):
            raise ConfigurationError(
                f"the {self._name} was placed on {here}, and the job's services listen on the loopback of "
                f"{self._config.ip}: all nodes were on one host when it began. Start the job "
                "when nodes of both hosts are there"
            )
        plugins.load(self._config.plugins)
        private = is_private(self._config.host, token=True)
        default = roots.default_roots(private=private, configured=self._config.directories)
        roots.allow_roots(self._config.roots or default)
        await self._serve(self._on_ready, self._stop)
        if not self._stop.is_set():
            raise Broken(f"the {self._name} ended by itself")

    def _on_ready(self, port: int) -> None:
        self._port = port
        self._listening.set()


def _was_restarted() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own implementation of it causes one
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class CoordinatorActor(ServiceActor):
    """A coordinator.

    Args:
        job: the job.
        config: the settings of all services.
        name: of a directory of its own among the files of Ray's session on its node, which `stop` removes.
        state: as `ClusterConfig.state` has it.
    """

    def __init__(self, job: CoordinatorConfig, config: ServiceConfig, name: str, state: str) -> None:
        self._job, self._state = job, state
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        self._directory = session / "axon_ps" / name
        self._audit_file = session / "logs" / f"axon_ps-{name}.audit.jsonl"  # it outlives the job
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__("coordinator", config)

    def stop(self) -> None:
        """End it in order, and remove its port and its state, unless the state is elsewhere."""
        super().stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _serve(self, ready: Ready, stop: asyncio.Event) -> None:
        port = self._directory / "port"

        def listens(number: int) -> None:
            port.write_text(str(number))
            ready(number)

        host, security = self._config.host, self._config.security
        with (
            open_state(self._state or str(self._directory / "state.sqlite"), self._job.job) as store,
            contextlib.closing(audit.opened("", self._audit_file, security.secrets)) as audit_log,
        ):
            number = int(port.read_text()) if port.exists() else 0
            await coordinator_server.serve(self._job, host, number, security, store, listens, stop, audit=audit_log)


class ShardActor(ServiceActor):
    """A shard server.

    Args:
        job: the job's name.
        coordinator: "host:port" of the coordinator; of several, with commas between them.
        config: the settings of all services.
        threads: of the arithmetic.
    """

    def __init__(self, job: str, coordinator: str, config: ServiceConfig, threads: int) -> None:
        self._job, self._coordinator, self._threads = job, coordinator, threads
        super().__init__("shard server", config)

    async def _serve(self, ready: Ready, stop: asyncio.Event) -> None:
        host = self._config.host
        config = ShardConfig(
            coordinator=self._coordinator,
            job=self._job,
            host=host,
            advertise="" if is_loopback(host) else ray.util.get_node_ip_address(),
            node=ray.get_runtime_context().get_node_id(),
            threads=self._threads,
            security=self._config.security,
        )
        await shard_server.serve(config, ready, stop)
