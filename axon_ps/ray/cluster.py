"""`RayCluster`: one job on a Ray cluster, its services and its workers, as a context manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from axon_ps.errors import ConfigurationError, Misuse
from axon_ps.ray.config import ClusterConfig
from axon_ps.ray.placement import create_placement_group
from axon_ps.ray.services import Services
from axon_ps.ray.workers import WorkerRun
from axon_ps.rpc.security import Security

if TYPE_CHECKING:
    from axon_ps.wire.events import Status


class RayCluster:
    """Coordinator, shard servers and reserved resources for workers on a Ray cluster, for one job.

    Args:
        workers: number of workers.
        config: the services; None = two shard servers and the defaults of `ClusterConfig`.
        resources_per_worker: the resources that Ray reserves for each; None = one CPU.
        max_restarts: times that a worker is started again after its process or node died; -1 = always.
        placement: Ray's strategy for workers.

    Attributes:
        services: the services' actors, while it runs.

    Raises:
        ConfigurationError: `workers` is less than 1.

    On entering, Ray is initialized if the program has not done it, and then shut down on leaving.
    """

    def __init__(
        self,
        workers: int = 1,
        config: ClusterConfig | None = None,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        max_restarts: int = 3,
        placement: str = "SPREAD",
    ) -> None:
        if workers < 1:
            raise ConfigurationError(f"workers is {workers}; it must be at least 1")
        self.num_workers = workers
        self._config = config or ClusterConfig()
        self._resources = dict(resources_per_worker or {"CPU": 1.0})
        self._max_restarts = max_restarts
        self._placement = placement
        self._services: Services | None = None
        self._group: PlacementGroup | None = None
        self._run: WorkerRun | None = None
        self._owns_ray = False

    def __enter__(self) -> RayCluster:
        """Place everything and start the services; returns when all of them listen.

        Raises:
            Misuse: it runs already.
            Busy: Ray could not place everything within `start_timeout_s`. Nothing is left.
            AxonError: a service could not start.
        """
        if self._services is not None:
            raise Misuse("this RayCluster is running already; make another")
        if not ray.is_initialized():
            ray.init()
            self._owns_ray = True
        try:
            bundles = [self._resources] * self.num_workers
            self._group = create_placement_group("the workers", bundles, self._placement, self._config.start_timeout_s)
            self._services = Services(self._config, self.num_workers)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that it started, workers first. A repeated call is harmless."""
        try:
            if self._run is not None:
                self._run.end()
            if self._services is not None:
                self._services.close()
            if self._group is not None:
                remove_placement_group(self._group)
        finally:
            self._run = self._services = self._group = None
            if self._owns_ray:
                self._owns_ray = False
                ray.shutdown()

    @property
    def services(self) -> Services:
        """The services' actors.

        Raises:
            Misuse: it does not run.
        """
        if self._services is None:
            raise Misuse("this RayCluster is not running; use it as a context manager")
        return self._services

    @property
    def workers(self) -> list[Any]:
        """The workers' actors by rank, while a function runs in them."""
        return self._run.actors if self._run is not None else []

    @property
    def address(self) -> str:
        """The coordinator's "host:port"; of several, with commas between them."""
        return self.services.address

    @property
    def security(self) -> Security:
        """Token and certificates for a client of this cluster."""
        return self.services.config.security

    def start(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call a function in every worker, and return at once. `results` waits for it.

        Args:
            function: joins the job with `World.init()`. It is called again from its first line in a worker that died,
                so it begins at `world.version` (docs/workers.md says what else it must do).
            args: its arguments.
            kwargs: its arguments.

        Raises:
            Misuse: a function runs already, or the cluster does not run.
        """
        services = self.services
        if self._run is not None:
            raise Misuse("a function runs in the workers already; call results() first")
        assert self._group is not None
        self._run = WorkerRun(self._group, self.num_workers, self._resources, self._max_restarts)
        environment = {**services.environment(""), "WORLD_SIZE": str(self.num_workers)}
        self._run.start(environment, function, args, kwargs)

    def results(self) -> list[object]:
        """Return the function's results, by rank; None for a lost worker if the others have finished without it.

        Raises:
            Misuse: no function runs.
            Broken: a worker raised, or died more often than `max_restarts`. The message has its traceback.
            Busy: all workers died, and Ray could not start any again.

        After an error: the workers have been ended. The services, and the parameters on them, are there until the
        cluster is left.
        """
        if self._run is None:
            raise Misuse("no function runs in the workers; call start() first")
        try:
            config = self.services.config
            return self._run.results(absent_s=config.join_timeout_s, grace_s=config.start_timeout_s)
        finally:
            self._run.end()
            self._run = None

    def run(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> list[object]:
        """Call `start` and then `results`."""
        self.start(function, *args, **kwargs)
        return self.results()

    def status(self) -> Status:
        """Return the coordinator's report of the job.

        Raises:
            AxonError: it does not reply.
        """

        from axon_ps.coordinator.client.operator import OperatorClient

        async def ask() -> Status:
            async with OperatorClient(self.address, security=self.security, job=self.services.config.job) as operator:
                return await operator.status()

        return asyncio.run(ask())
