"""The commands that change a job: `drain`, `release`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from axon_ps.cli import options as o

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings


@o.of_a_job
def drain(
    server: Annotated[int, typer.Argument(help="Rank of the shard server, as status shows it.", min=0)],
    timeout_s: Annotated[float, typer.Option(help="Seconds that it may take.")] = 3600.0,
    no_progress: o.NoProgress = False,
    *,
    settings: Settings,
) -> None:
    """Move everything that a shard server holds to others while training goes on; then it leaves the job and ends."""
    from axon_ps.cli.operations import drained
    from axon_ps.cli.terminal.progress import Progress
    from axon_ps.observe.work import LongWork

    work = LongWork("drain")
    with Progress(f"draining shard server {server}", work, None if no_progress else sys.stderr):
        asyncio.run(drained(settings, server, timeout_s, work))
    print(f"shard server {server} has left the job")


@o.of_a_job
def release(
    model: Annotated[str, typer.Argument(help="Its name, as status shows it.")],
    *,
    settings: Settings,
) -> None:
    """Release a model of a running job, whose parameters are lost; it may be too large for the shard servers."""
    from axon_ps.cli.operations import released

    asyncio.run(released(settings, model))
    print(f"model {model!r} was released")
