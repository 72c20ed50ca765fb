"""A worker's own state: a file that is damaged, and has the right hash all the same, is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from axon_ps.errors import CheckpointCorrupt, InvalidRequest
from axon_ps.parallel.checkpoints import own_state
from axon_ps.parallel.checkpoints.own_state import Decoder, RandomState
from axon_ps.storage.checkpoint import FileEntry, TensorSpec, create_file
from axon_ps.storage.files import open_store
from axon_ps.texts import value_of_json
from axon_ps.types import DType


def put(directory: Path, tree: Any, **tensors: TensorSpec) -> dict[int, FileEntry]:
    """The file of worker 0, with zeros as tensors."""
    import numpy as np

    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    specs = [TensorSpec(name="tree", dtype=DType.U8, shape=(len(text),)), *tensors.values()]
    with create_file(open_store(str(directory)), "state-00000-a", specs, {}) as writer:
        writer.write("tree", np.frombuffer(text, np.uint8))
        for spec in tensors.values():
            writer.write(spec.name, np.zeros(spec.shape, spec.dtype.numpy))
    return {0: writer.entry("state-00000-a")}


BYTES = TensorSpec(name="0", dtype=DType.U8, shape=(16,))


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": 1},
        {"$tensor": "x"},
        {"$tensor": [0]},
        {"$float": "x"},
        {"$float": [1]},
        {"$set": [[1]]},
        {"$set": 3},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$counter": [["a", "b"], 3]},
        {"$tuple": None},
        {"$bytes": 3, "$length": 3},
        {"$bytes": {"$tensor": 0}},
        {"$bytes": {"$tensor": 0}, "$length": "x"},
        {"$array": [{"$tensor": 0}, "O", [2]]},
        {"$array": [{"$tensor": 0}, "no dtype", [2]]},
        {"$array": [{"$tensor": 0}, "<f8", [3]]},
        {"$array": [{"$tensor": 0}, "<f8", [-2]]},
        {"$array": [{"$tensor": 0}, "<f8", [2**70]]},
        {"$array": [{"$tensor": 0}, "<f8"]},
        {"$array": 3},
        {"$unknown": 3},
    ],
)
def test_a_value_that_is_damaged_is_named(tmp_path: Path, value: object) -> None:
    files = put(tmp_path, {"state": {"good": 1, "bad": value}, "rank_state": {}}, bytes=BYTES)
    own: dict[str, Any] = {"good": 0, "bad": 0}
    with pytest.raises(CheckpointCorrupt, match="state-00000-a"):
        own_state.load(str(tmp_path), files, 0, own, None)
    assert own == {"good": 0, "bad": 0}, "all is read before anything is set"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (b"[" * 100_000, "has more than 400 lists"),
        (b'{"state":' + b"[" * 70 + b"]" * 70 + b"}", "has no 'state'"),
        (b'{"state": {"bad": ' + b"[" * 70 + b"]" * 70 + b"}}", "nested deeper than 64"),
        (b"{}", "has no 'state'"),
        (b'{"state": 3}', "has no 'state'"),
    ],
)
def test_a_file_that_is_no_state_is_named(tmp_path: Path, tree: bytes, words: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"state-00000-a.*{words}"):
        own_state.load(str(tmp_path), put(tmp_path, tree), 0, {"bad": 0}, None)


def test_a_tensor_without_a_number_is_named(tmp_path: Path) -> None:
    files = put(tmp_path, {"state": {}}, x=TensorSpec(name="x", dtype=DType.F32, shape=(2,)))
    with pytest.raises(CheckpointCorrupt, match="state-00000-a"):
        own_state.load(str(tmp_path), files, 0, {"bad": 0}, None)


@pytest.mark.parametrize("current", [torch.Generator(), torch.zeros(3), RandomState()])
def test_what_an_object_of_ours_cannot_take_is_named(tmp_path: Path, current: Any) -> None:
    for value in (3, {"torch": 3}, [1, 2]):
        files = put(tmp_path / str(value), {"state": {"it": value}})
        with pytest.raises(CheckpointCorrupt, match="is damaged"):
            own_state.load(str(tmp_path / str(value)), files, 0, {"it": current}, None)


def test_what_the_users_object_raises_is_the_users(tmp_path: Path) -> None:
    class Theirs:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("theirs")

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("theirs")

    files = put(tmp_path, {"state": {"it": {"f": {"$kept": "f"}}, "other": {}}})
    with pytest.raises(KeyError, match="theirs"):
        own_state.load(str(tmp_path), files, 0, {"it": Theirs()}, None)
    with pytest.raises(ValueError, match="theirs"):
        own_state.load(str(tmp_path), files, 0, {"other": Theirs()}, None)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.texts.MAX_JSON_VALUES", 1000)
    with pytest.raises(InvalidRequest, match="at most 1000 are read"):
        own_state._write(str(tmp_path), 0, {"state": {"order": list(range(2000))}, "rank_state": {}})
    assert list(tmp_path.iterdir()) == []


def test_the_deepest_that_is_written_is_read() -> None:
    value: Any = 1
    for _ in range(64):
        value = {3: value}  # three levels of JSON each
    tree = own_state.Encoder(lambda tensor, path: None).encode(value, "state")
    assert value_of_json(json.dumps({"state": {"a": tree}}), "it")
    assert Decoder(lambda _: None, "here").decode(tree, lambda: None) == value
