"""Settings and client of the commands that call a running coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from axon_ps.cli.settings import Settings, load
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.coordinator.client.operator import OperatorClient


def settings_for(config: Path | None, **flags: Any) -> Settings:
    """The settings of a command that needs a coordinator.

    Raises:
        ConfigurationError: none is named.
    """
    settings = load(config, **flags)
    if not settings.coordinator:
        raise ConfigurationError("which coordinator? Give --coordinator host:port or set AXON_PS_COORDINATOR")
    return settings


def client(settings: Settings) -> OperatorClient:
    """A client for the coordinator that the settings name; make and use it on one event loop."""
    from axon_ps.coordinator.client.operator import OperatorClient

    return OperatorClient(settings.coordinator, security=settings.security(), job=settings.job)
