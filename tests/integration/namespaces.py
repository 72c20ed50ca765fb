"""Hosts of a test that are network namespaces: those of the benchmarks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

NETNS = Path(__file__).parents[2] / "benchmarks" / "netns.py"


def network_of(*hosts: str) -> Any:
    """The benchmarks' network of namespaces; the test is skipped where none can be made."""
    spec = importlib.util.spec_from_file_location("netns", NETNS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.Network(list(hosts)).__enter__()
    except module.NetworkUnavailable as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
