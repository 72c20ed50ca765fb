"""A training program as data: a module, a loop, and the way it is wrapped. Hypothesis draws it, JSON keeps it.

The same description is interpreted for plain torch and for a wrapped model (`interpreted.py`), so that a difference
between them is a defect of the wrapper and not of the program. Every field has a default, which is the plainest thing
there is: a minimal program names only what it needs to go wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
KINDS = (
    "linear",
    "tanh",
    "norm",
    "batch norm",
    "scale",
    "mlp",
    "spare",
    "sometimes",
    "auxiliary",
    "counter",
    "twice",
    "detached",
    "dict",
    "tuple",
    "box",
    "distribution",
    "clamp",
    "decay",
    "codebook",
    "max norm",
    "weight norm",
    "spectral norm",
    "symmetric",
    "attention",
)
"""Of blocks; see `program_model.py`. The plain ones come first: hypothesis prefers them when it shrinks."""
HOOKS = ("", "forward", "forward pre", "full backward", "output", "parameter", "post accumulate")
EDITS = ("mul", "clamp", "copy", "data", "summon")
LOSSES = ("error", "auxiliary", "penalty", "two forwards", "again", "parts", "attribute")
SKIPS = ("", "drop", "forward", "backward")
OPTIMIZERS = ("SGD", "AdamW", "Adam", "RMSprop", "Adagrad")
SCHEDULERS = ("", "step", "exponential", "lambda", "cosine", "one cycle", "sequential")
HYPER: dict[str, tuple[dict[str, float], ...]] = {
    "SGD": ({"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": ({"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.5}),
    "Adam": ({"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": ({"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}),
    "Adagrad": ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Block:
    """One layer of the module.

    Attributes:
        kind: of `KINDS`.
        unit: whether it is gathered by itself; else it is of the root.
        frozen: "all", "first" (parameter) or none of it, when it is wrapped.
        hook: of `HOOKS`.
        hook_after: whether the hook is registered after wrapping.
        dtype: that it computes in, where it is not the module's.
    """

    kind: str = "linear"
    unit: bool = True
    frozen: str = ""
    hook: str = ""
    hook_after: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Net:
    """The module.

    Attributes:
        blocks: its layers.
        calls: which of them forward applies, in this order; a layer may come twice, or never.
        tie: whether the last linear layer has the first one's weight.
        checkpoint: "reentrant", "not reentrant" or no activation checkpointing of the layers.
        returns: what forward returns: "tensor", "dict" or "object".
        dtype: of parameters and inputs.
    """

    blocks: tuple[Block, ...] = (Block(),)
    calls: tuple[int, ...] = (0,)
    tie: bool = False
    checkpoint: str = ""
    returns: str = "tensor"
    dtype: str = "f32"


@dataclass(frozen=True)
class Op:
    """One thing that the loop does; which attributes count depends on `kind`.

    Attributes:
        kind: "train", "evaluate", "edit", "load state", "save", "load", "optimizer", "group", "freeze", "mode",
            "zero", "step".
        micro: "train": backwards before the step.
        no_sync: "train": all of them but the last are inside `no_sync()`.
        loss: "train": of `LOSSES`.
        clip: "train": the norm that gradients are clipped to; 0 = they are not.
        zero: "train": "after" the step, "before" the backward, "not" at all, or to "zeros" after it.
        skip: "train": of `SKIPS`: gradients are dropped, or an error in forward or backward is caught and they are.
        at: "train": before which call the error is raised.
        flag: "train": whose layers that are used sometimes are used: "none", "all", "rank 1".
        how: "evaluate": "no_grad", "inference_mode", "grad"; "edit": of `EDITS`; "optimizer": "same", "carried" (the
            old one's state is loaded) or another of `OPTIMIZERS`; "group": the key; "zero": "optimizer" or "model".
        block: "edit", "freeze": which layer.
        on: "freeze", "mode": to which side.
        value: "group": of the key.
    """

    kind: str = "train"
    micro: int = 1
    no_sync: bool = False
    loss: str = "error"
    clip: float = 0.0
    zero: str = "after"
    skip: str = ""
    at: int = 0
    flag: str = "none"
    how: str = ""
    block: int = 0
    on: bool = False
    value: float = 0.0


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        strategy: of `STRATEGIES`.
        mapped: whether parameters are mapped from a server of this host; else it is as between hosts.
        workers: how many.
        shards: shard servers.
        net: the module.
        loop: what is done with it.
        optimizer: of `OPTIMIZERS`.
        hyper: which of its hyperparameters, an index into `HYPER`.
        groups: 1 or 2 parameter groups.
        torchs: whether the optimizer is torch's own (NO_SHARD).
        scheduler: of `SCHEDULERS`.
        first_differ: whether only rank 0 has the right first values.
    """

    strategy: str = "FULL_SHARD"
    mapped: bool = False
    workers: int = 1
    shards: int = 1
    net: Net = Net()
    loop: tuple[Op, ...] = (Op(),)
    optimizer: str = "SGD"
    hyper: int = 0
    groups: int = 1
    torchs: bool = False
    scheduler: str = ""
    first_differ: bool = False

    def plainest(self) -> Program:
        """The same program without what has no effect in it."""
        blocks = tuple(b if b.hook else replace(b, hook_after=False) for b in self.net.blocks)
        uses = any(b.kind == "sometimes" for b in blocks)
        keeps = any(b.kind == "auxiliary" for b in blocks)
        loop, saved = list[Op](), False
        for op in self.loop:
            saved |= op.kind == "save"
            if op.kind == "load" and not saved:
                continue
            if op.kind == "train":
                op = replace(
                    op,
                    flag=op.flag if uses and (op.flag != "rank 1" or self.workers > 1) else "none",
                    loss="error" if op.loss == "auxiliary" and not keeps else op.loss,
                    clip=0.0 if op.skip else op.clip,
                )
            loop.append(op)
        net = replace(self.net, blocks=blocks)
        return replace(self, net=net, loop=tuple(loop), first_differ=self.first_differ and self.workers > 1)

    def to_json(self) -> str:
        """Without what is as by default."""
        return json.dumps(_short(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that `to_json` wrote."""
        content = json.loads(text)
        net = content.pop("net", {})
        blocks = tuple(Block(**block) for block in net.pop("blocks", [{}]))
        calls = tuple(net.pop("calls", (0,)))
        loop = tuple(Op(**op) for op in content.pop("loop", [{}]))
        return cls(net=Net(blocks=blocks, calls=calls, **net), loop=loop, **content)

    @classmethod
    def read(cls, path: Path) -> Program:
        """The program in a file."""
        return cls.from_json(path.read_text(encoding="utf-8"))

    def features(self) -> frozenset[str]:
        """What in it is not as by default, of strategy, mapping and numbers aside: what a finding needs."""
        found = {f"{f.name}={_value(self, f.name)}" for f in _changed(self) if f.name not in NUMBERS}
        found |= {
            f"net.{f.name}={_value(self.net, f.name)}" for f in _changed(self.net) if f.name not in ("blocks", "calls")
        }
        for block in self.net.blocks:
            found |= {f"block.{f.name}={_value(block, f.name)}" for f in _changed(block)}
        calls = self.net.calls
        found |= {"called twice"} if len(set(calls)) < len(calls) else set()
        found |= {"never called"} if set(range(len(self.net.blocks))) - set(calls) else set()
        for op in self.loop:
            found |= {
                f"op.{f.name}={_value(op, f.name)}" for f in _changed(op) if f.name not in ("at", "block", "value")
            }
        return frozenset(found)


NUMBERS = ("strategy", "mapped", "workers", "shards", "net", "loop", "hyper")


def _changed(value: Any) -> list[Any]:
    return [f for f in fields(value) if getattr(value, f.name) != f.default]


def _value(value: Any, name: str) -> Any:
    return getattr(value, name)


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_short(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return {f.name: _short(getattr(value, f.name)) for f in _changed(value)}


# ---------------------------------------------------------------------- drawing


def _mostly(plain: Any, *others: Any, of: int = 6) -> st.SearchStrategy[Any]:
    """`plain` in `of - 1` of `of` draws; it is also what the others shrink to."""
    return st.integers(0, of - 1).flatmap(lambda n: st.sampled_from(others) if n == of - 1 else st.just(plain))


def _one_of_many(plain: Any, others: tuple[Any, ...], of: int) -> st.SearchStrategy[Any]:
    return _mostly(plain, *(each for each in others if each != plain), of=of)


PLAIN_KINDS = ("linear", "tanh", "norm", "batch norm", "scale", "mlp")

blocks = st.builds(
    Block,
    kind=st.one_of(st.sampled_from(PLAIN_KINDS), st.sampled_from(KINDS)),
    unit=_mostly(True, False, of=4),
    frozen=_mostly("", "all", "first", of=6),
    hook=_one_of_many("", HOOKS, of=8),
    hook_after=st.booleans(),
    dtype=_mostly("", "bf16", "f64", of=20),
)


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Modules of one to four layers, most of which are applied once, in their order."""
    layers = tuple(draw(st.lists(blocks, min_size=1, max_size=4)))
    in_order = tuple(range(len(layers)))
    any_order = st.lists(st.integers(0, len(layers) - 1), min_size=1, max_size=5).map(tuple)
    return Net(
        blocks=layers,
        calls=draw(any_order) if draw(_mostly(False, True, of=4)) else in_order,
        tie=draw(_mostly(False, True, of=8)),
        checkpoint=draw(_mostly("", "not reentrant", "reentrant", of=10)),
        returns=draw(_mostly("tensor", "dict", "object", of=10)),
        dtype=draw(_mostly("f32", "bf16", "f64", of=12)),
    )


@st.composite
def steps(draw: st.DrawFn, calls: int) -> Op:
    """A training step; most are plain."""
    micro = draw(_mostly(1, 2, 3, of=5))
    skip = draw(_one_of_many("", SKIPS, of=8))
    return Op(
        micro=micro,
        no_sync=micro > 1 and draw(_mostly(True, False, of=3)),
        loss=draw(_one_of_many("error", LOSSES, of=6)),
        clip=draw(_mostly(0.0, 0.1, 10.0, of=6)),
        zero=draw(_mostly("after", "before", "not", "zeros", of=5)),
        skip=skip,
        at=draw(st.integers(0, calls - 1)) if skip in ("forward", "backward") else 0,
        flag=draw(st.sampled_from(("none", "all", "rank 1"))),
    )


@st.composite
def others(draw: st.DrawFn, layers: int) -> Op:
    """What loops do between steps."""
    kind = draw(
        st.sampled_from(
            ("evaluate", "mode", "save", "load", "load state", "freeze", "group", "optimizer", "zero", "edit", "step")
        )
    )
    block = st.integers(0, layers - 1)
    if kind == "evaluate":
        return Op(kind, how=draw(st.sampled_from(("no_grad", "inference_mode", "grad"))))
    if kind == "edit":
        return Op(kind, how=draw(st.sampled_from(EDITS)), block=draw(block))
    if kind == "optimizer":
        return Op(kind, how=draw(st.sampled_from(("same", "carried", "AdamW", "SGD"))))
    if kind == "freeze":
        return Op(kind, block=draw(block), on=draw(st.booleans()))
    if kind == "mode":
        return Op(kind, on=draw(st.booleans()))
    if kind == "zero":
        return Op(kind, how=draw(st.sampled_from(("optimizer", "model"))))
    if kind == "group":
        key, value = draw(st.sampled_from((("lr", 0.03), ("lr", 0.0), ("weight_decay", 0.2), ("momentum", 0.9))))
        return Op(kind, how=key, value=value)
    return Op(kind)


@st.composite
def programs(draw: st.DrawFn, strategies: tuple[str, ...] = STRATEGIES) -> Program:
    """Training programs, half of whose operations are training steps; the last one is."""
    net = draw(nets())
    training, between = steps(len(net.calls)), others(len(net.blocks))
    loop = [*draw(st.lists(st.one_of(training, between), max_size=5)), draw(training)]
    strategy = draw(st.sampled_from(strategies))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    return Program(
        strategy=strategy,
        mapped=draw(st.booleans()),
        workers=draw(st.sampled_from((1, 2))),
        shards=draw(_mostly(1, 2, of=4)),
        net=net,
        loop=tuple(loop),
        optimizer=optimizer,
        hyper=draw(st.integers(0, len(HYPER[optimizer]) - 1)),
        groups=draw(_mostly(1, 2, of=5)),
        torchs=strategy == "NO_SHARD" and draw(st.booleans()),
        scheduler=draw(_one_of_many("", SCHEDULERS, of=4)),
        first_differ=draw(_mostly(False, True, of=10)),
    ).plainest()
