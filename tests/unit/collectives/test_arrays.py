"""Collectives take arrays of every kind, in their own memory. Tests of `collectives/arrays.py`."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch

from axon_ps import ProcessGroup
from axon_ps.errors import InvalidRequest


class OnlyDLPack:
    """Host memory that is known by DLPack alone, as of a library that we know nothing of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def group() -> Any:
    return ProcessGroup.mock()


@pytest.mark.parametrize("kind", [array.array, memoryview])
def test_results_go_to_memory_that_the_buffer_protocol_gives(kind: type) -> None:
    memory = array.array("f", [1.0, 2.0, 3.0])
    given = memory if kind is array.array else memoryview(memory)
    group().all_reduce(given)
    assert list(memory) == [1.0, 2.0, 3.0]
    group().broadcast(given)
    out = array.array("f", [0.0] * 3)
    group().all_reduce(given, out=out)
    assert list(out) == [1.0, 2.0, 3.0]
    gathered = group().all_gather(given)
    assert isinstance(gathered, np.ndarray)
    np.testing.assert_array_equal(gathered.reshape(-1), [1.0, 2.0, 3.0])


def test_results_go_to_memory_that_dlpack_gives() -> None:
    tensor = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    out = torch.zeros(2, 3, dtype=torch.float64)
    group().all_reduce(OnlyDLPack(tensor), out=OnlyDLPack(out))
    assert torch.equal(out, tensor)


@pytest.mark.parametrize("given", [[1.0, 2.0], "text", 3, None])
def test_what_gives_no_memory_is_named(given: object) -> None:
    with pytest.raises(
        InvalidRequest, match=f"is a {type(given).__name__}; give a numpy, torch or cupy array, or what"
    ):
        group().all_reduce(given)


def test_memory_that_cannot_be_written_is_refused_where_a_result_goes() -> None:
    with pytest.raises(InvalidRequest, match="read-only"):
        group().all_reduce(b"1234")
