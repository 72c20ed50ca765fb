"""simulate.profile: what a profile must have, and what is wrong with one that has it not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.optim import names
from axon_ps_lab.simulate.profile import DEFAULT, Profile

BUILT_IN = {"sgd", "adam", "adamw", "adagrad", "rmsprop", "lion"}
WIRES = {"float32", "bfloat16", "float16", "int8", "int4"}


def changed(*path: str, value: Any) -> dict[str, Any]:
    """The default profile with another value in one place; None = without it."""
    values = copy.deepcopy(DEFAULT.as_dict())
    inner: Any = values
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return values


def test_the_default_has_every_optimizer_and_all_that_travels() -> None:
    assert DEFAULT.update_s.keys() == BUILT_IN <= set(names())
    assert DEFAULT.wires.keys() == WIRES


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(DEFAULT.as_dict()))
    assert Profile.read(tmp_path / "profile.json") == DEFAULT


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "missing here: cores, decision_s"),
        (None, "missing here: cores, decision_s"),
        (changed("decision_s", value=None), "missing here: decision_s$"),
        (changed("decision_s", value=-1e-3), "decision_s of a profile is -0.001; it must be a number above 0"),
        (changed("cores", value=0), "cores of a profile is 0"),
        (changed("cores", value=True), "cores of a profile is True"),
        (changed("worker_call_s", value="1 ms"), "worker_call_s of a profile is '1 ms'"),
        (changed("server_call_s", value=float("inf")), "server_call_s of a profile is inf"),
        (changed("update_s", value={}), "update_s of a profile is {}; it must be an object"),
        (changed("update_s", "adam", value=float("nan")), "update_s.adam of a profile is nan"),
        (changed("wires", value=[1]), r"wires of a profile is \[1\]; it must be an object"),
        (changed("wires", "int8", value=3), "wires.int8 of a profile is 3; it must be an object"),
        (changed("wires", "int8", "server_push_s", value=None), "wires.int8 of a profile has .*server_push_s"),
        (changed("wires", "int8", "worker_push_s", value=-1), "wires.int8.worker_push_s of a profile is -1"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(values: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Profile.of(values)


@pytest.mark.parametrize("text", [None, "{", "[1]"], ids=["no file", "no JSON", "no profile"])
def test_a_file_that_cannot_be_read_is_named_with_what_writes_one(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match="axon-ps doctor --measure") as raised:
        Profile.read(path)
    assert str(path) in str(raised.value)
