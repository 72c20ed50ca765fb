"""Which checkpoints of a directory remain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import retention, server
from axon_ps.errors import AxonError, CheckpointError
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.manifest import FileEntry, Manifest, write_manifest
from axon_ps.types import DType

FILE = FileEntry(name="shard-00000-of-00001-v1.safetensors", sha256="a" * 64, bytes=1)
LAYOUT = Layout(units=(build_unit("a", [("w", (3,), DType.F32)]),))


def put(directory: Path, name: str, version: int, minute: int) -> None:
    write_manifest(
        str(directory / name),
        Manifest(
            job="j", version=version, layout=LAYOUT, optimizer=None, num_servers=1, options=PlanOptions(),
            files=(FILE,), created=f"2026-01-02T03:{minute:02d}:00+00:00",
        ),
    )  # fmt: skip


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_those_written_last_remain_and_what_is_not_ours(tmp_path: Path) -> None:
    for minute, version in enumerate((10, 20, 30, 15)):  # somebody went back to 10
        put(tmp_path, f"step-{version:010d}", version, minute)
    put(tmp_path, "mine", 1, 0)
    put(tmp_path, "step-by-step", 2, 0)
    retention.remove_old(CheckpointPolicy(directory=str(tmp_path), limit=2))
    assert names(tmp_path) == ["mine", "step-0000000015", "step-0000000030", "step-by-step"]
    found = retention.newest(str(tmp_path))
    assert found is not None
    assert found.version == 15


def test_what_was_never_complete_or_is_half_removed_goes(tmp_path: Path) -> None:
    put(tmp_path, "step-0000000010", 10, 0)
    for name in ("step-0000000010", "step-0000000020", "mine"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / ".shard-0.ab.partial").write_bytes(b"half")
    (tmp_path / "step-0000000020" / "shard-00000-of-00001-v20-aa.safetensors").write_bytes(b"complete")
    (tmp_path / "step-0000000020" / "note").write_bytes(b"somebody's")
    retention.remove_old(CheckpointPolicy(directory=str(tmp_path)))
    assert names(tmp_path / "step-0000000010") == ["manifest.json"]
    assert names(tmp_path / "step-0000000020") == ["note"]
    assert names(tmp_path / "mine") == [".shard-0.ab.partial"]


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    put(tmp_path, "step-0000000010", 10, 0)
    put(tmp_path, "step-0000000020", 20, 1)
    (tmp_path / "step-0000000020" / "manifest.json").write_bytes(b"")
    told: list[tuple[str, AxonError]] = []
    found = retention.newest(str(tmp_path), lambda uri, error: told.append((uri, error)))
    assert found is not None
    assert found.version == 10
    ((uri, error),) = told
    assert uri.endswith("step-0000000020")
    assert "damaged" in str(error)


def test_an_empty_directory_has_none(tmp_path: Path) -> None:
    assert retention.newest(str(tmp_path / "nothing")) is None
    retention.remove_old(CheckpointPolicy(directory=str(tmp_path / "nothing")))


def test_a_directory_that_cannot_be_cleared_holds_up_no_other(tmp_path: Path) -> None:
    for number in (10, 20):
        (tmp_path / f"step-{number:010d}").mkdir()
        (tmp_path / f"step-{number:010d}" / "shard-0").write_bytes(b"half")
    (tmp_path / "step-0000000010" / ".x.partial").mkdir()  # no file, so it cannot be unlinked
    with pytest.raises(CheckpointError, match="step-0000000010"):
        retention.remove_old(CheckpointPolicy(directory=str(tmp_path)))
    assert not (tmp_path / "step-0000000020").exists()


def test_a_job_begins_beside_hostile_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a coordinator does at its start."""
    put(tmp_path, "good", 3, 0)
    put(tmp_path, "cut-over-too-many", 9, 9)
    manifest = tmp_path / "cut-over-too-many" / "manifest.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(value | {"num_servers": 4294967295, "sha256": ""}))
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "manifest.json").write_bytes(b"[" * 100_000)
    policy = CheckpointPolicy(directory=str(tmp_path), every_steps=1)
    assert server._resume(CoordinatorConfig(checkpoints=policy)) == str(tmp_path / "good")
    passed_over = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(passed_over) == 2
    assert f"{manifest} is damaged: units are cut over 4294967295 servers" in passed_over[0]
    assert f"{tmp_path}/nested/manifest.json is damaged: it has more than 400 lists" in passed_over[1]
