"""What a worker has sent for a step: which parameters have gradients, and what is sent again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from axon_ps.parallel.fsdp.on_servers.sent_step import SentStep
from axon_ps.types import DType
from axon_ps.worker.steps.ticket import Ticket


class Gradients:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, Any, Ticket]] = []

    def push(self, unit: int, grad: Any, ticket: Ticket, done: Any = None) -> Any:
        self.pushed.append((unit, None if grad is None else grad.tolist(), ticket))
        return len(self.pushed)


def ticket(replicas: int) -> Ticket:
    return Ticket(generation=1, step=0, replica=0, num_replicas=replicas)


def made() -> tuple[SentStep, Gradients]:
    gradients = Gradients()
    taken: Any = gradients
    return SentStep(taken, {0: 0, 1: 2}, DType.F32, on_device=False), gradients


def test_parameters_without_a_gradient_are_numbered_over_all_units() -> None:
    step, _ = made()
    first, second = [nn.Parameter(torch.zeros(1)) for _ in range(2)], [nn.Parameter(torch.zeros(1))]
    flats: list[Any] = [SimpleNamespace(index=0, params=first), SimpleNamespace(index=1, params=second)]
    step.note(flats[0], [True, False], ())
    step.note(flats[1], [False], ())
    assert step.untouched == [1, 2]
    assert [p is first[0] for p in step.applied] == [True]


def test_a_zero_gradient_is_one() -> None:
    step, _ = made()
    param = nn.Parameter(torch.zeros(1))
    flat: Any = SimpleNamespace(index=1, params=[param])
    step.note(flat, [False], {param})
    assert step.untouched == []
    assert step.applied[0] is param


def test_what_is_retained_is_sent_again_scaled_to_the_replicas_there_are() -> None:
    step, gradients = made()
    packed = torch.tensor([2.0, 4.0])
    step.retain(0, packed)
    step.retain(1, None)
    packed.fill_(float("nan"))  # the buffer is another gradient's
    assert len(step.push_again(ticket(4), ticket(2))) == 2
    assert gradients.pushed == [(0, [4.0, 8.0], ticket(2)), (1, None, ticket(2))]
    step.push_again(ticket(2), ticket(2))
    assert gradients.pushed[2][1] == [4.0, 8.0]


def test_nothing_is_left_after_the_step() -> None:
    step, gradients = made()
    step.push_nothing(1, ticket(1))
    assert gradients.pushed == [(1, None, ticket(1))]
    step.retain(0, torch.ones(1))
    step.end()
    assert (step.pushes, step.untouched, step.applied) == ([], [], [])
    assert step.push_again(ticket(1), ticket(1)) == []
