"""The bytes of a step by the formulas of `sharding.traffic`, on numbers that can be added up by hand."""

from __future__ import annotations

import pytest

from axon_ps.compress.registry import compressor
from axon_ps.sharding.layout import Unit, build_unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.sharding.traffic import ModuleBytes, fitting, gathered_bytes, node_traffic, sent_bytes
from axon_ps.types import DType

PRECISION = WirePrecision(param=DType.BF16, grad=DType.F32)


def unit(numel: int, *, trainable: bool = True) -> Unit:
    return build_unit("u", [("w", (numel,), DType.F32)], trainable=trainable)


def module(*units: Unit, buffered: bool = False) -> ModuleBytes:
    memory = [(unit, 4 * unit.numel, 2 * unit.numel if buffered else 0) for unit in units]
    return ModuleBytes.of(memory, PRECISION, retains=False)


@pytest.mark.parametrize(
    ("buffered", "numels", "staying"),
    [
        (False, [100, 100, 100, 100], 200),  # the last two
        (True, [100, 100, 100, 100], 100),  # the last one, since its buffer takes memory, too
        (False, [100, 10, 20, 30], 160),  # all that fit into twice the largest
        (False, [10, 100, 20, 100], 120),
        (False, [100], 100),
        (False, [], 0),
    ],
)
def test_units_that_fit_stay_for_backward(buffered: bool, numels: list[int], staying: int) -> None:
    modules = [module(unit(7)), *(module(unit(numel), buffered=buffered) for numel in numels)]
    total = 7 + sum(numels)
    received, sent = node_traffic(modules, 3, offloads=False)["FULL_SHARD"]
    assert received == 3 * 2 * (2 * total - 7 - staying)
    assert sent == 3 * 4 * total


def test_frozen_units_are_sent_once_and_have_no_gradients() -> None:
    modules = [module(), module(unit(10), unit(90, trainable=False)), module(unit(20))]
    rows = node_traffic(modules, 2, offloads=True)
    assert rows["FULL_SHARD"] == rows["SHARD_GRAD_OP"] == (2 * 2 * 30, 2 * 4 * 30)
    assert rows["HYBRID_SHARD"] == (2 * 30, 4 * 30)


def test_frozen_units_that_stay_are_not_gathered_in_a_step() -> None:
    frozen = [unit(n, trainable=False) for n in (800, 80)]
    adapters = [unit(n) for n in (10, 20, 30)]
    memory = [
        [(adapters[0], 40, 0)],
        *([(a, 4 * a.numel, 0), (f, 4 * f.numel, 0)] for a, f in zip(adapters[1:], frozen, strict=True)),
    ]
    modules = [ModuleBytes.of(units, PRECISION, retains=True) for units in memory]
    received, _ = node_traffic(modules, 1, offloads=False)["FULL_SHARD"]
    assert received == 2 * (10 + 20 + 30)  # all of them fit beside 880 frozen ones


def test_compressed_bytes_are_the_compressors() -> None:
    int8, int4 = compressor("int8"), compressor("int4")
    both = WirePrecision(param_compression=int8, grad_compression=int4)
    assert gathered_bytes(both, 1000) == int8.compressed_bytes(1000)
    assert sent_bytes(both, 1000) == int4.compressed_bytes(1000)
    assert (gathered_bytes(PRECISION, 1000), sent_bytes(PRECISION, 1000)) == (2000, 4000)


def test_what_fits_is_counted_from_the_first_on() -> None:
    assert [fitting(sizes, 10) for sizes in ([], [11], [5, 5, 1], [5, 6, 1], [0, 10])] == [0, 0, 2, 1, 2]
