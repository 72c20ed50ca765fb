"""Curves for TensorBoard: event files in a directory, written by the package `tensorboard` alone (torch not needed)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon_ps.observe.loggers.base import library


class TensorBoardLogger:
    """Writes event files. A continued run uses the same directory.

    If steps are repeated after a restored checkpoint or a restart of everything, the old ones from there on are marked
    as void (TensorBoard's `SessionLog.START`). So a curve has each step once, with its newest value.

    Args:
        directory: the directory of this run; it is made if it does not exist.

    Raises:
        ConfigurationError: `tensorboard` is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        self._event = library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        files = library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = files.EventFileWriter(str(directory))
        self._last: int | None = None

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `Logger.log_hyperparams`: a text summary, in JSON."""
        text = f"```\n{json.dumps(dict(params), indent=2, default=str)}\n```"
        tensor = library("tensorboard.compat.proto.tensor_pb2", "tensorboard").TensorProto(
            dtype=7, string_val=[text.encode()]
        )
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        value = self._summary.Summary.Value(tag="hyperparams", metadata=metadata, tensor=tensor)
        self._add(0, summary=self._summary.Summary(value=[value]))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Logger.log_metrics`."""
        if self._last is None or step <= self._last:
            self._add(step, session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        self._last = step
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))
