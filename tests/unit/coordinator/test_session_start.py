"""Why joining failed: what the coordinator said, not that a time is over that is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.coordinator.client.session_stream import SessionStream
from axon_ps.errors import Broken, InvalidRequest, Timeout
from axon_ps.observe.logging import ROOT
from axon_ps.rpc.security import Security
from axon_ps.types import Role


def client() -> CoordinatorClient:
    return CoordinatorClient(
        "127.0.0.1:1", job="job", role=Role.WORKER, node="a", security=Security(), on_event=lambda event: None
    )


def fails_with(monkeypatch: pytest.MonkeyPatch, error: Exception, timeout_s: float = 60.0) -> Exception:
    async def session(self: SessionStream) -> None:
        raise error

    async def start() -> Exception:
        with pytest.raises(type(error)) as raised:
            await client().start(timeout_s)
        return raised.value

    monkeypatch.setattr(SessionStream, "_session", session)
    return asyncio.run(start())


@pytest.mark.parametrize("error", [Timeout("set aside: the others waited for it"), InvalidRequest("rank 1 is taken")])
def test_what_refused_us_is_raised_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    raised = fails_with(monkeypatch, error)
    assert str(raised) == str(error)
    assert not getattr(raised, "__notes__", [])


def test_the_last_reason_is_raised_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = fails_with(monkeypatch, Broken("nobody there"), timeout_s=0.2)
    assert (str(raised), raised.__notes__) == ("nobody there", ["tried for 0.2 s"])


@pytest.mark.parametrize("broken_off", ["in the channel", "in close"])
def test_no_log_handler_is_left(monkeypatch: pytest.MonkeyPatch, broken_off: str) -> None:
    before = list(logging.getLogger(ROOT).handlers)

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    def refuse(self: Any) -> None:
        raise InvalidRequest("no such certificate")

    async def main() -> None:
        c = client()
        if broken_off == "in the channel":
            monkeypatch.setattr(SessionStream, "_connect", refuse)
            with pytest.raises(InvalidRequest):
                await c.start(1.0)
            return
        monkeypatch.setattr(SessionStream, "_session", never)
        starting = asyncio.create_task(c.start(60.0))
        await asyncio.sleep(0)
        while c._task is None:
            await asyncio.sleep(0)

        async def stuck(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(SessionStream, "leave", stuck)
        closing = asyncio.create_task(c.close())
        await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        assert logging.getLogger(ROOT).handlers == before
        monkeypatch.undo()
        starting.cancel()
        await asyncio.wait([starting])

    asyncio.run(main())
    assert logging.getLogger(ROOT).handlers == before
