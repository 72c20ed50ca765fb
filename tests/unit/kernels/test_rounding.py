"""Rounding is written once, and what numba has cached is used only while no file of the kernels has changed."""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from axon_ps import kernels
from axon_ps.kernels import optimizer_loops, rounding
from axon_ps.kernels.arrays import readonly

SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in Path(kernels.__file__).parent.glob("*.py")}
HARD = (0x0000_0000, 0x0000_8000, 0x0000_8001, 0x3F80_8000, 0x3F81_8000, 0x7F7F_7FFF, 0x7F7F_8000, 0x7F80_0000)
HARD += (0x7F80_0001, 0x7FBF_FFFF, 0x7FFF_FFFF, 0x3880_0000, 0x387F_F000, 0x3300_0000, 0x477F_EFFF, 0x477F_F000)


def test_a_loop_calls_nothing_of_another_package() -> None:
    imported = {
        name: {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        for name, source in SOURCES.items()
    }
    ours = {name: {m for m in modules if m.startswith("axon_ps.")} for name, modules in imported.items()}
    allowed = {"axon_ps.types", "axon_ps.errors", *(f"axon_ps.kernels.{name}" for name in SOURCES)}
    assert {name: sorted(modules - allowed) for name, modules in ours.items() if modules - allowed} == {}


def test_the_rounding_to_bf16_and_f16_is_written_once() -> None:
    for expression in ("bits + np.uint32(0x7FFF)", "magnitude + np.uint32(0xC800_0FFF)"):
        assert {name: count for name, source in SOURCES.items() if (count := source.count(expression))} == {
            "rounding": 1
        }


@pytest.mark.parametrize("sign", [0, 0x8000_0000])
def test_an_optimizers_wire_copy_is_the_cast_of_its_parameters(sign: int) -> None:
    values = (np.array(HARD, np.uint32) | np.uint32(sign)).view(np.float32)
    for wire_dtype, theirs in ((np.uint16, ml_dtypes.bfloat16), (np.int16, np.float16)):
        param, cast, copy = values.copy(), np.empty(values.size, wire_dtype), np.empty(values.size, wire_dtype)
        rounding.convert(readonly(param), cast)
        zeros = np.zeros(values.size, np.float32)
        optimizer_loops.sgd(param, zeros, None, copy, None, 1.0, None, 0.0, 0.0, 1.0, None)  # a learning rate of 0
        finite = ~np.isnan(values)
        assert copy[finite].tobytes() == cast[finite].tobytes()
        with np.errstate(over="ignore"):
            assert cast[finite].tobytes() == values[finite].astype(theirs).tobytes()
        assert all(np.isnan(c.view(theirs)[~finite].astype(np.float32)).all() for c in (cast, copy))
