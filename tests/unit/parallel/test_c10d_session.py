"""The world under torch.distributed's default group, and the entries by which torch comes to it.

Tests of `parallel/c10d/session.py` and `parallel/c10d/register.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from axon_ps import World
from axon_ps.errors import Closed, ConfigurationError, Misuse
from axon_ps.parallel.c10d import register
from axon_ps.parallel.c10d import session as sessions
from axon_ps.parallel.c10d.objects import ALLOW_PICKLE
from axon_ps.parallel.c10d.session import TorchSession, incarnations_of
from axon_ps.testing import run_threads

LONG_S = 20.0


# ------------------------------------------------------------------ sessions


def test_a_world_of_the_users_is_used_and_not_closed(world: World) -> None:
    first = TorchSession.begin(HashStore(), 0, 1, LONG_S, {})
    assert first.world is world
    assert first.group is world.default_group
    for _ in range(2):
        first.close()
    second = TorchSession.begin(HashStore(), 0, 1, LONG_S, {})
    assert second.prefix != first.prefix
    second.close()
    world.kv_put("still", b"here")


def test_a_world_that_is_owned_ends_with_the_session(world: World) -> None:
    session = TorchSession(world, 0, owned=False)
    session.own()
    session.close()
    with pytest.raises(Closed):
        world.kv_put("still", b"here")


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 1)])
def test_another_place_than_in_the_users_world_is_refused(world: World, rank: int, world_size: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"called for rank {rank} of {world_size}, and this process is rank 0 of 1"
    ):
        TorchSession.begin(HashStore(), rank, world_size, LONG_S, {})
    world.kv_put("still", b"here")


def test_names_are_the_same_on_every_rank_and_of_these_workers_alone() -> None:
    def names(world: World) -> tuple[str, str]:
        return incarnations_of(world), TorchSession(world, 3, owned=False).prefix

    first, again = run_threads(names, 2), run_threads(names, 2)
    assert len(set(first)) == len(set(again)) == 1
    assert first[0][0] in first[0][1]
    assert first[0] != again[0]


def test_a_worker_leaves_after_the_others_have_ended_their_session_too() -> None:
    events: list[str] = []

    def end(world: World) -> None:
        session = TorchSession(world, 0, owned=True)
        world.barrier()
        if world.rank == 1:
            world.kv_wait(f"{session.prefix}/done/0", LONG_S)
            events.append("the other ends")
        session.close()
        if world.rank == 0:
            events.append("the first has ended")

    run_threads(end, 2)
    assert events == ["the other ends", "the first has ended"]


def test_a_worker_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LINGER_S", 1e6)
    left = threading.Event()

    def end(world: World) -> None:
        session = TorchSession(world, 0, owned=True)
        world.barrier()
        if world.rank == 1:
            world.close()
            left.set()
            return
        assert left.wait(LONG_S)
        session.close()

    run_threads(end, 2)


@pytest.mark.parametrize(
    ("succeeded", "owned", "closes"),
    [(True, True, [None]), (False, True, [False]), (True, False, []), (False, False, [])],
)
def test_a_process_that_ends_by_an_error_leaves_as_unfinished(
    world: World, monkeypatch: pytest.MonkeyPatch, *, succeeded: bool, owned: bool, closes: list[bool | None]
) -> None:
    session, found = TorchSession(world, 0, owned=owned), []
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "process_succeeded", lambda: succeeded)
        patched.setattr(world, "close", lambda *, finished=None: found.append(finished))
        session._at_exit()
    assert found[: len(closes)] == closes
    assert bool(found) == bool(closes)


# ------------------------------------------------------------------ entries


@dataclass
class Options:
    """c10d's options of a group that is made: the default one of a process alone, unless a test says otherwise."""

    store: Any = field(default_factory=HashStore)
    group_rank: int = 0
    group_size: int = 1
    global_ranks_in_group: tuple[int, ...] = ()
    group_id: str = "g"
    timeout: timedelta = timedelta(seconds=LONG_S)
    enable_reconfigure: bool = False


@pytest.fixture
def pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions for objects stay as they are."""
    monkeypatch.setenv(ALLOW_PICKLE, "1")


@pytest.mark.usefixtures("pickles")
def test_there_is_one_default_group_at_a_time_and_sub_groups_end_before_it(world: World) -> None:
    group = register.create(Options(), None)
    with pytest.raises(Misuse, match="there is a process group over axon already"):
        register.create(Options(), None)
    sub_group = register.create(Options(global_ranks_in_group=(0,), group_id="sub"), None)
    for made in (group, sub_group):
        tensor = torch.ones(2)
        made.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0, 1.0]
    sub_group.shutdown()
    with pytest.raises(Closed):
        sub_group.allreduce([torch.ones(2)]).wait()
    group.allreduce([torch.ones(2)]).wait()
    group.shutdown()
    again = register.create(Options(), None)
    again.shutdown()
    world.kv_put("still", b"here")


@pytest.mark.usefixtures("pickles", "world")
def test_what_torch_may_ask_for_and_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="a group over axon cannot be reconfigured"):
        register.create(Options(enable_reconfigure=True), None)
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    with pytest.warns(UserWarning, match="TORCH_DIST_NAN_CHECK has no effect on a group over axon"):
        group = register.create(Options(), None)
    group.shutdown()


def test_a_rendezvous_gives_the_worlds_rank_and_size_and_a_store_of_its_own(world: World) -> None:
    found = register.rendezvous("axon://?rank=0&world_size=1")
    store, rank, world_size = next(found)
    assert (rank, world_size) == (world.rank, world.world_size)
    store.set("key", "value")
    other, _, _ = next(register.rendezvous("axon://"))
    assert store.get("key") == b"value"
    assert not other.check(["key"])
    with pytest.raises(Misuse, match="a second rendezvous"):
        next(found)


@pytest.mark.parametrize(("query", "words"), [("rank=1", "rank=1; .* it is 0"), ("world_size=3", "world_size=3; .* 1")])
@pytest.mark.usefixtures("world")
def test_a_rendezvous_for_another_place_is_refused(query: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        next(register.rendezvous(f"axon://?{query}"))


def test_without_a_job_a_rendezvous_is_torchs_own_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXON_PS_COORDINATOR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        next(register.rendezvous("axon://"))
