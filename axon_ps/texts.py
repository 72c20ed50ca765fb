"""Texts of other programs: made printable before they are logged, shown or raised, and read as JSON in bounds.

Names are refused where they are not printable (`wire.codec.name_from_proto`). This is for other texts: the reason of a
member that leaves, the message of a peer's error, a value of the key-value store. `suggestion` is for misspelt names.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from axon_ps.errors import InvalidRequest

MAX_JSON_BYTES: Final = 16 << 20
"""Most bytes of a text that is read as JSON."""

MAX_JSON_DEPTH: Final = 400
"""Most lists and objects inside each other: a value a hundred deep has three a level (`collectives.encoding`)."""

MAX_JSON_VALUES: Final = 1 << 20
"""Most values of a text that is read as JSON. They take at most 300 bytes of memory each."""

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


def printable(text: str, max_chars: int | None = None, *, lines: bool = False) -> str:
    """Return the text with an escape ("\\x1b") for every character that is not printable.

    Args:
        text: of another program.
        max_chars: characters that remain of it; None = all.
        lines: whether it may have several lines, and tabs.
    """
    text = text[:max_chars]
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in text)


def suggestion(name: str, known: Iterable[str], *, prefix: str = "", min_similarity: float = 0.6) -> str:
    """Return the end of a message about an unknown name: "; is X meant?" with the nearest known name, or nothing.

    Args:
        name: the unknown name.
        known: the known names.
        prefix: the beginning that all of them have. It is not compared.
        min_similarity: from 0 to 1. Below it a known name is not near.
    """
    endings = [one.removeprefix(prefix) for one in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), endings, 1, min_similarity)
    return f"; is {prefix + near[0]!r} meant?" if near else ""


def value_of_json(text: str | bytes, what: str, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON text, within bounds of its length, its depth and its number of values.

    Args:
        text: of another program. Bytes are UTF-8.
        what: its description, for messages.
        max_bytes: the longest that is read.

    Raises:
        InvalidRequest: it is not JSON, too long, has too many values, lists and objects in it are too deep, or an
            object names a key twice.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > max_bytes:
        raise InvalidRequest(f"{what} has {len(raw)} bytes; at most {max_bytes} are read as JSON")
    check_values_of_json(raw, what)
    if _depth(raw) > MAX_JSON_DEPTH:  # first: with a raised recursion limit the stack would overflow
        raise _too_deep(what)
    try:
        return json.loads(text if isinstance(text, str) else raw.decode(), object_pairs_hook=_object)
    except RecursionError as error:  # the caller is deep in its own stack
        raise _too_deep(what) from error
    except ValueError as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error


def check_values_of_json(text: bytes, what: str) -> None:
    """Refuse JSON that has too many values to be read.

    Raises:
        InvalidRequest: it has too many.
    """
    # each value but the first of its list or object is behind a comma; commas in strings are counted, too
    count = text.count(b",") + text.count(b"[") + text.count(b"{") + 1
    if count > MAX_JSON_VALUES:
        raise InvalidRequest(f"{what} has {count} values or more; at most {MAX_JSON_VALUES} are read as JSON")


def _depth(text: bytes) -> int:
    """Return the deepest nesting of JSON, or 0 where it cannot be too deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_JSON_DEPTH:
        return 0
    depth = deepest = 0
    for bracket in _STRING.sub(b"", text).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _too_deep(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} has more than {MAX_JSON_DEPTH} lists or objects inside each other, which is the most that are read"
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice[:80]!r} twice")
    return found
