"""`/metrics` of a process: what Prometheus scrapes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from axon_ps.observe.metrics.sources import Source
from axon_ps.rpc.http import Route

if TYPE_CHECKING:
    from aiohttp import web


def metrics(sources: Callable[[], Iterable[Source]], labels: Mapping[str, str]) -> Route:
    """`/metrics`: the numbers of `.statistics()`, read at every scrape on the event loop.

    Args:
        sources: what is read, at every scrape.
        labels: of every metric of this process: job, role, rank, node.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        from axon_ps.observe.metrics.exposition import Exposition

        began = time.perf_counter()
        await asyncio.sleep(0)  # everything that is ready comes before us
        lag_s = time.perf_counter() - began
        lag = Source(kind="process", read=lambda: {"loop_lag_s": lag_s})
        exposition = Exposition(lambda: chain(sources(), (lag,)), labels)
        body, content_type = exposition.encode(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    return Route(path="/metrics", handler=handler)
