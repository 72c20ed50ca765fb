"""Manifests: what makes a directory a checkpoint, and which one of several is taken."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from axon_ps.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, InvalidRequest
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.contents import read_attached, verify
from axon_ps.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_SLICES,
    MAX_VERSION,
    Manifest,
    check_sizes,
    list_checkpoints,
    newest,
    read_manifest,
    remove,
    write_attached,
    write_manifest,
)
from axon_ps.types import DType, OptimizerSpec
from shard_files import put_files

LAYOUT = Layout(
    units=(
        build_unit("a", [("w", (3, 4), DType.BF16), ("b", (), DType.F32)]),
        build_unit("f", [("x", (7,), DType.F16)], trainable=False),
    )
)


FILE = FileEntry(name="shard-a", sha256="0" * 64, bytes=1)
FILE_JSON = {"name": "shard-a", "sha256": "0" * 64, "bytes": "1"}


def put(uri: str, token: str = "v1-aa", **changes: Any) -> Manifest:
    """A manifest of files that are there."""
    return put_files(uri, manifest(**changes), token)


def manifest(version: int = 5, **changes: Any) -> Manifest:
    made = Manifest(
        job="j",
        version=version,
        layout=LAYOUT,
        optimizer=OptimizerSpec(name="adamw", groups=({"lr": 0.1},), group_of=(0, 0, -1)),
        num_servers=1,
        options=PlanOptions(chunk_numel=100, min_slice_numel=3),
        files=(FILE,),
        extra={"sampler": {"epoch": 3}, "lr": [1, 2.5, None]},
        created="2026-01-02T03:04:05+00:00",
    )
    return replace(made, **changes)


@pytest.mark.parametrize("scheme", ["", "file://", "memory:/"])
def test_round_trip(tmp_path: Path, scheme: str) -> None:
    uri = f"{scheme}{tmp_path}/checkpoint"
    written = put(uri)
    write_manifest(uri, written)
    got = read_manifest(uri)
    assert got == replace(written, uri=got.uri)
    assert got.uri == uri.removeprefix("file://")
    assert got.bytes == written.files[0].bytes > 200
    assert [got.file_of(s) for s in got.plan.numbered] == [0] * len(got.plan.numbered)
    assert verify(uri) == got


def test_without_an_optimizer(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), manifest(optimizer=None))
    assert read_manifest(str(tmp_path)).optimizer is None


def test_hyperparameters_and_extra_are_exact(tmp_path: Path) -> None:
    floats = {"inf": math.inf, "-inf": -math.inf, "tiny": 5e-324, "third": 1 / 3, "large": 2.0**63, "zero": -0.0}
    extra = {"seed": 2**64 - 1, "loss": math.inf, "name": "\u00fc"}
    made = manifest(
        optimizer=OptimizerSpec(name="adamw", groups=(floats, {"lr": math.nan}), group_of=(0, 1, -1)), extra=extra
    )
    write_manifest(str(tmp_path), made)
    read = read_manifest(str(tmp_path))
    assert read.extra == extra
    assert read.optimizer is not None
    assert read.optimizer.groups[0] == floats
    assert math.copysign(1.0, read.optimizer.groups[0]["zero"]) == -1.0
    assert math.isnan(read.optimizer.groups[1]["lr"])


def test_the_newest_complete_checkpoint_of_a_directory(tmp_path: Path) -> None:
    for version in (3, 20, 100):
        write_manifest(str(tmp_path / f"v{version}"), manifest(version))
    write_manifest(str(tmp_path / "v20-again"), manifest(20, created="2027-01-01T00:00:00+00:00"))
    (tmp_path / "v100" / MANIFEST_NAME).unlink()  # written aside, never completed
    (tmp_path / "v7").mkdir()
    (tmp_path / "v7" / MANIFEST_NAME).write_bytes(b"{ damaged")
    assert [Path(m.uri).name for m in list_checkpoints(str(tmp_path))] == ["v3", "v20", "v20-again"]
    assert Path(read_manifest(str(tmp_path)).uri).name == "v20-again"


def test_no_checkpoint(tmp_path: Path) -> None:
    put(str(tmp_path))
    for uri in (str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
            read_manifest(uri)
        assert list_checkpoints(uri) == []


def test_a_directory_of_damaged_checkpoints_is_not_one_without_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest(str(tmp_path)) is None
    (tmp_path / "v7").mkdir()
    (tmp_path / "v7" / MANIFEST_NAME).write_bytes(b"{ damaged")
    for read in (newest, read_manifest):
        with pytest.raises(CheckpointCorrupt, match="none of the 1 checkpoints"):
            read(str(tmp_path))
    write_manifest(str(tmp_path / "v3"), manifest(3))
    caplog.clear()
    found = newest(str(tmp_path))
    assert found is not None
    assert found.version == 3
    assert "v7 is passed over" in caplog.text


def test_a_second_checkpoint_in_the_same_place_takes_over_with_its_manifest(tmp_path: Path) -> None:
    uri = str(tmp_path)
    write_manifest(uri, put(uri, version=1))
    second = put(uri, "v2-bb", version=2)
    assert verify(uri).version == 1  # the first is untouched while the second is being written
    (tmp_path / "notes.txt").write_text("the user's own")
    write_manifest(uri, second)
    assert verify(uri).version == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([MANIFEST_NAME, "notes.txt", second.files[0].name])


def test_damage_is_named(tmp_path: Path) -> None:
    uri = str(tmp_path)
    write_manifest(uri, written := put(uri))
    (entry,) = written.files
    content = (tmp_path / entry.name).read_bytes()
    (tmp_path / entry.name).write_bytes(content[:-1] + b"\x01")
    with pytest.raises(CheckpointCorrupt, match=f"{entry.name} has SHA-256"):
        verify(uri)
    (tmp_path / entry.name).write_bytes(content[:-1])
    for check in (verify, lambda uri: check_sizes(read_manifest(uri))):
        with pytest.raises(CheckpointCorrupt, match=f"has {entry.bytes - 1} bytes; the manifest says {entry.bytes}"):
            check(uri)
    (tmp_path / entry.name).unlink()
    for check in (verify, lambda uri: check_sizes(read_manifest(uri))):
        with pytest.raises(CheckpointCorrupt, match=f"lacks the file {entry.name}"):
            check(uri)


def test_small_files_are_attached_and_checked_as_all_others(tmp_path: Path) -> None:
    uri = str(tmp_path)
    contents = {"model 0": b"\x00" * 5000, "a/b \u00fc": b"x", "empty": b"", "buffers/a": save({"x": np.zeros(3)})}
    shards = put(uri)
    (shard,) = shards.files
    first = write_attached(uri, contents)
    write_manifest(uri, replace(shards, attached=first))
    read = verify(uri)
    assert read.attached == first
    assert read.bytes == shard.bytes + 5001 + len(contents["buffers/a"])
    assert {key: read_attached(read, key) for key in read.attached} == contents

    second = write_attached(uri, {"model 0": b"newer"})
    assert read_attached(read, "model 0") == contents["model 0"], "untouched while the second is being written"
    write_manifest(uri, replace(shards, attached=second))
    assert {p.name for p in tmp_path.iterdir()} == {MANIFEST_NAME, shard.name, second["model 0"].name}

    path = tmp_path / second["model 0"].name
    for content, words in ((b"newex", "was altered"), (b"newe", "has 4 bytes"), (None, "lacks the file")):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CheckpointCorrupt, match=words):
            read_attached(read_manifest(uri), "model 0")
        with pytest.raises(CheckpointCorrupt):
            verify(uri)
    remove(read_manifest(uri))
    assert not tmp_path.exists()


def test_a_manifest_from_before_has_nothing_attached(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), put(str(tmp_path)))
    path = tmp_path / MANIFEST_NAME
    value = json.loads(path.read_text())
    del value["attached"], value["sha256"]
    path.write_text(json.dumps(value))
    assert verify(str(tmp_path)).attached == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(attached={"buffers/": {"name": "x"}}), "damaged"),
        (lambda v: v.update(attached=[3]), "damaged"),
        (lambda v: v.update(format_version=5), "format 5; this program reads format 4"),
        (lambda v: v.update(format_version=3), "format 3; this program reads format 4"),
        (lambda v: v.pop("format_version"), "damaged"),
        (lambda v: v.pop("models"), "damaged"),
        (lambda v: v.pop("extra_json"), "damaged"),
        (lambda v: v.update(unknown=1), "damaged"),
        (lambda v: v["models"][0].pop("layout"), "damaged"),
        (lambda v: v["models"][0].pop("version"), "damaged"),
        (lambda v: v["models"][0].update(layout={}), "damaged"),
        (lambda v: v["models"][0].update(layout={"units": [{}]}), "damaged"),
        (lambda v: v["models"][0].update(layout={"units": 3}), "damaged"),
        (lambda v: v["models"][0].update(layout={"units": [{"name": "a", "trainable": True}]}), "damaged"),
        (lambda v: v["models"][0]["layout"]["units"][0]["parameters"][0].update(offset=9), "damaged"),
        (lambda v: v["models"][0]["files"].append(3), "damaged"),
        (lambda v: v["models"][0]["files"].append({"name": "x"}), "damaged"),
        (lambda v: v["models"][0].update(version="five"), "damaged"),
        (lambda v: v["models"][0].update(chunk_numel=-1), "damaged"),
        (lambda v: v["models"][0].update(file_of=[0]), "damaged"),
        (lambda v: v["models"][0].update(file_of=[0, 1]), "damaged"),
        (lambda v: v["models"][0]["optimizer"].update(groups=3), "damaged"),
        (lambda v: v["models"][0]["optimizer"].update(group_of=[0]), "1 parameters are in groups; the layout has 3"),
        (lambda v: v["models"][0]["optimizer"].update(groups=[{}] * 65537), "has 65537 groups; at most 65536"),
        (lambda v: v["models"][0]["optimizer"].update(moments=[{}] * 65537), "has 65537 groups; at most 65536"),
        (lambda v: v.update(num_servers=0), "cut over 0 servers"),
        (lambda v: v.update(num_servers=4294967295), "cut over 4294967295 servers; it must be 1 to 65536"),
        (lambda v: v["models"][0].update(version=str(2**64 - 1)), f"the newest that is read is {MAX_VERSION}"),
        (lambda v: v["models"][0].update(chunk_numel=0), "chunk_numel is 0"),
        (lambda v: v["models"][0].update(committed={"a": "[" * 4000}), "has more than 400 lists"),
        (lambda v: v["models"][0].update(committed={"\x1b[31m": "1"}), "must be printable"),
        (lambda v: v["models"][0].update(name="\x1b[31m"), "must be printable"),
        (lambda v: v.update(job="a" * 1025), "has 1025 characters"),
        (lambda v: v.update(models=v["models"] * 2), "two models have the same name"),
        (lambda v: v.update(created="yesterday"), "damaged"),
        (lambda v: v.update(created="2026-01-01T00:00:00"), "with its zone"),
        (lambda v: v.update(extra_json="[" * 100_000), "has more than 400 lists"),
        (lambda v: v.update(extra_json="[[1, 2]]"), "extra_json is a JSON list"),
        (lambda v: v.update(format_version="4" * 100_000), "is of format '444"),
        (lambda v: v["models"][0]["files"][0].update(name="../shard-a"), "that of no directory"),
        (lambda v: v["models"][0]["files"][0].update(name="shard-a/../../x"), "that of no directory"),
        (lambda v: v["models"][0]["files"][0].update(name="passwd"), "its name begins with 'shard-'"),
        (lambda v: v["models"][0]["files"][0].update(name="shard-\n"), "must be printable"),
        (lambda v: v["models"][0]["files"][0].update(sha256="0" * 63 + "G"), "64 hexadecimal digits"),
        (lambda v: v["models"][0]["files"][0].update(bytes=str(2**64 - 1)), "bytes; at most"),
        (lambda v: v["models"][0]["files"].extend([{**FILE_JSON, "bytes": str(2**59)}] * 3), "its files have"),
        (lambda v: v.update(attached={"k": {**FILE_JSON, "name": "attached-a", "bytes": "268435457"}}), "at most"),
        (lambda v: v.update(attached={"k" * 401: {**FILE_JSON, "name": "attached-a"}}), "has 1 to 400 bytes"),
        (lambda v: v.update(attached={f"k{n}": FILE_JSON for n in range(1025)}), "1025 files are attached"),
        (lambda v: v.update(states=[{**FILE_JSON, "name": "state-a"}] * 2), "two files of its own state"),
        (lambda v: v.update(states=[FILE_JSON]), "its name begins with 'state-'"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    write_manifest(str(tmp_path), manifest())
    path = tmp_path / MANIFEST_NAME
    value = json.loads(path.read_text())
    value.pop("sha256")  # those of before have none
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointCorrupt, match=words):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"\xff", b'"text"', b"null", b'{"format_version": 4', b'{"format_version": 4}', b"[" * 100_000),
        *(b'{"format_version":' * 100_000, b"[" + b"[]," * 2_000_000, b'{"format_version": 4, "format_version": 4}'),
        *(b'{"format_version": 4, "sha256": "\\ud800"}', b'{"format_version": 4, "\\ud800": 3}'),
        b'{"format_version": 4, "models": [{"\\uDFFF": 3}]}',
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="damaged"):
        read_manifest(str(tmp_path))


def test_whatever_bit_of_a_manifest_flips_and_wherever_it_is_cut_that_is_found(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), manifest())
    path = tmp_path / MANIFEST_NAME
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        for damaged in (content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :], content[:at]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointCorrupt):
                read_manifest(str(tmp_path))
    path.write_bytes(content)
    read_manifest(str(tmp_path))


def test_a_plan_of_too_many_slices_is_not_made(tmp_path: Path) -> None:
    """Few bytes say it: 40 units of 2^39 elements over 65536 servers."""
    units = tuple(build_unit(f"u{n}", [(f"w{n}", (2**39,), DType.F32)]) for n in range(40))
    made = manifest(layout=Layout(units=units), num_servers=65536, optimizer=None)
    with pytest.raises(InvalidRequest, match=f"cut into {40 * 65536} slices; at most {MAX_SLICES} are read"):
        write_manifest(str(tmp_path), made)
    with pytest.raises(InvalidRequest, match="1 files are named, which do not have all slices"):
        write_manifest(str(tmp_path), replace(made, num_servers=4096))


def _put(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000)
    else:
        path.symlink_to({"loop": path.name, "zero": "/dev/zero", "outside": "/proc/self/mem"}[kind])


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "zero", "outside", "sparse", "deep"])
def test_whatever_is_in_the_place_of_a_manifest_the_others_are_found(tmp_path: Path, kind: str) -> None:
    write_manifest(str(tmp_path / "v3"), manifest(3))
    (tmp_path / "v9").mkdir()
    _put(tmp_path / "v9" / MANIFEST_NAME, kind)
    _put(tmp_path / "beside", kind)  # where a directory could be
    said: list[tuple[str, str]] = []
    found = newest(str(tmp_path), lambda uri, error: said.append((uri, str(error))))
    assert found is not None
    assert found.version == 3
    ((uri, why),) = said
    assert uri == str(tmp_path / "v9")
    assert f"{uri}/{MANIFEST_NAME}" in why
    _put(tmp_path / MANIFEST_NAME, kind)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        read_manifest(str(tmp_path / "v9"))


@pytest.mark.parametrize("name", ["v9\n\x1b[31m", "v9\\", "\udcff", "\u202e"])
def test_whatever_a_directory_is_called_the_others_are_found(tmp_path: Path, name: str) -> None:
    write_manifest(str(tmp_path / "v3"), manifest(9))
    (tmp_path / "v3").rename(tmp_path / name)
    (tmp_path / "\x07 of somebody").mkdir()  # which is no checkpoint
    write_manifest(str(tmp_path / "v3"), manifest(3))
    said: list[str] = []
    found = newest(str(tmp_path), lambda uri, error: said.append(f"{uri}: {error}"))
    assert found is not None
    assert found.version == 3
    (text,) = said
    assert text.isprintable()
    assert "v9" in text or "udcff" in text or "u202e" in text


def test_a_directory_that_cannot_be_opened_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (3, 9):
        write_manifest(str(tmp_path / f"v{version}"), manifest(version))
    opened = os.open

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("v9"):  # as for who is not root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    said: list[str] = []
    found = newest(str(tmp_path), lambda uri, error: said.append(f"{uri}: {error}"))
    assert found is not None
    assert found.version == 3
    assert len(said) == 1
    assert "v9/manifest.json cannot be read: Permission denied" in said[0]


def test_extra_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="extra holds what JSON cannot"):
        write_manifest(str(tmp_path), manifest(extra={"x": object()}))
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    unprintable = Layout(units=(build_unit("a", [("w\n", (1,), DType.F32)]),))
    with pytest.raises(InvalidRequest, match="a name must be printable"):
        write_manifest(str(tmp_path), manifest(layout=unprintable))
    assert list(tmp_path.iterdir()) == []


def test_each_slice_is_in_the_file_that_the_manifest_says(tmp_path: Path) -> None:
    files = (FILE, replace(FILE, name="shard-b"))
    cut = manifest(files=files, num_servers=2)
    slices = cut.plan.numbered
    assert {cut.file_of(s) for s in slices} == {0, 1}
    assert [cut.file_of(s) for s in slices] == [s.server for s in slices]
    places = tuple(1 - s.server for s in slices)
    write_manifest(str(tmp_path), replace(cut, slices_in=places))
    read = read_manifest(str(tmp_path))
    assert read.slices_in == places
    assert [read.file_of(s) for s in slices] == list(places)


def test_a_slice_without_a_file_is_damage(tmp_path: Path) -> None:
    uri, files = str(tmp_path), (FILE, replace(FILE, name="shard-b"))
    cut = manifest(files=files, num_servers=2)
    count = len(cut.plan.numbered)
    wrong = "1 files are named, which do not have all slices"
    for made, words in (
        (replace(cut, files=files[:1]), wrong),
        (replace(cut, files=files[:1], slices_in=(1,) * count), wrong),
        (replace(cut, slices_in=(0,)), f"{count} slices are in 1 places"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            write_manifest(uri, made)
    assert list(tmp_path.iterdir()) == []
    write_manifest(uri, cut)
    written = json.loads((tmp_path / MANIFEST_NAME).read_text())
    written["models"][0]["files"].pop()
    del written["sha256"]  # it is read as one of before there was a hash
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(written))
    with pytest.raises(CheckpointCorrupt, match=wrong):
        read_manifest(uri)


def several() -> Manifest:
    optimizer = OptimizerSpec(name="adamw", groups=({"lr": 0.1},), group_of=(0, 0))
    other = manifest(8, name="critic", layout=Layout(units=LAYOUT.units[:1]), extra={}, optimizer=optimizer)
    return manifest(3, name="policy", others=(other,))


def test_a_manifest_of_several_models_has_a_section_of_each(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), several())
    read = read_manifest(str(tmp_path))
    assert [(s.name, s.version, s.layout) for s in read.sections] == [
        ("policy", 3, LAYOUT),
        ("critic", 8, Layout(units=LAYOUT.units[:1])),
    ]
    assert read.section("critic", only=False).version == read.section("critic").version == 8
    assert read.extra == manifest().extra
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["format_version"] == FORMAT_VERSION == 4
    with pytest.raises(InvalidRequest, match="has no model 'nobody': it has 'policy', 'critic'"):
        read.section("nobody")
    with pytest.raises(InvalidRequest, match="has several models; name one"):
        read.section()


def test_a_checkpoint_of_a_model_without_a_name(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), manifest())
    written = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert written["format_version"] == FORMAT_VERSION == 4
    del written["models"][0]["name"], written["sha256"]  # it is empty; those of before have none
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(written))
    read = read_manifest(str(tmp_path))
    assert (read.name, read.section("whatever").version) == ("", 5)
    with pytest.raises(InvalidRequest, match="has no model 'whatever'"):
        read.section("whatever", only=False)


def test_files_of_every_model_are_checked_and_kept(tmp_path: Path) -> None:
    uri = str(tmp_path)
    (other,) = several().others
    other = put_files(uri, other, "v1-a1")
    made = replace(put_files(uri, several(), "v1-a0"), others=(other,))
    left = put_files(uri, several(), "v1-a2").files[0]
    write_manifest(uri, made)
    assert not (tmp_path / left.name).exists(), "what no section names is removed"
    assert verify(uri).bytes == made.files[0].bytes + other.files[0].bytes
    (tmp_path / other.files[0].name).write_bytes(b"altered")
    with pytest.raises(CheckpointCorrupt):
        verify(uri)


def test_the_newest_is_the_one_of_most_steps_of_all_models(tmp_path: Path) -> None:
    (other,) = several().others
    write_manifest(str(tmp_path / "late"), replace(several(), others=(replace(other, version=9),)))
    write_manifest(str(tmp_path / "early"), several())
    assert read_manifest(str(tmp_path)).uri.endswith("late")
