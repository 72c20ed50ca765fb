"""`optimizer.state` of moments that are elsewhere: empty, and writes are refused.

Tests of `parallel/server_state.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_ps.errors import Misuse
from axon_ps.parallel.server_state import ServerState

KEY = torch.zeros(1)


def test_it_is_empty_and_asking_for_an_entry_that_may_be_missing_is_allowed() -> None:
    state = ServerState(lambda: None)
    assert len(state) == 0
    assert KEY not in state
    assert state.get(KEY) is None
    assert list(state.items()) == []


@pytest.mark.parametrize(
    "act",
    [
        lambda state: state[KEY],
        lambda state: state.__setitem__(KEY, {}),
        lambda state: state.__delitem__(KEY),
        lambda state: state.update({KEY: {}}),
        lambda state: state.setdefault(KEY, {}),
        lambda state: state.pop(KEY, None),
        lambda state: state.popitem(),
        lambda state: state.__ior__({KEY: {}}),
    ],
)
def test_the_entry_of_a_parameter_is_refused_and_none_is_made(act: Callable[[Any], object]) -> None:
    state = ServerState(lambda: None)
    with pytest.raises(Misuse, match="has no entry of a parameter: its moments are on the shard servers"):
        act(state)
    assert len(state) == 0


def test_clearing_it_begins_all_moments_anew_while_there_is_an_optimizer() -> None:
    begun: list[int] = []
    ServerState(lambda: lambda: begun.append(1)).clear()
    assert begun == [1]
    ServerState(lambda: None).clear()


def test_it_holds_entries_during_a_block_only() -> None:
    state = ServerState(lambda: None)
    with pytest.raises(ZeroDivisionError), state.holding({KEY: {"step": 3}}):
        assert state[KEY] == {"step": 3}
        raise ZeroDivisionError
    assert len(state) == 0


def test_a_copy_of_it_is_a_plain_dict() -> None:
    copied = pickle.loads(pickle.dumps(ServerState(lambda: lambda: None)))
    assert not isinstance(copied, ServerState)
    copied["x"]["y"] = 1
    assert copied == {"x": {"y": 1}}
