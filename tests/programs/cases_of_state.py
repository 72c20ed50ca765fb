"""State: what is saved, loaded, written to parameters, and which first values count."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from axon_ps.errors import AxonError
from case_parts import WIDTH, Block, batches, go_on, mse, small, three, two
from case_table import SERVED, SHARDED, Wrong, add, case
from sides import Side, Values, built

# ---------------------------------------------------------------------- first values


@case("state: rank 0 alone has the first values")
def _(side: Side) -> Values:
    module = built(small, seed=side.rank)
    with torch.no_grad():
        module[0].weight.fill_(float(side.rank))  # type: ignore[index, union-attr, operator]
    model = side.wrap(module)
    return side.values(model)


@case("state: rank 0 alone has the first buffers")
def _(side: Side) -> Values:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    module = built(lambda: module)
    module[1].running_mean.fill_(float(side.rank))  # type: ignore[union-attr, operator]
    model = side.wrap(module)
    return {name: value for name, value in side.values(model).items() if "running" in name}


# ---------------------------------------------------------------------- checkpoints


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def _released(side: Side, model: Any) -> None:
    if getattr(side, "strategy", "NO_SHARD") in SERVED:
        model.release()


def _named(side: Side, name: str) -> dict[str, str]:
    return {"name": name} if hasattr(side, "world") else {}


@case("state: running statistics are in a checkpoint", wrappers=SHARDED, workers=(1,))
def _(side: Side) -> Values:
    model = side.wrap(built(_normed), **_named(side, "m"))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, y in batches(side)[:3]:
        (model(x * 5 + 3) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    side.save(model, optimizer)
    _released(side, model)
    again = side.wrap(built(_normed, seed=5), **_named(side, "m"))
    side.load(again, side.optimizer("SGD", again.parameters(), lr=0.1))
    return side.values(again)


def _saved(side: Side, then: Callable[[Side, Any, Any], Values]) -> Values:
    model = side.wrap(built(small), **_named(side, "m"))
    optimizer = side.optimizer("AdamW", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0, 1)
    return then(side, model, optimizer)


def _uri(side: Any, name: str) -> str:
    return f"{side.uri}/{name}"


def saved_twice(side: Side, model: Any, optimizer: Any) -> Values:
    side.save(model, optimizer)
    go_on(side, model, optimizer, 1, 1)
    side.save(model, optimizer)
    go_on(side, model, optimizer, 2, 1)
    side.load(model, optimizer)
    return side.values(model)


def saved_over(side: Side, model: Any, optimizer: Any) -> Values:
    """The second checkpoint has the first one's place: it replaces it, or is refused; the first is never lost."""
    if not hasattr(side, "world"):
        return side.values(model)
    model.save_checkpoint(_uri(side, "one"), optimizer)
    before = side.values(model)
    go_on(side, model, optimizer, 1, 1)
    refused = False
    try:
        model.save_checkpoint(_uri(side, "one"), optimizer)
    except AxonError:
        refused = True
    after = side.values(model)
    model.load_checkpoint(_uri(side, "one"), optimizer)
    got = side.values(model)
    if any(not torch.equal(got[n], v) for n, v in (before if refused else after).items()):
        raise Wrong(f"the checkpoint has neither values (the second was {'' if refused else 'not '}refused)")
    return before


def relative(side: Side, model: Any, optimizer: Any) -> Values:
    """A relative path is of the worker's directory, or refused."""
    if hasattr(side, "world"):
        import os

        if side.rank == 0:
            Path(_uri(side, "there")).mkdir(parents=True, exist_ok=True)
        side.world.barrier("made")
        here = os.getcwd()
        os.chdir(_uri(side, "there"))
        try:
            model.save_checkpoint("relative", optimizer)
            if not Path("relative").exists():
                raise Wrong("a checkpoint at a relative path is not where the path says")
            model.load_checkpoint("relative", optimizer)
        finally:
            os.chdir(here)
    return side.values(model)


def _must_refuse(call: Callable[[Any, Any, Any], object], what: str) -> Callable[[Side, Any, Any], Values]:
    """It raises an error of ours on every rank; then training goes on with torch's values."""

    def then(side: Side, model: Any, optimizer: Any) -> Values:
        if hasattr(side, "world"):
            try:
                call(side, model, optimizer)
            except AxonError:
                pass
            else:
                raise Wrong(f"{what}: no error")
        go_on(side, model, optimizer, 1)
        return side.values(model)

    return then


def _no_directory(side: Any, model: Any, optimizer: Any) -> object:
    return model.save_checkpoint("/proc/checkpoint", optimizer)


def _a_file(side: Any, model: Any, optimizer: Any) -> object:
    place = Path(_uri(side, "file"))
    if side.rank == 0:
        place.write_text("not a checkpoint", encoding="utf-8")
    side.world.barrier("written")
    return model.save_checkpoint(str(place), optimizer)


def _missing(side: Any, model: Any, optimizer: Any) -> object:
    return model.load_checkpoint(_uri(side, "none"), optimizer)


def _other_layout(side: Any, model: Any, optimizer: Any) -> object:
    side.save(model, optimizer)
    other = side.wrap(built(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1))), name="other")
    return side.load(other, side.optimizer("AdamW", other.parameters(), lr=0.1))


def _no_json(side: Any, model: Any, optimizer: Any) -> object:
    return model.save_checkpoint(_uri(side, "extra"), optimizer, extra={"t": object()})


def without_optimizer(side: Side, model: Any, optimizer: Any) -> Values:
    values = side.values(model)
    if hasattr(side, "world"):
        model.save_checkpoint(_uri(side, "bare"))
        go_on(side, model, optimizer, 1, 1)
        model.load_checkpoint(_uri(side, "bare"))
        return side.values(model)
    return values


def while_summoned(side: Side, model: Any, optimizer: Any) -> Values:
    """It has the values that are read there."""
    values = side.values(model)
    if hasattr(side, "world"):
        with model.summon_full_params():
            model.save_checkpoint(_uri(side, "summoned"), optimizer)
        go_on(side, model, optimizer, 1, 1)
        model.load_checkpoint(_uri(side, "summoned"), optimizer)
        return side.values(model)
    return values


def pending(side: Side, model: Any, optimizer: Any) -> Values:
    """A checkpoint between backward and step does not disturb the step."""
    x, y = batches(side)[1]
    mse(model, x, y).backward()
    side.save(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return side.values(model)


def by_torch_save(side: Side, model: Any, optimizer: Any) -> Values:
    kept = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, kept)
    kept.seek(0)
    content = torch.load(kept)
    go_on(side, model, optimizer, 1, 1)
    model.load_state_dict(content["m"])
    return side.values(model)


def torchs_state(side: Side, model: Any, optimizer: Any) -> Values:
    """A state of torch's optimizer: its moments are loaded, or it is refused; not taken in silence without them."""
    plain = built(small)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for x, y in batches(side)[:2]:
        mse(plain, x, y).backward()
        theirs.step()
        theirs.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    go_on(side, model, optimizer, 2)
    return side.values(model)


def by_dcp(side: Side, model: Any, optimizer: Any) -> Values:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    content = get_model_state_dict(model)
    set_model_state_dict(model, {name: value * 0.5 for name, value in content.items()})
    go_on(side, model, optimizer, 1)
    return side.values(model)


for _name, _then, _options in (
    ("saved twice, the second is loaded", saved_twice, {}),
    ("saved twice at one place", saved_over, {}),
    ("a relative path", relative, {}),
    ("a place where nobody may write", _must_refuse(_no_directory, "/proc"), {}),
    ("a file in its place", _must_refuse(_a_file, "a file"), {}),
    ("none is there", _must_refuse(_missing, "no checkpoint"), {}),
    ("of another layout", _must_refuse(_other_layout, "another layout"), {}),
    ("inside summon_full_params()", while_summoned, {}),
    ("more that is no JSON", _must_refuse(_no_json, "no JSON"), {}),
    ("without the optimizer", without_optimizer, {}),
    ("between backward and step", pending, {"says": r"checkpoint.*under way|gradients were sent"}),
    ("by torch.save", by_torch_save, {"wrappers": (*SHARDED, "DDP")}),
    ("of torch's optimizer", torchs_state, {"says": r"load_state_dict|[Mm]oments are"}),
    ("by DCP's get_model_state_dict", by_dcp, {"wrappers": (*SHARDED, "DDP")}),
):
    add(
        f"checkpoints: {_name}",
        lambda side, then=_then: _saved(side, then),
        **{"wrappers": SHARDED, **_options},
    )


@case("checkpoints: written by rank 0 alone", wrappers=SERVED, workers=(2, 3), says="Every worker calls", timeout_s=8.0)
def _(side: Side) -> Values:
    model = side.wrap(built(small))
    optimizer = side.optimizer("AdamW", model.parameters(), lr=0.1)
    if side.rank == 0 and hasattr(side, "world"):
        side.save(model, optimizer)
    go_on(side, model, optimizer, 0)
    return side.values(model)


# ---------------------------------------------------------------------- under torch's checkpoint_wrapper


def _checkpointed() -> nn.Module:
    module = three()
    apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
    return module


def _state_of(side: Side, model: Any, optimizer: Any) -> Values:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _saved_by_torch(side: Side, model: Any, optimizer: Any) -> Values:
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    content: Values = torch.load(kept)
    return content


def _loaded(side: Side, model: Any, optimizer: Any) -> Values:
    model.load_state_dict(built(_checkpointed, seed=3).state_dict())
    return _state_of(side, model, optimizer)


def _own_back(side: Side, model: Any, optimizer: Any) -> Values:
    model.load_state_dict(model.state_dict())
    return _state_of(side, model, optimizer)


def _saved_and_loaded(side: Side, model: Any, optimizer: Any) -> Values:
    side.save(model, optimizer)
    go_on(side, model, optimizer, 3)
    side.load(model, optimizer)
    return _state_of(side, model, optimizer)


def _under_wrapper(side: Side, then: Callable[[Side, Any, Any], Values]) -> Values:
    model = side.wrap(built(_checkpointed), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0)
    return then(side, model, optimizer)


for _name, _then in (
    ("state_dict()", _state_of),
    ("torch.save(model.state_dict())", _saved_by_torch),
    ("load_state_dict()", _loaded),
    ("load_state_dict(model.state_dict())", _own_back),
    ("save and load a checkpoint", _saved_and_loaded),
):
    add(f"checkpoint_wrapper: {_name}", lambda side, t=_then: _under_wrapper(side, t), wrappers=SHARDED)

# ---------------------------------------------------------------------- load_state_dict


def _values() -> Values:
    values: Values = built(two, seed=3).state_dict()
    return values


def _prefixed() -> Values:
    return {f"module.{name}": value for name, value in _values().items()}


Load = Callable[[Any], object]
LOADS: dict[str, Load] = {
    "strict": lambda m: m.load_state_dict(_values()),
    "a name missing, strict": lambda m: m.load_state_dict({k: v for k, v in _values().items() if k != "1.bias"}),
    "a name missing, not strict": lambda m: m.load_state_dict(
        {k: v for k, v in _values().items() if k != "1.bias"}, strict=False
    ),
    "a name too many, strict": lambda m: m.load_state_dict(_values() | {"new.weight": torch.ones(2)}),
    "a name too many, not strict": lambda m: m.load_state_dict(_values() | {"new.weight": torch.ones(2)}, strict=False),
    "another shape": lambda m: m.load_state_dict(_values() | {"1.weight": torch.ones(5, 8)}),
    "another shape, not strict": lambda m: m.load_state_dict(_values() | {"1.weight": torch.ones(5, 8)}, strict=False),
    "names with module. before them": lambda m: m.load_state_dict(_prefixed()),
    "bfloat16 values": lambda m: m.load_state_dict({k: v.bfloat16() for k, v in _values().items()}),
    "nn.Parameter values": lambda m: m.load_state_dict({k: nn.Parameter(v) for k, v in _values().items()}),
}
INNER: dict[str, Load] = {
    "by the module itself": lambda m: m.load_state_dict(_values()),
    "by a part of it": lambda m: m[1].load_state_dict({"weight": torch.ones(1, WIDTH), "bias": torch.ones(1)}),
    "by a unit": lambda m: m[0].load_state_dict({k[2:]: v for k, v in _values().items() if k[0] == "0"}),
}


def _loaded_midway(side: Side, load: Load, *, inner: bool) -> Values:
    """A step, a load, a step. A load that raises has changed nothing; torch's has taken what fits: it is put back."""
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.01)
    go_on(side, model, optimizer, 0, 1)
    torchs = getattr(side, "strategy", "DDP") == "DDP"
    target: Any = side.inner(model) if inner or torchs else model
    before, raised = side.values(model), 0.0
    try:
        load(target)
    except (RuntimeError, ValueError):
        if inner:
            raise
        raised = 1.0
        if torchs:
            side.inner(model).load_state_dict(before)
        elif any(not torch.equal(value, before[name]) for name, value in side.values(model).items()):
            raise Wrong("load_state_dict() has raised, and values have changed") from None
    go_on(side, model, optimizer, 1, 1)
    return side.values(model) | {"raised": torch.tensor(raised)}


for _name, _load in LOADS.items():
    add(f"load_state_dict: {_name}", lambda side, f=_load: _loaded_midway(side, f, inner=False))
for _name, _load in INNER.items():
    add(
        f"load_state_dict: {_name}",
        lambda side, f=_load: _loaded_midway(side, f, inner=True),
        says=r"`load_state_dict\(\)` of a module inside the wrapped one",
    )

BAD: dict[str, Callable[[Side, torch.Tensor], Any]] = {
    "a meta tensor": lambda side, value: torch.empty_like(value, device="meta"),
    "an array of numpy": lambda side, value: value.numpy(),
    "None": lambda side, value: None,
    "a meta tensor on rank 0": lambda side, value: torch.empty_like(value, device="meta") if side.rank == 0 else value,
}


def _fails_midway(side: Side, bad: Callable[[Side, torch.Tensor], Any]) -> Values:
    """It raises on every rank, nothing of it is taken, and training goes on. (torch takes what came before.)"""
    model = side.wrap(built(small))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    go_on(side, model, optimizer, 0, 1)
    values = built(small, seed=3).state_dict()
    if hasattr(side, "world"):
        try:
            model.load_state_dict(values | {"0.bias": bad(side, values["0.bias"])})
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AxonError):
            pass
        else:
            raise Wrong("a value that cannot be copied was loaded")
    go_on(side, model, optimizer, 1)
    return side.values(model)


for _name, _bad in BAD.items():
    add(
        f"load_state_dict: fails midway at {_name}",
        lambda side, b=_bad: _fails_midway(side, b),
        wrappers=SHARDED,
        workers=(2, 3) if "rank 0" in _name else (1, 2, 3),
    )


@case("load_state_dict: assign", says=r"assign=True")
def _(side: Side) -> Values:
    model = side.wrap(built(two), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.01)
    go_on(side, model, optimizer, 0, 1)
    if not hasattr(side, "world"):  # in torch the optimizer has the old parameters then, and trains nothing
        model.load_state_dict(_values())
    else:
        (side.inner(model) if getattr(side, "strategy", "") == "DDP" else model).load_state_dict(_values(), assign=True)
    go_on(side, model, optimizer, 1, 1)
    return side.values(model)


# ---------------------------------------------------------------------- what is written to parameters

WRITES: dict[str, Callable[[Any, Any], object]] = {
    "param.data.fill_()": lambda model, m: m[0].weight.data.fill_(0.25),
    "fill_() under no_grad": lambda model, m: m[0].weight.fill_(0.25),
    "param.data = tensor": lambda model, m: setattr(m[0].weight, "data", torch.full((WIDTH, WIDTH), 0.25)),
    "clamp_() under no_grad": lambda model, m: m[0].weight.clamp_(-0.1, 0.1),
    "vector_to_parameters()": lambda model, m: nn.utils.vector_to_parameters(
        torch.full((sum(p.numel() for p in model.parameters()),), 0.25), model.parameters()
    ),
    "load_state_dict of a layer": lambda model, m: m[0].load_state_dict(
        {"weight": torch.full((WIDTH, WIDTH), 0.25), "bias": torch.zeros(WIDTH)}
    ),
    "nn.init": lambda model, m: nn.init.constant_(m[0].weight, 0.25),
    "another nn.Parameter": lambda model, m: setattr(m[0], "weight", nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))),
}


def _written(side: Side, write: Callable[[Any, Any], object], *, later: bool, summoned: bool) -> Values:
    model: Any = side.wrap(built(small))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    if later:
        go_on(side, model, optimizer, 0, 1)
    with torch.no_grad():
        if summoned and hasattr(model, "summon_full_params"):
            with model.summon_full_params():
                write(model, side.inner(model))
        else:
            write(model, side.inner(model))
    with torch.no_grad():
        out = model(batches(side)[9][0])
    go_on(side, model, optimizer, 1)
    return side.values(model) | {"output after the write": out}


for _name, _write in WRITES.items():
    for _later in (False, True):
        if _name == "another nn.Parameter":  # torch's optimizer would train the old one
            continue
        add(
            f"writes: {_name}, {'after a step' if _later else 'before the first'}",
            lambda side, w=_write, n=_later: _written(side, w, later=n, summoned=False),
            says=r"values between uses",
        )
    add(
        f"writes: {_name}, inside summon_full_params()",
        lambda side, w=_write: _written(side, w, later=True, summoned=True),
        wrappers=SHARDED,
        says=r"changes inside `summon_full_params\(\)`",
    )


@case("writes: a parameter is replaced after wrapping", says=r"replaced after wrapping|assign=True")
def _(side: Side) -> Values:
    model: Any = side.wrap(built(small))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    inner = side.inner(model)
    new = torch.full((WIDTH, WIDTH), 0.25)
    if hasattr(side, "world"):
        inner[0].weight = nn.Parameter(new)
    else:
        with torch.no_grad():
            inner[0].weight.copy_(new)
    go_on(side, model, optimizer, 1)
    return side.values(model)
