"""safetensors files: what we write the library reads, what the library writes we read, and damage is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.errors import CheckpointCorrupt, InternalError, InvalidRequest
from axon_ps.storage import checkpoint, writer_thread
from axon_ps.storage.checkpoint import FileEntry, SafetensorsReader, TensorSpec, check_size, create_file, open_checked
from axon_ps.storage.files import FileStore, LocalFileStore, open_store
from axon_ps.types import NUMBERS, Array, DType

VALUES: dict[str, Array] = {
    "a.param": np.arange(1000, dtype=np.float32),
    "counts": np.array([3, -1, 2**40], np.int64),
    "scalar": np.full((), 2.5, np.float32),
    "matrix": np.arange(12, dtype=np.float64).reshape(3, 4),
    "ü": np.array([1, 0, 1], np.bool_),
}
DTYPES = {np.dtype(d.numpy): d for d in NUMBERS if d is not DType.BF16}


def specs(values: dict[str, Array]) -> list[TensorSpec]:
    return [TensorSpec(name=n, dtype=DTYPES[v.dtype], shape=v.shape) for n, v in values.items()]


def write(store: FileStore, name: str, values: dict[str, Array], metadata: dict[str, str] | None = None) -> FileEntry:
    with create_file(store, name, specs(values), metadata or {}) as writer:
        for tensor, array in values.items():
            writer.write(tensor, array)
    return writer.entry(name)


def opened(store: FileStore, name: str) -> contextlib.AbstractContextManager[SafetensorsReader]:
    """A file whose manifest has the right size and hash of it, whatever is in it."""
    with store.open(name) as source:
        content = source.read(0, source.size)
    entry = FileEntry(name=name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    return open_checked(store, entry)


def read(store: FileStore, name: str) -> dict[str, Array]:
    with opened(store, name) as reader:
        out: dict[str, Array] = {}
        for tensor, spec in reader.tensors.items():
            out[tensor] = np.empty(spec.shape, spec.dtype.numpy)
            reader.read_into(tensor, 0, out[tensor])
        return out


def assert_equal(got: dict[str, Array], expected: dict[str, Array]) -> None:
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    entry = write(LocalFileStore(tmp_path), "f.safetensors", VALUES, {"who": "us"})
    path = tmp_path / "f.safetensors"
    assert_equal(safetensors.numpy.load_file(path), VALUES)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"who": "us"}
        assert np.array_equal(file.get_slice("a.param")[10:20], VALUES["a.param"][10:20])
    assert entry.bytes == path.stat().st_size
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    safetensors.numpy.save_file(VALUES, tmp_path / "f.safetensors", {"who": "them"})
    assert_equal(read(LocalFileStore(tmp_path), "f.safetensors"), VALUES)
    with opened(LocalFileStore(tmp_path), "f.safetensors") as reader:
        assert reader.metadata == {"who": "them"}


@settings(max_examples=40)
@given(
    numels=st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 300), min_size=1, max_size=6),
    piece=st.integers(1, 500),
)
def test_round_trip_in_pieces_of_any_size(numels: dict[str, int], piece: int) -> None:
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(k).astype(np.float32) for n, k in numels.items() if n != "__metadata__"}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", piece)
        patch.setattr(writer_thread, "BLOCK_BYTES", piece)
        write(store, "f", values)
        assert_equal(read(store, "f"), values)


def test_a_tensor_may_come_in_parts(tmp_path: Path) -> None:
    array = np.arange(10, dtype=np.float32)
    with create_file(LocalFileStore(tmp_path), "f", specs({"a": array, "b": array}), {}) as writer:
        for part in (array[:3], array[3:4], array[4:]):
            writer.write("a", part)
        writer.write("b", array)
    assert_equal(read(LocalFileStore(tmp_path), "f"), {"a": array, "b": array})


def test_bf16_is_stored_as_such(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    values = torch.randn(100).bfloat16()
    spec = TensorSpec(name="x", dtype=DType.BF16, shape=(4, 25))
    with create_file(LocalFileStore(tmp_path), "f", [spec], {}) as writer:
        writer.write("x", values.view(torch.uint16).numpy())
    got = load_file(tmp_path / "f")["x"]
    assert got.dtype is torch.bfloat16
    assert torch.equal(got.reshape(-1), values)


@pytest.mark.parametrize("names", [["b"], ["a", "a"], ["a"], ["a", "b", "c"]])
def test_a_writer_that_strays_from_its_header_is_our_bug(tmp_path: Path, names: list[str]) -> None:
    array = np.zeros(4, np.float32)

    def stray() -> None:
        with create_file(LocalFileStore(tmp_path), "f", specs({"a": array, "b": array}), {}) as writer:
            for name in names:
                writer.write(name, array)

    with pytest.raises(InternalError):
        stray()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_too_long_is_our_bug(tmp_path: Path) -> None:
    with (
        pytest.raises(InternalError, match="leaves 16"),
        create_file(LocalFileStore(tmp_path), "f", specs({"a": np.zeros(4, np.float32)}), {}) as writer,
    ):
        writer.write("a", np.zeros(5, np.float32))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    spec = specs({"a": np.zeros(4, np.float32)})
    with pytest.raises(InvalidRequest, match="share a name"), create_file(LocalFileStore(tmp_path), "f", spec * 2, {}):
        pass


# ---------------------------------------------------------------------- damage


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    store = LocalFileStore(tmp_path)
    entry = write(store, "f", VALUES)
    path = tmp_path / "f"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match=f"f has {entry.bytes - 1} bytes; the manifest says {entry.bytes}"):
        check_size(store, entry)
    with pytest.raises(CheckpointCorrupt, match="is said to lie at"):
        read(store, "f")


def test_an_altered_file_is_named(tmp_path: Path) -> None:
    store = LocalFileStore(tmp_path)
    entry = write(store, "f", VALUES)
    with open_checked(store, entry):
        pass
    content = bytearray((tmp_path / "f").read_bytes())
    content[-5] ^= 1
    (tmp_path / "f").write_bytes(content)
    with (
        pytest.raises(CheckpointCorrupt, match=f"f has SHA-256 .*; the manifest says {entry.sha256}"),
        open_checked(store, entry),
    ):
        pass


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    store = LocalFileStore(tmp_path)
    entry = FileEntry(name="f", sha256="", bytes=1)
    with pytest.raises(CheckpointCorrupt, match="lacks the file f"):
        check_size(store, entry)
    with pytest.raises(CheckpointCorrupt, match="lacks the file f"), open_checked(store, entry):
        pass


def header(value: object) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (1 << 60).to_bytes(8, "little") + b"{}",
        header(b"\xff\xfe"),
        header(b"[1, 2]") + bytes(8),
        header(b"{") + bytes(8),
        header({"a": 5}) + bytes(8),
        header({"a": {**GOOD, "dtype": "Q9"}}) + bytes(8),
        header({"a": {**GOOD, "shape": [-2]}}) + bytes(8),
        header({"a": {**GOOD, "shape": [True]}}) + bytes(8),
        header({"a": {**GOOD, "shape": "x"}}) + bytes(8),
        header({"a": {**GOOD, "data_offsets": [0, 4]}}) + bytes(8),
        header({"a": {**GOOD, "data_offsets": [4, 12]}}) + bytes(8),
        header({"a": {**GOOD, "data_offsets": [-8, 0]}}) + bytes(8),
        header({"a": {**GOOD, "data_offsets": [0]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [2]}}) + bytes(8),
        header({"__metadata__": 3, "a": GOOD}) + bytes(8),
        header({"a": GOOD, "b": GOOD}) + bytes(8),
        header({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}) + bytes(12),
        header({"a": {**GOOD, "data_offsets": [8, 16]}}) + bytes(16),
        header({"a": GOOD}) + bytes(9),
        header({"a": {**GOOD, "shape": [1] * 65 + [2]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}),
        header({"a" * 1025: GOOD}) + bytes(8),
        header(b'{"a":' + json.dumps(GOOD).encode() + b',"a":' + json.dumps(GOOD).encode() + b"}") + bytes(8),
        header(b"[" * 100_000),
        header(b'{"a":' * 100_000),
        header(b"{}," * 800_000),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="f"), opened(LocalFileStore(tmp_path), "f"):
        pass


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_to_the_header_is_our_error_or_none(data: st.DataObject) -> None:
    store = open_store("memory://damage")
    write(store, "f", {"a": VALUES["a.param"], "b": VALUES["counts"]})
    with store.open("f") as source:
        content = bytearray(source.read(0, source.size))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
    with store.create("g") as sink:
        sink.write(bytes(content))
    with contextlib.suppress(CheckpointCorrupt):
        read(store, "g")


def test_what_is_not_there_is_not_read(tmp_path: Path) -> None:
    store = LocalFileStore(tmp_path)
    write(store, "f", VALUES)
    with opened(store, "f") as reader:
        with pytest.raises(CheckpointCorrupt, match="no tensor 'x'"):
            reader.read_into("x", 0, np.empty(1, np.float32))
        with pytest.raises(CheckpointCorrupt, match="needed are those from 999 to 1001"):
            reader.read_into("a.param", 999, np.empty(2, np.float32))
        with pytest.raises(CheckpointCorrupt, match="as float64"):
            reader.read_into("a.param", 0, np.empty(2, np.float64))
