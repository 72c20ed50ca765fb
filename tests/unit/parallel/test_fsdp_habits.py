"""Habits of scripts around a wrapped model: torch's values, or a refusal that names what and what to do."""

from __future__ import annotations

import copy
import io
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from axon_ps import World
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse, Timeout
from axon_ps.parallel import DDP, FSDP, SGD, ShardingStrategy
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.work import QueuedWork
from axon_ps.storage.export import export_model
from parallel_fakes import FakeGroup

ALL = list(ShardingStrategy)
SERVED = [s for s in ALL if s is not ShardingStrategy.NO_SHARD]
every_strategy = pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)


class Block(nn.Sequential):
    """A unit, with a buffer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.arange(3.0))

    def reset_parameters(self) -> None:
        """Give its own parameter and buffer values, on a device where they had none."""
        nn.init.ones_(self.scale)
        self.seen = torch.arange(3.0, device=self.scale.device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.scale
        return out


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def wrapped(module: nn.Module, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> FSDP:
    options.setdefault("unit_types", {Block})
    return FSDP(module, FakeGroup(), sharding_strategy=strategy, **options)  # type: ignore[arg-type]


def inputs(step: int) -> Tensor:
    return torch.linspace(-1, 1 + step, 12).view(3, 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(inputs(step).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_same(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------------- activation checkpointing


def checkpointed(impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> nn.Sequential:
    module = plain()
    apply_activation_checkpointing(module, lambda child: checkpoint_wrapper(child, impl), check_fn=is_block)
    return module


def wrapped_first() -> FSDP:
    """Sharded, then checkpointed, as torch's tutorial of FSDP does it."""
    model = wrapped(plain())
    apply_activation_checkpointing(model, check_fn=is_block)
    return model


def test_torch_calls_the_module_in_its_wrapper_as_we_think() -> None:
    assert wrap.name_in_states(f"0.{torch_wrapper._CHECKPOINT_PREFIX}1.weight") == "0.1.weight"
    assert wrap.name_in_states("a.weight") == "a.weight"


@pytest.mark.parametrize("impl", CheckpointImpl)
@every_strategy
def test_a_model_with_checkpoint_wrappers_has_the_names_and_values_of_the_plain_one(
    strategy: ShardingStrategy, impl: CheckpointImpl
) -> None:
    reference = plain()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    model = wrapped(checkpointed(impl), strategy)
    train(model, SGD(model.parameters(), lr=0.1))
    check_same(model, reference)
    assert [name for name, _ in model.full_parameters()] != []
    assert all(torch_wrapper._CHECKPOINT_PREFIX not in name for name, _ in model.full_parameters())


@pytest.mark.parametrize("make", [lambda: wrapped(checkpointed()), wrapped_first], ids=["before", "after"])
def test_state_dicts_of_a_checkpointed_model_are_saved_and_loaded(make: Callable[[], FSDP]) -> None:
    model, reference = make(), plain()
    check_same(model, reference)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert list(torch.load(saved)) == list(reference.state_dict())
    changed = {name: value + 1 for name, value in reference.state_dict().items()}
    assert model.load_state_dict(changed) == ([], [])
    reference.load_state_dict(changed)
    check_same(model, reference)
    train(model, SGD(model.parameters(), lr=0.1))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    check_same(model, reference)
    assert {unit.name for unit in model.spec.layout.units} == {"(root)", "0", "1"}


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_a_checkpoint_of_a_checkpointed_model_is_one_of_the_plain_model(
    strategy: ShardingStrategy, tmp_path: Path
) -> None:
    uri, reference = str(tmp_path / "checkpoints"), plain()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    with World.mock() as world:
        model = FSDP(checkpointed(), world, unit_types={Block}, sharding_strategy=strategy)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        model.save_checkpoint(uri, optimizer)
        train(model, optimizer)
    export_model(uri, str(tmp_path / "model.safetensors"))
    exported = safetensors.torch.load_file(str(tmp_path / "model.safetensors"))
    assert set(exported) == set(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-6)
    with World.mock() as world:
        model = FSDP(plain(), world, unit_types={Block}, sharding_strategy=strategy)
        model.load_checkpoint(uri)
        check_same(model, reference)


def test_a_checkpointed_model_on_the_meta_device_is_made() -> None:
    with torch.device("meta"):
        module = checkpointed()
    model = wrapped(module)
    state = model.state_dict()
    assert list(state) == list(plain().state_dict())
    assert torch.equal(state["0.scale"], torch.ones(4))
    assert torch.equal(state["0.seen"], torch.arange(3.0))


# ---------------------------------------------------------------------- wrapped more than once


def test_blocks_wrapped_before_the_root_are_refused() -> None:
    module = plain()
    module[0] = wrapped(module[0])
    with pytest.raises(
        InvalidRequest, match=r"FSDP was given a module of which '0' is wrapped .* unit_types=\{Block\}"
    ):
        wrapped(module)
    with pytest.raises(InvalidRequest, match=r"DistributedDataParallel was given a module of which '0' is wrapped"):
        DDP(module, FakeGroup())  # type: ignore[arg-type]


@every_strategy
def test_a_model_is_wrapped_once(strategy: ShardingStrategy) -> None:
    model = wrapped(plain(), strategy)
    for again in (lambda: wrapped(model), lambda: DDP(model, FakeGroup())):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="wrapped by FullyShardedDataParallel already; use it as it is"):
            again()
    with pytest.raises(InvalidRequest, match=r"parameter '0\.scale' is of a module that is wrapped already"):
        wrapped(model.unwrap())
    train(model, SGD(model.parameters(), lr=0.1))  # it still works


@pytest.mark.parametrize("other", [lambda m: DDP(m, FakeGroup()), nn.DataParallel], ids=["DDP", "DataParallel"])
def test_a_model_inside_another_wrapper_is_refused(other: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(InvalidRequest, match="is wrapped by .*DataParallel already"):
        wrapped(other(plain()))


# ---------------------------------------------------------------------- kinds of parameters


class Extra(nn.Module):
    """A model with another parameter beside those of a block."""

    def __init__(self, param: Tensor, trainable: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.extra = nn.Parameter(param, requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        extra = self.extra.abs() if self.extra.is_complex() else self.extra
        out: Tensor = self.block(x) + extra.float().sum()
        return out


POSSIBLE = [
    torch.tensor(0.5),
    torch.ones(3),
]
UNTRAINABLE = [
    torch.ones(2, dtype=torch.float64),
    torch.tensor(0.5, dtype=torch.float64),
    torch.ones(2, dtype=torch.int8),
    torch.ones(2, dtype=torch.uint8),
    torch.ones(2, dtype=torch.int64),
    torch.ones(2, dtype=torch.bool),
    torch.ones(2).to(torch.float8_e4m3fn),
    torch.ones(2, dtype=torch.complex64),
]


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("param", POSSIBLE, ids=lambda p: f"{p.dtype} {list(p.shape)}")
@every_strategy
def test_a_parameter_of_any_shape_trains_as_in_torch(
    strategy: ShardingStrategy, param: Tensor, trainable: bool
) -> None:
    model, reference = wrapped(Extra(param, trainable), strategy), Extra(param.clone(), trainable)
    train(model, SGD(model.parameters(), lr=0.1))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    check_same(model, reference)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("param", UNTRAINABLE, ids=lambda p: f"{p.dtype} {list(p.shape)}")
@every_strategy
def test_a_frozen_parameter_of_a_dtype_that_cannot_train_is_sharded_or_ignored(
    strategy: ShardingStrategy, param: Tensor, ignored: bool
) -> None:
    module, reference = Extra(param), Extra(param)
    model = wrapped(module, strategy, ignored_parameters=[module.extra] if ignored else [])
    if ignored:
        with pytest.raises(
            InvalidRequest, match=r"'extra' is one of the model's ignored_parameters.*sharded_parameters\(\)"
        ):
            SGD(model.parameters(), lr=0.1)
    train(model, SGD(model.sharded_parameters() if ignored else model.parameters(), lr=0.1))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    ours, theirs = model.state_dict(), reference.state_dict()
    extra = ours.pop("extra")
    assert extra.dtype is param.dtype
    assert torch.equal(extra, theirs.pop("extra"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_a_trainable_parameter_of_such_a_dtype_is_to_be_built_in_another() -> None:
    with pytest.raises(InvalidRequest, match=r"'extra' has dtype torch\.float64; .*build it in one of these"):
        wrapped(Extra(torch.ones(2, dtype=torch.float64), trainable=True))


def test_a_parameter_without_elements_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'extra' has shape \[0, 4\], so no elements.*ignored_parameters"):
        wrapped(Extra(torch.ones(0, 4), trainable=True))


class Tagged(Tensor):
    """A tensor with a class of its own, as of a library of quantised weights."""


def test_a_parameter_that_is_no_plain_tensor_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'extra' is a Tagged; needed is a plain tensor"):
        wrapped(Extra(torch.ones(2).as_subclass(Tagged)))


def tied_by_data(module: Any) -> None:
    module[1][2].weight.data = module[0][2].weight.data


def of_a_transposed_view(module: Any) -> None:
    module[1][2].weight = nn.Parameter(module[0][0].weight.t())


def of_a_slice(module: Any) -> None:
    module[2].weight = nn.Parameter(module[1][2].weight[1:2, ::2])


def a_buffer(module: Any) -> None:
    module[1].register_buffer("w", module[0][0].weight.data[3:, 1])


def an_attribute(module: Any) -> None:
    module[1].w = module[0][0].weight.detach()


OVERLAPS: dict[Callable[[Any], None], tuple[str, str]] = {
    tied_by_data: ("parameter '0.2.weight'", "parameter '1.2.weight'"),
    of_a_transposed_view: ("parameter '0.0.weight'", "parameter '1.2.weight'"),
    of_a_slice: ("parameter '1.2.weight'", "parameter '2.weight'"),
    a_buffer: ("parameter '0.0.weight'", "buffer '1.w'"),
    an_attribute: ("parameter '0.0.weight'", "attribute '1.w'"),
}


@every_strategy
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_parameter_that_shares_memory_with_another_tensor_is_refused_by_both_names(
    strategy: ShardingStrategy, overlap: Callable[[Any], None]
) -> None:
    module = plain()
    overlap(module)
    both = OVERLAPS[overlap]
    either = "|".join((f"{a} and {b}" for a, b in (both, both[::-1])))
    with pytest.raises(InvalidRequest, match=rf"({either}) have memory in common.*same nn\.Parameter.*clone\(\)"):
        wrapped(module, strategy)


class Neighbours(nn.Module):
    """Two parameters that are parts of one storage, and buffers that overlap with each other."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 20)
        self.weight, self.bias = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:])
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("same", self.one[:2])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.one


def recomputed() -> nn.Module:
    """The attribute `weight` is the parameter's memory until a hook sets it before each forward."""
    torch.manual_seed(0)
    module: nn.Module = nn.utils.spectral_norm(nn.Linear(4, 2))
    return module


@every_strategy
@pytest.mark.parametrize("make", [Neighbours, recomputed])
def test_memory_that_is_no_others_or_read_by_nobody_is_not_refused(
    strategy: ShardingStrategy, make: Callable[[], nn.Module]
) -> None:
    module = make()
    reference = copy.deepcopy(module)
    model = wrapped(module, strategy)
    train(model, SGD(model.parameters(), lr=0.1))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    check_same(model, reference)


def test_dtypes_of_one_unit_are_named_with_a_parameter_each() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).bfloat16())
    with pytest.raises(
        InvalidRequest, match=r"torch\.bfloat16 \('1\.weight'\), torch\.float32 \('0\.weight'\).*unit_types"
    ):
        wrapped(mixed)
    wrapped(mixed, unit_types={nn.LayerNorm})


# ---------------------------------------------------------------------- sparse gradients


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@every_strategy
def test_a_sparse_embedding_is_refused_by_name_when_it_is_wrapped(
    strategy: ShardingStrategy, kind: type[nn.Module]
) -> None:
    def make(trainable: bool) -> nn.Module:
        embedding: Any = kind(5, 4, sparse=True)
        embedding.weight.requires_grad_(trainable)
        return nn.Sequential(embedding, nn.Linear(4, 1))

    with pytest.raises(InvalidRequest, match=rf"'0\.weight' has sparse gradients \({kind.__name__}.*use sparse=False"):
        wrapped(make(True), strategy)
    wrapped(make(False), strategy)  # frozen, it has no gradients
    module = make(True)
    wrapped(module, strategy, ignored_parameters=module[0].parameters())  # type: ignore[index]


@every_strategy
def test_a_sparse_gradient_is_refused_by_name_in_backward(strategy: ShardingStrategy) -> None:
    class Lookup(Extra):
        def forward(self, x: Tensor) -> Tensor:
            rows = nn.functional.embedding(torch.tensor([1, 0, 1]), self.extra, sparse=True)
            out: Tensor = self.block(x) + rows
            return out

    model = wrapped(Lookup(torch.ones(2, 4), trainable=True), strategy)
    with pytest.raises(InvalidRequest, match=r"'extra' has sparse gradients \(torch\.sparse_coo\).*use sparse=False"):
        model(inputs(0)).sum().backward()


# ---------------------------------------------------------------------- modules that read others' parameters


class Attention(nn.Module):
    """Self-attention, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(1, -1, 4)
        out: Tensor = self.last(self.mha(x, x, x)[0])
        return out


class Encoder(nn.Module):
    """torch's encoder, which has a way of its own when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.encoder(x.view(1, -1, 4)))
        return out


@pytest.mark.parametrize("unit", [nn.Linear, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.LayerNorm])
@pytest.mark.parametrize("kind", [Attention, Encoder])
@every_strategy
def test_attention_trains_and_evaluates_as_in_torch_whatever_the_units(
    strategy: ShardingStrategy, kind: type[nn.Module], unit: type[nn.Module]
) -> None:
    model, reference = wrapped(kind(), strategy, unit_types={unit}), kind()
    ours, theirs = SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for mode in (torch.no_grad, torch.inference_mode):
        train(model, ours)
        train(reference, theirs)
        with mode():
            torch.testing.assert_close(model.eval()(inputs(0)), reference.eval()(inputs(0)))
        model.train(), reference.train()
    check_same(model, reference)


class Reader(nn.Module):
    """It reads the weight of a module inside without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.table = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.own.bias, self.own(x), self.table.weight)


@pytest.mark.parametrize("strategy", SERVED, ids=lambda s: s.name)
def test_a_parameter_read_while_its_unit_does_not_run_is_the_one_that_is_named(strategy: ShardingStrategy) -> None:
    net = nn.Sequential(Reader(), nn.Linear(4, 1))
    model = wrapped(net, strategy, auto_wrap_policy=lambda m: m is net[0].table, unit_types=())
    message = (
        r"torch\.addmm was called on parameter '0\.table\.weight', .* reads a parameter of another "
        r"module needs it in its own unit: .*unit_types"
    )
    with pytest.raises(Misuse, match=message):
        model(inputs(0))


# ---------------------------------------------------------------------- torch's defaults


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "defaults", [lambda: torch.device("meta"), lambda: default_dtype(torch.float64)], ids=["meta", "float64"]
)
@every_strategy
def test_torch_s_defaults_change_nothing(strategy: ShardingStrategy, defaults: Callable[[], Any]) -> None:
    reference, module = plain(), plain()
    data = [inputs(step) for step in range(2)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for x in data:
        optimizer.zero_grad()
        reference(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    with defaults():
        model = wrapped(module, strategy)
        ours = SGD(model.parameters(), lr=0.1) if strategy in SERVED else SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x in data:
            model(x).square().mean().backward()
            model.clip_grad_norm_(0.1)
            ours.step()
            ours.zero_grad()
        state = model.state_dict()
        model.load_state_dict(state)
        again = model.state_dict()
    for name, value in state.items():
        assert value.device.type == "cpu"
        assert value.dtype == reference.state_dict()[name].dtype
        assert torch.equal(value, again[name])
    if strategy is ShardingStrategy.NO_SHARD:
        check_same(model, reference)


# ---------------------------------------------------------------------- state dicts


@every_strategy
def test_a_state_dict_may_have_parameters(strategy: ShardingStrategy) -> None:
    reference = plain()
    model = wrapped(copy.deepcopy(reference), strategy)
    changed = {
        name: nn.Parameter(value + 1) if isinstance(value, nn.Parameter) else value + 1
        for name, value in reference.state_dict(keep_vars=True).items()
    }
    model.load_state_dict(changed)
    reference.load_state_dict(changed)
    check_same(model, reference)
    partial = {"2.bias": nn.Parameter(torch.full((1,), 7.0))}
    model.load_state_dict(partial, strict=False)
    reference.load_state_dict(partial, strict=False)
    check_same(model, reference)
    train(model, SGD(model.parameters(), lr=0.1))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    check_same(model, reference)


# ---------------------------------------------------------------------- several threads


class Waiting(nn.Module):
    """A module that waits for the test in its forward, in its backward, or raises."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.where = where
        self.inside, self.go_on = threading.Event(), threading.Event()

    def wait(self, *_: object) -> None:
        self.inside.set()
        assert self.go_on.wait(60)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.where == "forward" and not self.inside.is_set():
                self.wait()
            if self.where == "error" and not self.inside.is_set():
                self.inside.set()
                raise ValueError("the user's")
            if self.where == "backward" and x.requires_grad:
                x.register_hook(self.wait)  # type: ignore[no-untyped-call]
        return x


def step(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
@every_strategy
def test_a_second_thread_is_refused_and_the_first_goes_on(strategy: ShardingStrategy, where: str) -> None:
    net, reference = Waiting(where), Waiting("nowhere")
    model = wrapped(net, strategy)
    optimizer = SGD(model.parameters(), lr=0.1)
    step(reference, torch.optim.SGD(reference.parameters(), lr=0.1))  # type: ignore[arg-type]
    with futures.ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        under_way = pool.submit(step, model, optimizer)
        assert net.inside.wait(60)
        try:
            message = (
                f"a forward of 'the model' begins in thread 'MainThread' while thread 'trainer_0' .* model's {where}"
            )
            with torch.no_grad(), pytest.raises(Misuse, match=message):
                model(inputs(1))
        finally:
            net.go_on.set()
        under_way.result(60)
    check_same(model, reference)
    train(model, optimizer)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    check_same(model, reference)


@every_strategy
def test_a_second_thread_is_refused_from_the_first_thing_on_that_a_forward_does(
    strategy: ShardingStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Waiting("nowhere")
    model = wrapped(net, strategy)
    monkeypatch.setattr(model.runtime, "agree", net.wait)  # as with the workers of a node
    with futures.ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        under_way = pool.submit(model, inputs(0))
        assert net.inside.wait(60)
        try:
            with torch.no_grad(), pytest.raises(Misuse, match="while thread 'trainer_0' is inside the model's forward"):
                model(inputs(1))
        finally:
            net.go_on.set()
        assert under_way.result(60).shape == inputs(0).shape


def test_a_backward_is_refused_while_another_thread_evaluates() -> None:
    net = Waiting("nowhere")
    model = wrapped(net)
    loss = model(inputs(0)).square().mean()
    net.where = "forward"
    with futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation") as pool, torch.no_grad():
        under_way = pool.submit(torch.no_grad()(model), inputs(1))
        assert net.inside.wait(60)
        try:
            with pytest.raises(Misuse, match="a backward begins .* while thread 'evaluation_0' is inside .* forward"):
                loss.backward()
        finally:
            net.go_on.set()
        under_way.result(60)


def test_units_that_run_in_threads_of_a_forward_are_refused() -> None:
    class Parallel(Waiting):
        def forward(self, x: Tensor) -> Tensor:
            with futures.ThreadPoolExecutor(2) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))  # type: ignore[return-value]

    with pytest.raises(
        Misuse, match=r"a forward of 'blocks\.\d' begins in thread .* 'MainThread' is inside .* forward"
    ):
        wrapped(Parallel("nowhere"))(inputs(0))


@every_strategy
def test_threads_one_after_the_other_are_as_one_also_after_an_error(strategy: ShardingStrategy) -> None:
    reference = Waiting("nowhere")
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    model = wrapped(Waiting("error"), strategy)
    optimizer = SGD(model.parameters(), lr=0.1)
    with futures.ThreadPoolExecutor(1) as other:
        with pytest.raises(ValueError, match="the user's"):
            other.submit(model, inputs(0)).result(60)
        for number in range(2):
            loss = other.submit(model, inputs(number)).result(60).square().mean()
            loss.backward()  # in this thread
            other.submit(optimizer.step).result(60)
            optimizer.zero_grad()
            with torch.no_grad():
                model(inputs(0))
    check_same(model, reference)


# ---------------------------------------------------------------------- signal handlers


@pytest.mark.parametrize("timeout_s", [None, 60.0])
@pytest.mark.parametrize("kind", [Work, QueuedWork])
def test_what_a_signal_handler_raises_while_something_is_waited_for_is_not_taken_for_ours(
    kind: type[Any], timeout_s: float | None
) -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("the user's alarm")

    before = signal.signal(signal.SIGUSR2, handler)
    alarm = threading.Thread(target=signal.pthread_kill, args=(threading.get_ident(), signal.SIGUSR2))
    try:
        with pytest.raises(TimeoutError, match="the user's alarm") as raised:
            alarm.start()
            kind(futures.Future(), "mapping unit 0").wait(timeout_s)
    finally:
        alarm.join(60)
        signal.signal(signal.SIGUSR2, before)
    assert type(raised.value) is TimeoutError
    with pytest.raises(Timeout, match=r"mapping unit 0 is not done after 0\.01 s"):
        kind(futures.Future(), "mapping unit 0").wait(0.01)


# ---------------------------------------------------------------------- reentrant checkpoints


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_a_unit_used_twice_in_reentrant_checkpoints_trains_or_says_so(strategy: ShardingStrategy) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block = nn.Linear(4, 4), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=True)
            return x

    model, reference = wrapped(Twice(), strategy), Twice()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    try:
        train(model, SGD(model.parameters(), lr=0.1))
    except Misuse as error:
        assert "unit 'block'" in str(error)  # noqa: PT017
        assert "use_reentrant=False" in str(error)  # noqa: PT017
    else:
        check_same(model, reference)
