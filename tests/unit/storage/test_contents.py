"""The files of a checkpoint: whatever is wrong with one is found when it is opened, before a value is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from axon_ps.errors import CheckpointCorrupt
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.contents import open_slices, open_state, read_attached, verify
from axon_ps.storage.manifest import MAX_VERSION, Manifest, read_manifest, write_attached, write_manifest
from axon_ps.types import DType
from shard_files import entry_of, put_files

LAYOUT = Layout(
    units=(
        build_unit("a", [("w", (30, 4), DType.F32), ("b", (9,), DType.F32)]),
        build_unit("f", [("x", (7,), DType.F16)], trainable=False),
    )
)


def manifest(num_servers: int = 2) -> Manifest:
    return Manifest(
        job="j", version=3, layout=LAYOUT, optimizer=None, num_servers=num_servers,
        options=PlanOptions(min_slice_numel=8), files=(),
    )  # fmt: skip


def change(uri: str, written: Manifest, file: int, how: Callable[[dict[str, Any]], object]) -> Manifest:
    """Change the tensors of a file, by the library; the manifest that says so."""
    path = Path(uri) / written.files[file].name
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    how(tensors)
    save_file(tensors, path)
    files = [*written.files[:file], entry_of(uri, path.name), *written.files[file + 1 :]]
    changed = replace(written, files=tuple(files))
    write_manifest(uri, changed)
    return changed


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    uri = str(tmp_path)
    written = put_files(uri, manifest())
    write_manifest(uri, written)
    verify(uri)

    def fill(tensors: dict[str, Any]) -> None:
        tensors["0.0.param"][:] = np.arange(tensors["0.0.param"].size)
        tensors["0.0.updates"][:] = [3, MAX_VERSION]

    first = written.plan.slices[0][0]
    written = change(uri, written, first.server, fill)
    verify(uri)
    with open_slices(read_manifest(uri), written.plan.numbered) as slices:
        out = np.zeros(5, np.float32)
        assert slices.read_into(first, 3, out)
        assert out.tolist() == [3, 4, 5, 6, 7]
        assert slices.updates(first) == (3, MAX_VERSION)
        assert not slices.read_into(first, 3, out, "no_such_moment")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda t: t.pop("0.0.param"), "lacks the tensor '0.0.param'"),
        (lambda t: t.pop("0.0.updates"), "lacks the tensor '0.0.updates'"),
        (lambda t: t.update({"0.0.param": t["0.0.param"][1:]}), r"is f32\[\d+\]; by its manifest it must be f32"),
        (lambda t: t.update({"0.0.param": t["0.0.param"].astype(np.float64)}), r"must be f32\["),
        (lambda t: t.update({"0.0.param": t["0.0.param"].reshape(1, -1)}), r"must be f32\["),
        (lambda t: t.update({"0.0.exp_avg": t["0.0.exp_avg"][:-1]}), r"must be f32\["),
        (lambda t: t.update({"0.0.exp_avg": t["0.0.updates"]}), r"must be f32\["),
        (lambda t: t.update({"0.0.updates": np.zeros(3, np.int64)}), r"must be i64\[2\]"),
        (lambda t: t.update({"0.0.updates": np.zeros(2, np.int32)}), r"must be i64\[2\]"),
        (lambda t: t["0.0.updates"].fill(-1), "counts -1 updates of a parameter; it must be 0 to"),
        (lambda t: t["0.0.updates"].fill(2**62), f"counts {2**62} updates"),
    ],
)
def test_what_the_manifest_does_not_say_is_found_before_a_value_is_read(
    tmp_path: Path, how: Callable[[dict[str, Any]], object], words: str
) -> None:
    """Sizes and hashes are right: somebody has put it together so."""
    uri = str(tmp_path)
    written = put_files(uri, manifest())
    first = written.plan.slices[0][0]
    written = change(uri, written, first.server, how)
    name = written.files[first.server].name
    for read in (lambda: verify(uri), lambda: open_slices(read_manifest(uri), [first])):
        with pytest.raises(CheckpointCorrupt, match=words) as caught:
            read()
        assert name in str(caught.value)
    others = [s for s in written.plan.numbered if s.server != first.server]
    open_slices(read_manifest(uri), others).close()  # a server that needs the other file alone is not concerned


def test_tensors_that_overlap_are_found_where_hashes_are_right(tmp_path: Path) -> None:
    """The counts of updates lie where parameters do: read as such, they end a server with its next step."""
    uri = str(tmp_path)
    written = put_files(uri, manifest(1))
    path = tmp_path / written.files[0].name
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin = header["0.0.param"]["data_offsets"][0]
    header["0.0.updates"]["data_offsets"] = [begin, begin + 16]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    write_manifest(uri, replace(written, files=(entry_of(uri, path.name),)))
    with pytest.raises(CheckpointCorrupt, match=f"{path.name}: tensor .* tensors lie one behind the other"):
        verify(uri)


def test_a_file_that_is_exchanged_after_it_was_opened_is_not_read(tmp_path: Path) -> None:
    uri = str(tmp_path)
    written = put_files(uri, manifest(1))
    write_manifest(uri, written)
    with open_slices(read_manifest(uri), written.plan.numbered) as slices:
        other = tmp_path / "other"
        other.write_bytes(b"something else")
        other.replace(tmp_path / written.files[0].name)
        out = np.ones(7, np.float32)
        slices.read_into(written.plan.slices[1][0], 0, out)
        assert not out.any()


def test_buffers_are_a_safetensors_file(tmp_path: Path) -> None:
    uri = str(tmp_path)
    attached = write_attached(uri, {"buffers/m": b"no such file", "another": b"anything"})
    write_manifest(uri, replace(put_files(uri, manifest()), attached=attached))
    assert read_attached(read_manifest(uri), "another") == b"anything"
    for read in (lambda: verify(uri), lambda: read_attached(read_manifest(uri), "buffers/m")):
        with pytest.raises(CheckpointCorrupt, match=f"the buffers in .*{attached['buffers/m'].name} are damaged"):
            read()


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (b"[" * 100_000, "has more than 400 lists"),
        (b"[]", "its JSON is no object"),
        (b"{", "not JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (None, "it has no bytes called 'tree'"),
    ],
)
def test_a_workers_state_has_json(tmp_path: Path, tree: bytes | None, words: str) -> None:
    uri, name = str(tmp_path), "state-00000-aa.safetensors"
    save_file({"0": np.zeros(2), **({} if tree is None else {"tree": np.frombuffer(tree, np.uint8)})}, tmp_path / name)
    entry: FileEntry = entry_of(uri, name)
    write_manifest(uri, replace(put_files(uri, manifest()), states={0: entry}))
    with pytest.raises(CheckpointCorrupt, match=f"{name}.*{words}"):
        verify(uri)
    with pytest.raises(CheckpointCorrupt, match=words), open_state(uri, entry):
        pass


def test_frozen_units_need_no_counts(tmp_path: Path) -> None:
    """Counts of one that was frozen later are there, and nobody reads them."""
    uri = str(tmp_path)
    written = put_files(uri, manifest(1))
    change(uri, written, 0, lambda t: t.update({"1.0.updates": np.full(5, -1, np.int64)}))
    changed = verify(uri)
    open_slices(changed, changed.plan.numbered).close()
