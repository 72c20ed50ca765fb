"""The libraries' own readers read back our loggers' files; a curve goes on without doubles.

Tests of `observe/loggers/mlflow.py`, `observe/loggers/tensorboard.py` and `observe/loggers/wandb.py`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps import World
from axon_ps.observe.loggers import Logger, MLflowLogger, TensorBoardLogger, WandbLogger

FIRST, AGAIN = (1, 2, 3), (3, 4)
"""Versions of a job's first life; and of its second, which was restored at version 2."""


def log(logger: Logger, steps: tuple[int, ...], scale: float) -> None:
    logger.log_hyperparams({"lr": 0.1, "layers": 2})
    for step in steps:
        logger.log_metrics({"loss": scale * step}, step)
    logger.close()


def test_tensorboard_reads_each_step_once_as_it_was_made_last(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(TensorBoardLogger(tmp_path), FIRST, 1.0)
    log(TensorBoardLogger(tmp_path), AGAIN, 10.0)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    (text,) = {event.tensor_proto.string_val[0] for event in read.Tensors("hyperparams")}
    assert json.loads(text.strip(b"`\n")) == {"lr": 0.1, "layers": 2}


def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/runs"
    logger = MLflowLogger("gpt", "one", tracking_uri=uri)
    log(logger, FIRST, 1.0)
    again = MLflowLogger("gpt", "one", tracking_uri=uri)
    assert again.run_id == logger.run_id
    log(again, AGAIN, 10.0)
    client = mlflow.MlflowClient(tracking_uri=uri)
    history = client.get_metric_history(logger.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    run = client.get_run(logger.run_id)
    assert (run.data.params, run.info.status) == ({"lr": "0.1", "layers": "2"}, "FINISHED")


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not kind:
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # it is complete, or this was its last part
            yield record
            record = b""


def wandb_history(directory: Path) -> list[tuple[int, float]]:
    """Step and loss of the offline runs in a directory, by wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    points = []
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                points.append((items["_step"], items["loss"]))
    return points


def test_wandb_writes_a_run_offline(tmp_path: Path) -> None:
    import wandb

    log(WandbLogger("gpt", id="one", mode="offline", directory=str(tmp_path)), (1, 2, 2, 3), 1.0)
    wandb.teardown()
    assert wandb_history(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_world_reports_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with World.mock() as world:
        world.log_to(lambda: TensorBoardLogger(tmp_path), hyperparams={"lr": 0.1})
        world.models.client(0)
        world.report(loss=0.5, tokens_per_s=12.0)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(read.Tags()["scalars"]) == ["loss", "tokens_per_s"]
