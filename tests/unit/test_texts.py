"""Texts of somebody else: what is printed of them, and what is read as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.texts import MAX_JSON_DEPTH, MAX_JSON_VALUES, printable, suggestion, value_of_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.mark.parametrize(
    ("text", "options", "printed"),
    [
        ("naïve ✓ 日本", {}, "naïve ✓ 日本"),
        ("\x1b[2J\x07\r\x9b1m", {}, r"\x1b[2J\x07\r\x9b1m"),
        ("\u202e\u2028\x7f\0", {}, r"\u202e\u2028\x7f\x00"),
        ("a\nb\tc\r", {}, r"a\nb\tc\r"),
        ("a\nb\tc\r", {"lines": True}, "a\nb\tc\\r"),
        ("abc\x1bdef", {"max_chars": 4}, r"abc\x1b"),
        ("\ud800", {}, r"\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_printed_as_an_escape(text: str, options: dict[str, Any], printed: str) -> None:
    assert printable(text, **options) == printed


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("joob", {}, "; is 'job' meant?"),
        ("jo", {"min_similarity": 0.9}, ""),
        ("p_joob", {"prefix": "p_"}, "; is 'p_job' meant?"),
        ("p_zzz", {"prefix": "p_"}, ""),
    ],
)
def test_the_nearest_name_is_suggested(name: str, options: dict[str, Any], said: str) -> None:
    known = [options.get("prefix", "") + ending for ending in ("job", "node")]
    assert suggestion(name, known, **options) == said


@pytest.mark.parametrize("value", [None, 0, -1.5, "x", [], {}, [[]], {"a": {"b": [1, {"c": None}]}}])
def test_json_is_read(value: Any) -> None:
    assert value_of_json(json.dumps(value), "it") == value
    assert value_of_json(json.dumps(value).encode(), "it") == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    each = sum(map(opening.count, "[{"))

    def nested(depth: int) -> str:
        return opening * (depth // each) + "0" + closing * (depth // each)

    value_of_json(nested(MAX_JSON_DEPTH), "it")
    for depth in (MAX_JSON_DEPTH + each, 1000, 100_000):
        with pytest.raises(InvalidRequest, match=r"it has more than 400 lists or objects inside each other"):
            value_of_json(nested(depth), "it")


@pytest.mark.parametrize("text", ["", "{", "[1,]", "nul", b"\xff", "[" * 100_000, "1" * 5000])
def test_what_is_not_json_is_named(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"it is not JSON|it has more than 400"):
        value_of_json(text, "it")


def test_size_is_bounded_before_it_is_read() -> None:
    with pytest.raises(InvalidRequest, match=r"it has 12 bytes; at most 10 are read as JSON"):
        value_of_json('"0123456789"', "it", max_bytes=10)


@settings(max_examples=200)
@given(value=VALUES, ascii_only=st.booleans())
def test_json_is_what_python_says(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert value_of_json(text, "it") == value_of_json(text.encode(), "it") == value


@settings(max_examples=200)
@given(text=st.binary() | st.text(alphabet='[]{}",:\\n1 ').map(str.encode))
def test_other_text_is_what_python_says(text: bytes) -> None:
    twice: list[object] = []

    def found(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(() if len(dict(pairs)) == len(pairs) else pairs)
        return dict(pairs)

    try:
        expected = json.loads(text.decode(), object_pairs_hook=found)
    except ValueError:
        twice.append(text)
    if twice:
        with pytest.raises(InvalidRequest, match="it is not JSON"):
            value_of_json(text, "it")
    else:
        assert value_of_json(text, "it") == expected


@pytest.mark.parametrize(
    ("opening", "closing"),
    [(b"[", b"]"), (b'{"a":', b"}"), (b'["[[[{\\"", {"a":', b"}]")],
    ids=["list", "object", "both"],
)
def test_depth_is_bounded_where_a_program_has_raised_its_stack(opening: bytes, closing: bytes) -> None:
    """Its memory ends all the same."""
    depth = MAX_JSON_DEPTH // len(closing)
    value_of_json(opening * depth + b"1" + closing * depth, "it")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**9)
    try:
        for text in (opening * (depth + 1), opening * 100_000):
            with pytest.raises(InvalidRequest, match="more than 400 lists or objects"):
                value_of_json(text, "it")
    finally:
        sys.setrecursionlimit(limit)


def test_values_are_counted_before_they_are_read() -> None:
    for text in (b"[" + b"[]," * MAX_JSON_VALUES, b'"' + b"," * MAX_JSON_VALUES + b'"'):
        with pytest.raises(InvalidRequest, match=f"at most {MAX_JSON_VALUES} are read"):
            value_of_json(text, "it")


def test_a_key_that_is_there_twice_is_named() -> None:
    with pytest.raises(InvalidRequest, match="it is not JSON: an object has the key 'a' twice"):
        value_of_json(b'[{"b": {"a": 1, "c": 2, "a": 1}}]', "it")
