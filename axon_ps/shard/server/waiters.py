"""Who waits for what on a shard server: streams that came before their turn. One event loop, no locks."""

from __future__ import annotations

import asyncio


class Waiters:
    """Futures by what they wait for: a unit, and in it optionally one replica's turn at one chunk.

    Waking is a hint, never a promise: whoever wakes looks again.
    """

    def __init__(self) -> None:
        self._units: dict[int, dict[tuple[int, int], list[asyncio.Future[None]]]] = {}

    async def wait(self, unit: int = -1, offset: int = -1, replica: int = -1) -> None:
        """Wait until something about `unit` changes, or the turn of `replica` at chunk `offset` may have come.

        Without arguments: until `wake_all`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._units.setdefault(unit, {}).setdefault((offset, replica), [])
        waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._forget(unit, (offset, replica), future)

    def wake_turn(self, unit: int, offset: int, replica: int) -> None:
        """The turn of `replica` at chunk `offset` of `unit` has come."""
        if unit in self._units:
            _wake(self._units[unit].pop((offset, replica), ()))
            if not self._units[unit]:
                del self._units[unit]

    def wake_unit(self, unit: int) -> None:
        """Something about `unit` changed."""
        for waiting in self._units.pop(unit, {}).values():
            _wake(waiting)

    def wake_all(self) -> None:
        """Anything may have changed."""
        units, self._units = self._units, {}
        for unit in units.values():
            for waiting in unit.values():
                _wake(waiting)

    def _forget(self, unit: int, turn: tuple[int, int], future: asyncio.Future[None]) -> None:
        turns = self._units.get(unit, {})
        if future in turns.get(turn, ()):
            turns[turn].remove(future)
            if not turns[turn]:
                del turns[turn]
            if not turns:
                del self._units[unit]


def _wake(waiting: list[asyncio.Future[None]] | tuple[()]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
