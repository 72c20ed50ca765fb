"""Who has changed a job, or tried to, is in the audit log, one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from axon_ps.coordinator.server.audit import audited, record
from axon_ps.errors import PermissionDenied
from axon_ps.wire.v1 import common_pb2, coordinator_pb2


class Context:
    def peer(self) -> str:
        return "ipv4:10.0.0.7:40212"


class Servicer:
    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        return "gpt", f"worker 3, {incarnation}"

    @audited
    async def restore_checkpoint(self, request: Any, context: Any) -> Any:
        if request.uri == "/etc":
            raise PermissionDenied("not there")
        return coordinator_pb2.CheckpointReply(uri=request.uri)

    @audited
    async def register(self, request: Any, context: Any) -> Any:
        return coordinator_pb2.RegisterReply(first=request.name == "new")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "axon_ps.audit"]


def test_calls_are_recorded_with_who_what_and_result(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        context = common_pb2.CallContext(incarnation="abc")
        servicer = Servicer()
        for uri in ("/run", "/etc"):
            try:
                await servicer.restore_checkpoint(
                    coordinator_pb2.RestoreCheckpointRequest(context=context, uri=uri), Context()
                )
            except PermissionDenied:
                assert uri == "/etc"
        for name in ("new", "known"):
            await servicer.register(coordinator_pb2.RegisterRequest(context=context, name=name), Context())

    with caplog.at_level(logging.INFO, logger="axon_ps.audit"):
        asyncio.run(main())
    done, refused, registered = lines(caplog)
    assert done == {
        "job": "gpt",
        "what": "restore_checkpoint",
        "who": "worker 3, abc",
        "peer": "ipv4:10.0.0.7:40212",
        "credentials": "a caller of this process, or without credentials",
        "about": {"uri": "/run", "models": "[]"},
        "result": "done",
    }
    assert refused["result"] == "PermissionDenied: not there"
    assert (registered["what"], registered["about"]["name"]) == ("register", "new"), "what changed nothing is not in it"


def test_what_happened_is_one_line_however_long_and_whatever_it_contains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="axon_ps.audit"):
        record("gpt", "left", text="worker 1 left: \n" + "x" * 1000)
    (line,) = caplog.records
    assert "\n" not in line.getMessage()
    assert len(lines(caplog)[0]["text"]) == 500
