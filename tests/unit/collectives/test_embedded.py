"""What an embedded cluster refuses, and what it says when its services cannot start."""

from __future__ import annotations

import os

import pytest
from axon_ps.collectives.embedded import EmbeddedCluster

from axon_ps.errors import Broken, ConfigurationError


def test_it_does_not_open_itself_to_the_network_without_being_told() -> None:
    with pytest.raises(ConfigurationError, match="a certificate and key"):
        EmbeddedCluster(2, job="j", host="0.0.0.0", environment=os.environ)


def test_services_that_cannot_start_are_reaped_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Broken, match="embedded coordinator ended"):
        EmbeddedCluster(2, job="no such\njob name", environment=os.environ | {"AXON_PS_LOG": "nonsense"})
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert "nonsense" in capfd.readouterr().err
