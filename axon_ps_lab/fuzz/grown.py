"""Messages grown from the schema: of a valid shape with hostile values, and then damaged; or real ones, changed.

The messages are encoded here in protobuf's wire format, so that they also contain bytes that the protobuf library would
never write: fields twice, of a wrong wire type, unknown ones, false lengths, groups, numbers too long.

Owns: the bytes. Refuses: to know their receivers. `Facts` has values that are valid in a job, so that most messages
pass the first check of a servicer. `Grower` confines checkpoints on disk to a directory of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from axon_ps_lab.fuzz.entropy import Entropy

F = FieldDescriptor
MAX_DEPTH: Final = 6
"""Most levels of nested messages, where the schema is recursive or deep."""

BIG_BYTES: Final = 1 << 16
"""Longest payload that is grown; a longer one only costs time."""

NUMBERS: Final = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1000, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31),
    *((1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 2),
)
FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-3, 1e-300, 5e-324, 1e38, 1e300, -1e300, 1e9, 2.0**63, 2.0**64)
SPECIAL_FLOATS: Final = (float("nan"), float("inf"), float("-inf"))
TEXTS: Final = (
    *("", "a", "model 0", "sgd", "adamw", "int8", "top_k", "lr", "beta1", "block_numel", "fraction", "momentum"),
    *("int4", "param", "residual", "frame", "exp_avg", "weight", "uploaded", "{}", '{"a": 1}', "[[", "NaN", "1e999"),
    *("\0", "\n", "\x7f", "é", "\U0001f600", "\u202e", "%s%n", "../..", "/", "-1"),
)
LONG_TEXTS: Final = ("a" * 1024, "a" * 1025, "[" * 3000, "x" * 70_000)
NOT_UTF8: Final = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"a\xff")

_FLOATING: Final = {F.TYPE_DOUBLE: "<d", F.TYPE_FLOAT: "<f"}
_FIXED: Final = {F.TYPE_FIXED64: 8, F.TYPE_SFIXED64: 8, F.TYPE_FIXED32: 4, F.TYPE_SFIXED32: 4}
_ZIGZAG: Final = (F.TYPE_SINT32, F.TYPE_SINT64)
_BYTES: Final = (F.TYPE_STRING, F.TYPE_BYTES, F.TYPE_MESSAGE)


@dataclass
class Facts:
    """The facts of a job, by the name of the field that has them.

    Attributes:
        numbers: right values of integer and enum fields, by field name.
        texts: right values of text fields, by field name.
        seeds: real messages, by full name of their type.
        directory: the directory in which checkpoints may be written; empty = they never are.
    """

    numbers: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    seeds: dict[str, list[bytes]] = field(default_factory=dict)
    directory: str = ""


def varint(value: int) -> bytes:
    """Return a number in protobuf's wire format."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    """Return the tag of a field."""
    return varint(number << 3 | wire_type)


def delimited(number: int, body: bytes) -> bytes:
    """Return a field that has a length."""
    return tag(number, 2) + varint(len(body)) + body


@dataclass(frozen=True)
class WireField:
    """A field as it is in a message: its tag, then the rest; `body` = the content of a field that has a length."""

    number: int
    wire_type: int
    raw: bytes
    body: bytes | None = None


def entries(data: bytes) -> list[WireField] | None:
    """Return the fields of a message in their order; None when it is damaged, or has groups."""
    found, at = [], 0
    try:
        while at < len(data):
            begin = at
            key, at = _read_varint(data, at)
            number, wire_type, body = key >> 3, key & 7, None
            if wire_type == 0:
                _, at = _read_varint(data, at)
            elif wire_type == 2:
                length, at = _read_varint(data, at)
                body, at = data[at : at + length], at + length
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            else:
                return None
            if at > len(data) or not number:
                return None
            found.append(WireField(number, wire_type, data[begin:at], body))
    except IndexError:
        return None
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7


class Grower:
    """Grows messages.

    Args:
        facts: valid values, which may change at any time.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def message(self, kind: Descriptor, entropy: Entropy) -> bytes:
        """Return a message of that type, or the rest of a damaged one."""
        seeds = self.facts.seeds.get(kind.full_name)
        if seeds and not entropy.once_in(3):
            data = entropy.pick(seeds)
            for _ in range(entropy.below(4)):
                data = self._changed(kind, data, entropy, MAX_DEPTH)
        else:
            data = self.grown(kind, entropy)
        if entropy.once_in(4):
            data = entropy.pick(DAMAGES)(data, entropy)
        return self._safe(kind, data)

    def grown(self, kind: Descriptor, entropy: Entropy, depth: int = MAX_DEPTH) -> bytes:
        """Grow a message of that type: each field or not, with a value that is right, extreme or absurd."""
        if entropy.once_in(50):
            return b""
        left_out = entropy.pick((2, 4, 12))  # sparse, or nearly full
        fields = [self._field(f, entropy, depth) for f in kind.fields if not entropy.once_in(left_out)]
        if kind.oneofs and not entropy.once_in(8):  # of a oneof the last one counts
            chosen = [entropy.pick(o.fields) for o in kind.oneofs]
            fields += [self._field(f, entropy, depth) for f in chosen]
        return b"".join(fields)

    # ------------------------------------------------------------------ fields

    def _field(self, f: FieldDescriptor, entropy: Entropy, depth: int) -> bytes:
        if not f.is_repeated:
            return self._one(f, entropy, depth)
        count = entropy.pick((0, 1, 1, 2, 3, 8, 100 if depth == MAX_DEPTH and entropy.once_in(10) else 2))
        if f.type not in _BYTES and not entropy.once_in(4):
            return delimited(f.number, b"".join(self._scalar(f, entropy)[1] for _ in range(count)))
        return b"".join(self._one(f, entropy, depth - (count > 8)) for _ in range(count))

    def _one(self, f: FieldDescriptor, entropy: Entropy, depth: int) -> bytes:
        if f.type == F.TYPE_MESSAGE:
            body = self.grown(f.message_type, entropy, depth - 1) if depth > 0 else b""
            return delimited(f.number, body)
        if f.type == F.TYPE_STRING:
            return delimited(f.number, self._text(f.name, entropy))
        if f.type == F.TYPE_BYTES:
            return delimited(f.number, self._bytes(entropy))
        wire_type, value = self._scalar(f, entropy)
        return tag(f.number, wire_type) + value

    def _text(self, name: str, entropy: Entropy) -> bytes:
        right = self.facts.texts.get(name)
        if right and not entropy.once_in(12):
            return entropy.pick(right).encode()
        if name == "uri":
            return entropy.pick(self.uris()).encode()
        if entropy.once_in(20):
            return entropy.pick(NOT_UTF8)
        return entropy.pick(LONG_TEXTS if entropy.once_in(200) else TEXTS).encode()

    def uris(self) -> tuple[str, ...]:
        """Return the names that a checkpoint may have here: in our directory, or nowhere."""
        d = self.facts.directory
        known = (f"{d}/a", f"{d}/b", f"{d}/../{d.rpartition('/')[2]}/c", d, f"file://{d}/a") if d else ()
        return (*known, "", "nowhere://x", "memory://fuzz/a", "\0", "http://127.0.0.1:1/x")

    def _bytes(self, entropy: Entropy) -> bytes:
        size = entropy.pick((0, 1, 4, 8, 16, 24, 32, 64, 128, 256, 1024, BIG_BYTES if entropy.once_in(30) else 12))
        return entropy.data(size)

    def _scalar(self, f: FieldDescriptor, entropy: Entropy) -> tuple[int, bytes]:
        """Return wire type and value of a field that is neither text, bytes nor message."""
        if (form := _FLOATING.get(f.type)) is not None:
            value = entropy.pick(FLOATS if entropy.below(3) else SPECIAL_FLOATS)
            return (1, struct.pack(form, value)) if form == "<d" else (5, struct.pack(form, _single(value)))
        if (size := _FIXED.get(f.type)) is not None:
            return (1 if size == 8 else 5), (self._number(f, entropy) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        number = self._number(f, entropy)
        if f.type in _ZIGZAG:
            number = (number << 1) ^ (number >> 63)
        return 0, varint(number)

    def _number(self, f: FieldDescriptor, entropy: Entropy) -> int:
        right = self.facts.numbers.get(f.name)
        if right and not entropy.once_in(5):
            return entropy.pick(right)
        if f.type == F.TYPE_ENUM and not entropy.once_in(8):
            return int(entropy.pick(f.enum_type.values).number)
        if f.type == F.TYPE_BOOL and not entropy.once_in(20):
            return entropy.below(2)
        how = entropy.below(8)
        if how < 3:
            return entropy.below(5)
        return entropy.bits(entropy.pick((8, 16, 32, 64))) if how == 3 else entropy.pick(NUMBERS)

    # ------------------------------------------------------------------ real messages, changed

    def _changed(self, kind: Descriptor, data: bytes, entropy: Entropy, depth: int) -> bytes:
        """Return the message with one field left out, twice, added, of another wire type, or with another value."""
        found = entries(data)
        if not found:
            return data + self.grown(kind, entropy, 1)
        at = entropy.below(len(found))
        entry, fields = found[at], [e.raw for e in found]
        f = kind.fields_by_number.get(entry.number)
        how = entropy.below(8)
        if f is not None and f.type == F.TYPE_MESSAGE and entry.body is not None and how < 6 and depth:
            fields[at] = delimited(entry.number, self._changed(f.message_type, entry.body, entropy, depth - 1))
        elif how < 4:
            other = f if f is not None and not entropy.once_in(4) else entropy.pick(kind.fields)
            fields[at] = self._field(other, entropy, 2)
        elif how == 4:
            del fields[at]
        elif how == 5:
            fields.insert(entropy.below(len(fields) + 1), fields[at])
        elif how == 6:
            fields.append(self._field(entropy.pick(kind.fields), entropy, 2))
        else:
            fields[at] = tag(entry.number, entropy.below(6)) + fields[at][1:]
        return b"".join(fields)

    def _safe(self, kind: Descriptor, data: bytes) -> bytes:
        """Return the message, with one of `uris` as its URI."""
        if (f := kind.fields_by_name.get("uri")) is None:
            return data
        try:
            message: Any = GetMessageClass(kind).FromString(data)
        except DecodeError:
            return data
        return data if message.uri in self.uris() else data + delimited(f.number, self.uris()[0].encode())


def _single(value: float) -> float:
    """Return a number that a float of 32 bits may have."""
    return max(-3e38, min(3e38, value)) if abs(value) != float("inf") else value


# ---------------------------------------------------------------------- damage


def _truncated(data: bytes, entropy: Entropy) -> bytes:
    return data[: entropy.below(len(data) + 1)]


def _flipped(data: bytes, entropy: Entropy) -> bytes:
    if not data:
        return data
    out = bytearray(data)
    for _ in range(1 + entropy.below(4)):
        out[entropy.below(len(out))] ^= 1 << entropy.below(8)
    return bytes(out)


def _appended(data: bytes, entropy: Entropy) -> bytes:
    return data + entropy.data(1 + entropy.below(20))


def _unknown(data: bytes, entropy: Entropy) -> bytes:
    number = entropy.pick((16, 100, 19_000, (1 << 29) - 1, 1 << 29, 0))
    extra = (delimited(number, b"x" * 50), tag(number, 0) + b"\x01", tag(number, 5) + b"abcd")
    return entropy.pick(extra) * entropy.pick((1, 40, 2000)) + data


def _lying_length(data: bytes, entropy: Entropy) -> bytes:
    length = entropy.pick((1, 127, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1))
    return data + tag(1 + entropy.below(15), 2) + varint(length) + b"abc"


def _deep(data: bytes, entropy: Entropy) -> bytes:
    number, depth = 1 + entropy.below(15), entropy.pick((20, 101, 3000))
    if entropy.below(2):
        return data + tag(number, 3) * depth + tag(number, 4) * entropy.pick((0, depth))
    body = b""
    for _ in range(min(depth, 300)):
        body = delimited(number, body)
    return data + body


def _long_varint(data: bytes, entropy: Entropy) -> bytes:
    return data + tag(1 + entropy.below(15), 0) + b"\x80" * entropy.pick((9, 10, 11, 100)) + b"\x01"


def _twice(data: bytes, entropy: Entropy) -> bytes:
    return data * 2


DAMAGES: Final[Sequence[Callable[[bytes, Entropy], bytes]]] = (
    *(_truncated, _truncated, _flipped, _flipped, _flipped),
    *(_appended, _unknown, _lying_length, _deep, _long_varint, _twice),
)
"""Damages to an entire message."""


def kinds(module: Any) -> list[Descriptor]:
    """Return every message type of a generated module, nested ones too (not those of maps)."""
    found = list(module.DESCRIPTOR.message_types_by_name.values())
    for kind in found:
        found.extend(n for n in kind.nested_types if not n.GetOptions().map_entry)
    return found
