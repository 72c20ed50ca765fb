"""The page's requests to the coordinator over HTTP: its files, the feed, and the acts of an operator.

Files need no token, since they have no data of the job. The page sends the token it was given as a header, never as a
cookie, so no other site's page can act for it; see `rpc.http`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from axon_ps.coordinator.server.feed import as_json
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.standby import Switch
from axon_ps.errors import AxonError, Busy
from axon_ps.rpc.access import PAGE
from axon_ps.rpc.http import Route, taken

if TYPE_CHECKING:
    from aiohttp import web

ASSETS: Final = Path(__file__).parent / "assets"
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def page_routes(switch: Switch) -> list[Route]:
    """Return the routes of the page.

    Args:
        switch: has the servicer, if this coordinator leads.
    """

    def leading() -> CoordinatorServicer:
        from aiohttp import web

        if switch.servicer is None:
            raise web.HTTPServiceUnavailable(text=f"{switch.why}\n")
        return switch.servicer

    async def feed(request: web.Request) -> web.StreamResponse:
        """Send the events of `Feed.read` as server-sent events, in JSON."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        async with contextlib.aclosing(leading().feed.read()) as messages:
            try:
                first = await anext(messages)
            except AxonError as error:
                raise web.HTTPServiceUnavailable(text=f"{error}\n") from None
            with contextlib.suppress(AxonError, ConnectionError):  # it leads no more, or the reader is gone
                await response.prepare(request)
                async with taken(request):
                    await response.write(first.sse)
                async for message in messages:
                    async with taken(request):
                        await response.write(message.sse)
        return response

    async def logs(request: web.Request) -> web.StreamResponse:
        """Return a page of the job's log; see `CoordinatorServicer.logs_after`."""
        from aiohttp import web

        try:
            after = float(request.query.get("after", 0))
            reply = leading().logs_after(request.query.get("history", ""), after)
        except ValueError:
            raise web.HTTPBadRequest(text="after is no number\n") from None
        except AxonError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from None
        return web.Response(text=as_json(reply), content_type="application/json")

    async def operator(_: web.Request) -> web.StreamResponse:
        """Answer an operator. All other callers are refused."""
        from aiohttp import web

        return web.Response(status=204)

    async def drain(request: web.Request) -> web.StreamResponse:
        """Have a shard server give up its slices, and end; reply with the number of slices that it still has."""
        from aiohttp import web

        servicer, rank = leading(), int(request.match_info["rank"])
        try:
            slices = await servicer.drain_by_http(rank, request.remote or "")
        except AxonError as error:
            return web.Response(status=503 if isinstance(error, Busy) else 409, text=f"{error}\n")
        return web.json_response({"slices": slices})

    return [
        *(_file("/" if path.name == "index.html" else f"/{path.name}", path) for path in sorted(ASSETS.iterdir())),
        Route(path="/api/feed", handler=feed),
        Route(path="/api/logs", handler=logs),
        Route(path="/api/operator", handler=operator),
        Route(
            path=r"/api/servers/{rank:\d{1,5}}/drain", handler=drain, method="POST", row="POST /api/servers/RANK/drain"
        ),
    ]


def _file(where: str, path: Path) -> Route:
    async def handler(_: web.Request) -> web.StreamResponse:
        from aiohttp import web

        headers = {**_HEADERS, "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8", "Cache-Control": "no-cache"}
        return web.Response(body=path.read_bytes(), headers=headers)

    return Route(path=where, handler=handler, row=PAGE)
