"""The command `top`: a job, live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

from axon_ps.cli import options as o
from axon_ps.errors import AxonError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from axon_ps.cli.settings import Settings
    from axon_ps.cli.terminal.top_state import TopState


@o.of_a_job
def top(*, settings: Settings) -> None:
    """Show a job live: its members and what they are busy with, steps, loss, events. Keys: q, p, s."""
    from rich.console import Console

    console = Console()
    live = console.is_terminal and sys.stdin.isatty()
    asyncio.run(_Top(settings, console).run() if live else _snapshot(settings, console))


async def _followed(settings: Settings, state: TopState) -> AsyncGenerator[str, None]:
    """Bring `state` up to date; yields after each change why nothing newer comes, or "".

    Raises:
        AxonError: the coordinator has never answered, refuses, or was silent for too long.
    """
    from axon_ps.cli.operate import client
    from axon_ps.cli.terminal.feed import PATIENCE_S

    newest_s = time.monotonic()
    async with client(settings) as operator, contextlib.aclosing(operator.watch()) as feed:
        async for event in feed:
            if isinstance(event, AxonError):
                silent_s = time.monotonic() - newest_s
                if state.status is None or silent_s >= PATIENCE_S:
                    raise event
                yield f"no answer for {silent_s:.0f} s, trying again: {event}"
                continue
            newest_s = time.monotonic()
            state.apply(event)
            yield ""
            if state.finished:
                return


async def _snapshot(settings: Settings, console: Console) -> None:
    """What there is now, once: standard output or input is no terminal."""
    from axon_ps.cli.terminal.top_state import TopState
    from axon_ps.cli.terminal.top_view import rendered

    state = TopState()
    async with contextlib.aclosing(_followed(settings, state)) as changes:
        async for _ in changes:
            break
    lines = len(state.members()) + 30  # all members, and the newest events
    console.print(rendered(state, settings.coordinator, console.width, lines, keys=False))


class _Top:
    """The live picture, and what keys have asked for."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from axon_ps.cli.terminal.top_state import TopState

        self._settings, self._console = settings, console
        self._state, self._note = TopState(), ""
        self._sort, self._paused = 0, False
        self._quit = asyncio.Event()

    async def run(self) -> None:
        """Draw until the job has finished, or q."""
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
        async with contextlib.aclosing(_followed(self._settings, self._state)) as changes:
            async for note in changes:
                if self._quit.is_set():
                    return
                self._note = note
                if not self._paused:
                    self._draw(live)

    def _picture(self, *, keys: bool = True) -> object:
        from axon_ps.cli.terminal.top_state import SORTS
        from axon_ps.cli.terminal.top_view import rendered

        width, height = self._console.size
        note = "paused; p goes on" if self._paused else self._note
        address = self._settings.coordinator
        return rendered(self._state, address, width, height, sort=SORTS[self._sort], note=note, keys=keys)

    def _draw(self, live: Live) -> None:
        live.update(self._picture(), refresh=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _keys(self, live: Live) -> Iterator[None]:
        """Have keys do what they say, one by one and unseen, until the context ends."""
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
        from axon_ps.cli.terminal.top_state import SORTS

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
