"""Which RPC may be called with which token: the table is complete, and servers keep to it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import axon_ps.wire.v1
from axon_ps.errors import ConfigurationError
from axon_ps.rpc.access import MAY_CALL, may_call, needs_nothing, refusal
from axon_ps.rpc.auth.identity import EVERY_ROLE, Principal
from axon_ps.rpc.security import Security
from rpc_fakes import run, serving

BOTH = Security(token="all-of-it", observer_token="read-only")
OBSERVER = Security(token="read-only")


def every_rpc() -> dict[str, Any]:
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(axon_ps.wire.v1.__path__, "axon_ps.wire.v1.")
    ]
    services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
    services += reflection_pb2.DESCRIPTOR.services_by_name.values()
    services += health_pb2.DESCRIPTOR.services_by_name.values()
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


RPCS = every_rpc()
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


def may(role: Principal) -> set[str]:
    return {rpc for rpc in RPCS if may_call(frozenset({role}), rpc) and not needs_nothing(rpc)}


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert {row for row in MAY_CALL if " " not in row} == set(RPCS)


def test_what_is_not_in_the_table_is_nobodys() -> None:
    assert not may_call(EVERY_ROLE, "/axon_ps.wire.v1.Shard/New")
    assert refusal(EVERY_ROLE, "/axon_ps.wire.v1.Shard/New").endswith("Shard.New is nobody's")


def test_health_alone_needs_nothing() -> None:
    assert {rpc for rpc in RPCS if needs_nothing(rpc)} == {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }


def test_an_observer_only_reads_and_whoever_has_another_role_reads_too() -> None:
    assert may(Principal.OBSERVER) == READ_ONLY
    assert all(may(role) >= READ_ONLY for role in Principal)


def test_operators_and_observers_are_no_members_and_workers_no_operators() -> None:
    members = {"/axon_ps.wire.v1.Coordinator/Session", "/axon_ps.wire.v1.Shard/Handshake"}
    for role in (Principal.OPERATOR, Principal.OBSERVER, Principal.COORDINATOR):
        assert not may(role) & members
    assert not may(Principal.WORKER) & {f"/axon_ps.wire.v1.Coordinator/{rpc}" for rpc in ("Drain", "Revoke")}
    assert may(Principal.COORDINATOR) == READ_ONLY  # it calls nobody
    assert may(Principal.SHARD) & {f"/axon_ps.wire.v1.Shard/{rpc}" for rpc in ("Replicate", "Copy")}
    assert not may(Principal.WORKER) & {f"/axon_ps.wire.v1.Shard/{rpc}" for rpc in ("Replicate", "Copy")}


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
