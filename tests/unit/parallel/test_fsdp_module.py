"""The methods of torch's `FSDPModule` on ours. Tests of `parallel/fsdp2/modules.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import fsdp as torchs

from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.parallel import FSDPModule, fully_shard, sharded_model
from axon_ps.testing import run_threads
from composed_model import INPUTS, ROWS, TARGETS, Model, State, difference, init, shard, train


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


@pytest.mark.parametrize("name", list(public(torchs.FSDPModule)))
def test_every_method_of_torch_is_here_with_its_arguments(name: str) -> None:
    theirs = inspect.signature(public(torchs.FSDPModule)[name]).parameters
    ours = inspect.signature(getattr(FSDPModule, name)).parameters
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_units_are_unsharded_and_resharded_by_hand() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        assert model.blocks[0].unshard() is None
        handle = model.blocks[1].unshard(async_op=True)
        handle.wait()
        assert torch.equal(model.blocks[0].up.weight, Model().blocks[0].up.weight)
        with pytest.raises(Misuse, match="on the shard servers"):
            model.blocks[2].up.weight.sum()
        model.blocks[0].reshard()
        with pytest.raises(Misuse, match="on the shard servers"):
            model.blocks[0].up.weight.sum()
        for unit in (model, *model.blocks):
            unit.unshard()
        assert difference(values(model), init()) == 0
        model.reset_iter_state()
        with pytest.raises(Misuse, match="on the shard servers"):
            model.blocks[1].up.weight.sum()

    run_threads(run, 1)


def test_a_unit_is_unsharded_and_not_resharded_in_a_forward_of_the_model() -> None:
    def run(world: World) -> None:
        model = Model()
        model.blocks[0].register_forward_hook(lambda *_: model.blocks[2].unshard(async_op=True).wait())
        hook = model.blocks[1].register_forward_hook(lambda *_: model.blocks[1].reshard())
        shard(model)
        with pytest.raises(Misuse, match="inside a forward"):
            model(torch.ones(1, 8))
        hook.remove()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), world.rank, world.world_size)

    run_threads(run, 1)


def test_modules_without_parameters_of_their_own_are_unsharded_too() -> None:
    def run(world: World) -> None:
        model = Model()
        model.act = torch.nn.ReLU()
        model.blocks[0].up.weight = model.blocks[1].up.weight
        fully_shard([model.act, model.blocks[0].up, model.blocks[0].down])
        shard(model)
        for module in (model.act, model.blocks[0], model.blocks[0].up):
            module.unshard()
        assert torch.equal(model.blocks[0].up.weight, Model().blocks[1].up.weight), "it is tied, and so the root's"
        for module in (model.act, model.blocks[0], model.blocks[0].up):
            module.reshard()

    run_threads(run, 1)


def test_a_forward_that_was_broken_off_is_forgotten() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        model.reset_iter_state()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        model.reset_iter_state()
        model.load_state_dict(init())
        assert difference(model.state_dict(), init()) == 0

    run_threads(run, 1)


def test_flags_may_be_set_before_there_are_values() -> None:
    def run(world: World) -> None:
        with torch.device("meta"):
            model = shard(Model())
        model.set_gradient_divide_factor(1.0)
        model.set_requires_gradient_sync(False)
        model.to_empty(device="cpu")
        model.load_state_dict(init())
        assert not sharded_model(model).runtime.accumulation.syncing
        assert difference(model.state_dict(), init()) == 0

    run_threads(run, 1)


NO_EFFECT = {
    "set_is_last_backward": (False,),
    "set_requires_all_reduce": (True,),
    "set_gradient_divide_factor": (2.0,),
    "set_reduce_scatter_divide_factor": (2.0,),
    "set_reshard_after_forward": (False,),
    "set_reshard_after_backward": (False,),
    "set_post_optim_event": (None,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_unshard_in_backward": (False,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (3,),
    "set_separate_reduce_scatter_group": (True,),
}


def test_methods_that_choose_when_bytes_move_change_no_value() -> None:
    def run(world: World, calls: bool) -> dict[str, torch.Tensor]:
        model = shard(Model())
        if calls:
            for name, given in NO_EFFECT.items():
                getattr(model, name)(*given)
            model.set_modules_to_forward_prefetch(list(model.blocks))
            model.blocks[0].set_modules_to_backward_prefetch([model.blocks[1]])
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1), world.rank, world.world_size)

    called, plain = (run_threads(run, 2, args=(calls,))[0] for calls in (True, False))
    assert difference(called, plain) == 0


REFUSED = {
    "set_custom_all_gather": ((None,), "give a compressor"),
    "set_custom_reduce_scatter": ((None,), "give a compressor"),
    "set_all_reduce_hook": ((print,), r"param\.register_hook"),
    "set_symm_mem_for_comm": ((), "leave it out"),
    "set_gradient_divide_factor": ((1.0,), r"multiply the loss by 2 / 1\.0"),
    "set_modules_to_forward_prefetch": (([torch.nn.ReLU()],), "was given a ReLU"),
}


def test_methods_that_change_what_is_communicated_are_refused() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        for name, (given, says) in REFUSED.items():
            with pytest.raises(InvalidRequest, match=says):
                getattr(model, name)(*given)

    run_threads(run, 2)


def test_every_method_is_in_one_of_the_tables() -> None:
    shown = {*NO_EFFECT, *REFUSED, "unshard", "reshard", "reset_iter_state", "set_requires_gradient_sync"}
    assert public(torchs.FSDPModule).keys() - shown == {"set_modules_to_backward_prefetch"}


def test_values_are_loaded_before_and_after_the_first_use() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        ones, twos = ({k: torch.full_like(v, n) for k, v in init().items()} for n in (1.0, 2.0))
        model.load_state_dict(ones)
        assert difference(model.state_dict(), ones) == 0
        model(torch.ones(1, 8))
        assert difference(model.state_dict(), ones) == 0
        assert sharded_model(model).version == 0
        model.load_state_dict(twos)
        assert difference(model.state_dict(), twos) == 0
        with pytest.raises(Misuse, match="module inside the wrapped model"):
            model.blocks[0].load_state_dict(Model().blocks[0].state_dict())

    run_threads(run, 2)


def test_a_model_is_moved_and_cast_until_its_first_use() -> None:
    def run(world: World) -> None:
        model = shard(Model()).double().float()
        model(torch.ones(1, 8))
        model.to("cpu")
        with pytest.raises(Misuse, match="cannot go from"):
            model.double()

    run_threads(run, 1)


def test_gradients_are_dropped_before_they_are_applied() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        model.zero_grad()
        assert difference(model.state_dict(), init()) == 0
        (model(torch.ones(1, 8)).sum() * 0).backward()
        optimizer.step()
        assert optimizer.last.committed  # type: ignore[attr-defined]
        assert difference(model.state_dict(), init()) == 0, "the first gradients were dropped"

    run_threads(run, 1)


# ---------------------------------------------------------------------- several backwards in a step

Sync = Callable[[Any, int], object]
"""Chooses the units whose gradients are sent, before a backward of this number in the step."""


def backwards(model: Any, optimizer: torch.optim.Optimizer, world: World | None, count: int, sync: Sync) -> State:
    """Train with `count` backwards in each step, with clipping in the second half."""
    rank, workers = (0, 1) if world is None else (world.rank, world.world_size)
    rows = slice(rank * ROWS // workers, (rank + 1) * ROWS // workers)
    for step in range(4):
        for backward in range(count):
            sync(model, backward)
            loss = torch.nn.functional.mse_loss(model(INPUTS[step + backward, rows]), TARGETS[step, rows])
            loss.backward()
        if step > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def some_units(model: Any, backward: int) -> None:
    for number, block in enumerate(model.blocks):
        block.set_requires_gradient_sync(backward == 2 or backward == number)


SYNCS: dict[str, Sync] = {
    "all": lambda model, backward: None,
    "all but the first": lambda model, backward: model.set_requires_gradient_sync(backward > 0),
    "all but the root's": lambda model, backward: model.set_requires_gradient_sync(backward == 2, recurse=False),
    "other units each time": some_units,
}


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("name", SYNCS)
def test_several_backwards_before_a_step_are_as_in_torch(name: str, reshard: bool | int) -> None:
    def run(world: World) -> State:
        model = shard(Model(), reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return backwards(model, optimizer, world, 3, SYNCS[name])

    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected = backwards(plain, optimizer, None, 3, lambda model, backward: None)
    for values in run_threads(run, 2, shards=2):
        assert difference(values, expected) < 1e-6


def test_a_step_whose_gradients_torch_would_leave_is_refused() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.blocks[1].set_requires_gradient_sync(False)
        model(INPUTS[0]).sum().backward()
        with pytest.raises(Misuse, match=r"set_requires_gradient_sync\(False\)"):
            optimizer.step()
        model.blocks[1].set_requires_gradient_sync(True)
        optimizer.step()
        assert sharded_model(model).version == 1

    run_threads(run, 1)


def test_workers_whose_numbers_of_backwards_differ_are_named() -> None:
    def run(world: World) -> str:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(1 + world.rank):
            model(INPUTS[0]).sum().backward()
        with pytest.raises(StepAborted) as raised:
            optimizer.step()
        return str(raised.value)

    for said in run_threads(run, 2):
        assert "different numbers of backwards in the step: worker 0: 1; worker 1: 2" in said
