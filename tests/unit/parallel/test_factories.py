"""Tensors of axon_ps are where and what it says, whatever `torch.set_default_device` and `set_default_dtype` say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import axon_ps

ROOT = Path(axon_ps.__file__).parent
FACTORIES = {factory.__name__ for factory in _device_constructors()}
"""The functions of torch that make tensors where the default device says."""
NEEDED = {"device", "dtype"}


def without_place(source: str) -> Iterator[str]:
    """Calls of a factory that leave the device or the dtype to torch's defaults."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            given = {keyword.arg for keyword in node.keywords}  # None for **options
            if ast.unparse(node.func.value) == "torch" and None not in given and not given >= NEEDED:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_has_a_device_and_a_dtype_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        if "testing" not in path.parts
        for line in without_place(path.read_text())
    ]
    assert found == [], "say where a tensor is (device=) and what it consists of (dtype=)"


@pytest.mark.parametrize("call", ["torch.empty(3)", "torch.zeros(3, dtype=torch.int64)", "torch.ones(3, device='cpu')"])
def test_a_factory_without_them_is_found(call: str) -> None:
    assert len(list(without_place(call))) == 1
