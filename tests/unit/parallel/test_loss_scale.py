"""The scale of a backward, and of the gradients that wait for a step.

Tests of `parallel/fsdp/tensors/loss_scale.py`.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.tensors import loss_scale
from axon_ps.parallel.fsdp.tensors.loss_scale import LossScale, scale_of_backward, scaled


@pytest.fixture(autouse=True)
def no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the scales of backwards that other tests have broken off."""
    monkeypatch.setattr(loss_scale, "_scales", {})


def weight(seen: list[float]) -> Tensor:
    """A leaf whose gradient notes the scale of the backward that it comes of."""
    made = torch.ones(2, requires_grad=True)
    made.register_hook(lambda _: seen.append(scale_of_backward()))
    return made


def test_a_backward_has_the_scale_of_its_loss_alone() -> None:
    seen: list[float] = []
    one, other = weight(seen), weight(seen)
    scaled((one * 3).sum() * 8.0, 8.0).backward()
    (other * 3).sum().backward()
    scaled((one + other).sum() * 2.0, 2.0).backward()
    assert seen == [8.0, 1.0, 2.0, 2.0]
    assert scale_of_backward() == 1.0
    assert not loss_scale._scales


def test_a_loss_without_a_graph_is_left_as_it_is() -> None:
    loss = torch.ones(())
    assert scaled(loss, 4.0) is loss
    assert not loss_scale._scales


def test_losses_of_one_backward_need_one_scale() -> None:
    seen: list[float] = []
    leaf = weight(seen)
    torch.autograd.backward([scaled(leaf.sum() * 4.0, 4.0), scaled((leaf * 2).sum() * 4.0, 4.0)])
    assert seen == [4.0]
    with pytest.raises(Misuse, match="one backward of losses that were scaled by (4 and 2|2 and 4)"):
        torch.autograd.backward([scaled(leaf.sum() * 4.0, 4.0), scaled((leaf * 2).sum() * 2.0, 2.0)])
    loss_scale._scales.clear()


def test_backwards_of_threads_are_apart() -> None:
    seen: dict[float, list[float]] = {scale: [] for scale in (2.0, 3.0)}
    both = threading.Barrier(2, timeout=20.0)

    def train(scale: float) -> None:
        made = torch.ones(2, requires_grad=True)

        def note(_: Tensor) -> None:
            both.wait()
            seen[scale].append(scale_of_backward())

        made.register_hook(note)
        scaled(made.sum() * scale, scale).backward()

    threads = [threading.Thread(target=train, args=(scale,)) for scale in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {2.0: [2.0], 3.0: [3.0]}


def test_a_reentrant_checkpoint_has_the_scale_of_the_backward_around_it() -> None:
    seen: list[float] = []
    leaf, x = weight(seen), torch.ones(2, requires_grad=True)
    for scale in (4.0, 1.0):
        loss = checkpoint(lambda x: (x * leaf).sum(), x, use_reentrant=True)
        (scaled(loss * scale, scale) if scale != 1.0 else loss).backward()
    assert seen == [4.0, 1.0]


def test_backwards_that_were_broken_off_do_not_pile_up() -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    for _ in range(loss_scale._MOST + 3):
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            scaled(leaf.sum() * 2.0, 2.0).backward()
    assert len(loss_scale._scales) <= loss_scale._MOST
    loss_scale._scales.clear()


def begun(of: LossScale, scale: float, *, adds: bool) -> None:
    """Begin a backward of `of`, inside one that torch makes."""
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: of.begin(adds=adds))
    scaled(leaf.sum() * scale, scale).backward()


def test_gradients_of_another_scale_are_not_added() -> None:
    scale = LossScale()
    begun(scale, 4.0, adds=False)
    begun(scale, 4.0, adds=True)
    with pytest.raises(Misuse, match="a loss scaled by 2 would be added to those of a loss scaled by 4"):
        begun(scale, 2.0, adds=True)
    loss_scale._scales.clear()
    scale.divided()
    begun(scale, 2.0, adds=True)  # those that are there are divided by theirs
    assert scale.value == 2.0
    begun(scale, 8.0, adds=False)
    assert scale.value == 8.0


def test_scaled_gradients_are_applied_by_the_scalers_step_and_others_never_by_it() -> None:
    scale = LossScale()
    scale.check()
    with scale.stepping(4.0), pytest.raises(Misuse, match="scaled by 1, and the step is for one that was scaled by 4"):
        scale.check()
    begun(scale, 4.0, adds=False)
    with scale.stepping(4.0):
        scale.check()
    with pytest.raises(Misuse, match="scaled by 4, and the step is for one that was scaled by 1"):
        scale.check()
