"""Arguments and habits: how people wrap, what they pass, and torch's transforms on a wrapped model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload as TorchOffload
from torch.distributed.fsdp import MixedPrecision as TorchPrecision
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.func import functional_call, grad, jacrev, jvp, vmap

from case_parts import WIDTH, Block, batches, go_on, mse, three, trained, two
from case_table import SHARDED, WHERE_WRITTEN, WRAPPERS, Wrong, add, case
from sides import Side, Values, built

# ---------------------------------------------------------------------- arguments by other names

TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "'NO_SHARD'": ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD"),
    "'no_shard'": ({"sharding_strategy": "no_shard"}, "NO_SHARD"),
    "7": ({"sharding_strategy": 7}, ""),
    "torch's NO_SHARD": ({"sharding_strategy": TorchStrategy.NO_SHARD}, "NO_SHARD"),
    "torch's FULL_SHARD": ({"sharding_strategy": TorchStrategy.FULL_SHARD}, "FULL_SHARD"),
    "torch's SHARD_GRAD_OP": ({"sharding_strategy": TorchStrategy.SHARD_GRAD_OP}, "SHARD_GRAD_OP"),
    "torch's HYBRID_SHARD": ({"sharding_strategy": TorchStrategy.HYBRID_SHARD}, "HYBRID_SHARD"),
    "'nonsense'": ({"sharding_strategy": "nonsense"}, ""),
}


def _strategy(side: Any, options: dict[str, Any], means: str) -> Values:
    """It is taken as that strategy, or refused when it is written."""
    if not hasattr(side, "world"):
        return trained(side)
    from axon_ps import parallel

    model = parallel.FSDP(built(three), side.world, unit_types={Block}, **options)
    if model.strategy is not getattr(parallel.ShardingStrategy, means or "none", None):
        raise Wrong(f"taken as {model.strategy}")
    optimizer = parallel.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(side)[:3]:
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = model.statistics().get("gathers", 0)
    if (means == "NO_SHARD") != (not gathers):
        raise Wrong(f"taken as {model.strategy}, and gathered {gathers} times")
    return side.values(model)


for _name, (_options, _means) in TAKEN.items():
    add(
        f"arguments: sharding_strategy={_name}",
        lambda side, o=_options, m=_means: _strategy(side, o, m),
        wrappers=("FULL_SHARD",),
        says=WHERE_WRITTEN,
    )

OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "cpu_offload=True": ({"cpu_offload": True}, 2e-5),
    "torch's CPUOffload": ({"cpu_offload": TorchOffload(offload_params=True)}, 2e-5),
    "cpu_offload='PARAMS'": ({"cpu_offload": "PARAMS"}, 2e-5),
    "mixed_precision='bf16'": ({"mixed_precision": "bf16"}, 0.05),
    "mixed_precision=True": ({"mixed_precision": True}, 0.05),
    "torch's MixedPrecision": (
        {"mixed_precision": TorchPrecision(param_dtype=torch.bfloat16)},
        0.05,
    ),
    "policy='async'": ({"policy": "async"}, 2e-5),
    "device='cpu'": ({"device": "cpu"}, 2e-5),
    "device=-1": ({"device": -1}, 2e-5),
    "unit_types=[Block]": ({"unit_types": [Block]}, 2e-5),
    "unit_types=Block": ({"unit_types": Block}, 2e-5),
    "unit_types={'Block'}": ({"unit_types": {"Block"}}, 2e-5),
    "unit_types=nn.Linear": ({"unit_types": nn.Linear}, 2e-5),
    "unit_types=nn.Module": ({"unit_types": (nn.Module,)}, 2e-5),
    "unit_types=nn.Sequential": ({"unit_types": (nn.Sequential,)}, 2e-5),
    "torch's ModuleWrapPolicy": ({"auto_wrap_policy": ModuleWrapPolicy({Block})}, 2e-5),
    "torch's transformer_auto_wrap_policy": (
        {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
        2e-5,
    ),
    "use_orig_params=True": ({"use_orig_params": True}, 2e-5),
}


def _optioned(side: Any, options: dict[str, Any]) -> Values:
    if not hasattr(side, "world"):
        return trained(side, optimizer="SGD", hyper={"lr": 0.1})
    if "auto_wrap_policy" in options:
        from axon_ps import parallel

        strategy = parallel.ShardingStrategy[side.strategy]
        model = parallel.FSDP(built(three), side.world, sharding_strategy=strategy, **options)
        optimizer = parallel.SGD(model.parameters(), lr=0.1)
        go_on(side, model, optimizer, 0, 3)
        return side.values(model)
    units = options.get("unit_types", (Block,))
    model = side.wrap(built(three), **{"unit_types": units, **options})
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0, 3)
    return side.values(model)


for _name, (_options, _near) in OPTIONS.items():
    add(
        f"arguments: {_name}",
        lambda side, o=_options: _optioned(side, o),
        wrappers=SHARDED,
        says=WHERE_WRITTEN,
        tolerance=_near,
    )

# ---------------------------------------------------------------------- habits of wrapping


def _all(side: Any, module: nn.Module, model: nn.Module | None = None) -> Values:
    """Three steps; the values under the names of the plain module."""
    model = side.wrap(module) if model is None else model
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0, 3)
    return {n.replace("module.", "").replace("_fsdp_wrapped_", ""): v for n, v in side.values(model).items()}


def blocks_first(side: Any) -> Values:
    module: Any = built(three)
    if hasattr(side, "world"):
        for i in range(2):
            module[i] = side.wrap(module[i])
    return _all(side, module)


def wrapped_twice(side: Any) -> Values:
    return _all(side, side.wrap(built(three)))


def a_part_alone(side: Any) -> Values:
    module: Any = built(three)
    part = side.wrap(module[0])
    module[0] = part
    optimizer = side.optimizer("SGD", part.parameters(), lr=0.1)
    go_on(side, module, optimizer, 0, 3)
    return side.values(part)


def ddp_around(side: Any) -> Values:
    if not hasattr(side, "world"):
        return _all(side, built(three))
    from axon_ps import parallel

    model = parallel.DDP(side.wrap(built(three)), side.world.default_group)
    return _all(side, model, model)


def around_ddp(side: Any) -> Values:
    if not hasattr(side, "world"):
        return _all(side, built(three))
    from axon_ps import parallel

    return _all(side, parallel.DDP(built(three), side.world.default_group))


def data_parallel_around(side: Any) -> Values:
    if not hasattr(side, "world"):
        return _all(side, built(three))
    return _all(side, built(three), nn.DataParallel(side.wrap(built(three))))


class TeacherAndStudent(nn.Module):
    """A frozen part that is used under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.s = three().requires_grad_(False), three()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            t = self.t(x)
        return self.s(x) + t


class ListIsUnit(nn.Module):
    """A ModuleList, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l[1](self.l[0](x))


class Unequal(nn.Module):
    """Experts of unequal width, of which a batch uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.ex = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, w), nn.Tanh(), nn.Linear(w, 1)) for w in (4, 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(x).argmax(1), torch.zeros(len(x), 1)
        for k, expert in enumerate(self.ex):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), expert(x[rows]))
        return out


class Generates(nn.Module):
    """Forward is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.h = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for block in self.b:
            x = block(x)
            yield self.h(x)


class ReturnsNone(nn.Module):
    """The output is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> None:
        self.out = self.a(x)


def _kept_output(side: Any) -> Values:
    model = side.wrap(built(ReturnsNone))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, y in batches(side)[:3]:
        model(x)
        (side.inner(model).out - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


def on_meta(side: Any) -> Values:
    """Values are made by reset_parameters(), so that only the shapes can be compared; and it trains."""
    if hasattr(side, "world"):
        with torch.device("meta"):
            module = three()
        torch.manual_seed(0)
        values = _all(side, module)
    else:
        values = _all(side, built(three))
    return {name: torch.tensor(float(value.isfinite().all())) for name, value in values.items()}


def lazy(side: Any) -> Values:
    return _all(side, nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, 1)))


def no_parameters(side: Any) -> Values:
    return _all(side, nn.Sequential(nn.Tanh()))


def all_frozen(side: Any) -> Values:
    model = side.wrap(built(three).requires_grad_(False))
    with torch.no_grad():
        return {"out": model(batches(side)[0][0])}


for _name, _script, _says, _for in (
    ("blocks first, then the root", blocks_first, r"wrapped (first|already|before)|wrap(ped)? twice", SHARDED),
    ("wrapped twice", wrapped_twice, r"wrapped (already|twice)|wrap(ped)? twice", WRAPPERS),
    ("a part of the model alone", a_part_alone, "", WRAPPERS),
    ("DDP around it", ddp_around, r"DDP in FSDP or around it", SHARDED),
    ("around DDP", around_ddp, r"DDP in FSDP or around it", SHARDED),
    ("DataParallel around it", data_parallel_around, r"DataParallel", SHARDED),
    ("a teacher and a student", lambda side: trained(side, TeacherAndStudent), "", WRAPPERS),
    (
        "a ModuleList is a unit",
        lambda side: trained(side, ListIsUnit, units=(nn.ModuleList,)),
        r"ModuleList|never called|no forward",
        SHARDED,
    ),
    (
        "experts of unequal width",
        lambda side: trained(side, Unequal, units=(nn.Sequential,)),
        r"other units than each other",
        WRAPPERS,
    ),
    (
        "forward is a generator",
        lambda side: trained(
            side, Generates, lambda m, x, y: sum(((v - y).square().mean() for v in m(x)), start=torch.zeros(()))
        ),
        r"generator",
        SHARDED,
    ),
    ("forward returns None", _kept_output, "", SHARDED),
    ("on the meta device", on_meta, "", SHARDED),
    ("lazy layers", lazy, r"[Ll]azy", SHARDED),
    ("no parameters at all", no_parameters, r"no parameters", WRAPPERS),
    ("all parameters frozen", all_frozen, r"frozen", SHARDED),
):
    add(f"wrapping: {_name}", _script, wrappers=_for, says=_says)

# ---------------------------------------------------------------------- transforms


def _x(side: Side) -> torch.Tensor:
    return batches(side)[0][0]


Transform = Callable[[Any, torch.Tensor], torch.Tensor]


def fcall(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(m, {k: torch.ones_like(v) for k, v in m.state_dict().items()}, (x,))


def jac_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    return jacrev(lambda z: m(z).sum(0))(x)


def jvp_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = jvp(lambda z: m(z), (x,), (torch.ones_like(x),))[1]
    return tangent


def per_sample(m: Any, x: torch.Tensor) -> torch.Tensor:
    params = {k: v.detach() for k, v in m.state_dict().items()}
    one = grad(lambda p, z: functional_call(m, p, (z[None],)).sum())
    return vmap(one, (None, 0))(params, x)[next(k for k in params if k.endswith("1.bias"))]


def vmapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return vmap(m)(x)


def hessian(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hessian(lambda z: m(z).sum(), x[:1])


def of_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.clone().requires_grad_()
    return torch.autograd.grad(m(z).sum(), z)[0]


def inputs_only(m: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.clone().requires_grad_()
    m(z).sum().backward(inputs=[z])
    assert z.grad is not None
    return z.grad


def of_params(m: Any, x: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(m(x).sum(), [p for p in m.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in grads])


def scripted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.trace(m, x)(x)


def exported(m: Any, x: torch.Tensor) -> torch.Tensor:
    module = torch.export.export(m, (x,)).module()
    out: torch.Tensor = module(x)
    return out


def _transformed(side: Side, transform: Transform) -> Values:
    """The transform's value, then a step."""
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    got = transform(model, _x(side)).detach()
    optimizer.zero_grad()
    go_on(side, model, optimizer, 1)
    return side.values(model) | {"transformed": got}


for _transform, _says in (
    (fcall, r"functional_call|torch\.func"),
    (jac_input, r"jacrev|torch\.func"),
    (jvp_input, r"jvp|torch\.func"),
    (per_sample, r"functional_call|torch\.func"),
    (vmapped, r"vmap|torch\.func"),
    (hessian, r"[Hh]essian"),
    (of_input, ""),
    (inputs_only, ""),
    (of_params, r"autograd\.grad"),
    (scripted, r"jit\.trace|torch\.jit"),
    (exported, r"torch\.export"),
):
    add(
        f"transforms: {_transform.__name__}",
        lambda side, t=_transform: _transformed(side, t),
        says=_says,
        wrappers=SHARDED if _transform in (fcall, per_sample) else WRAPPERS,
        workers=(1,) if _transform in (jvp_input, scripted, exported) else (1, 2, 3),  # theirs are no threads' business
    )


def anomaly(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model, x, y)


@case("transforms: anomaly detection")
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, y in batches(side)[:2]:
        if hasattr(side, "world"):  # it is of the process, and plain torch has threads
            with torch.autograd.set_detect_anomaly(True):
                mse(model, x, y).backward()
        else:
            mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


def _saved_elsewhere(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return mse(model, x, y)


add("transforms: save_on_cpu", lambda side: trained(side, two, _saved_elsewhere))


@case("transforms: a default dtype of float64")
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    data = batches(side)
    if hasattr(side, "world"):
        torch.set_default_dtype(torch.float64)
    try:
        for x, y in data[:2]:
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    return side.values(model)


@case("transforms: a default device")
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    x, y = batches(side)[0]
    with torch.device("meta"):
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


@case("transforms: forward and backward in another thread")
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, y in batches(side)[:2]:
        errors: list[BaseException] = []

        def work(x: torch.Tensor = x, y: torch.Tensor = y, errors: list[BaseException] = errors) -> None:
            try:
                mse(model, x, y).backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20.0)
        if thread.is_alive():
            raise Wrong("the thread does not end")
        if errors:
            raise errors[0]
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)
