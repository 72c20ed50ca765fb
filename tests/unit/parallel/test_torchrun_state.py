"""The state of torch's rendezvous goes through JSON, and comes back as it was; what is no state is refused."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime

import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as Node
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState as State

from axon_ps.parallel.torchrun.state import from_json, to_json

A, B = Node("a", 1, 0), Node("b", 2, 1)


def state() -> State:
    state = State()
    state.round, state.complete, state.deadline = 3, True, datetime(2026, 1, 2, tzinfo=UTC)
    state.participants, state.last_heartbeats = {A: 0, B: 1}, {A: datetime(2026, 1, 1, 1, 2, 3, 4, UTC)}
    state.wait_list = {B}
    return state


@pytest.mark.parametrize("given", [State(), state()])
def test_a_state_comes_back_as_it_was(given: State) -> None:
    text = to_json(pickle.dumps(given))
    assert vars(pickle.loads(from_json(text))) == vars(given)
    assert to_json(from_json(text)) == text  # as a token it is compared


class Attack:
    """What somebody may pickle."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


DEEP = b'{"round":' + b'{"set":' * 10**5
WELL = json.loads(to_json(pickle.dumps(State())))


@pytest.mark.parametrize(
    "stored",
    [
        pickle.dumps(Attack()),
        b"",
        b"[]",
        b"{}",
        DEEP,
        json.dumps(WELL | {"participants": 5}).encode(),
        json.dumps(WELL | {"participants": {"map": [[{"time": "x"}, 0]]}}).encode(),
        json.dumps(WELL | {"last_heartbeats": {"map": [[{"node": ["a"]}, 0]]}}).encode(),
        json.dumps(WELL | {"wait_list": {"eval": "1"}}).encode(),
        json.dumps(WELL | {"deadline": 1}).encode(),
    ],
)
def test_what_is_no_state_is_refused(stored: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        from_json(stored)


def test_a_state_of_types_that_we_do_not_know_is_refused() -> None:
    unknown = State()
    unknown.round = 1.5
    with pytest.raises(RendezvousStateError, match="float in its state"):
        to_json(pickle.dumps(unknown))
