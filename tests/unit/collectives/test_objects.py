"""Values of Python between ranks: what is decoded is what was encoded, and what would not be is refused.

Tests of `collectives/objects.py`.
"""

from __future__ import annotations

import enum
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import axon_ps
from axon_ps.collectives.encoding import SENDABLE, decode, encode
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["$tuple", "$", "$array"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys | st.tuples(st.integers(), st.text()), inner, max_size=4)
    ),
    max_leaves=6,
)


def kinds(value: Any) -> Any:
    """The types in a value, at all places."""
    if isinstance(value, dict):
        return dict, [(kinds(k), kinds(v)) for k, v in value.items()]
    return type(value), [kinds(v) for v in value] if isinstance(value, (list, tuple)) else None


@settings(max_examples=50)
@given(values)
def test_what_comes_out_is_what_went_in(value: Any) -> None:
    found = decode(encode(value, "a test"), "a test")
    assert found == value
    assert kinds(found) == kinds(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128"])
def test_numpy_arrays_and_scalars(dtype: str) -> None:
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.zeros((0, 2), dtype), np.array(1).astype(dtype)):
        for given_array in (array, array.T):
            found = decode(encode(given_array, "a test"), "a test")
            np.testing.assert_array_equal(found, given_array)
            assert (found.dtype, found.shape) == (given_array.dtype, given_array.shape)
            assert found.flags.writeable
    scalar = np.ones(1, dtype)[0]
    assert type(decode(encode(scalar, "a test"), "a test")) is type(scalar)


def test_floats_that_are_no_numbers() -> None:
    found = decode(encode([math.inf, -math.inf, math.nan], "a test"), "a test")
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


class Color(enum.StrEnum):
    RED = "red"


class Loaded:
    """What pickle would run."""

    def __reduce__(self) -> Any:
        return print, ("this was run",)


itself: list[Any] = []
itself.append(itself)

REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ({"seen": [{1, 2}]}, r"a set at \['seen'\]\[0\]"),
    "a tensor": (torch.ones(2), r"a torch.Tensor, .*give tensor.numpy\(\)"),
    "a parameter in a tuple": ((1, torch.nn.Parameter(torch.ones(2))), r"a torch.nn.parameter.Parameter at \[1\]"),
    "an object": (Loaded(), "Loaded, which cannot be sent"),
    "a function": (print, "a builtin_function_or_method"),
    "an enum that is a str": ([Color.RED], r"Color at \[0\]"),
    "a subclass of dict": (OrderedDict(a=1), "a collections.OrderedDict, which"),
    "an array of objects": (np.array([None]), "an? object array"),
    "an array of strings": (np.array(["a"]), "<U1 array"),
    "a key": ({frozenset(): 1}, "a frozenset at a key"),
    "itself": (itself, "more than 100 deep, or one that is in itself"),
    "a number too long": (10**5000, "cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_named_with_what_can(name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(InvalidRequest, match=words) as caught:
        encode(value, "all_gather_object")
    assert "all_gather_object was given" in str(caught.value)
    assert name in ("itself", "a number too long") or SENDABLE in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Loaded()),
        b"",
        b"[1",
        b"\xff",
        json.dumps({"$array": ["object", [1], "AAAA"]}).encode(),
        json.dumps({"$array": ["float32", [10**9], "AAAA"]}).encode(),
        json.dumps({"$scalar": ["float32", ""]}).encode(),
        json.dumps({"$bytes": "?"}).encode(),
        json.dumps({"$dict": [[[], 1]]}).encode(),
        json.dumps({"$import": "os"}).encode(),
        b"[" * 100_000,
    ],
    ids=lambda data: str(data[:24]),
)
def test_bytes_that_are_no_value_make_nothing(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no encoded value"):
        decode(data, "a test")


# ---------------------------------------------------------------------- the collectives


def on_ranks(world_size: int, body: Callable[[ProcessGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(30) for f in [pool.submit(body, group) for group in ProcessGroup.mock(world_size)]]


def thing(rank: int) -> Any:
    return {"rank": rank, "name": "x" * 50 * rank, 3: (1.5, None), "values": [True] * rank}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_object_collective(ranks: int) -> None:
    everything = [thing(r) for r in range(ranks)]
    last = ranks - 1

    def body(group: ProcessGroup) -> None:
        me = group.rank
        assert axon_ps.all_gather_object(thing(me), group) == everything
        assert axon_ps.gather_object(thing(me), last, group) == (everything if me == last else None)
        listed = [*everything, me] if me == last else [None] * (ranks + 1)
        assert axon_ps.broadcast_object_list(listed, last, group) is listed
        assert listed == [*everything, last]
        assert axon_ps.scatter_object_list(everything if me == last else None, last, group) == thing(me)
        right, left = (me + 1) % ranks, (me - 1) % ranks
        if ranks > 1:
            into = [None, None]
            if me == 0:
                axon_ps.send_object_list([me, "é"], right, group)
            assert axon_ps.recv_object_list(into, left if me else -1, group) == left
            assert into == [left, "é"]
            if me:
                axon_ps.send_object_list([me, "é"], right, group)

    on_ranks(ranks, body)


def test_a_rank_that_cannot_send_its_value_reports_that_to_the_others() -> None:
    def body(group: ProcessGroup) -> None:
        values = [{1}, "fine"]
        calls: list[Callable[[], Any]] = [
            lambda: axon_ps.all_gather_object(values[group.rank], group),
            lambda: axon_ps.gather_object(values[group.rank], 1, group),
            lambda: axon_ps.broadcast_object_list([values[group.rank]], 0, group),
            lambda: axon_ps.scatter_object_list([values[group.rank]] * 2, 0, group),
        ]
        for call in calls:
            wrong = pytest.raises(InvalidRequest, match="given a set")
            informed = pytest.raises(Disagreement, match=r"rank 0.*given a set")
            with informed if group.rank else wrong:
                call()
        with pytest.raises(InvalidRequest, match=r"lists of \[1, 2\] items, by rank"):
            axon_ps.broadcast_object_list([None] * (group.rank + 1), 0, group)
        for call in (
            lambda: axon_ps.gather_object(1, 2, group),
            lambda: axon_ps.broadcast_object_list([1], -1, group),
            lambda: axon_ps.scatter_object_list([1, 2], 7, group),
        ):
            with pytest.raises(InvalidRequest, match="go from 0 to 1"):
                call()
        scattering = pytest.raises(InvalidRequest, match="was given 1 values on rank 0; it needs one for each of 2")
        with pytest.raises(Disagreement) if group.rank else scattering:
            axon_ps.scatter_object_list([1], 0, group)
        if group.rank == 0:
            axon_ps.send_object_list([1, 2], 1, group)
        else:
            with pytest.raises(InvalidRequest, match="a list of 1 items; rank 0 has sent 2"):
                axon_ps.recv_object_list([None], 0, group)
        assert axon_ps.all_gather_object(group.rank, group) == [0, 1]  # the group can go on

    on_ranks(2, body)


def test_a_value_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.collectives.objects.MAX_OBJECT_BYTES", 100)
    with pytest.raises(InvalidRequest, match="has 202 bytes; at most 100 can be sent"):
        axon_ps.all_gather_object("x" * 200, ProcessGroup.mock())
