"""Modules: what forward returns and keeps, what is frozen, unused, tied, embedded, hooked, of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from case_parts import WIDTH, Block, batches, go_on, mse, three, trained, two
from case_table import SHARDED, add, case
from sides import Side, Values, built

# ---------------------------------------------------------------------- gradients of gradients, losses from elsewhere


def _penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - y).square().mean() + (grad.norm(dim=1) - 1).square().mean()


for _units in ((), (Block,)):
    _by = " and ".join(u.__name__ for u in _units) or "the root alone"
    add(f"modules: gradient penalty, units {_by}", lambda side, u=_units: trained(side, three, _penalty, units=u))


class Routed(nn.Module):
    """A layer that keeps a balance loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ff = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g = self.gate(x).softmax(-1)
        self.aux = self.ff(g).square().mean()
        return x + g


class Experts(nn.Module):
    """Layers with a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _balance(model: Any) -> torch.Tensor:
    return sum((m.aux for m in model.modules() if isinstance(m, Routed)), start=torch.zeros(()))


def _only_balance(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model(x)
    return _balance(model)


add(
    "modules: a loss from attributes beside the output's",
    lambda side: trained(side, Experts, lambda m, x, y: mse(m, x, y) + _balance(m), units=(Routed,)),
    says=r"whose loss comes from an attribute",
)
add(
    "modules: a loss from attributes alone",
    lambda side: trained(side, Experts, _only_balance, optimizer="SGD", units=(Routed,)),
    wrappers=SHARDED,  # the head has no gradient; torch's DDP looks for parameters in the output
)


class Overlapping(nn.Module):
    """A weight that has memory in common with another tensor of the module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        if how == "data":
            self.dec.weight.data = self.enc.weight.data
        elif how == "a transposed view":
            self.dec.weight = nn.Parameter(self.enc.weight.t())
        elif how == "a slice":
            self.head.weight = nn.Parameter(self.dec.weight[2:3])
        else:
            self.dec.register_buffer("w", self.enc.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dec(torch.tanh(self.enc(x)))) + sum(0.01 * w.square().sum() for w in self.buffers())


for _how in ("data", "a transposed view", "a slice", "a buffer"):
    add(
        f"modules: memory in common, {_how}",
        lambda side, how=_how: trained(side, lambda: Overlapping(how), optimizer="SGD", units=(nn.Linear,)),
        says=r"has memory in common with another parameter",
    )


def _another_head(module: Any) -> None:
    module[2] = built(lambda: nn.Linear(WIDTH, 1), 7)


def _one_more_layer(module: Any) -> None:
    module.append(built(lambda: nn.Linear(1, 1), 7))


def _changed(side: Side, change: Callable[[Any], None], made: str) -> Values:
    """A change of the module between wrapping and training."""
    model: Any = side.wrap(built(three), unit_types=(Block,))
    if made == "after it":
        change(side.inner(model))
    opt = side.optimizer("SGD", model.parameters(), lr=0.1)
    if made != "after it":
        before = set(model.parameters())
        change(side.inner(model))
        if made == "before it and told":
            opt.add_param_group({"params": [p for p in side.inner(model).parameters() if p not in before]})
    go_on(side, model, opt, 0, 3)
    return side.values(model)


for _what, _change in (("a head replaced", _another_head), ("a layer added", _one_more_layer)):
    for _made in ("before it", "after it", "before it and told"):
        add(
            f"modules: {_what} after wrapping, the optimizer made {_made}",
            lambda side, change=_change, made=_made: _changed(side, change, made),
            says=r"replaced or added after wrapping",
        )


def _there_and_back(module: Any) -> None:
    module[0].bfloat16()
    module.float()


def _parametrized(module: Any) -> None:
    parametrize.register_parametrization(module[2], "weight", Doubled())


def _pruned(module: Any) -> None:
    prune.l1_unstructured(module[2], "weight", 0.5)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _converted(side: Side, change: Callable[[Any], Any], dtype: torch.dtype) -> Values:
    """A change of the module between two steps."""
    model: Any = side.wrap(built(three), unit_types=(Block,))
    opt = side.optimizer("SGD", model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(side)[:3]):
        if i == 1:
            change(side.inner(model))
        used = dtype if i else torch.float32
        mse(model, x.to(used), y.to(used)).backward()
        opt.step()
        opt.zero_grad()
    return side.values(model)


for _what, _change, _dtype in (
    ("double()", lambda module: module.double(), torch.float64),
    ("bfloat16() and float()", _there_and_back, torch.float32),
    ("a parametrization", _parametrized, torch.float32),
    ("pruning", _pruned, torch.float32),
):
    add(
        f"modules: {_what} after wrapping",
        lambda side, change=_change, dtype=_dtype: _converted(side, change, dtype),
        says=r"`double\(\)`, `half\(\)`, `to\(\)`",
    )


class Kept:
    """An object that holds a tensor."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Policy(nn.Module):
    """Returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.log_std = nn.Linear(WIDTH, 1), nn.Parameter(torch.zeros(1))

    def forward(self, h: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mu(h), self.log_std.exp())


class Boxed(nn.Module):
    """Returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> Kept:
        return Kept(torch.tanh(self.a(h)))


class Agent(nn.Module):
    """Blocks, boxes and a policy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.boxed = nn.ModuleList(Boxed() for _ in range(4))
        self.policy = Policy()

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        for block in self.blocks:
            x = block(x)
        for boxed in self.boxed:
            x = boxed(x).h
        return self.policy(x)


def _surprise(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -model(x).log_prob(y).mean()


for _units in ((), (Block,), (Block, Policy), (Block, Boxed, Policy), (Boxed,)):
    _by = " and ".join(u.__name__ for u in _units) or "the root alone"
    add(
        f"modules: forward returns a distribution, units {_by}",
        lambda side, u=_units: trained(side, Agent, _surprise, units=u),
    )

# ---------------------------------------------------------------------- evaluation


def _evaluated(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        model(x)
    loss = mse(model, x, y)
    with torch.inference_mode():
        model(x)
    return loss


add("modules: inference_mode before and between steps", lambda side: trained(side, three, _evaluated))


@case("modules: inference_mode before and between steps, bfloat16", wrappers=SHARDED, tolerance=0.03)
def _(side: Side) -> Values:
    ours = getattr(side, "world", None) is not None
    return trained(side, three, _evaluated, **({"mixed_precision": torch.bfloat16} if ours else {}))


@case("modules: state_dict and load_state_dict under inference_mode")
def _(side: Side) -> Values:
    model = side.wrap(built(three), unit_types=(Block,))
    with torch.inference_mode():
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    x, y = batches(side)[0]
    mse(model, x, y).backward()
    optimizer.step()
    return side.values(model)


@case("modules: evaluation under inference_mode between steps, each layer a unit")
def _(side: Side) -> Values:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    model = side.wrap(built(make), unit_types=(nn.Linear,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, _ in batches(side)[:3]:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(x)
    return side.values(model)


# ---------------------------------------------------------------------- frozen, unused, shared


def _at(begin: int, what: Callable[[Any], Any]) -> Callable[[int, Any], None]:
    def each(step: int, module: Any) -> None:
        if step == begin:
            what(module)

    return each


def _frozen_until_2(step: int, module: Any) -> None:
    module[0][0].weight.requires_grad_(step >= 2)


DECAYS = {"lr": 0.01, "weight_decay": 0.1}
add(
    "modules: frozen when wrapped, trained from the third step on",
    lambda side: trained(
        side,
        steps=4,
        hyper=DECAYS,
        prepare=lambda m: m[0].requires_grad_(False),
        each=_at(2, lambda m: m[0].requires_grad_(True)),
    ),
    says=r"frozen when wrapped and trained later",
)
add(
    "modules: frozen from the third step on",
    lambda side: trained(side, steps=4, hyper=DECAYS, each=_at(2, lambda m: m[0].requires_grad_(False))),
)
add(
    "modules: a weight of a block frozen for two steps",
    lambda side: trained(side, steps=4, hyper=DECAYS, each=_frozen_until_2),
)


class Optional(nn.Module):
    """A layer that is used when `use` says so, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.spare, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.a(x)
        return self.head(self.c(self.b(x) if use else x))


def _unused(side: Side, use: Callable[[int, int], bool], optimizer: str, hyper: dict[str, float]) -> Values:
    model = side.wrap(built(Optional), unit_types=(Block,))
    made = side.optimizer(optimizer, model.parameters(), **hyper)
    for step, (x, y) in enumerate(batches(side)[:4]):
        made.zero_grad()
        (model(x, use(step, side.rank)) - y).square().mean().backward()
        made.step()
    return side.values(model)


for _optimizer, _hyper in (
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1}),
):
    for _when, _use in (
        ("never used", lambda step, rank: False),
        ("used on rank 1 alone", lambda step, rank: rank == 1),
        ("used every second step", lambda step, rank: step % 2 == 1),
    ):
        _with = f"{_optimizer}{' with momentum' if 'momentum' in _hyper else ''}"
        add(
            f"modules: a layer {_when}, {_with}",
            lambda side, u=_use, o=_optimizer, h=_hyper: _unused(side, u, o, h),
            says=r"other units than each other" if "alone" in _when else "",
        )


class Again(nn.Linear):
    """A unit that is applied twice."""


class AgainNorm(nn.LayerNorm):
    """The same of a norm."""


class Twice(nn.Module):
    """A unit applied twice in a row, with a frozen weight."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.b: Any = kind(WIDTH) if kind is AgainNorm else kind(WIDTH, WIDTH)
        self.b.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.b(self.a(x))))


for _kind in (AgainNorm, Again):
    add(
        f"modules: {_kind.__bases__[0].__name__} with a frozen weight, twice in a row",
        lambda side, k=_kind: trained(side, lambda: Twice(k), optimizer="SGD", hyper={"lr": 0.1}, units=(k,)),
    )


class Reentrant(nn.Module):
    """A unit used twice, each time inside reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDTH, WIDTH), Again(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.block, h, use_reentrant=True)
        return self.head(h)


add(
    "modules: a block used twice inside reentrant checkpointing",
    lambda side: trained(side, Reentrant, units=(Again,)),
    says=r"a unit used more than once inside `checkpoint",
)


class Detached(nn.Module):
    """A weight used twice, once detached."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.lin, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            stopped = x @ self.lin.weight.detach()
            return stopped + self.lin(x)
        return self.lin(x) + x @ self.lin.weight.detach()


def _detached(side: Side, *, first: bool) -> Values:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached(first=first), nn.Linear(WIDTH, 1))

    model = side.wrap(built(make), unit_types=(Detached,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    x, y = batches(side)[0]
    x = x.clone().requires_grad_()
    mse(model, x, y).backward()
    optimizer.step()
    assert x.grad is not None
    return side.values(model) | {"gradient of the input": x.grad}


add("modules: a weight used detached before it is used", lambda side: _detached(side, first=True))
add("modules: a weight used detached after it is used", lambda side: _detached(side, first=False))

# ---------------------------------------------------------------------- torch's own layers as units


class Attention(nn.Module):
    """Attention reads its projection's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mha, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.stack([x, x * 2, x.flip(1)], 1)
        return self.head(self.mha(h, h, h)[0].mean(1))


class Encoder(nn.Module):
    """The encoder layer has a fast path for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.enc, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.enc(torch.stack([x, x * 2, x.flip(1)], 1)).mean(1))


class Recurrent(nn.Module):
    """The recurrent layers read flat weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(torch.stack([x, x * 2, x.flip(1)], 1))[0].mean(1))


def _evaluated_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return mse(model, x, y)


for _net, _units in (
    (Attention, (nn.Linear,)),
    (Attention, (nn.MultiheadAttention,)),
    (Encoder, (nn.TransformerEncoderLayer,)),
    (Encoder, (nn.Linear,)),
    (Encoder, (nn.MultiheadAttention,)),
    (Recurrent, (nn.LSTM,)),
    (Recurrent, ()),
):
    _by = " and ".join(u.__name__ for u in _units) or "the root alone"
    add(
        f"modules: {_net.__name__}, units {_by}",
        lambda side, n=_net, u=_units: trained(side, n, _evaluated_first, optimizer="SGD", hyper={"lr": 0.1}, units=u),
        says=r"MultiheadAttention" if _units == (nn.Linear,) else "",
    )

# ---------------------------------------------------------------------- how units lie in a model


class Leaf(nn.Linear):
    """A unit inside a unit."""


class Nested(nn.Module):
    """A unit with units of its own class in it, used twice, and parameters that it reads before and after them."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.before, self.after, self.last = (kind(WIDTH, WIDTH) for kind in (nn.Linear, nn.Linear, Leaf))
        self.inside = Nested(depth - 1) if depth else Leaf(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        return x + self.after(self.last(self.inside(x) + self.inside(x * 2)))


class Siamese(nn.Module):
    """An encoder that makes its own target: in one forward it runs with a gradient and without."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor, self.head = Block(), Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            before = self.encoder(x * 2)
        predicted = self.predictor(self.encoder(x))
        with torch.no_grad():
            after = self.encoder(x * 3)
        return self.head(predicted - before * after)


class Parts(nn.Module):
    """Parameters in lists, dicts, and under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})
        self.again, self.plain, self.head = self.many, [self.many[0]], nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.many:
            x = torch.tanh(x @ weight)
        return self.head(x @ self.plain[0] + self.named["a"] + x @ self.again[1])


class Packed(nn.Module):
    """Units that return packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.second, self.head = nn.GRU(2 * WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([1 + i % 3 for i in range(len(x))])
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.stack([x, x * 2, x.flip(1)], 1), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.second(self.first(packed)[0])[1][0])


def _frozen_inside(module: Any) -> None:
    module[0].inside.requires_grad_(False)
    module[1].before.requires_grad_(False)


def _nested() -> nn.Module:
    return nn.Sequential(Nested(), Nested(), nn.Linear(WIDTH, 1))


for _name, _net, _units, _prepare in (
    ("units in units", _nested, (Nested, Leaf), lambda m: None),
    ("units in units, some frozen", _nested, (Nested, Leaf), _frozen_inside),
    ("a unit under no_grad before and after its use", Siamese, (Block,), lambda m: None),
    ("parameters in lists and dicts", lambda: nn.Sequential(Parts(), nn.Linear(1, 1)), (Parts,), lambda m: None),
    ("units that return packed sequences", Packed, (nn.LSTM, nn.GRU), lambda m: None),
):
    add(
        f"modules: {_name}",
        lambda side, n=_net, u=_units, p=_prepare: trained(
            side, n, optimizer="SGD", hyper={"lr": 0.1}, units=u, prepare=p
        ),
    )


class Saving(nn.Module):
    """A unit that says itself what autograd saves."""

    def __init__(self, how: Callable[[], Any]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.how():
            return x + self.b(torch.tanh(self.a(x)))


for _name, _how in (
    ("as it is", lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)),
    ("detached", lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
    ("on the CPU", torch.autograd.graph.save_on_cpu),
):
    add(
        f"modules: what a unit saves is saved {_name}",
        lambda side, h=_how: trained(
            side, lambda: nn.Sequential(*(Saving(h) for _ in range(5)), nn.Linear(WIDTH, 1)), units=(Saving,)
        ),
    )

# ---------------------------------------------------------------------- hooks


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _post_accumulate(module: nn.Module) -> None:
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(_halve)


def _mask(module: Any) -> None:
    mask = (torch.arange(2 * WIDTH) % 2).float()[:, None]
    module[0][0].weight.register_hook(lambda grad: grad * mask)


def _full_backward(module: Any) -> None:
    module[1].register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))
    module[0].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))


def _with_weights(module: Any) -> None:
    module[1].register_forward_hook(lambda m, _, out: out + m[2].weight.sum())
    module[0].register_forward_pre_hook(lambda m, args: (args[0] * m[0].weight.norm(),))


def _replaced(module: Any) -> None:
    module[0].register_forward_hook(lambda _, __, out: out * 1.5)


for _what, _register, _says in (
    ("post-accumulate hooks", _post_accumulate, r"register_post_accumulate_grad_hook|post-accumulate"),
    ("a parameter's hook that masks", _mask, ""),
    ("backward hooks of modules", _full_backward, ""),
    ("forward hooks that use weights", _with_weights, ""),
    ("a forward hook that replaces the output", _replaced, ""),
):
    add(f"modules: {_what}, before wrapping", lambda side, r=_register: trained(side, prepare=r), says=_says)
    add(f"modules: {_what}, after wrapping", lambda side, r=_register: trained(side, ready=r), says=_says)

# ---------------------------------------------------------------------- embeddings


class Embedded(nn.Module):
    """An embedding beside a block."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.emb, self.block, self.head = make(), Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.abs() * 5).long().clamp(max=19)
        e = self.emb(index) if isinstance(self.emb, nn.EmbeddingBag) else self.emb(index[:, 0])
        return self.head(self.block(e + x))


class Normed(nn.Module):
    """An embedding that changes all of its rows in forward, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block, self.head = nn.Embedding(20, WIDTH, max_norm=1.0), Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(torch.arange(20)).mean(0) + x))


for _what, _make in (
    ("sparse", lambda: nn.Embedding(20, WIDTH, sparse=True)),
    ("scaled by frequency", lambda: nn.Embedding(20, WIDTH, scale_grad_by_freq=True)),
    ("with padding", lambda: nn.Embedding(20, WIDTH, padding_idx=0)),
    ("in a bag", lambda: nn.EmbeddingBag(20, WIDTH)),
    ("in a sparse bag", lambda: nn.EmbeddingBag(20, WIDTH, sparse=True, mode="sum")),
):
    for _units in ((Block,), (Block, nn.Embedding)):
        add(
            f"modules: an embedding {_what}, {'a unit' if len(_units) > 1 else 'in the root'}",
            lambda side, m=_make, u=_units: trained(
                side, lambda: Embedded(m), optimizer="SGD", hyper={"lr": 0.1}, units=u
            ),
            says=r"sparse=True|[Ss]parse embedding|[Ss]parse gradient" if "sparse" in _what else "",
        )
for _units in ((Block,), (Block, nn.Embedding)):
    add(
        f"modules: an embedding with max_norm, {'a unit' if len(_units) > 1 else 'in the root'}",
        lambda side, u=_units: trained(side, Normed, optimizer="SGD", hyper={"lr": 0.1}, units=u),
        says=r"max_norm",
    )


class Clamped(nn.Module):
    """Forward writes into a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.2, 0.2)
            self.book.mul_(0.9)
        return self.head(self.lin(x) + self.book)


add(
    "modules: forward clamps a weight and moves a codebook",
    lambda side: trained(side, Clamped),
    says=r"forward writes|writes? into a parameter|written in forward",
)

# ---------------------------------------------------------------------- dtypes


class Extra(nn.Module):
    """A block, and a parameter of any kind."""

    def __init__(
        self, value: torch.Tensor, *, frozen: bool, use: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        super().__init__()
        self.a, self.head, self.use = Block(), nn.Linear(WIDTH, 1), use
        self.p = nn.Parameter(value, requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.head(h + (self.use(self.p) if self.use else 0.0))


class Mixed(nn.Module):
    """Blocks in bf16, a norm in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = Block().bfloat16(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.a(x.bfloat16()).float()).bfloat16()).float()


DTYPES_SAID = r"(float64|f64|int8|complex).*(ignored_parameters|refused|error|instead)"

for _dtype, _near in ((torch.float64, 2e-5), (torch.bfloat16, 0.03), (torch.float16, 0.03)):
    add(
        f"modules: all of it in {str(_dtype).removeprefix('torch.')}",
        lambda side, d=_dtype: trained(
            side, lambda: two().to(d), optimizer="SGD", hyper={"lr": 0.1}, dtype=d, units=(Block,)
        ),
        says=DTYPES_SAID if _dtype is torch.float64 else "",
        tolerance=_near,
    )
add(
    "modules: blocks in bfloat16, the root's norm in float32",
    lambda side: trained(side, Mixed, optimizer="SGD", hyper={"lr": 0.1}),
    says=r"several dtypes in one unit",
    tolerance=0.03,
)


class Adapted(nn.Module):
    """A frozen block in a dtype of its own, and what is trained on it in f32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.base = Block().to(dtype).requires_grad_(False)
        self.adapter = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x.to(self.dtype)).float()).mean(-1, keepdim=True)


for _dtype in (torch.bfloat16, torch.float16):
    add(
        f"modules: units in float32 on a frozen one in {str(_dtype).removeprefix('torch.')}",
        lambda side, d=_dtype: trained(side, lambda: Adapted(d), optimizer="SGD", hyper={"lr": 0.1}, units=(Block,)),
    )


@case("modules: units of several dtypes, compressed", wrappers=("FULL_SHARD", "HYBRID_SHARD"), tolerance=0.05)
def _(side: Side) -> Values:
    from axon_ps.parallel import MixedPrecision

    ours = getattr(side, "world", None) is not None
    packed = {"mixed_precision": MixedPrecision(wire_dtype="int8", reduce_dtype=torch.float32)} if ours else {}
    return trained(side, lambda: Adapted(torch.bfloat16), optimizer="SGD", hyper={"lr": 0.1}, units=(Block,), **packed)


def _float(p: torch.Tensor) -> torch.Tensor:
    return p.float()


for _what, _value, _frozen, _used in (
    ("complex64", torch.ones(WIDTH, dtype=torch.complex64), False, torch.abs),
    ("int8, frozen", torch.ones(WIDTH, dtype=torch.int8), True, _float),
    ("uint8, frozen", torch.ones(WIDTH, dtype=torch.uint8), True, _float),
    ("bool, frozen", torch.ones(WIDTH, dtype=torch.bool), True, _float),
    ("int64, frozen", torch.ones(WIDTH, dtype=torch.int64), True, _float),
    ("float8, frozen", torch.ones(WIDTH).to(torch.float8_e4m3fn), True, _float),
    ("no dimension", torch.tensor(0.5), False, _float),
    ("no dimension, frozen", torch.tensor(0.5), True, _float),
    ("no elements", torch.ones(0, 4), False, torch.sum),
    ("no elements, unused", torch.ones(0), False, None),
    ("float64 beside float32", torch.tensor(0.5, dtype=torch.float64), False, _float),
):
    add(
        f"modules: a parameter of {_what}",
        lambda side, v=_value, f=_frozen, u=_used: trained(
            side, lambda: Extra(v.clone(), frozen=f, use=u), optimizer="SGD", hyper={"lr": 0.1}
        ),
        says=r"parameters without elements" if not _value.numel() else DTYPES_SAID,
    )
