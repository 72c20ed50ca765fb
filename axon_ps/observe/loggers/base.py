"""The interface of loggers: three methods, of which two have Lightning's names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from axon_ps.errors import ConfigurationError


@runtime_checkable
class Logger(Protocol):
    """Receives metrics. Its methods are called on one thread, for which training does not wait.

    Its exceptions are logged as warnings, and training goes on.
    """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the settings of the run; called once, before any metrics, unless there are none."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log values by name at a step. Steps grow, unless a checkpoint was restored: then they continue from it."""

    def close(self) -> None:
        """Write or send everything that was logged; no call follows."""


def library(name: str, extra: str) -> Any:
    """Import a logger's library.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"this logger needs {name}: pip install 'axon-ps[{extra}]' ({error})") from error
