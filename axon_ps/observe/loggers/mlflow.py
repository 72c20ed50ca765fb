"""Curves for MLflow: a server, a database or a directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from axon_ps.observe.loggers.base import library


class MLflowLogger:
    """One run. The newest run of that name in the experiment is continued.

    MLflow cannot replace a value. If steps are repeated after a restored checkpoint or a restart, those that the run
    has already are not logged again.

    Args:
        experiment: its name; it is made if it does not exist.
        run_name: the run's name.
        tracking_uri: a server, "sqlite:///file.db" or a directory; None = the value of MLFLOW_TRACKING_URI.

    Raises:
        ConfigurationError: `mlflow` is not installed.
    """

    def __init__(self, experiment: str, run_name: str, *, tracking_uri: str | None = None) -> None:
        mlflow = library("mlflow", "mlflow")
        self._entities = library("mlflow.entities", "mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        runs = self._client.search_runs(
            [number], f"attributes.run_name = '{run_name}'", order_by=["attributes.start_time DESC"], max_results=1
        )
        self.run_id: str = (runs[0] if runs else self._client.create_run(number, run_name=run_name)).info.run_id
        if runs:
            self._client.set_terminated(self.run_id, "RUNNING")
        self._last = self._newest_step()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `Logger.log_hyperparams`; those that a continued run has already do not change."""
        known = self._client.get_run(self.run_id).data.params
        for name, value in params.items():
            if name not in known:
                self._client.log_param(self.run_id, name, value)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Logger.log_metrics`."""
        if step > self._last:
            self._last, now_ms = step, int(time.time() * 1000)
            values = [self._entities.Metric(name, value, now_ms, step) for name, value in metrics.items()]
            self._client.log_batch(self.run_id, metrics=values)

    def close(self) -> None:
        """See `Logger.close`."""
        self._client.set_terminated(self.run_id, "FINISHED")

    def _newest_step(self) -> int:
        names = self._client.get_run(self.run_id).data.metrics
        return max((m.step for name in names for m in self._client.get_metric_history(self.run_id, name)), default=-1)
