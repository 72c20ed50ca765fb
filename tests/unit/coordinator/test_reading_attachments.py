"""Attachments are unpacked and hashed by the thread that wants them, and not by the loop that sends heartbeats."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from axon_ps.coordinator.attachments import Attachment
from axon_ps.coordinator.client.attachments import Attachments
from axon_ps.rpc.background_loop import BackgroundLoop

CONTENT = bytes(range(256)) * 100


class Coordinator:
    """A store that has one attachment."""

    def __init__(self, *, torn: int = 0) -> None:
        self.values = Attachment.made("k", CONTENT).values("k")
        self.torn = torn
        self.asked: set[int] = set()

    async def kv_get(self, key: str, timeout_s: float | None = None) -> bytes | None:
        self.asked.add(threading.get_ident())
        value = dict(self.values).get(key)
        if self.torn and len(value or b"") > 200:  # it is being replaced
            self.torn -= 1
            return b"x"
        return value


@pytest.mark.parametrize("torn", [0, 1])
def test_what_is_attached_is_unpacked_by_its_reader(torn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []
    content = Attachment.content

    def recorded(self: Attachment) -> bytes:
        unpacked.append(threading.get_ident())
        return content(self)

    monkeypatch.setattr(Attachment, "content", recorded)
    with BackgroundLoop(settle_s=0.0) as loop:
        coordinator: Any = Coordinator(torn=torn)
        attachments = Attachments(loop, coordinator, 60.0)
        assert attachments.read("k") == CONTENT
        assert attachments.read("another") is None
    assert unpacked == [threading.get_ident()] * (torn + 1)
    assert threading.get_ident() not in coordinator.asked
