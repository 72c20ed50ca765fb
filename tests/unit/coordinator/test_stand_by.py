"""A standby tries to lead until it does, whatever the store says. Tests of `coordinator/server/standby.py`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.coordinator.server import standby
from axon_ps.errors import Broken, StorageFull


@pytest.mark.parametrize("error", [Broken("no etcd answers"), StorageFull("etcd has no space")])
def test_a_store_that_fails_for_a_while_ends_no_standby(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_S", 0.0)
    answers: list[Any] = [error, "host:7077", ""]

    def campaign() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    store: Any = SimpleNamespace(campaign=campaign)
    switch: Any = SimpleNamespace(why="")

    async def main() -> bool:
        return await standby.stand_by(store, switch, asyncio.Event())

    assert asyncio.run(main())
    assert switch.why == "this coordinator stands by: the coordinator at host:7077 leads"
    assert not answers
