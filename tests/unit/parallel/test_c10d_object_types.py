"""What torch.distributed's object collectives carry over "axon": torch's values, and no class that may do harm."""

from __future__ import annotations

import json
import traceback
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from axon_ps.collectives.encoding import decode, encode
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.object_types import TORCH

CHUNK = ChunkStorageMetadata(offsets=torch.Size([0, 4]), sizes=torch.Size([2, 3]))
INDEX = MetadataIndex("layer.weight", torch.Size([0, 4]), 1)
ITEM = WriteItem(
    index=INDEX,
    type=WriteItemType.SHARD,
    tensor_data=TensorWriteData(chunk=CHUNK, properties=TensorProperties(), size=torch.Size([4, 7])),
)
METADATA = Metadata(
    {"layer.weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 7]), [CHUNK])},
    planner_data={"layer.weight": ("layer", "weight")},
    storage_data={INDEX: _StorageInfo("a.distcp", 0, 12)},
)


def returned(value: Any) -> Any:
    return decode(encode(value, "a test", TORCH), "a test", TORCH)


@pytest.mark.parametrize(
    "value",
    [
        SavePlan([ITEM], storage_data={"prefix": "__0_"}, planner_data=METADATA),
        [torch.float16, torch.strided, torch.channels_last, torch.device("cuda", 1), torch.Size([])],
        {"a set": {1, 2}, "frozen": frozenset("ab"), 3: slice(1, None, 2), "path": Path("/a/b"), "r": range(2, 9, 3)},
        [1j, bytearray(b"\x80\x04"), timedelta(seconds=1.5), OrderedDict(b=1, a=2), WriteItemType.BYTE_IO],
    ],
    ids=["plan", "torch", "python", "more"],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = returned(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).T.to(dtype)
    back = returned({"t": tensor})["t"]
    assert back.dtype is dtype
    assert torch.equal(back.float(), tensor.float())
    assert returned(torch.ones(0, requires_grad=True)).requires_grad


class OfTheProgram(Exception):
    pass


class Config:
    pass


def test_what_another_rank_raised_says_what_it_was() -> None:
    try:
        raise OfTheProgram("a disk is full")
    except OfTheProgram as error:
        raised, stack = returned((error, traceback.extract_tb(error.__traceback__)))
    assert isinstance(raised, RuntimeError)
    assert "OfTheProgram: a disk is full" in str(raised)
    assert stack[0].name == "test_what_another_rank_raised_says_what_it_was"
    theirs = returned(CheckpointException("write", {1: (OSError(28, "No space left"), stack)}))
    assert isinstance(theirs, CheckpointException)
    assert "No space left" in str(theirs)
    assert isinstance(returned(KeyError("a")), KeyError)


def test_a_class_of_the_program_is_refused_with_its_place() -> None:
    with pytest.raises(
        InvalidRequest, match=r"types.Config at \['kind'\], which cannot be sent; .*sets, paths, tensors"
    ):
        encode({"kind": Config()}, "a test", TORCH)
    with pytest.raises(InvalidRequest, match="Linear"):
        encode(torch.nn.Linear(1, 1), "a test", TORCH)


@pytest.mark.parametrize(
    "hostile",
    [
        {"$object": ["os:system", {}]},
        {"$object": ["torch.serialization:load", {}]},
        {"$object": ["torch.nn:Linear", {}]},
        {"$object": ["torch.utils.not_imported:X", {}]},
        {"$object": ["torch.distributed.checkpoint.planner:SavePlan", {"__class__": 1}]},
        {"$object": ["torch.distributed.checkpoint.planner:dataclass", {}]},
        {"$enum": ["torch.distributed.checkpoint.planner:WriteItemType", "NONE"]},
        {"$enum": ["torch.distributed.checkpoint.planner:WriteItemType", "mro"]},
        {"$named": ["torch.distributed.checkpoint.planner:SavePlan", []]},
        {"$error": ["torch:Tensor", [], {}]},
        {"$error": ["builtins:eval", ["1"], 7]},
        {"$torch": "load"},
        {"$torch": "ops"},
        {"$tensor": [{"$bytes": "AAAA"}, False]},
        {"$tensor": 3},
        {"$size": ["a"]},
        {"$range": [0, 1, 0]},
        {"$device": "no device"},
        {"$reduce": ["os:system", "true"]},
    ],
)
def test_no_message_makes_anything_else(hostile: Any) -> None:
    with pytest.raises(InvalidRequest, match="no encoded value"):
        decode(json.dumps(hostile).encode(), "a test", TORCH)


def test_an_exception_that_is_a_function_of_python_becomes_an_error() -> None:
    made = decode(json.dumps({"$error": ["builtins:eval", ["1 + 1"], {}]}).encode(), "a test", TORCH)
    assert type(made) is RuntimeError
    assert str(made) == "1 + 1"
