"""Ranks that are threads of the test, and the comparison of what they compute with what one process does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from axon_ps.collectives.process_group import ProcessGroup


def on_ranks(world_size: int, body: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What `body(group)` returns on each of `world_size` threads; the first error otherwise."""

    def one(group: ProcessGroup) -> Any:
        try:
            return body(group)
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(30) for f in [pool.submit(one, group) for group in ProcessGroup.mock(world_size)]]


def generator(seed: int = 0) -> torch.Generator:
    """A generator of one's own: torch's default one is shared by the threads."""
    return torch.Generator().manual_seed(seed)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same values on every rank."""
    return torch.randn(*shape, generator=generator(seed))


def close(value: torch.Tensor | None, expected: torch.Tensor | None, relative: float = 1e-5) -> None:
    """||a - b|| <= relative * ||b||."""
    assert value is not None
    assert expected is not None
    assert value.shape == expected.shape
    difference, size = (value - expected).norm().item(), expected.norm().item()
    assert difference <= relative * size + 1e-12, f"differs by {difference}, of {size}"
