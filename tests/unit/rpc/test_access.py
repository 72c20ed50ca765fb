"""Which RPC may be called with which token: the table is complete, and servers keep to it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import axon_ps.wire.v1
from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.access import MAY_CALL, Principal, may_call, needs_no_token
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import coordinator_pb2, logs_pb2, shard_pb2, status_pb2, trace_pb2
from rpc_fakes import COORDINATOR, SHARD, run, serving

BOTH = Security(token="all-of-it", observer_token="read-only")
OBSERVER = Security(token="read-only")
READ_ONLY = {
    "/axon_ps.wire.v1.Coordinator/Describe",
    "/axon_ps.wire.v1.Coordinator/Status",
    "/axon_ps.wire.v1.Coordinator/Trace",
    "/axon_ps.wire.v1.Coordinator/Watch",
    "/axon_ps.wire.v1.Coordinator/Logs",
    "/axon_ps.wire.v1.Shard/Subscribe",
    "/axon_ps.wire.v1.Shard/Stats",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}


def every_rpc() -> dict[str, Any]:
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(axon_ps.wire.v1.__path__, "axon_ps.wire.v1.")
    ]
    services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
    services += reflection_pb2.DESCRIPTOR.services_by_name.values()
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert set(MAY_CALL) == set(every_rpc())


def test_an_observer_may_call_what_only_reads_and_the_job_everything() -> None:
    assert {rpc for rpc in MAY_CALL if may_call(Principal.OBSERVER, rpc)} == READ_ONLY
    assert all(may_call(Principal.JOB, rpc) for rpc in (*MAY_CALL, "/axon_ps.wire.v1.Shard/New"))
    assert not may_call(Principal.OBSERVER, "/axon_ps.wire.v1.Shard/New")


def test_health_alone_needs_no_token() -> None:
    assert needs_no_token("/grpc.health.v1.Health/Check")
    assert not any(needs_no_token(rpc) for rpc in MAY_CALL)


def test_a_server_refuses_an_observer_whatever_changes_something() -> None:
    async def refusal(stub: Stub, method: Any) -> str:
        try:
            if method.client_streaming:
                await stub.open(method.name, timeout_s=5).read()
            else:
                await stub.call(method.name, GetMessageClass(method.input_type)(), timeout_s=5)
        except PermissionDenied as error:
            return str(error)
        return ""

    async def main() -> None:
        async def reply(_: Any, __: Any) -> Any:
            return shard_pb2.StatsReply(values={"a": 1})

        async def status(_: Any, __: Any) -> Any:
            return status_pb2.StatusReply()

        async def trace(_: Any, __: Any) -> Any:
            return trace_pb2.TraceReply()

        async def describe(_: Any, __: Any) -> Any:
            return coordinator_pb2.DescribeReply()

        async def send(context: Any) -> None:
            await context.write(b"")

        async def logs(_: Any, __: Any) -> Any:
            return logs_pb2.LogsReply()

        of_shards = {"stats": reply, "subscribe": send}
        of_coordinator = {"status": status, "describe": describe, "trace": trace, "watch": send, "logs": logs}
        for descriptor, readers in ((SHARD, of_shards), (COORDINATOR, of_coordinator)):
            async with serving(descriptor, security=BOTH, client=OBSERVER, **readers) as s:
                for method in descriptor.methods:
                    path = f"/{descriptor.full_name}/{method.name}"
                    text = await refusal(s.stub, method)
                    assert bool(text) == (path not in READ_ONLY), path
                    assert not text or text.endswith(f"{descriptor.name}.{method.name} needs the job's token")
                with pytest.raises(PermissionDenied, match=r"may call Coordinator\.Describe, .*Shard\.Subscribe"):
                    await s.stub.open(descriptor.methods[0].name, timeout_s=5).read()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await s.channel.stream_stream(f"/{descriptor.full_name}/Unknown")(iter([])).read()
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(main())


def test_an_observer_may_reflect() -> None:
    async def main() -> None:
        async with serving(security=BOTH) as s:
            call = reflection_pb2_grpc.ServerReflectionStub(s.channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=OBSERVER.metadata()
            )
            assert "axon_ps.wire.v1.Shard" in str(await call.read())

    run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer_token": "a"}, "everybody may do everything"),
        ({"observer_token": "a", "token": "a"}, "equals the job's"),
    ],
)
def test_an_observers_token_that_restricts_nobody_is_refused(options: dict[str, str], message: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match=message):
            async with serving(security=Security(**options)):
                pass

    run(main())
