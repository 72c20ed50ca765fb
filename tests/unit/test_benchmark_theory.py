"""How `benchmarks/theory.py` says what a card has to carry."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "theory.py"


@pytest.fixture
def theory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("theory", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "theory", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("strategy", "ours", "own_servers", "expected"),
    [
        # a model of 8 x 100 + 40 elements of 4 bytes: P = G = 3360; 8 blocks are R = 3200, 6 are 2400
        ("full_shard", False, False, (0.75 * (2 * 3360 + 3200),) * 2),
        ("full_shard", True, False, (3360 + 2400, 3360)),
        ("full_shard", True, True, (0.75 * (2 * 3360 + 2400),) * 2),
        ("shard_grad_op", False, False, (0.75 * 2 * 3360,) * 2),
        ("shard_grad_op", True, False, (3360, 3360)),
        ("shard_grad_op", True, True, (0.75 * 2 * 3360,) * 2),
        ("hybrid_shard", False, False, (2 * 0.75 * 3360,) * 2),
        ("hybrid_shard", True, False, (3360, 3360)),
        ("hybrid_shard", True, True, (0.75 * 2 * 3360,) * 2),
    ],
)
def test_a_card_carries(
    theory: ModuleType, strategy: str, ours: bool, own_servers: bool, expected: tuple[float, float]
) -> None:
    sizes = theory.Sizes(blocks=8, block=100, root=40)
    found = theory.card_bytes(sizes, strategy, ours=ours, hosts=4, own_servers=own_servers, element_bytes=4.0)
    assert found == pytest.approx(expected)


def test_a_model_that_stays_unsharded_is_gathered_once(theory: ModuleType) -> None:
    sizes = theory.Sizes(blocks=1, block=100, root=40)
    assert theory.gathered_again(sizes, "full_shard", ours=True) == 0
    assert theory.gathered_again(sizes, "full_shard", ours=False) == 100


def test_what_is_kept_comes_once(theory: ModuleType) -> None:
    sizes = theory.Sizes(blocks=8, block=100, root=40)
    where = {"ours": True, "hosts": 4, "own_servers": False, "element_bytes": 0.5}
    assert theory.card_bytes(sizes, "full_shard", kept=True, **where) == (420.0, 420.0)
    assert theory.card_bytes(sizes, "full_shard", **where) == (720.0, 420.0)
