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


class Grads:
    """The gradients of a unit of parameters with one element each; None where there is none."""

    def __init__(self, *values: float | None) -> None:
        self.values = values

    def pack(self, out: torch.Tensor, scale: float) -> list[bool]:
        out.copy_(torch.tensor([scale * (value or 0.0) for value in self.values]))
        return [value is not None for value in self.values]

    def pop(self) -> None:
        self.values = (None,) * len(self.values)


def unit(index: int, *values: float | None) -> Any:
    params = [nn.Parameter(torch.zeros(1)) for _ in values]
    return SimpleNamespace(index=index, params=params, grads=Grads(*values), trainable=True, pushes=True)


def send(step: SentStep, flat: Any, at: Ticket, *, scale: float = 1.0, zeroed: Any = (), retains: bool = True) -> None:
    packed = torch.empty(len(flat.params))
    step.pack(flat, packed, scale, set(zeroed))
    step.push(flat, packed, at, lambda: None, retains=retains)
    packed.fill_(float("nan"))  # the buffer is another gradient's


def test_parameters_without_a_gradient_are_numbered_over_all_units() -> None:
    step, gradients = made()
    first, second = unit(0, 1.0, None), unit(1, None)
    send(step, first, ticket(1), scale=0.5)
    step.push_absent([first, second], ticket(1), set())
    assert gradients.pushed == [(0, [0.5, 0.0], ticket(1)), (1, None, ticket(1))]
    assert step.untouched == [1, 2]
    assert [p is first.params[0] for p in step.applied] == [True]


def test_a_zero_gradient_is_one() -> None:
    step, _ = made()
    flat = unit(1, None)
    assert step.lacks(flat, set(flat.params))
    assert not step.lacks(flat, set())
    send(step, flat, ticket(1), zeroed=flat.params)
    assert not step.lacks(flat, set(flat.params))
    assert step.untouched == []
    assert step.applied[0] is flat.params[0]


def test_a_weight_of_zero_gives_no_gradient_even_if_it_is_not_finite() -> None:
    step, gradients = made()
    send(step, unit(1, float("nan")), ticket(1), scale=0.0)
    assert gradients.pushed[0][1] == [0.0]
    assert step.untouched == [2]


def test_what_is_retained_is_sent_again_scaled_to_the_replicas_there_are() -> None:
    step, gradients = made()
    first, second = unit(0, 2.0, 4.0), unit(1, None)
    send(step, first, ticket(4))
    step.push_absent([first, second], ticket(4), set())
    gradients.pushed.clear()
    assert len(step.push_again(ticket(4), ticket(2))) == 2
    assert gradients.pushed == [(0, [4.0, 8.0], ticket(2)), (1, None, ticket(2))]
    step.push_again(ticket(2), ticket(2))
    assert gradients.pushed[2][1] == [4.0, 8.0]


def test_nothing_is_left_after_the_step() -> None:
    step, _ = made()
    send(step, unit(0, 1.0, None), ticket(1))
    step.end_backward()
    step.end()
    assert (step.pushes, step.untouched, step.applied) == ([], [], [])
    assert step.push_again(ticket(1), ticket(1)) == []
    assert not step.begins_addend(0)


# ---------------------------------------------------------------------- several backwards


def test_a_backward_after_another_one_makes_an_addend_whichever_units_it_uses() -> None:
    step, gradients = made()
    first, second = unit(0, 1.0, None), unit(1, 3.0)
    step.end_backward()
    assert not step.begins_addend(0), "it has sent nothing"
    send(step, first, ticket(1))
    assert (step.begins_addend(0), step.begins_addend(1)) == (True, False), "a unit has one gradient in an addend"
    step.end_backward()
    assert step.begins_addend(1)
    step.push_absent([first, second], ticket(1), set())
    step.begin_addend()
    assert not step.begins_addend(1)
    after = ticket(1).next_addend()
    send(step, second, after)
    step.push_absent([first, second], after, set())
    assert [(number, at.addend) for number, _, at in gradients.pushed] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert step.untouched == [1], "a parameter has a gradient if it has one in any of them"
    gradients.pushed.clear()
    step.push_again(ticket(1), ticket(1))
    assert gradients.pushed == [(0, [1.0, 0.0], ticket(1)), (1, [3.0], ticket(1))], "they are sent again as one"


def test_gradients_of_no_backward_are_of_the_last_addend() -> None:
    step, _ = made()
    send(step, unit(0, 1.0, None), ticket(1))
    step.end_backward()
    step.add_to_last()
    assert (step.begins_addend(0), step.begins_addend(1)) == (True, False)


def test_what_is_retained_of_several_is_added_up_in_f32() -> None:
    gradients = Gradients()
    taken: Any = gradients
    step = SentStep(taken, {1: 0}, DType.BF16, on_device=True)
    for _ in range(600):
        step.push(unit(1, 1.0), torch.ones(1, dtype=torch.bfloat16), ticket(1), lambda: None, retains=True)
    gradients.pushed.clear()
    step.push_again(ticket(1), ticket(1))
    assert gradients.pushed == [(1, [600.0], ticket(1))]
