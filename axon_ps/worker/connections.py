"""A worker's connections to its job: to the coordinator, the shard servers and other workers, and for its metrics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from axon_ps.aggregation.client.client import CollectiveClient
from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.coordinator.client.session import CoordinatorClient, Event
from axon_ps.observe.metrics.sources import Source, registered
from axon_ps.rpc.http import HttpServer, healthz, metrics
from axon_ps.types import Role
from axon_ps.worker.hang_report import key_of, watch
from axon_ps.worker.worker import Worker

_HTTP_START_S = 10.0

_CLOSE_S = 10.0
"""Seconds that each connection may take to close."""


class Connections:
    """The connections of one worker. They are made together. The session is closed before those to servers.

    Args:
        worker: the worker; closed with them.
        on_event: gets the events of the session, on the loop's thread.

    Attributes:
        loop: the background loop.
        coordinator: the session with the coordinator.
        shards: the connections to the shard servers, for parameters.
        collectives: those for collectives that shard servers compute.
    """

    def __init__(self, worker: Worker, on_event: Callable[[Event], None]) -> None:
        config = worker.config
        self._worker = worker
        self._http: HttpServer | None = None
        self.loop = worker.loop
        self.shards = worker.make_shards()
        self.coordinator = coordinator = CoordinatorClient(
            config.coordinator,
            job=config.job,
            role=Role.WORKER,
            node=config.node,
            security=config.security,
            requested_rank=config.rank,
            world_size=config.world_size,
            standby=config.standby,
            on_event=on_event,
        )
        self.collectives = CollectiveClient(config.security, coordinator.context)
        self.shards.probe(coordinator.connectivity, coordinator.context)
        self.collectives.probe(coordinator.connectivity)

    def make_grpc(self, context: GroupContext) -> Backend:
        """Make the backend of a group whose collectives shard servers compute."""
        from axon_ps.collectives.backends.grpc import GrpcBackend, GrpcCalls

        return GrpcBackend(context, GrpcCalls(loop=self.loop, client=self.collectives))

    def observe(self, own: Source) -> None:
        """Begin to trace, and to serve metrics if the worker has a port for them. The worker must have joined.

        Args:
            own: the worker's own numbers.

        Raises:
            ConfigurationError: it may not listen there.
        """
        config, coordinator = self._worker.config, self.coordinator
        about = {"axon_ps.job": config.job, "axon_ps.rank": str(coordinator.rank), "axon_ps.node": config.node}
        coordinator.tracer.start(config.tracing, "worker", about)
        if config.http_port is None:
            return
        self._http = server = HttpServer(config.http_host, config.http_port, config.security)
        labels = {"job_name": config.job, "role": "worker", "rank": str(coordinator.rank), "node": config.node}
        process = Source(kind="process", read=coordinator.tracer.statistics)
        server.add(healthz(lambda: True), metrics(lambda: chain((own, process), registered()), labels))
        server.refuse(coordinator.revocations)
        self.loop.run(server.start(), _HTTP_START_S)

    async def report_hangs(self, recorder: Recorder) -> None:
        """Report collectives that hang to the job, until cancelled."""
        coordinator, key = self.coordinator, key_of(self.coordinator.rank)
        await watch(
            recorder,
            self._worker.config.node,
            lambda report: coordinator.kv_put(key, report),
            lambda: coordinator.kv_delete(key),
        )

    def close(self, *, finished: bool) -> None:
        """Leave the job, close the connections, wait for others that need this worker's services, and end these.

        Args:
            finished: True if the worker has done all its work. Only then it waits for others.
        """
        run, coordinator = self.loop.run, self.coordinator
        try:
            if self._http is not None:
                run(self._http.stop(), _CLOSE_S)
            run(coordinator.close("closed by its owner", finished=finished), _CLOSE_S)
            run(self.shards.close(), _CLOSE_S)
            run(self.collectives.close(), _CLOSE_S)
            coordinator.tracer.close()
            if finished:
                run(self._worker.wait_for_others())
        finally:
            self._worker.close()
