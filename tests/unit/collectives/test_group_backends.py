"""`Siblings`: the backends of a group that was made of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.group_backends import Siblings
from axon_ps.errors import ConfigurationError


@pytest.mark.parametrize("name", ["auto", "device", "mock"])
def test_the_group_has_the_backend_and_sub_groups_have_siblings(name: str) -> None:
    (backend,) = MockBackend.create_world(1)
    make = Siblings(backend)
    assert make(backend.context, name) is backend
    sibling = make(replace(backend.context, name="mock/0"), name)
    assert isinstance(sibling, MockBackend)
    assert sibling.context.name == "mock/0"


def test_there_are_no_backends_of_another_kind() -> None:
    (backend,) = MockBackend.create_world(1)
    with pytest.raises(ConfigurationError, match=r"was made of a backend 'mock'.*leave out backend='shm'"):
        Siblings(backend)(backend.context, "shm")
