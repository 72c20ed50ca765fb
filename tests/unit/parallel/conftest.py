"""Fixtures of the tests of `parallel`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from axon_ps import World


@pytest.fixture
def world() -> Iterator[World]:
    """A world of one worker inside this process, closed at the end."""
    with World.mock() as made:
        yield made
