"""The `param_groups` at `step()` are applied, and an optimizer begins and ends as torch's, which is the oracle.

Tests of `parallel/optim.py`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps.parallel as ours
from axon_ps import World
from axon_ps.errors import AxonError, InvalidRequest, Misuse, StepAborted
from axon_ps.parallel import FSDP, ShardingStrategy
from axon_ps.testing import run_threads
from mock_ranks import close, generator

FULL, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
BOTH = pytest.mark.parametrize("strategy", [FULL, NONE], ids=["full", "none"])
ON_SERVERS = pytest.mark.parametrize(
    "strategy", [FULL, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD], ids=["full", "grad_op", "hybrid"]
)
INPUTS = torch.randn(12, 8, 8, generator=generator(2))
TARGETS = torch.randn(12, 8, 1, generator=generator(3))
Make = Callable[[Any, Any], Iterator[Any]]


def module() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    values = generator(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=values) * 0.3)
    return made


def backward(made: nn.Module, step: int) -> None:
    nn.functional.mse_loss(made(INPUTS[step]), TARGETS[step]).backward()


def steps(made: nn.Module, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        backward(made, step)
        result = optimizer.step()
        assert result is None or result.committed
        made.zero_grad()


def same(made: nn.Module, expected: nn.Module, bound: float = 2e-5) -> None:
    state = made.state_dict()
    for name, value in expected.state_dict().items():
        close(state[name], value, bound)


def both(make: Make, strategy: ShardingStrategy, *, steps_each: int = 2) -> None:
    """Train with each optimizer that `make(module, package)` gives, in torch and here."""
    expected = module()
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy, unit_types={nn.Linear})
        at = 0
        for optimizer, plain in zip(make(made, ours), make(expected, torch.optim), strict=True):
            steps(expected, plain, at, steps_each)
            steps(made, optimizer, at, steps_each)
            at += steps_each
        same(made, expected)


# ---------------------------------------------------------------------- groups and flags


def by_decay(made: Any, **more: Any) -> list[dict[str, Any]]:
    heavy = [p for p in made.parameters() if p.ndim > 1]
    light = [p for p in made.parameters() if p.ndim <= 1]
    return [{"params": heavy, "weight_decay": 0.1, **more}, {"params": light, "weight_decay": 0.0, **more}]


GROUPS: dict[str, Callable[[Any], Any]] = {
    "decay": by_decay,
    "a name": lambda m: by_decay(m, name="block"),
    "a scale": lambda m: by_decay(m, lr_scale=0.5, anything=object()),
    "named_parameters": lambda m: m.named_parameters(),
    "a rate of 0": lambda m: [{"params": m[0].parameters(), "lr": 0.0}, {"params": [*m[1:].parameters()]}],
    "some in no group": lambda m: m[0].parameters(),
}


@BOTH
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_groups_are_those_of_torch(groups: Callable[[Any], Any], strategy: ShardingStrategy) -> None:
    def make(made: Any, package: Any) -> Iterator[Any]:
        yield package.AdamW(groups(made if package is torch.optim or hasattr(made, "0") else Indexed(made)), lr=0.01)

    both(make, strategy)


class Indexed:
    """A wrapped model whose children are had by number, as those of the module."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getitem__(self, at: Any) -> nn.Module:
        return self._made.module[at]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": False, "capturable": False}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"maximize": True}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
    ("AdamW", {"betas": [0.8, 0.9]}),
    ("Adam", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True, "foreach": True}),
    ("SGD", {"lr": torch.tensor(0.02), "momentum": 0.9, "dampening": 0.5}),
    ("Adagrad", {"lr_decay": 0.1, "maximize": True, "fused": None}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "maximize": True, "foreach": True}),
]


@BOTH
@pytest.mark.parametrize(("name", "flags"), FLAGS, ids=[f"{n} {','.join(f)}" for n, f in FLAGS])
def test_flags_are_those_of_torch(name: str, flags: dict[str, Any], strategy: ShardingStrategy) -> None:
    def make(made: Any, package: Any) -> Iterator[Any]:
        yield getattr(package, name)(made.parameters(), **copy.deepcopy({"lr": 0.01, **flags}))

    both(make, strategy, steps_each=3)


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("AdamW", {"differentiable": True}, "differentiable"),
        ("Adam", {"learning_rate": 0.1}, "learning_rate"),
        ("AdamW", {"lr": "fast"}, "lr is 'fast'"),
        ("SGD", {"nesterov": True}, "nesterov"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(name: str, flags: dict[str, Any], says: str) -> None:
    with World.mock():
        made = FSDP(module())
        with pytest.raises(InvalidRequest, match=says):
            getattr(ours, name)(made.parameters(), **flags)


# ---------------------------------------------------------------------- the life of an optimizer


def again(m: Any, k: Any) -> Iterator[Any]:
    yield k.AdamW(m.parameters(), lr=0.01)
    yield k.AdamW(m.parameters(), lr=0.01)


def again_with_another_rate(m: Any, k: Any) -> Iterator[Any]:
    yield k.AdamW(m.parameters(), lr=0.01)
    yield k.AdamW(m.parameters(), lr=0.02)
    yield k.AdamW(m.parameters(), lr=0.03)


def another_type(m: Any, k: Any) -> Iterator[Any]:
    yield k.AdamW(m.parameters(), lr=0.01)
    yield k.SGD(m.parameters(), lr=0.01, momentum=0.9)
    yield k.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True)
    yield k.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.5)


def other_groups(m: Any, k: Any) -> Iterator[Any]:
    params = list(m.parameters())
    yield k.AdamW(m.parameters(), lr=0.01)
    yield k.AdamW([{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=0.01)


def round_trip(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.01)
    yield optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    yield optimizer


def loaded_into_a_new_one(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.01)
    yield optimizer
    new = k.AdamW(m.parameters(), lr=0.02)
    new.load_state_dict(optimizer.state_dict())
    yield new


def added(m: Any, k: Any) -> Iterator[Any]:
    params = list(m.parameters())
    optimizer = k.AdamW(params[:2], lr=0.01)
    yield optimizer
    optimizer.add_param_group({"params": params[2:], "lr": 0.05})
    yield optimizer
    yield optimizer


def hooked(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: o.param_groups[0].update(lr=0.05))
    yield optimizer


def momentum_later(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.SGD(m.parameters(), lr=0.05)
    yield optimizer
    optimizer.param_groups[0]["momentum"] = 0.9
    yield optimizer
    optimizer.param_groups[0]["momentum"] = 0.0
    yield optimizer
    optimizer.param_groups[0]["momentum"] = 0.5
    yield optimizer


def two_groups(m: Any, k: Any) -> Any:
    params = list(m.parameters())
    return k.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:4], "lr": 0.01}], lr=0.1, momentum=0.9)


def exchanged(m: Any, k: Any) -> Iterator[Any]:
    optimizer = two_groups(m, k)
    yield optimizer
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]
    yield optimizer


def replaced(m: Any, k: Any) -> Iterator[Any]:
    optimizer = two_groups(m, k)
    yield optimizer
    optimizer.param_groups[1]["params"] = list(m.parameters())[4:]
    yield optimizer
    optimizer.param_groups[1]["params"][:] = list(m.parameters())[2:4]  # with the momentum that they had
    yield optimizer


def cleared(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.05)
    optimizer.state.clear()
    yield optimizer
    optimizer.state.clear()
    yield optimizer
    optimizer.state = defaultdict(dict)
    yield optimizer
    optimizer.__setstate__({"state": defaultdict(dict)})
    yield optimizer
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.state = optimizer.state
    yield optimizer


def cleared_and_regrouped(m: Any, k: Any) -> Iterator[Any]:
    optimizer = two_groups(m, k)
    yield optimizer
    optimizer.state.clear()
    optimizer.add_param_group({"params": list(m.parameters())[4:], "lr": 0.05})
    yield optimizer


def cleared_by_a_hook(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.05)
    yield optimizer
    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: o.state.clear())  # after the backward
    yield optimizer
    handle.remove()
    yield optimizer


def cleared_and_loaded(m: Any, k: Any) -> Iterator[Any]:
    optimizer = k.AdamW(m.parameters(), lr=0.05)
    yield optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.load_state_dict(saved)
    yield optimizer


LIVES = [
    exchanged,
    replaced,
    cleared,
    cleared_and_regrouped,
    cleared_by_a_hook,
    cleared_and_loaded,
    again,
    again_with_another_rate,
    another_type,
    other_groups,
    round_trip,
    loaded_into_a_new_one,
    added,
    hooked,
    momentum_later,
]


@BOTH
@pytest.mark.parametrize("life", LIVES)
def test_an_optimizer_lives_as_in_torch(life: Make, strategy: ShardingStrategy) -> None:
    both(life, strategy)


@ON_SERVERS
def test_gradients_that_torch_would_have_added_up_are_refused(strategy: ShardingStrategy) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy, unit_types={nn.Linear})
        optimizer = ours.AdamW(made[0].parameters(), lr=0.01)
        backward(made, 0)
        optimizer.step()
        optimizer.zero_grad()  # in torch, not of parameters that it has not
        with pytest.raises(Misuse, match=r"'2\.weight' was in no group.*model\.zero_grad\(\)"):
            optimizer.add_param_group({"params": made[2].parameters()})
        assert len(optimizer.param_groups) == 1
        made.zero_grad()
        optimizer.add_param_group({"params": made[2].parameters()})
        backward(made, 1)
        assert optimizer.step().committed


@ON_SERVERS
@pytest.mark.parametrize("life", [another_type, momentum_later, added, exchanged, cleared])
def test_two_workers_change_optimizers_together(life: Make, strategy: ShardingStrategy) -> None:
    def train(world: World) -> dict[str, Any]:
        made = FSDP(module(), sharding_strategy=strategy, unit_types={nn.Linear})
        at = 0
        for optimizer in life(made, ours):
            steps(made, optimizer, at, 2)
            at += 2
        return made.state_dict()

    expected = module()
    for at, optimizer in enumerate(life(expected, torch.optim)):
        steps(expected, optimizer, 2 * at, 2)
    for state in run_threads(train, 2, shards=2):
        for name, value in expected.state_dict().items():
            close(state[name], value, 2e-5)


@BOTH
def test_two_optimizers_of_one_model_are_refused_by_name(strategy: ShardingStrategy) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        params = list(made.parameters())
        first = ours.AdamW(params[:2], lr=0.01)
        second = ours.SGD(params[2:], lr=0.1)
        backward(made, 0)
        with pytest.raises(Misuse, match=r"another optimizer of model .* was made after this AdamW"):
            first.step()
        assert second.step().committed


@BOTH
def test_moments_of_one_parameter_are_not_changed_without_a_word(strategy: ShardingStrategy) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(made.parameters(), lr=0.01)
        steps(made, mine, 0, 1)
        first, state = next(made.parameters()), mine.state
        changes: list[Callable[[], Any]] = [
            lambda: state[first]["exp_avg"].zero_(),
            lambda: state.__setitem__(first, {}),
            lambda: state.__delitem__(first),
            lambda: state.pop(first, None),
            lambda: state.setdefault(first, {}),
            lambda: state.update({first: {}}),
        ]
        for change in changes:
            with pytest.raises(Misuse, match=r"optimizer\.state has no entry.*save_checkpoint"):
                change()
        assert not state
        assert first not in state


@BOTH
def test_an_optimizer_that_was_replaced_is_cleared_without_effect(strategy: ShardingStrategy) -> None:
    expected = module()
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        for model, package in ((made, ours), (expected, torch.optim)):
            old = package.SGD(model.parameters(), lr=0.01, momentum=0.9)  # type: ignore[attr-defined]
            steps(model, old, 0, 2)
            new = package.AdamW(model.parameters(), lr=0.01)  # type: ignore[attr-defined]
            steps(model, new, 2, 2)
            old.state.clear()
            steps(model, new, 4, 2)
        same(made, expected)


@BOTH
def test_a_parameter_is_in_one_group_once(strategy: ShardingStrategy) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        mine = two_groups(made, ours)
        backward(made, 0)
        mine.param_groups[1]["params"] = mine.param_groups[0]["params"]
        with pytest.raises(InvalidRequest, match=r"'0\.weight' is in the optimizer's groups twice"):
            mine.step()


@BOTH
def test_gradients_are_dropped_of_the_groups_that_there_are(strategy: ShardingStrategy) -> None:
    expected = module()
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        for model, package in ((made, ours), (expected, torch.optim)):
            params = list(model.parameters())
            optimizer = package.SGD(params[:2], lr=0.1)  # type: ignore[attr-defined]
            backward(model, 0)
            optimizer.step()
            optimizer.param_groups[0]["params"] = params[4:]
            optimizer.zero_grad()
            for p in params[:4]:
                p.grad = None
            backward(model, 1)
            optimizer.step()
        same(made, expected)


@pytest.mark.parametrize(("of", "into"), [(FULL, FULL), (FULL, NONE), (NONE, FULL), (NONE, NONE)])
def test_moments_of_another_model_are_not_its_own(of: ShardingStrategy, into: ShardingStrategy) -> None:
    theirs = [module(), module()]
    with World.mock():
        models = [
            FSDP(module(), sharding_strategy=strategy, name=name)
            for strategy, name in zip((of, into), ("first", "second"), strict=True)
        ]
        pairs = [
            [package.AdamW(m.parameters(), lr=0.05) for m in made]  # type: ignore[attr-defined]
            for made, package in ((models, ours), (theirs, torch.optim))
        ]
        for (made, plain), (mine, torchs) in zip(
            zip(models, theirs, strict=True), zip(*pairs, strict=True), strict=True
        ):
            steps(made, mine, 0 if made is models[0] else 2, 2)
            steps(plain, torchs, 0 if made is models[0] else 2, 2)
        saved = pairs[0][0].state_dict()
        if (of, into) != (NONE, NONE):
            says = "of model 'first'" if of is FULL else "has the moments of 6 parameters"
            with pytest.raises(InvalidRequest, match=says):
                pairs[0][1].load_state_dict(saved)
        else:
            pairs[0][1].load_state_dict(saved)
            pairs[1][1].load_state_dict(pairs[1][0].state_dict())
        steps(models[1], pairs[0][1], 4, 2)
        steps(theirs[1], pairs[1][1], 4, 2)
        same(models[1], theirs[1])


@ON_SERVERS
def test_a_step_that_load_state_dict_has_overtaken_says_so(strategy: ShardingStrategy) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy, unit_types={nn.Linear})
        mine = ours.AdamW(made.parameters(), lr=0.01)
        backward(made, 0)
        made.load_state_dict(module().state_dict())
        result = mine.step()
        assert not result.committed
        assert "replaced by a worker, by load_state_dict() or the like: a step whose backward" in result.reason
        mine.zero_grad()
        steps(made, mine, 1, 1)


def test_moments_of_torch_are_not_dropped_without_a_word() -> None:
    plain = module()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps(plain, optimizer, 0, 1)
    with World.mock():
        made = FSDP(module())
        mine = ours.AdamW(made.parameters(), lr=0.01)
        with pytest.raises(InvalidRequest, match="load_checkpoint"):
            mine.load_state_dict(optimizer.state_dict())


def test_moments_of_torch_go_on_under_no_shard() -> None:
    plain = module()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps(plain, optimizer, 0, 3)
    with World.mock():
        made = FSDP(copy.deepcopy(plain), sharding_strategy=NONE)
        mine = ours.AdamW(made.parameters(), lr=0.05)
        mine.load_state_dict(optimizer.state_dict())
        for at in (3, 4):
            steps(plain, optimizer, at, 1)
            steps(made, mine, at, 1)
        same(made, plain)
        other = torch.optim.AdamW(plain.parameters(), lr=0.5)
        other.load_state_dict(copy.deepcopy(mine.state_dict()))
        steps(plain, other, 5, 1)
        steps(made, mine, 5, 1)
        same(made, plain)


def test_a_state_dict_of_another_version_warns_that_moments_stay() -> None:
    with World.mock():
        made = FSDP(module())
        mine = ours.AdamW(made.parameters(), lr=0.01)
        saved = copy.deepcopy(mine.state_dict())
        steps(made, mine, 0, 2)
        with pytest.warns(UserWarning, match=r"of version 0, .* of version 2"):
            mine.load_state_dict(saved)


def test_momentum_with_dampening_cannot_come_later() -> None:
    with World.mock():
        made = FSDP(module())
        mine = ours.SGD(made.parameters(), lr=0.01, dampening=0.1)
        steps(made, mine, 0, 1)
        mine.param_groups[0]["momentum"] = 0.9
        backward(made, 1)
        with pytest.raises(InvalidRequest, match="dampening"):
            mine.step()


# ---------------------------------------------------------------------- votes that disagree


@ON_SERVERS
@pytest.mark.parametrize("what", ["lr", "optimizer"])
def test_votes_that_disagree_for_good_are_an_error_on_every_rank(what: str, strategy: ShardingStrategy) -> None:
    nodes = 2 if strategy is ShardingStrategy.HYBRID_SHARD else 1

    def train(world: World) -> tuple[int, str]:
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(made.parameters(), lr=0.01)
        steps(made, mine, 0, 1)
        if world.rank == 1 and what == "lr":
            mine.param_groups[0]["lr"] = 0.02
        elif world.rank == 1:
            mine = ours.AdamW(made.parameters(), lr=0.01)
        for step in range(1, 10):
            backward(made, step)
            try:
                assert not mine.step().committed
            except StepAborted as error:
                return step, str(error)
            mine.zero_grad()
        return 0, "none"

    said = run_threads(train, 2, nodes=nodes)
    assert [step for step, _ in said] == [3, 3]
    for _, error in said:
        if what == "lr":
            assert "lr of group 0: rank 0: 0.01; rank 1: 0.02" in error
        else:
            assert "rank 0: as before; rank 1: another adamw" in error


def test_a_rank_that_comes_to_agree_goes_on() -> None:
    def train(world: World) -> list[bool]:
        made = FSDP(module())
        mine = ours.AdamW(made.parameters(), lr=0.01)
        committed = []
        for step in range(7):
            mine.param_groups[0]["lr"] = 0.02 if world.rank and step in (0, 1, 3, 4) else 0.01
            backward(made, step)
            committed.append(mine.step().committed)
            made.zero_grad()
        return committed

    assert run_threads(train, 2) == [[False, False, True, False, False, True, True]] * 2


# ---------------------------------------------------------------------- checkpoints


@BOTH
def test_groups_come_back_with_all_their_keys(strategy: ShardingStrategy, tmp_path: Any) -> None:
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(by_decay(made, name="block"), lr=0.01)
        steps(made, mine, 0, 1)
        mine.param_groups[0].update(lr=0.5, betas=(0.7, 0.8), lr_scale=2.0)
        made.save_checkpoint(str(tmp_path / "c"), mine, extra={"mine": 1})
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(by_decay(made, name="other"), lr=torch.tensor(0.01))
        info = made.load_checkpoint(str(tmp_path / "c"), mine)
        assert info.extra == {"mine": 1}
        first = mine.param_groups[0]
        assert (first["betas"], first["lr_scale"], first["name"]) == ((0.7, 0.8), 2.0, "block")
        assert isinstance(first["lr"], torch.Tensor)
        assert [float(group["lr"]) for group in mine.param_groups] == [0.5, pytest.approx(0.01)]
        steps(made, mine, 1, 1)


@pytest.mark.parametrize("back", [FULL, NONE], ids=["to full", "to none"])
@BOTH
def test_a_checkpoint_without_groups_has_the_hyperparameters_of_its_version(
    strategy: ShardingStrategy, back: ShardingStrategy, tmp_path: Any
) -> None:
    expected = module()
    plain = torch.optim.SGD(expected.parameters(), lr=0.05)
    uri = str(tmp_path / "c")
    with World.mock() as world:
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.SGD(made.parameters(), lr=0.05)
        for model, optimizer in ((expected, plain), (made, mine)):
            steps(model, optimizer, 0, 2)
            optimizer.param_groups[0].update(momentum=0.9, lr=0.02)
            steps(model, optimizer, 2, 2)
        if strategy is FULL:
            world.save_checkpoint(uri)
        else:
            made.save_checkpoint(uri, mine)
    with World.mock():
        made = FSDP(module(), sharding_strategy=back)
        mine = ours.SGD(made.parameters(), lr=0.05)
        made.load_checkpoint(uri, mine)
        assert (mine.param_groups[0]["lr"], mine.param_groups[0]["momentum"]) == (0.02, 0.9)
        steps(expected, plain, 4, 2)
        steps(made, mine, 4, 2)
        same(made, expected)


def test_moments_that_no_group_needs_now_are_in_a_checkpoint(tmp_path: Any) -> None:
    expected = module()
    plain = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    steps(expected, plain, 0, 3)
    plain.param_groups[0]["momentum"] = 0.0
    steps(expected, plain, 3, 1)
    with World.mock() as world:
        made = FSDP(module())
        mine = ours.SGD(made.parameters(), lr=0.05, momentum=0.9)
        steps(made, mine, 0, 3)
        mine.param_groups[0]["momentum"] = 0.0
        steps(made, mine, 3, 1)
        world.save_checkpoint(str(tmp_path / "c"))
    with World.mock():
        made = FSDP(module())
        mine = ours.SGD(made.parameters(), lr=0.05)
        made.load_checkpoint(str(tmp_path / "c"), mine)
        for model, optimizer in ((expected, plain), (made, mine)):
            optimizer.param_groups[0]["momentum"] = 0.9
            steps(model, optimizer, 4, 2)
        same(made, expected)


class Counter:
    """An object of a program's own, as torch.distributed.checkpoint calls it: `Stateful`."""

    def __init__(self) -> None:
        self.seen: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


@BOTH
def test_a_programs_own_state_comes_back(strategy: ShardingStrategy, tmp_path: Any) -> None:
    import numpy as np

    seen = {
        3: float("inf"),
        "a": (1, [2.5, None]),
        (1, 2): b"bytes\0",
        "t": torch.arange(6).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "n": np.arange(4, dtype=np.uint16),
        "big": 1 << 80,
        "$": {1, 2},
    }

    def save(world: World) -> list[float]:
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(made.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(mine, lambda n: 1 / (n + 1))
        steps(made, mine, 0, 1)
        scheduler.step()
        counter, own = Counter(), torch.Generator().manual_seed(world.rank)
        counter.seen = seen
        torch.rand(3, generator=own)
        state = {"scheduler": scheduler, "counter": counter, "epoch": 7, "weights": torch.full((2,), 4.0)}
        made.save_checkpoint(str(tmp_path / "c"), mine, state=state, rank_state={"rng": own, "rank": world.rank})
        return torch.rand(3, generator=own).tolist()

    def load(world: World) -> tuple[Any, ...]:
        made = FSDP(module(), sharding_strategy=strategy)
        mine = ours.AdamW(made.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(mine, lambda n: 1 / (n + 1))
        counter, own, weights = Counter(), torch.Generator(), torch.zeros(2)
        state: dict[str, Any] = {"scheduler": scheduler, "counter": counter, "epoch": 0, "weights": weights}
        ranks: dict[str, Any] = {"rng": own, "rank": -1}
        made.load_checkpoint(str(tmp_path / "c"), mine, state=state, rank_state=ranks)
        drawn = torch.rand(3, generator=own).tolist()
        return scheduler.last_epoch, mine.param_groups[0]["lr"], counter.seen, state, ranks["rank"], drawn

    drawn = run_threads(save, 2)
    assert drawn[0] != drawn[1]
    for rank, found in enumerate(run_threads(load, 2)):
        last_epoch, rate, back, state, mine, again = found
        assert (last_epoch, rate, mine, again) == (1, 0.005, rank, drawn[rank])
        assert (state["epoch"], state["weights"].tolist()) == (7, [4.0, 4.0])
        assert {k: v for k, v in back.items() if not hasattr(v, "shape")} == {
            k: v for k, v in seen.items() if not hasattr(v, "shape")
        }
        for name in ("t", "half", "empty", "n"):
            assert back[name].dtype == seen[name].dtype  # type: ignore[attr-defined]
            assert back[name].tolist() == seen[name].tolist()  # type: ignore[attr-defined]
    assert [found[4] for found in run_threads(load, 1)] == [0]
    with pytest.warns(UserWarning, match="own state of 2 workers, and none of worker 2"):
        more = run_threads(load, 3)
    assert [found[4] for found in more] == [0, 1, -1]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_has_no_safe_form_is_refused_on_every_rank(rank: int, tmp_path: Any) -> None:
    def save(world: World) -> str:
        made = FSDP(module())
        mine = ours.AdamW(made.parameters(), lr=0.01)
        value = object() if world.rank == rank else 1
        with pytest.raises(InvalidRequest) as caught:
            made.save_checkpoint(str(tmp_path / "c"), mine, rank_state={"thing": value})
        assert not (tmp_path / "c" / "manifest.json").exists()
        return str(caught.value)

    said = run_threads(save, 2)
    assert "object, for which a checkpoint has no safe form" in said[rank]
    assert f"worker {rank}" in said[1 - rank]


def test_a_state_file_that_is_damaged_or_lacks_a_name_says_so(tmp_path: Any) -> None:
    with World.mock():
        made = FSDP(module())
        made.save_checkpoint(str(tmp_path / "c"), state={"epoch": 1})
        with pytest.raises(InvalidRequest, match="'step'; it has 'epoch'"):
            made.load_checkpoint(str(tmp_path / "c"), state={"step": 0})
        [file] = (tmp_path / "c").glob("state-*")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(AxonError, match="SHA-256"):
            made.load_checkpoint(str(tmp_path / "c"), state={"epoch": 0})


def test_too_much_of_ones_own_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.parallel.checkpoints.own_state.MAX_STATE_BYTES", 1000)
    with World.mock():
        made = FSDP(module())
        with pytest.raises(InvalidRequest, match="at most 1000 are saved"):
            made.save_checkpoint(str(tmp_path / "c"), state={"weights": torch.zeros(1000)})


def test_another_type_cannot_load_before_its_first_step(tmp_path: Any) -> None:
    with World.mock():
        made = FSDP(module())
        first = ours.AdamW(made.parameters(), lr=0.01)
        steps(made, first, 0, 1)
        made.save_checkpoint(str(tmp_path / "c"), first)
        second = ours.SGD(made.parameters(), lr=0.01)
        with pytest.raises(Misuse, match="'sgd' is to take the place"):
            made.load_checkpoint(str(tmp_path / "c"), second)


def test_generators_of_a_process_come_back() -> None:
    from axon_ps.parallel.checkpoints import own_state

    state = ours.RandomState()
    tree = state.state_dict()
    tensors: list[torch.Tensor] = []

    def of_tensor(tensor: torch.Tensor, path: str) -> dict[str, int]:
        tensors.append(tensor)
        return {"$tensor": len(tensors) - 1}

    encoded = own_state.Encoder(of_tensor).encode(tree, "rng")
    drawn = torch.rand(2).tolist()
    state.load_state_dict(own_state.Decoder(tensors.__getitem__, "here").decode(encoded, lambda: None))
    assert torch.rand(2).tolist() == drawn
