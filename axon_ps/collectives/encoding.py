"""Values of Python as bytes, and back, for object collectives, `World.agree` and `World.gather_json`.

Owns: the types, and the encoding of each. The encoding is JSON, so decoding makes nothing but values: unlike with
pickle, no class is looked up and no code runs. JSON's own types are written as they are; the others as an object with
one key that begins with "$":

    tuple                 {"$tuple": [...]}
    dict                  {"$dict": [[key, value], ...]}     if a key is not a str, or begins with "$"
    bytes                 {"$bytes": base64}
    numpy array, scalar   {"$array": [dtype, shape, base64]}, {"$scalar": [dtype, base64]}

Invariant: a decoded value equals the encoded one and has the same types; other values are refused. `Types` adds types
of a library, each with a key of its own (`parallel.c10d.object_types`: PyTorch's).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.texts import value_of_json

SENDABLE = "None, bool, int, float, str, bytes, numpy arrays, and lists, tuples and dicts of these"

MAX_DEPTH = 100
"""The most levels of lists, tuples and dicts in each other."""

_DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


class Types(NamedTuple):
    """Types beyond `SENDABLE`.

    Attributes:
        take_apart: returns the key of a value and its content, encodable itself; None if it is of none of these types.
        put_together: returns the value of a key and a content; raises ValueError if they make none.
        names: the names of these types, for messages.
    """

    take_apart: Callable[[Any], tuple[str, Any] | None] = lambda value: None
    put_together: Callable[[str, Any], Any] = lambda tag, content: _unknown(tag)
    names: str = ""


NO_MORE = Types()


def encode(value: Any, what: str, types: Types = NO_MORE) -> bytes:
    """Encode a value as bytes.

    Args:
        value: one of `SENDABLE` or of `types`, exactly: a subclass would come out as something else.
        what: the name of the function that was given it, for messages.
        types: more types.

    Raises:
        InvalidRequest: it cannot be sent; the message names the type, and the path in the value.
    """
    try:
        return json.dumps(_plain(value, what, "", 0, types), separators=(",", ":")).encode()
    except ValueError as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{what} was given what cannot be written: {error}") from error


def decode(data: bytes, what: str, types: Types = NO_MORE) -> Any:
    """Return the value that `encode` was given.

    Args:
        data: the bytes that it returned, perhaps in another process.
        what: the name of the function that received them, for messages.
        types: the types that `encode` was given.

    Raises:
        InvalidRequest: they are not an encoded value.
    """
    try:
        return _value(value_of_json(data, "an encoded value", max_bytes=len(data)), types)
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise InvalidRequest(f"{what} got {len(data)} bytes that are no encoded value: {error}") from error


def _plain(value: Any, what: str, path: str, depth: int, types: Types) -> Any:
    """Return the value in JSON's types."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{what} was given lists or dicts more than {MAX_DEPTH} deep, or one that is in itself")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        items = [_plain(item, what, f"{path}[{i}]", depth + 1, types) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        pairs = [
            (_plain(k, what, f"{path}, a key", depth + 1, types), _plain(v, what, f"{path}[{k!r}]", depth + 1, types))
            for k, v in value.items()
        ]
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        return dict(pairs) if plain else {"$dict": [list(pair) for pair in pairs]}
    if kind is bytes:
        return {"$bytes": _text(value)}
    if kind is np.ndarray and value.dtype in _DTYPES.values():
        return {"$array": [value.dtype.name, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, np.generic) and value.dtype in _DTYPES.values():
        return {"$scalar": [value.dtype.name, _text(value.tobytes())]}
    if (taken := types.take_apart(value)) is not None:
        return {taken[0]: _plain(taken[1], what, path, depth + 1, types)}
    name = f"{value.dtype} array" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
    where = f" at {path.lstrip(', ')}" if path else ""
    raise InvalidRequest(
        f"{what} was given a {name.removeprefix('builtins.')}{where}, which cannot be sent; what can is {SENDABLE}"
        f"{types.names or ' (a tensor has collectives of its own, or give tensor.numpy())'}"
    )


def _value(plain: Any, types: Types) -> Any:
    if isinstance(plain, list):
        return [_value(item, types) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        return {key: _value(value, types) for key, value in plain.items()}
    ((tag, content),) = plain.items()
    if tag == "$tuple":
        return tuple(_value(item, types) for item in content)
    if tag == "$dict":
        return {_value(key, types): _value(value, types) for key, value in content}
    if tag == "$bytes":
        return _bytes(content)
    if tag == "$scalar":
        return np.frombuffer(_bytes(content[1]), _DTYPES[content[0]], 1)[0]
    if tag == "$array":
        name, shape, text = content
        return np.frombuffer(bytearray(_bytes(text)), _DTYPES[name]).reshape([int(n) for n in shape])
    return types.put_together(tag, _value(content, types))


def _unknown(tag: str) -> Any:
    raise ValueError(f"{tag} is not known")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
