"""Which backend a group gets: by where its members are, by name, and by a name of one's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from axon_ps.collectives import selection
from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.selection import BackendMaker, register_backend, select, select_for_device
from axon_ps.collectives.store import MemoryStore
from axon_ps.errors import ConfigurationError
from axon_ps.types import Member, Role


def members(*nodes: str) -> tuple[Member, ...]:
    return tuple(Member(role=Role.WORKER, rank=i, incarnation=f"{i}", node=node) for i, node in enumerate(nodes))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(("a",), "shm"), (("a", "a"), "shm"), (("a", "b", "c"), "grpc"), (("a", "a", "b"), "hierarchical")],
)
def test_the_backend_fits_where_the_members_are(nodes: tuple[str, ...], expected: str) -> None:
    assert select(members(*nodes)) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(("a",), "nccl"), (("a", "a"), "nccl"), (("a", "b"), "hierarchical"), (("a", "a", "b"), "hierarchical")],
)
def test_device_memory_goes_over_nccl_inside_a_node_only(nodes: tuple[str, ...], expected: str) -> None:
    assert select_for_device(members(*nodes)) == expected


def test_a_hierarchy_of_device_memory_has_names_of_its_own_beside_the_hosts() -> None:
    made: list[GroupContext] = []

    def note(context: GroupContext) -> Backend:
        made.append(context)
        return MockBackend(context)

    apart = GroupContext(name="g", rank=0, ranks=(0, 1), members=members("a", "b"), store=MemoryStore(), timeout_s=1.0)
    for name in ("hierarchical", "device"):
        assert BackendMaker(note)(apart, name).name == "hierarchical"
    assert [c.name for c in made] == ["g/flat", "g/device/flat"]


def no_servers(context: GroupContext) -> Backend:
    raise AssertionError("nobody asked for gRPC")


def context() -> GroupContext:
    return GroupContext(name="g", rank=0, ranks=(0,), members=members("a"), store=MemoryStore(), timeout_s=1.0)


def test_a_backend_of_ones_own_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {}
    monkeypatch.setattr(selection, "_registered", own)
    made = MockBackend.create_world(1)[0]
    register_backend("mine", lambda context: made)
    assert BackendMaker(no_servers)(context(), "mine") is made
    for taken in ("mine", *selection.NAMES, "auto", "device"):
        with pytest.raises(ConfigurationError, match="choose another name"):
            register_backend(taken, no_servers)
    assert list(own) == ["mine"]


def test_a_name_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError) as info:
        BackendMaker(no_servers)(context(), "rdma")
    assert all(name in str(info.value) for name in itertools.chain(selection.NAMES, ["'rdma'", "auto"]))
