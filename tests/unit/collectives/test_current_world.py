"""The world that functions without a group use: a process's, or a thread's own.

Tests of `collectives/current_world.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from axon_ps.collectives import current_world
from axon_ps.collectives.backends.base import Backend
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.errors import Misuse


class World:
    """A membership that does nothing."""

    default_group: Any = None

    def new_group(self, ranks: Sequence[int], *, backend: str = "auto") -> Any:
        raise NotImplementedError

    def close(self, *, finished: bool | None = None) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_world, "_of_process", None)
    monkeypatch.setattr(current_world, "_of_thread", threading.local())


def test_the_newest_world_of_the_process_counts_until_it_is_left() -> None:
    first, second = World(), World()
    assert current_world.current() is None
    for world in (first, second):
        current_world.enter(world)
        assert current_world.current() is world
    current_world.leave(first)
    assert current_world.current() is second
    current_world.leave(second)
    assert current_world.current() is None


def test_a_threads_own_world_is_its_alone_and_hides_that_of_the_process() -> None:
    own, shared = World(), World()
    current_world.enter(shared)
    current_world.enter_thread(own)
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.append(current_world.current()))
    other.start()
    other.join()
    assert seen == [shared]
    assert current_world.current() is own
    current_world.leave(own)
    assert current_world.current() is shared


def test_a_threads_world_ends_with_its_last_reference() -> None:
    own, shared = World(), World()
    current_world.enter(shared)
    current_world.enter_thread(own)
    del own
    gc.collect()
    assert current_world.current() is shared


def test_a_group_made_of_a_backend_has_the_world_that_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_world, "_mock_world", None)
    (backend,) = MockBackend.create_world(1)
    with pytest.raises(Misuse, match=f"group '{backend.context.name}' was made of a backend; load axon_ps.World"):
        current_world.mock_world(backend)
    made = World()
    asked: list[Backend] = []

    def find(of: Backend) -> World:
        asked.append(of)
        return made

    current_world.register_mock_worlds(find)
    assert current_world.mock_world(backend) is made
    assert asked == [backend]
