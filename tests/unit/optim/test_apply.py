"""What all optimizers share: the wire copy, the same bits however a slice is cut, and refusing what does not fit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.optim import create, names
from axon_ps.optim.base import AT_LEAST_0, Range, UpdateRule
from axon_ps.types import Array, DType, Hyper

TORCH_DTYPE = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}

# Per optimizer, the setting with the most state.
FULL: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.1},
    "adam": {"lr": 0.1, "amsgrad": 1.0, "weight_decay": 0.1},
    "adamw": {"lr": 0.1, "weight_decay": 0.1},
    "adagrad": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    "rmsprop": {"lr": 0.1, "momentum": 0.9, "centered": 1.0, "weight_decay": 0.1},
    "lion": {"lr": 0.1, "weight_decay": 0.1},
}


def test_every_optimizer_is_here() -> None:
    assert set(FULL) == set(names())


@pytest.mark.parametrize("dtype", list(TORCH_DTYPE))
@pytest.mark.parametrize("name", list(FULL))
def test_wire_copy_is_torchs_cast(oracle: Any, name: str, dtype: DType) -> None:
    ours = oracle.ours(name, [FULL[name]], 1001, 3, wire_dtype=dtype)
    theirs = torch.from_numpy(ours.param).to(TORCH_DTYPE[dtype])
    assert ours.wire.tobytes() == theirs.view(torch.uint8).numpy().tobytes()


SPECIAL = [0x7F800000, 0x7FC00000, 0xFF800001, 0x7F7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000]
"""An infinity, NaNs of several payloads (some that rounding by adding would carry into a number), the largest."""


@pytest.mark.parametrize("dtype", list(TORCH_DTYPE))
def test_wire_copy_is_encode_for_every_kind_of_number(dtype: DType) -> None:
    """A learning rate of 0 leaves the parameters, whatever they are, and copies them."""
    bits = np.arange(0, 2**32, 65519, dtype=np.uint64).astype(np.uint32)
    param = np.concatenate([bits, np.array(SPECIAL, np.uint32)])
    param = param.view(np.float32)
    wire, expected = np.zeros(param.size, dtype.numpy), np.zeros(param.size, dtype.numpy)
    cast.encode(param, expected, dtype)
    create("sgd").apply(param, np.zeros_like(param), (), wire, dtype, {"lr": 0.0}, 1, 1.0)
    numbers = ~np.isnan(param)
    assert (wire[numbers] == expected[numbers]).all()
    widened = np.empty(param.size, np.float32)
    cast.decode(wire, widened, dtype)
    assert np.isnan(widened[~numbers]).all()


def in_ranges(one: Callable[[slice], None]) -> None:
    edges = [0, 1, 4, 21, 22, 500, 1001]
    for start, stop in itertools.pairwise(edges):
        one(slice(start, stop))


def on_threads(one: Callable[[slice], None]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, [slice(start, min(start + 77, 1001)) for start in range(0, 1001, 77)]))


@pytest.mark.parametrize("ranges", [in_ranges, on_threads])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("name", list(FULL))
def test_bits_do_not_depend_on_ranges_or_threads(oracle: Any, name: str, dtype: DType, ranges: Any) -> None:
    whole = oracle.ours(name, [FULL[name]], 1001, 4, wire_dtype=dtype)
    oracle.assert_same_bits(whole, oracle.ours(name, [FULL[name]], 1001, 4, wire_dtype=dtype, ranges=ranges))


@pytest.mark.parametrize("name", list(FULL))
def test_no_wire_copy(name: str) -> None:
    optimizer, values = create(name), create(name).validate(FULL[name])
    param, grad = np.ones(10, np.float32), np.full(10, 0.5, np.float32)
    state = tuple(np.zeros(10, np.float32) for _ in optimizer.state_names([values]))
    wire = np.zeros(10, np.uint16)
    copies = [a.copy() for a in (param, *state)]
    optimizer.apply(param, grad, state, None, DType.BF16, values, 1, 1.0)
    optimizer.apply(copies[0], grad, tuple(copies[1:]), wire, DType.BF16, values, 1, 1.0)
    assert param.tobytes() == copies[0].tobytes()
    assert (param != 1.0).all()
    assert (grad == 0.5).all()


class Unsumming(UpdateRule):
    """An optimizer as a plugin has it, whose `_update` knows nothing of digests."""

    name = "unsumming"
    defaults: ClassVar[Mapping[str, float]] = {"lr": 0.1}
    ranges: ClassVar[Mapping[str, Range]] = {"lr": AT_LEAST_0}

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        return ("total",)

    def _update(
        self,
        param: Array,
        grad: Array,
        state: tuple[Array, ...],
        wire: Array | None,
        hyper: Hyper,
        update: int,
        grad_scale: float,
    ) -> None:
        state[0][:] += grad * np.float32(grad_scale)
        param -= np.float32(hyper["lr"]) * state[0]
        self._write(param, wire)


def words_of(*arrays: Array) -> list[int]:
    return [int(array.view(np.uint32).sum(dtype=np.uint64)) for array in arrays]


def test_every_optimizer_of_ours_sums_in_its_loop() -> None:
    assert all(create(name)._sums for name in FULL)
    assert not Unsumming()._sums


SUMMED = [*((create(name), values) for name, values in FULL.items()), (create("sgd"), {"lr": 0.1}), (Unsumming(), {})]


@pytest.mark.parametrize("dtype", [None, *TORCH_DTYPE])
@pytest.mark.parametrize("numel", [0, 1, 1001, (1 << 17) + 77])
@pytest.mark.parametrize("unneeded", [0, 1])
@pytest.mark.parametrize(("rule", "hyper"), SUMMED, ids=[f"{r.name}-{len(h)}" for r, h in SUMMED])
def test_digests_are_of_what_was_read_and_written(
    rule: UpdateRule, hyper: dict[str, float], unneeded: int, numel: int, dtype: DType | None
) -> None:
    """Some state may be there for other groups alone. With digests or without, the bits are the same."""
    values, rng = rule.validate(hyper), np.random.default_rng(numel)
    count = len(rule.state_names([values])) + unneeded
    param, grad, *state = (rng.standard_normal(numel, dtype=np.float32) for _ in range(2 + count))
    state = [np.square(array) for array in state]
    wire = None if dtype is None else np.zeros(numel, dtype.numpy)
    others = [array.copy() for array in (param, *state)]
    wire2 = None if wire is None else wire.copy()
    digests = np.full((2, 2 + count), 5, np.uint64)
    read = words_of(param, *state, grad)
    rule.apply(param, grad, tuple(state), wire, dtype or DType.F32, values, 3, 0.5, digests)
    assert (digests - np.uint64(5)).tolist() == [read, [*words_of(param, *state), 0]]
    rule.apply(others[0], grad, tuple(others[1:]), wire2, dtype or DType.F32, values, 3, 0.5)
    assert [a.tobytes() for a in (param, *state)] == [a.tobytes() for a in others]
    assert wire is None or wire2 is None or wire.tobytes() == wire2.tobytes()


MIXED = [
    ("sgd", {"momentum": 0.9}, {}),
    ("adam", {"amsgrad": 1.0}, {}),
    ("adamw", {"amsgrad": 1.0}, {}),
    ("rmsprop", {"momentum": 0.9, "centered": 1.0}, {"centered": 1.0}),
    ("rmsprop", {"momentum": 0.9, "centered": 1.0}, {"momentum": 0.9}),
    ("rmsprop", {"momentum": 0.9, "centered": 1.0}, {}),
]


@pytest.mark.parametrize(("name", "other", "hyper"), MIXED)
def test_digests_of_a_group_that_does_not_need_all_the_state(
    name: str, other: dict[str, float], hyper: dict[str, float]
) -> None:
    rule, rng = create(name), np.random.default_rng(1)
    count = len(rule.state_names([other, hyper]))
    assert len(rule.state_names([hyper])) < count
    param, grad, *state = (np.square(rng.standard_normal(333, dtype=np.float32)) for _ in range(2 + count))
    digests, read = np.zeros((2, 2 + count), np.uint64), words_of(param, *state, grad)
    rule.apply(param, grad, tuple(state), None, DType.F32, rule.validate(hyper), 3, 1.0, digests)
    assert digests.tolist() == [read, [*words_of(param, *state), 0]]


def test_missing_hyperparameters_have_their_defaults() -> None:
    optimizer = create("adamw")
    a, b = np.ones(4, np.float32), np.ones(4, np.float32)
    for param, hyper in ((a, {"lr": 0.1}), (b, optimizer.validate({"lr": 0.1}))):
        state = (np.zeros(4, np.float32), np.zeros(4, np.float32))
        optimizer.apply(param, np.ones(4, np.float32), state, None, DType.F32, hyper, 1, 1.0)
    assert a.tobytes() == b.tobytes()


def arrays(n: int) -> dict[str, Any]:
    zeros = {k: np.zeros(n, np.float32) for k in ("param", "grad", "m", "v")}
    return {
        "param": zeros["param"],
        "grad": zeros["grad"],
        "state": (zeros["m"], zeros["v"]),
        "wire": np.zeros(n, np.uint16),
        "wire_dtype": DType.BF16,
        "hyper": {"lr": 0.1},
        "update": 1,
        "grad_scale": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grad": np.zeros(7, np.float32)}, r"grad is float32\[7\]"),
        ({"grad": np.zeros(8, np.float64)}, r"grad is float64\[8\]"),
        ({"grad": np.zeros(16, np.float32)[::2]}, "contiguous"),
        ({"param": np.zeros((8, 1), np.float32)}, "param is"),
        ({"state": (np.zeros(8, np.float32), np.zeros(9, np.float32))}, r"state is float32\[9\]"),
        ({"state": (np.zeros(8, np.float32),)}, "exp_avg, exp_avg_sq"),
        ({"hyper": {"lr": 0.1, "amsgrad": 1.0}}, "max_exp_avg_sq"),
        ({"wire": np.zeros(9, np.uint16)}, "wire is"),
        ({"wire": np.zeros(8, np.float16)}, "wire is"),
        ({"wire": np.zeros(8, np.int64), "wire_dtype": DType.I64}, "wire_dtype is I64; a copy is BF16 or F16"),
        ({"wire": np.zeros(8, np.float32), "wire_dtype": DType.F32}, "what travels as f32 needs none"),
        ({"update": 0}, "counted from 1"),
        ({"digests": np.zeros((2, 3), np.uint64)}, r"digests is uint64\[2, 3\]"),
        ({"digests": np.zeros((2, 4), np.int64)}, r"digests is int64\[2, 4\]"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        create("adamw").apply(**{**arrays(8), **change})


def test_warm_up_compiles_every_group() -> None:
    for name, hyper in FULL.items():
        create(name).warm_up([{}, hyper], DType.BF16)
        create(name).warm_up([{}, hyper], None)


def test_describing_an_optimizer_needs_no_numba() -> None:
    code = (
        "import sys, axon_ps.optim as o, axon_ps.compress\n"
        "for name in o.names(): o.create(name).state_names([o.create(name).validate({})])\n"
        "assert 'numba' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
