"""Curves for Weights & Biases; `mode="offline"` writes to a directory that `wandb sync` sends later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_ps.observe.loggers.base import library


class WandbLogger:
    """One run. With an `id`, a restarted process continues that run.

    Weights & Biases accepts no step twice. If steps are repeated after a restored checkpoint, those that it has already
    are not sent.

    Args:
        project: the run's project.
        id: the run's id, so that it can be continued; None = a new one.
        mode: "online", "offline" or "disabled"; None = the value of WANDB_MODE.
        directory: the directory of its files; None = the default of wandb.
        options: further arguments of `wandb.init`.

    Raises:
        ConfigurationError: `wandb` is not installed.
    """

    def __init__(
        self,
        project: str,
        *,
        id: str | None = None,
        mode: str | None = None,
        directory: str | None = None,
        **options: Any,
    ) -> None:
        wandb = library("wandb", "wandb")
        resume = "allow" if id is not None else None
        given = {"id": id, "mode": mode, "dir": directory, "resume": resume}
        self._run = wandb.init(project=project, **{k: v for k, v in given.items() if v is not None}, **options)
        self._last = self._run.step - 1

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `Logger.log_hyperparams`."""
        self._run.config.update(dict(params), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Logger.log_metrics`."""
        if step > self._last:
            self._last = step
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()
