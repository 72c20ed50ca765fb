"""`make lab NAME=integrations`: tests against other people's tools and libraries, of the extra `integrations`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests start whole clusters of somebody else's; each has five minutes, if it does not say otherwise."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
