"""A verified caller survives its way over a shared stream. Tests of `rpc/multiplex/callers.py`."""

from __future__ import annotations

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.rpc.auth.credentials import EVERYBODY, Credentials
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.multiplex.callers import caller_from_proto, caller_to_proto
from axon_ps.wire.v1 import multiplex_pb2

WORKER = Credentials(frozenset({Principal.WORKER}), 0, ("token", "process"), False, 1e9, "worker 0")


@pytest.mark.parametrize("caller", [EVERYBODY, WORKER, Credentials(frozenset(), 7)])
def test_a_caller_comes_back_equal(caller: Credentials) -> None:
    message = multiplex_pb2.FrameCaller.FromString(caller_to_proto(caller).SerializeToString())
    assert caller_from_proto(message) == caller


def test_roles_are_sent_in_one_order_so_that_equal_callers_are_equal_bytes() -> None:
    assert list(caller_to_proto(EVERYBODY).roles) == sorted(role.value for role in Principal)


def test_an_unknown_role_is_refused() -> None:
    message = caller_to_proto(WORKER)
    message.roles.append("emperor")
    with pytest.raises(InvalidRequest, match=r"a call names a role that there is not: .*emperor"):
        caller_from_proto(message)
