"""Every public name of torch.distributed is in docs/torch_names.md: what it is called here, or why there is none.

A name that torch has added since is found here by itself. What our names are is resolved, and must say what it is.
"""

from __future__ import annotations

import pkgutil
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.test_features import resolve, said_of

PAGE = (Path(__file__).parent.parent / "docs" / "torch_names.md").read_text()
IMPORTED = {"contextlib", "logging", "sys", "timedelta", "torch", "traceback", "typing"}
"""What torch's module has imported from elsewhere."""
ELSEWHERE = {
    "2.15": {"ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "gather_into_tensor", "gather_single", "get_backend_impl"}
    | {"set_timeout"},
    "CUDA": {"ProcessGroupNCCL"},
}
"""Names on the page that the torch of our tests lacks, by the version or build that has them."""


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables, without their heads."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def theirs() -> set[str]:
    """The public names of torch.distributed: in it, in its `__all__`s, and its modules."""
    modules = {m.name for m in pkgutil.iter_modules(dist.__path__)}
    names = {*dir(dist), *dist.distributed_c10d.__all__} | modules
    return {name for name in names if not name.startswith("_")} - IMPORTED


def test_every_name_of_torch_is_here_or_it_is_said_why_not() -> None:
    listed = [name for row in rows() for name in ticked(row[0])]
    assert len(listed) == len(set(listed)), "a name is in two rows"
    missing = theirs() - set(listed)
    assert not missing, (
        f"torch {torch.__version__} has {sorted(missing)}: say in docs/torch_names.md what they are here"
    )
    if "2.13" in torch.__version__:  # others lack some, or have had more
        assert set(listed) - set().union(*ELSEWHERE.values()) == theirs()


def test_what_was_left_out_was_imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED:
            found = getattr(dist, name, None)
            own = isinstance(found, types.ModuleType) and found.__name__.startswith("torch.distributed")
            assert not own
            assert not getattr(found, "__module__", "").startswith("torch.distributed")


@pytest.mark.parametrize("row", rows(), ids=lambda row: ticked(row[0])[0])
def test_a_row_names_what_there_is_or_says_why_there_is_not(row: list[str]) -> None:
    if len(row) == 2:
        assert len(row[1]) > 20
        return
    assert ticked(row[1]), "there is nothing under `here`"
    for name in ticked(row[1]):
        found, holder = resolve(name)
        assert isinstance(found, float) or said_of(found, holder, name.rpartition(".")[2]), f"{name} has no docstring"
