"""A member or caller writes what a terminal obeys into every text of the protocol: nothing that is said of it obeys.

Every string field of every message that the coordinator takes is filled. They are found by walking the schema, so a new
field is tested, too. What is looked at is all that a person or another process gets: log records, the errors of calls,
the status, the feed, the job's log, and the events of other members.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from axon_ps.errors import AxonError
from axon_ps.rpc.channels import connect
from axon_ps.rpc.service import EOF, Stub
from axon_ps.wire import build
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, logs_pb2, membership_pb2, session_pb2, watch_pb2
from coordinator_harness import Coordinator
from rpc_fakes import run

HOSTILE = "a\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e"
BUILD = membership_pb2.Build(version=build.ours().version, protocol=build.PROTOCOL)
SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
UNARY = [m for m in SERVICE.methods if not m.client_streaming]
KINDS = [f for f in session_pb2.SessionRequest.DESCRIPTOR.fields if f.name != "join"]
MAX_DEPTH = 6


def filled(message: Any, depth: int = 0) -> Any:
    """The message with `HOSTILE` in every text of it, and of one of each kind of message that it may have."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            if field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING:
                if value.message_type is not None:
                    filled(getattr(message, field.name)[HOSTILE], depth + 1)
                else:
                    getattr(message, field.name)[HOSTILE] = HOSTILE if value.type == FieldDescriptor.TYPE_STRING else 1
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(HOSTILE)
            else:
                setattr(message, field.name, HOSTILE)
        elif field.message_type is not None and depth < MAX_DEPTH and field.containing_oneof is None:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, depth + 1)
    return message


def texts(value: Any) -> Iterator[str]:
    """Every text in a message, a dataclass or a collection."""
    if isinstance(value, Message):
        for _, found in value.ListFields():
            yield from texts(found)
    elif isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from texts(getattr(value, field.name))
    elif isinstance(value, BaseException):
        yield str(value)
        yield from getattr(value, "__notes__", ())
    elif hasattr(value, "items"):
        for key, inner in value.items():
            yield from texts(key)
            yield from texts(inner)
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        for inner in value:
            yield from texts(inner)


def obeyed(value: Any) -> list[str]:
    """The texts of it that a terminal obeys."""
    return [text for text in texts(value) if not text.replace("\n", "").replace("\t", "").isprintable()]


def test_nothing_that_is_said_moves_a_cursor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "axon_ps")

    async def main() -> None:
        coordinator = Coordinator(tmp_path, world_size=2, min_workers=1)
        await coordinator.start()
        channel = connect(coordinator.address, coordinator.security)
        stub = Stub(channel, SERVICE)
        said: list[Any] = []
        try:
            members, shard = await coordinator.assembled()
            me = members[1].membership.workers[1]
            truth = {"job": "job", "incarnation": me.incarnation}

            for method in UNARY:
                for context in ({}, truth):
                    request = filled(GetMessageClass(method.input_type)())
                    generation = members[0].membership.generation
                    request.context.MergeFrom(common_pb2.CallContext(generation=generation, **context))
                    said.append(await outcome(stub, method.name, request))
                    if method.name == "KV":
                        for op in range(1, 7):
                            request.op, request.timeout_s = op, 0.01
                            await outcome(stub, "KV", request)

            for kind in KINDS:
                said.extend(await session(stub, kind))
            await members[0].until(lambda: any(HOSTILE[0] in t for e in members[0].events for t in texts(e)))

            operator = coordinator.operator()
            said += [await operator.status(), members[0].events, shard.events]
            said += [await stub.call("Logs", logs_pb2.LogsRequest(context=common_pb2.CallContext()))]
            watch = stub.open("Watch")
            await watch.write(watch_pb2.WatchRequest())
            event = watch_pb2.WatchEvent.FromString(await watch.read())
            assert any("left: a\\x1b]0;owned\\x07" in text for text in texts(event)), "nothing shows the reason"
            said.append(event)
            watch.cancel()
        finally:
            await channel.close()
            await coordinator.close()
        assert obeyed(said) == []

    run(main())
    assert obeyed([record.getMessage() for record in caplog.records if record.name.startswith("axon_ps")]) == []


async def outcome(stub: Stub, method: str, request: Any) -> Any:
    """The reply or error that a caller gets."""
    try:
        return await stub.call(method, request, timeout_s=20)
    except AxonError as error:
        return error


async def session(stub: Stub, kind: Any) -> list[Any]:
    """Events of a member that joins as it should, then sends a message of this kind full of such texts, and ends."""
    join = session_pb2.Join(
        job="job", role=1, incarnation=f"{kind.number:032x}", node="b", requested_rank=-1, build=BUILD
    )
    message = session_pb2.SessionRequest()
    part = getattr(message, kind.name)
    part.SetInParent()
    filled(part)
    events: list[Any] = []
    call = stub.open("Session")
    with contextlib.suppress(AxonError):
        await call.write(session_pb2.SessionRequest(join=join))
        events.append(await call.read())
        await call.write(message)
        await call.done_writing()
    try:
        async with asyncio.timeout(60):
            while (event := await call.read()) is not EOF:
                events.append(event)
    except AxonError as error:
        events.append(error)
    return events
