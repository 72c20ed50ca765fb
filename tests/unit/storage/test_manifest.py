"""Manifests: what makes a directory a checkpoint, and which one of several is taken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axon_ps.errors import CheckpointCorrupt, CheckpointNotFound, InvalidRequest
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    check_sizes,
    file_prefix,
    list_checkpoints,
    newest,
    read_attached,
    read_manifest,
    remove,
    verify,
    write_attached,
    write_manifest,
)
from axon_ps.types import DType, OptimizerSpec

LAYOUT = Layout(
    units=(
        build_unit("a", [("w", (3, 4), DType.BF16), ("b", (), DType.F32)]),
        build_unit("f", [("x", (7,), DType.F16)], trainable=False),
    )
)


def put_file(uri: str, server: int = 0, content: bytes = b"content", token: str = "v1-aa") -> FileEntry:
    import hashlib

    name = f"{file_prefix(server, 1)}{token}.safetensors"
    with open_store(uri).create(name) as sink:
        sink.write(content)
    return FileEntry(name=name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


FILE = FileEntry(name="shard-a", sha256="0" * 64, bytes=1)


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
    files = (put_file(uri),)
    write_manifest(uri, manifest(files=files))
    got = read_manifest(uri)
    assert got == manifest(files=files, uri=got.uri)
    assert got.uri == uri.removeprefix("file://")
    assert got.bytes == 7
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
    put_file(str(tmp_path))
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
    first = put_file(uri)
    write_manifest(uri, manifest(1, files=(first,)))
    second = put_file(uri, content=b"other content", token="v2-bb")
    assert verify(uri).version == 1  # the first is untouched while the second is being written
    (tmp_path / "notes.txt").write_text("the user's own")
    write_manifest(uri, manifest(2, files=(second,)))
    assert verify(uri).version == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([MANIFEST_NAME, "notes.txt", second.name])


def test_damage_is_named(tmp_path: Path) -> None:
    uri = str(tmp_path)
    entry = put_file(uri)
    write_manifest(uri, manifest(files=(entry,)))
    (tmp_path / entry.name).write_bytes(b"contenT")
    with pytest.raises(CheckpointCorrupt, match=f"{entry.name} has SHA-256"):
        verify(uri)
    (tmp_path / entry.name).write_bytes(b"conten")
    for check in (verify, lambda uri: check_sizes(read_manifest(uri))):
        with pytest.raises(CheckpointCorrupt, match="has 6 bytes; the manifest says 7"):
            check(uri)
    (tmp_path / entry.name).unlink()
    for check in (verify, lambda uri: check_sizes(read_manifest(uri))):
        with pytest.raises(CheckpointCorrupt, match=f"lacks the file {entry.name}"):
            check(uri)


def test_small_files_are_attached_and_checked_as_all_others(tmp_path: Path) -> None:
    uri = str(tmp_path)
    contents = {"buffers/model 0": b"\x00" * 5000, "buffers/a/b \u00fc": b"x", "empty": b""}
    shard = put_file(uri)
    first = write_attached(uri, contents)
    write_manifest(uri, manifest(1, files=(shard,), attached=first))
    read = verify(uri)
    assert read.attached == first
    assert read.bytes == shard.bytes + 5001
    assert read_attached(read) == contents
    assert read_attached(read, ["empty"]) == {"empty": b""}

    second = write_attached(uri, {"buffers/model 0": b"newer"})
    assert read_attached(read) == contents, "the first is untouched while the second is being written"
    write_manifest(uri, manifest(2, files=(shard,), attached=second))
    names = {MANIFEST_NAME, shard.name, second["buffers/model 0"].name}
    assert {p.name for p in tmp_path.iterdir()} == names

    path = tmp_path / second["buffers/model 0"].name
    for content, words in ((b"newex", "was altered"), (b"newe", "has 4 bytes"), (None, "lacks the file")):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CheckpointCorrupt, match=words):
            read_attached(read_manifest(uri))
        with pytest.raises(CheckpointCorrupt):
            verify(uri)
    remove(read_manifest(uri))
    assert not tmp_path.exists()


def test_a_manifest_from_before_has_nothing_attached(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), manifest(files=(put_file(str(tmp_path)),)))
    path = tmp_path / MANIFEST_NAME
    value = json.loads(path.read_text())
    del value["attached"], value["sha256"]
    path.write_text(json.dumps(value))
    assert read_attached(read_manifest(str(tmp_path))) == {}


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
    "content", [b"", b"[]", b"\xff", b'"text"', b"null", b'{"format_version": 4', b'{"format_version": 4}']
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
    other = manifest(8, name="critic", layout=Layout(units=LAYOUT.units[:1]), extra={})
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
    files = [put_file(uri, token=f"v1-a{n}") for n in range(3)]
    (other,) = several().others
    made = replace(several(), files=(files[0],), others=(replace(other, files=(files[1],)),))
    write_manifest(uri, made)
    assert not (tmp_path / files[2].name).exists(), "what no section names is removed"
    assert verify(uri).bytes == files[0].bytes + files[1].bytes
    (tmp_path / files[1].name).write_bytes(b"altered")
    with pytest.raises(CheckpointCorrupt):
        verify(uri)


def test_the_newest_is_the_one_of_most_steps_of_all_models(tmp_path: Path) -> None:
    (other,) = several().others
    write_manifest(str(tmp_path / "late"), replace(several(), others=(replace(other, version=9),)))
    write_manifest(str(tmp_path / "early"), several())
    assert read_manifest(str(tmp_path)).uri.endswith("late")
