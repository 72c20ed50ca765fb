"""The command `top`: a job, live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from axon_ps.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from axon_ps.cli.settings import Settings


@o.of_a_job
def top(*, settings: Settings) -> None:
    """Show a job live: its members and what they are busy with, steps, loss, events. Keys: q, p, s."""
    from rich.console import Console

    console = Console()
    live = console.is_terminal and sys.stdin.isatty()
    asyncio.run(_Top(settings, console).run() if live else _snapshot(settings, console))


async def _snapshot(settings: Settings, console: Console) -> None:
    """Print the present state once: standard output or input is not a terminal."""
    from axon_ps.cli.terminal.feed import followed
    from axon_ps.cli.terminal.top_view import rendered
    from axon_ps.cli.terminal.watched_job import WatchedJob

    state = WatchedJob()
    async with contextlib.aclosing(followed(settings, state)) as changes:
        async for _ in changes:
            break
    lines = len(state.members()) + 30  # all members, and the newest events
    console.print(rendered(state, settings.coordinator, console.width, lines, keys=False))


class _Top:
    """The live picture, and the settings that keys change."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from axon_ps.cli.terminal.watched_job import WatchedJob

        self._settings, self._console = settings, console
        self._state, self._note = WatchedJob(), ""
        self._sort, self._paused = 0, False
        self._quit = asyncio.Event()

    async def run(self) -> None:
        """Draw until the job has finished, or q is pressed."""
        from rich.live import Live

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
        from axon_ps.cli.terminal.feed import followed

        async with contextlib.aclosing(followed(self._settings, self._state)) as changes:
            async for note in changes:
                if self._quit.is_set():
                    return
                self._note = note
                if not self._paused:
                    self._draw(live)

    def _picture(self, *, keys: bool = True) -> object:
        from axon_ps.cli.terminal.top_view import rendered
        from axon_ps.cli.terminal.watched_job import SORTS

        width, height = self._console.size
        note = "paused; p goes on" if self._paused else self._note
        address = self._settings.coordinator
        return rendered(self._state, address, width, height, sort=SORTS[self._sort], note=note, keys=keys)

    def _draw(self, live: Live) -> None:
        live.update(self._picture(), refresh=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _keys(self, live: Live) -> Iterator[None]:
        """Handle keys one by one, without an echo, until the context ends."""
        import termios
        import tty

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
        from axon_ps.cli.terminal.watched_job import SORTS

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
