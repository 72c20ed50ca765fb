"""The HTTP endpoint of a worker: its metrics, and those of the wrappers and groups in its process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from axon_ps.observe.metrics.sources import Source, registered
from axon_ps.rpc.http import HttpServer, healthz, metrics
from axon_ps.worker.environment import WorkerConfig


def endpoint(
    config: WorkerConfig,
    rank: int,
    own: Source,
    spans: Callable[[], dict[str, float]],
) -> HttpServer:
    """Make the endpoint; the caller starts it.

    Args:
        config: the address to listen on, and the worker's job and node.
        rank: of the worker.
        own: the worker's own numbers.
        spans: `Tracer.statistics`.

    Raises:
        ConfigurationError: it may not listen there.
    """
    assert config.http_port is not None
    server = HttpServer(config.http_host, config.http_port, config.security)
    labels = {"job_name": config.job, "role": "worker", "rank": str(rank), "node": config.node}
    process = Source(kind="process", read=spans)
    server.add(healthz(lambda: True), metrics(lambda: chain((own, process), registered()), labels))
    return server
