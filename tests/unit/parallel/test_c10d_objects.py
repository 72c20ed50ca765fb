"""Objects in place of pickles: which of torch's functions it is, is looked for when there is an error to say it in."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.collectives.encoding import decode
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d import objects
from axon_ps.parallel.c10d.object_types import TORCH


def test_an_object_that_can_be_sent_costs_no_walk_over_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []
    monkeypatch.setattr(objects, "_caller", lambda: walks.append("walk") or ("send_object_list", False))
    group: Any = None  # is told of errors alone
    assert decode(objects._encoded({"a": [1, 2.5]}, group), "it", TORCH) == {"a": [1, 2.5]}
    assert walks == []
    with pytest.raises(
        InvalidRequest, match="^send_object_list was given a object, which cannot be sent.*ALLOW_PICKLE=1"
    ):
        objects._encoded(object(), group)
    assert walks == ["walk"]
