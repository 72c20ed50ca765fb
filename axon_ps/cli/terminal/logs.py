"""The command `logs`: the logs of all processes of a job, in one stream."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from axon_ps.cli import options as o

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings


@o.of_a_job
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is logged from now on.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only the worker of this rank; may be repeated.", show_default="all")
    ] = None,
    server: Annotated[
        list[int] | None, typer.Option(help="Only the shard server of this rank; may be repeated.", show_default="all")
    ] = None,
    level: Annotated[str, typer.Option(help="The lowest level: debug, info, warning, error or critical.")] = "info",
    since: Annotated[
        str, typer.Option(help="Only what is not older than 30s, 5m, 2h.", show_default="all that is known")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
    *,
    settings: Settings,
) -> None:
    """Show what coordinator, shard servers and workers have logged, in one stream."""
    from axon_ps.cli.terminal.log_stream import show
    from axon_ps.cli.terminal.log_view import Wanted

    wanted = Wanted.of(level, since, rank or (), server or (), time.time())
    asyncio.run(show(settings, wanted, follow=follow, as_json=as_json))
