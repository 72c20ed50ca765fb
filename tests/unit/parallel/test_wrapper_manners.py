"""A wrapped model as a module: docs/wrapped_model.md's table, row by row. The oracle is torch's own FSDP2.

Tests of `parallel/wrapper.py`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from axon_ps.errors import Misuse
from axon_ps.parallel import FSDP, SGD, ShardingStrategy
from parallel_fakes import FakeGroup

ALL = list(ShardingStrategy)
SERVED = [s for s in ALL if s is not ShardingStrategy.NO_SHARD]


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two units, a buffer, weights that are tied, and a signature."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Run the blocks."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x) * scale
        return out

    def __getitem__(self, index: int) -> nn.Module:
        return self.blocks[index]


class Outer(nn.Module):
    """A module that holds the model, as Lightning's does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.own = nn.Parameter(torch.ones(2))


@pytest.fixture
def make_fsdp2() -> Iterator[Callable[[], Any]]:
    """Makes the same model, wrapped by torch in a group of one, which needs no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield fully_sharded
    dist.destroy_process_group()


def fully_sharded() -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def wrap(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FSDP:
    return FSDP(Net(), FakeGroup(), unit_types={Block}, sharding_strategy=strategy)  # type: ignore[arg-type]


def backward(model: Any) -> None:
    model(torch.linspace(-1, 1, 8).view(2, 4), scale=2.0).square().sum().backward()


def full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def test_it_has_the_signature_the_class_and_the_attributes_of_its_module(make_fsdp2: Callable[[], Any]) -> None:
    fsdp2 = make_fsdp2()
    model = wrap()
    assert inspect.signature(model.forward) == inspect.signature(fsdp2.forward) == inspect.signature(Net().forward)
    assert model.forward.__doc__ == fsdp2.forward.__doc__ == "Run the blocks."
    assert isinstance(model, Net)
    assert isinstance(model, FSDP)
    assert isinstance(fsdp2, Net)
    assert inspect.signature(model.__class__.forward) == inspect.signature(fsdp2.__class__.forward)
    assert model.limit == fsdp2.limit == 3
    assert model[1] is model.blocks[1] is model.unwrap().blocks[1]  # type: ignore[index]
    assert isinstance(fsdp2[1], Block)
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.forward = lambda x: x + 1  # as accelerate does
    assert float(model(torch.zeros(()))) == 1.0


def test_parameters_buffers_and_modules_have_the_names_they_have_in_the_module(make_fsdp2: Callable[[], Any]) -> None:
    fsdp2 = make_fsdp2()
    model, plain = wrap(), Net()
    for module in (model, fsdp2):
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert list(module.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_modules())) == list(dict(plain.named_modules()))
    names = [n for n, _ in Outer(plain).named_parameters()]
    assert [n for n, _ in Outer(model).named_parameters()] == [n for n, _ in Outer(fsdp2).named_parameters()] == names
    assert model.get_submodule("blocks.0.linear") is model.unwrap().blocks[0].linear  # type: ignore[index,union-attr]


@pytest.mark.parametrize("strategy", ALL)
def test_state_dicts_go_where_and_are_called_as_asked(
    strategy: ShardingStrategy, make_fsdp2: Callable[[], Any]
) -> None:
    fsdp2 = make_fsdp2()
    model, plain = wrap(strategy), Net()
    for options in ({}, {"prefix": "net."}, {"prefix": "a.", "destination": {"present": 1}}):
        ours, theirs, wanted = (m.state_dict(**copy.deepcopy(options)) for m in (model, fsdp2, plain))  # type: ignore[attr-defined]
        assert list(ours) == list(theirs) == list(wanted)
        for name, value in wanted.items():
            assert ours[name] == value if name == "present" else torch.equal(ours[name], value), name
    mine: dict[str, Any] = {}
    assert model.state_dict(destination=mine) is mine
    assert all(isinstance(v, nn.Parameter) or n == "seen" for n, v in model.state_dict(keep_vars=True).items())
    for name, value in Outer(model).state_dict().items():
        assert torch.equal(value, Outer(plain).state_dict()[name])
    for name, value in model.unwrap().state_dict().items():  # what save_pretrained() takes
        assert torch.equal(value, plain.state_dict()[name])


@pytest.mark.parametrize("strategy", ALL)
def test_what_holds_the_model_loads_it(strategy: ShardingStrategy) -> None:
    model = wrap(strategy)
    outer = Outer(model)
    other = {name: torch.full_like(value, 2.0) for name, value in outer.state_dict().items()}
    assert str(outer.load_state_dict(other)) == "<All keys matched successfully>"
    assert all(bool((value == 2.0).all()) for value in outer.state_dict().values())
    with pytest.raises(RuntimeError, match=r'Missing key.*"net\.seen"'):
        outer.load_state_dict({name: value for name, value in other.items() if name != "net.seen"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"net\.more"'):
        outer.load_state_dict({**other, "net.more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="has shape"):
        outer.load_state_dict({**other, "net.seen": torch.zeros(7)})


@pytest.mark.parametrize("strategy", ALL)
def test_tied_weights_are_saved_as_one_tensor(strategy: ShardingStrategy) -> None:
    state = wrap(strategy).state_dict()
    assert state["first.weight"] is state["last.weight"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = Net()
    loaded.load_state_dict(torch.load(file))
    assert loaded.first.weight is loaded.last.weight
    assert torch.equal(loaded.first.weight, Net().first.weight)


REFUSED: dict[str, Callable[[Any], object]] = {
    "copied": copy.copy,
    "copied deep": copy.deepcopy,
    "pickled": pickle.dumps,
    "saved": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_not_copied_and_not_pickled(what: str, make_fsdp2: Callable[[], Any]) -> None:
    fsdp2 = make_fsdp2()
    with pytest.raises(Misuse, match=r"wrapped Net cannot be (copied|pickled).*state_dict"):
        REFUSED[what](wrap())
    if what == "copied deep":
        with pytest.raises(AssertionError, match="state dict"):
            REFUSED[what](fsdp2)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("strategy", ALL)
def test_the_module_inside_is_not_copied_and_not_pickled(strategy: ShardingStrategy, what: str, inside: bool) -> None:
    """A copy would be hooked to the model: its `state_dict()` gave the model's values."""
    model = wrap(strategy)
    with model.summon_full_params() if inside else contextlib.nullcontext():
        if what == "copied":  # shares all with it, in torch, too
            return
        with pytest.raises(Misuse, match=r"inside a wrapped one cannot be (copied|pickled).*state_dict"):
            REFUSED[what](model.module)


@pytest.mark.parametrize("strategy", ALL)
def test_its_memory_is_given_back_with_it(strategy: ShardingStrategy) -> None:
    model = wrap(strategy)
    backward(model)
    runtime = weakref.ref(model.runtime)
    del model
    gc.collect()
    assert runtime() is None


@pytest.mark.parametrize("strategy", ALL)
def test_it_is_not_moved_or_cast(strategy: ShardingStrategy) -> None:
    model = wrap(strategy)
    assert model.to("cpu") is model.float() is model.train(False)
    for move in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(Misuse, match="device= and mixed_precision="):
            move()
    assert list(model.state_dict()) == list(Net().state_dict())


@pytest.mark.parametrize("strategy", SERVED[:2])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_it_is_compiled_as_a_whole(strategy: ShardingStrategy) -> None:
    plain, model = wrap(strategy), wrap(strategy)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for trained, called in ((plain, plain), (model, compiled)):
        optimizer = SGD(trained, lr=0.01)
        for _ in range(3):
            backward(called)
            optimizer.step()
            optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("strategy", ALL)
def test_gradients_are_clipped_by_torchs_names(strategy: ShardingStrategy, make_fsdp2: Callable[[], Any]) -> None:
    fsdp2 = make_fsdp2()
    clip: list[Callable[[Any], Any]] = [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model: model.clip_grad_norm_(0.01),
    ]
    theirs = torch.optim.SGD(fsdp2.parameters(), lr=0.1)
    backward(fsdp2)
    expected = float(full(nn.utils.clip_grad_norm_(fsdp2.parameters(), 0.01)))
    theirs.step()
    for clipping in clip:
        model = wrap(strategy)
        group: Any = model.process_group
        optimizer = SGD(model, lr=0.1)
        backward(model)
        norm = clipping(model)
        if strategy is not ShardingStrategy.NO_SHARD:
            group.world.steps.clip_factor = 0.01 / (expected + 1e-6)  # as the coordinator says it
        optimizer.step()
        assert float(norm) == pytest.approx(expected, rel=1e-5)
        for name, value in fsdp2.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], full(value))


@pytest.mark.parametrize("strategy", SERVED)
def test_what_is_changed_with_writeback_is_trained_on(strategy: ShardingStrategy) -> None:
    model, plain = wrap(strategy), Net()
    with model.summon_full_params(writeback=True), torch.no_grad():
        next(model.parameters()).mul_(2.0)
        list(model.parameters())[-1].data.add_(1.0)
    with torch.no_grad():
        next(plain.parameters()).mul_(2.0)
        list(plain.parameters())[-1].add_(1.0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    with model.summon_full_params(writeback=True):  # nothing is changed
        assert torch.equal(next(model.parameters()), next(plain.parameters()))


@pytest.mark.parametrize("strategy", SERVED)
def test_what_torch_would_do_to_the_wrong_values_is_refused(strategy: ShardingStrategy) -> None:
    model = wrap(strategy)
    with pytest.raises(Misuse, match="summon_full_params"):
        next(model.parameters()).sum()
    with pytest.raises(Misuse, match="changed inside summon_full_params"), model.summon_full_params(), torch.no_grad():
        next(model.parameters()).mul_(2.0)
    with model.summon_full_params():
        assert torch.equal(next(model.parameters()), next(Net().parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    with pytest.raises(Misuse, match=r"axon_ps\.parallel\.AdamW"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(Misuse, match=r"axon_ps\.parallel\.GradScaler"):
        scaler.unscale_(optimizer)
