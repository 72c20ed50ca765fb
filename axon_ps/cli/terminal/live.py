"""A job in the terminal: its status once, or again and again; or live, as `axon-ps top` shows it.

It needs gRPC and rich, so commands import it before their event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from axon_ps.cli.operations import client
from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal import status_view, top_view
from axon_ps.cli.terminal.feed import followed
from axon_ps.cli.terminal.watched_job import SORTS, WatchedJob
from axon_ps.wire.events import Status


async def show_status(settings: Settings, timeout_s: float, *, as_json: bool) -> None:
    """Show the status once."""
    async with client(settings) as operator:
        reply = await operator.status(timeout_s=timeout_s)
    if as_json:
        print(json.dumps(_as_dict(reply), indent=2))
    else:
        console = Console()
        console.print(status_view.rendered(reply, settings.coordinator, width=console.width))


async def watch_status(settings: Settings, every_s: float, timeout_s: float) -> None:
    """Show the status again and again; if there is no terminal, one below the other."""
    console, job, drawn_s, before = Console(), WatchedJob(), -math.inf, ""
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        async with contextlib.aclosing(followed(settings, job, first_s=timeout_s)) as changes:
            async for note in changes:
                if time.monotonic() - drawn_s < every_s and bool(note) == bool(before) and not job.finished:
                    continue
                drawn_s, before = time.monotonic(), note
                picture = status_view.rendered(job.as_status(), settings.coordinator, note, width=console.width)
                if console.is_terminal:
                    live.update(picture, refresh=True)
                else:
                    console.print(picture)


async def show_top(settings: Settings, console: Console) -> None:
    """Print the present state once, if standard output or input is not a terminal."""
    state = WatchedJob()
    async with contextlib.aclosing(followed(settings, state)) as changes:
        async for _ in changes:
            break
    lines = len(state.members()) + 30  # all members, and the newest events
    console.print(top_view.rendered(state, settings.coordinator, console.width, lines, keys=False))


class LiveTop:
    """The live picture of a job, and the settings that keys change. It is made on the event loop, or before that runs.

    Args:
        settings: those that name the job.
        console: the terminal.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._state, self._note = WatchedJob(), ""
        self._sort, self._paused = 0, False
        self._quit = asyncio.Event()

    async def run(self) -> None:
        """Draw until the job has finished, or q is pressed."""
        with Live(console=self._console, auto_refresh=False, screen=True) as live:
            self._draw(live)
            with self._keys(live):
                follow = asyncio.ensure_future(self._follow(live))
                leave = asyncio.ensure_future(self._quit.wait())
                try:
                    await asyncio.wait((follow, leave), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._quit.set()
                    for task in (follow, leave):
                        task.cancel()
                    await asyncio.wait((follow, leave))
        if not follow.cancelled():
            follow.result()
        if self._state.finished:
            self._console.print(self._picture(keys=False))

    async def _follow(self, live: Live) -> None:
        async with contextlib.aclosing(followed(self._settings, self._state)) as changes:
            async for note in changes:
                if self._quit.is_set():
                    return
                self._note = note
                if not self._paused:
                    self._draw(live)

    def _picture(self, *, keys: bool = True) -> object:
        width, height = self._console.size
        note = "paused; p goes on" if self._paused else self._note
        address = self._settings.coordinator
        return top_view.rendered(self._state, address, width, height, sort=SORTS[self._sort], note=note, keys=keys)

    def _draw(self, live: Live) -> None:
        live.update(self._picture(), refresh=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _keys(self, live: Live) -> Iterator[None]:
        """Handle keys one by one, without an echo, until the context ends."""
        fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
        before = termios.tcgetattr(fd)
        tty.setcbreak(fd)
        loop.add_reader(fd, lambda: self._pressed(os.read(fd, 64), live))
        try:
            yield
        finally:
            loop.remove_reader(fd)
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _pressed(self, keys: bytes, live: Live) -> None:
        if not keys:
            self._quit.set()  # the terminal has gone
        for key in keys.decode(errors="ignore"):
            if key == "q":
                self._quit.set()
            elif key == "p":
                self._paused = not self._paused
            elif key == "s":
                self._sort = (self._sort + 1) % len(SORTS)
        self._draw(live)


def _as_dict(reply: Status) -> dict[str, Any]:
    values = dataclasses.asdict(reply) | {"finished": reply.membership.is_over}
    membership = values["membership"]
    for member in (*membership["workers"], *membership["shards"], *membership["finished"]):
        member["role"] = member["role"].value
    values["awaited"] = sorted(reply.awaited)
    return values
