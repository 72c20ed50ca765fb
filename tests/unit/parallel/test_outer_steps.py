"""The schedule of outer steps; `test_diloco_steps.py` has what they do to the parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from axon_ps.parallel.diloco.fragment import OuterPush, OuterResult
from axon_ps.parallel.diloco.outer_steps import OuterSteps
from axon_ps.types import Decision, Outcome
from axon_ps.worker.steps.ticket import Ticket


class Part:
    """A fragment whose outer steps always commit; it notes what is done with it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.weight = 0.0
        self.begun: OuterPush | None = None
        self.synced = self.now = (0, 0)
        self.steps = SimpleNamespace(view=SimpleNamespace(latest_version=0), attempt=(1, 0), vote_requested=False)

    def push(self, out: Any) -> OuterPush:
        self.log.append(f"push {self.name}")
        version = self.steps.view.latest_version
        ticket = Ticket(generation=1, step=version, replica=0, num_replicas=1)
        self.begun = OuterPush(ticket=ticket, sent=[], weight=self.weight)
        return self.begun

    def end(self, push: OuterPush, hyper: Any) -> OuterResult:
        self.steps.view.latest_version += 1
        version = self.steps.view.latest_version
        decision = Decision(
            step=0, generation=1, outcome=Outcome.COMMIT, version=version, grad_norm=1.0, clip_factor=1.0, hyper=()
        )
        return OuterResult(decision=decision, at=(0, version), values=[])

    def take(self, push: OuterPush, ended: OuterResult, mixing: float | None) -> None:
        self.log.append(f"take {self.name}")
        self.synced = self.now = ended.at
        self.weight -= push.weight

    def to_anchor(self) -> None:
        self.log.append(f"anchor {self.name}")


def made(*, overlap_steps: int = 0) -> tuple[OuterSteps, list[Any], list[str]]:
    """The outer steps of two fragments, every second inner step."""
    log: list[str] = []
    parts: list[Any] = [Part("a", log), Part("b", log)]
    group: Any = None
    out: Any = None
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return OuterSteps("m", group, parts, 2, overlap_steps, None, out, inner, 0.5, {"momentum": 0.0}), parts, log


def test_fragments_come_in_turn_and_count_the_weight_of_their_training() -> None:
    steps, parts, log = made()
    results = [steps.advance(1.0) for _ in range(4)]
    assert [result is not None for result in results] == [False, True, False, True]
    assert log == ["push a", "take a", "push b", "take b"]
    assert [part.weight for part in parts] == [0.5, 0.0], "a quarter for each step since the last outer one"
    assert steps.version == 2
    assert steps.counters["inner_steps_committed"] == 2 * 0.5 + 2 * 1.0
    steps.close()


def test_an_outer_step_has_as_many_inner_steps_as_may_overlap() -> None:
    steps, _, log = made(overlap_steps=1)
    results = [steps.advance(1.0) for _ in range(3)]
    assert [result is not None for result in results] == [False, False, True]
    assert log == ["push a", "take a"]
    steps.close()


def test_a_quorum_that_waits_ends_the_inner_steps_of_this_round() -> None:
    steps, parts, log = made()
    parts[0].steps.vote_requested = True
    assert steps.vote_requested()
    result = steps.advance(1.0)
    assert result is not None
    assert (log, steps.left, steps.counters["outer_steps_due"]) == (["push a", "take a"], 2, 1.0)
    steps.close()


def test_the_learning_rate_is_that_of_the_coming_step() -> None:
    steps, _, _ = made()
    assert steps.hyper == {"lr": 0.5, "momentum": 0.0}
    steps.lr = 0.25
    assert steps.hyper["lr"] == 0.25
    steps.close()
