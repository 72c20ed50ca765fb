"""Hostile checkpoint directories, grown from real ones: their bytes, JSON, headers of tensors, and files.

In half of them the hashes and sizes in the manifest, and its own hash, are made to fit the files. Such directories pass
every comparison, and only their contents are wrong.

Owns: the content. Refuses: to know its readers. A `Directory` is written to disk, and to a finding's file.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.grown import LONG_TEXTS, NUMBERS, TEXTS

MANIFEST: Final = "manifest.json"
NAMES: Final = (
    *(
        "bad",
        "step-0000000009",
        "step-9999999999999",
        "bad\n\x1b[31mbad",
        "b\\ad",
        "...",
        "-rf",
        "%s%n",
        " ",
        "x" * 255,
    ),
    *("manifest.json", "shard-0", ".hidden", "\udcff\udcfe", "\u202egnp", "é"),
)
"""Names of the hostile directory."""

KINDS: Final = ("nothing", "directory", "fifo", "loop", "link", "zero", "socket", "sparse", "empty")
"""Things in the place of a file."""

_TIMES: Final = (
    *("", "now", "9999-12-31T23:59:59.999999+00:00", "0001-01-01T00:00:00+00:00", "2026-01-01", "2026-01-01T00:00:00"),
    *("2026-01-01T00:00:00+99:99", "2026-W01-1T00:00:00Z", "2026-01-01T00:00:00+00:00\n"),
)
_DEEP: Final = ("[" * 100_000, '{"a":' * 100_000, "[" * 300 + "]" * 300, "[" * 200 + "]" * 200)
_WIDE: Final = ("[" + "0," * 300_000 + "0]", "[" + "[]," * 1_000_000 + "[]]", '"' + "x" * 1_000_000 + '"')
_RAW: Final = "@raw {}@"
"""In JSON, a placeholder for text that `json` would not write."""


@dataclass(frozen=True)
class Directory:
    """A directory.

    Attributes:
        name: its name in the directory of checkpoints.
        files: by name, their content; or one of `KINDS`.
    """

    name: str
    files: Mapping[str, bytes | str]

    def write(self, parent: Path) -> Path:
        """Make it, and return its path."""
        path = parent / self.name
        path.mkdir()
        for name, content in self.files.items():
            if isinstance(content, bytes):
                (path / name).write_bytes(content)
            else:
                _put(path / name, content)
        return path

    def encoded(self) -> bytes:
        """Return it as bytes."""
        files = {
            _text(name): base64.b64encode(content).decode() if isinstance(content, bytes) else [content]
            for name, content in self.files.items()
        }
        return json.dumps({"name": _text(self.name), "files": files}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Directory:
        """Return the directory that `encoded` has encoded."""
        value = json.loads(data)
        files = {
            _name(name): content[0] if isinstance(content, list) else base64.b64decode(content)
            for name, content in value["files"].items()
        }
        return cls(_name(value["name"]), files)


def _text(name: str) -> str:
    return os.fsencode(name).decode("latin-1")


def _name(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))


def _put(path: Path, kind: str) -> None:
    """Put one of `KINDS` at a path."""
    if kind == "directory":
        (path / "in it").mkdir(parents=True)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link":
        path.symlink_to("../good/" + MANIFEST)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:  # a path of at most 107 bytes
            listener.bind(path.name[:100])
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "empty":
        path.touch()


def remove(path: Path) -> None:
    """Remove a directory with all its content."""
    shutil.rmtree(path)


class Directories:
    """Grows directories.

    Args:
        seeds: real checkpoints: by name, the content of each file.
    """

    def __init__(self, seeds: list[dict[str, bytes]]) -> None:
        self._seeds = seeds
        self._changes: tuple[Callable[[dict[str, bytes | str], Entropy], None], ...] = (
            *(_change_manifest,) * 6,
            *(_change_header,) * 5,
            *(_change_data,) * 2,
            *(_change_counts,) * 2,
            *(_change_bytes,) * 2,
            _change_kind,
            _change_tree,
            _exchange,
        )

    def grow(self, entropy: Entropy) -> Directory:
        """Grow a directory."""
        files: dict[str, bytes | str] = dict(entropy.pick(self._seeds))
        for _ in range(1 + (entropy.below(3) if entropy.once_in(3) else 0)):
            entropy.pick(self._changes)(files, entropy)
        if entropy.once_in(2):
            fit(files)
        return Directory(entropy.pick(NAMES) if entropy.once_in(4) else "bad", files)


def fit(files: dict[str, bytes | str]) -> None:
    """Give the manifest the sizes and hashes of the files, and its own hash, as far as it can be read."""
    text = files.get(MANIFEST)
    if not isinstance(text, bytes):
        return
    for name, content in files.items():
        if isinstance(content, bytes) and name != MANIFEST:
            entry = rb'("name": "%s",\s*"sha256": ")[^"]*(",\s*"bytes": ")[^"]*"' % re.escape(name).encode(
                "utf-8", "surrogateescape"
            )
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            text = re.sub(entry, rb'\g<1>%s\g<2>%d"' % (sha256.encode(), size), text)
    own = list(re.finditer(rb'"sha256": "([0-9a-f]{64})"', text))
    if own:
        begin, end = own[-1].span(1)
        sha256 = hashlib.sha256(text[:begin] + b"0" * 64 + text[end:]).hexdigest()
        text = text[:begin] + sha256.encode() + text[end:]
    files[MANIFEST] = text


# ---------------------------------------------------------------------- JSON


def _number(entropy: Entropy) -> Any:
    value = entropy.pick(NUMBERS)
    return entropy.pick((value, -value, str(value), -1, value / 3, float(value)))


def _text_value(entropy: Entropy) -> Any:
    among: tuple[Any, ...] = (*TEXTS, *LONG_TEXTS, *_TIMES, *NAMES, *KINDS, "\ud800", "0" * 64, "../../etc/passwd")
    return entropy.pick(among)


def _hostile(entropy: Entropy, raws: list[str]) -> Any:
    kind = entropy.below(8)
    if kind <= 2:
        return _number(entropy)
    if kind <= 4:
        return _text_value(entropy)
    if kind == 5:
        return entropy.pick((None, True, False, [], {}, [[]], [0], {"": 0}, float("nan"), float("inf"), [None] * 70))
    if kind == 6 and entropy.once_in(4):
        raws.append(entropy.pick((*_DEEP, *_DEEP, *_WIDE)))
        return _RAW.format(len(raws) - 1)
    return {entropy.pick(TEXTS): _number(entropy), entropy.pick(TEXTS): _text_value(entropy)}


def _locations(value: Any) -> list[tuple[Any, Any]]:
    """Return every value's position in JSON, as the object or list that it is in and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        at = waiting.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            found.append((at, key))
            waiting.append(at[key])
    return found


def changed_json(value: Any, entropy: Entropy) -> bytes:
    """Return JSON with a few changes, as text."""
    value, raws = copy.deepcopy(value), list[str]()
    for _ in range(1 + (entropy.below(4) if entropy.once_in(4) else 0)):
        locations = _locations(value)
        if not locations:
            break
        at, key = entropy.pick(locations)
        kind = entropy.below(10)
        if kind <= 5:
            at[key] = _hostile(entropy, raws)
        elif kind == 6:
            del at[key]
        elif kind == 7:
            other, there = entropy.pick(locations)
            with contextlib.suppress(KeyError, IndexError):
                at[key] = copy.deepcopy(other[there])
        elif isinstance(at, list):
            at.extend([copy.deepcopy(at[key])] * entropy.pick((1, 2, 100)))
        else:
            at[str(entropy.pick((*TEXTS, key)))] = at.pop(key)
    text = json.dumps(value, indent=1)
    for index, raw in enumerate(raws):
        text = text.replace(json.dumps(_RAW.format(index)), raw)
    if entropy.once_in(12):
        text = re.sub(r'\n( *"[a-z_0-9]+": [^\[{\n]+),\n', r"\n\1,\n\1,\n", text, count=1)  # a key twice
    return text.encode("utf-8", "surrogatepass")


def _change_manifest(files: dict[str, bytes | str], entropy: Entropy) -> None:
    content = files.get(MANIFEST)
    if entropy.once_in(40):
        files[MANIFEST] = entropy.pick((*_DEEP, *_WIDE)).encode()
    elif isinstance(content, bytes):
        with contextlib.suppress(ValueError, RecursionError):
            files[MANIFEST] = changed_json(json.loads(content), entropy)


# ---------------------------------------------------------------------- safetensors


def _tensor_file(files: dict[str, bytes | str], entropy: Entropy) -> tuple[str, Any, bytes] | None:
    """Choose a file of tensors; returns its name, its header and its data, or None."""
    names = [n for n, content in sorted(files.items()) if n != MANIFEST and isinstance(content, bytes)]
    if not names:
        return None
    name = entropy.pick(names)
    content = files[name]
    assert isinstance(content, bytes)
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return (name, header, content[8 + length :]) if isinstance(header, dict) and header else None


def joined(text: bytes, data: bytes) -> bytes:
    """Return a safetensors file."""
    return len(text).to_bytes(8, "little") + text + data


def _change_header(files: dict[str, bytes | str], entropy: Entropy) -> None:
    if (found := _tensor_file(files, entropy)) is None:
        return
    name, header, data = found
    tensors = [key for key, value in header.items() if isinstance(value, dict) and "data_offsets" in value]
    kind = entropy.below(8)
    if kind <= 1 and len(tensors) > 1:  # overlapping, or in another order
        one, other = entropy.pick(tensors), entropy.pick(tensors)
        offsets = header[one]["data_offsets"], header[other]["data_offsets"]
        header[one]["data_offsets"] = offsets[1]
        if kind:
            header[other]["data_offsets"] = offsets[0]
    elif kind == 2 and tensors:  # one tensor, and all behind it, begins elsewhere
        shift, behind = entropy.pick((-8, -4, 4, 8, 1 << 40)), header[entropy.pick(tensors)]["data_offsets"]
        with contextlib.suppress(TypeError):
            behind[:] = [at + shift for at in behind]
    elif kind == 3 and tensors:  # of another dtype or shape of as many bytes
        fields = header[entropy.pick(tensors)]
        fields["dtype"] = entropy.pick(
            ("F32", "I32", "BF16", "F16", "I64", "F64", "U8", "BOOL", "F8_E4M3", "F4", "C64")
        )
        with contextlib.suppress(TypeError, KeyError):
            size = fields["data_offsets"][1] - fields["data_offsets"][0]
            width = {"I64": 8, "F64": 8, "C64": 8, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}.get(fields["dtype"], 4)
            fields["shape"] = entropy.pick(([size // width], [1, size // width], [size // width] + [1] * 70, [2, 2]))
    elif kind == 4 and len(tensors) > 1:  # tensors exchange their names
        one, other = entropy.pick(tensors), entropy.pick(tensors)
        header[one], header[other] = header[other], header[one]
    elif kind == 5 and tensors:  # a tensor is renamed, and its data stays
        key = entropy.pick(tensors)
        header[entropy.pick((*TEXTS, "0.0.updates", "9.9.param", "tree"))] = dict(header.pop(key))
    elif kind == 6 and entropy.once_in(4):
        files[name] = joined(entropy.pick((*_DEEP, *_WIDE)).encode(), data)
        return
    else:
        files[name] = joined(changed_json(header, entropy), data)
        return
    files[name] = joined(json.dumps(header).encode(), data)


def _change_data(files: dict[str, bytes | str], entropy: Entropy) -> None:
    """Change values: counts below zero, NaN, infinity."""
    if (found := _tensor_file(files, entropy)) is None:
        return
    name, header, data = found
    counts = [key for key in header if key.endswith("updates")]
    key = entropy.pick(counts if counts and entropy.once_in(2) else list(header))
    with contextlib.suppress(TypeError, KeyError, ValueError):
        begin, end = header[key]["data_offsets"]
        value = entropy.pick((b"\xff", b"\x80", b"\x7f", b"\0", b"\0\0\xc0\x7f", b"\xff" * 7 + b"\x7f"))
        filled = (value * (end - begin))[: end - begin]
        files[name] = joined(json.dumps(header).encode(), data[:begin] + filled + data[end:])


def _change_counts(files: dict[str, bytes | str], entropy: Entropy) -> None:
    """Change counts of updates, with which a server computes: impossible values, or counts that are elsewhere."""
    names = [n for n, content in sorted(files.items()) if n.startswith("shard-") and isinstance(content, bytes)]
    if not names:
        return
    content = files[name := entropy.pick(names)]
    assert isinstance(content, bytes)
    length = int.from_bytes(content[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError):
        header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
        key = entropy.pick([key for key in header if key.endswith(".updates")])
        begin, end = header[key]["data_offsets"]
        value = entropy.pick((-1, -2, -(1 << 63), (1 << 63) - 1, 1 << 53, (1 << 53) + 1, 1 << 31, -(1 << 31)))
        if entropy.once_in(3):
            other = entropy.pick([key for key in header if "data_offsets" in header[key]])
            at = header[other]["data_offsets"][0]
            header[key]["data_offsets"] = [at, at + end - begin]
        else:
            data[begin:end] = value.to_bytes(8, "little", signed=True) * ((end - begin) // 8)
        files[name] = joined(json.dumps(header).encode(), bytes(data))
    fit(files)


def _change_tree(files: dict[str, bytes | str], entropy: Entropy) -> None:
    """Change the JSON in a worker's own state."""
    names = [n for n, content in sorted(files.items()) if n.startswith("state-") and isinstance(content, bytes)]
    if not names:
        return
    content = files[name := entropy.pick(names)]
    assert isinstance(content, bytes)
    length = int.from_bytes(content[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        begin, end = header["tree"]["data_offsets"]
        tree = changed_json(json.loads(data[begin:end]), entropy)
        grown = len(tree) - (end - begin)
        for fields in header.values():
            if "data_offsets" in fields:
                fields["data_offsets"] = [at + grown if at > begin else at for at in fields["data_offsets"]]
        header["tree"]["shape"] = [len(tree)]
        files[name] = joined(json.dumps(header).encode(), data[:begin] + tree + data[end:])


# ---------------------------------------------------------------------- bytes and files


def _change_bytes(files: dict[str, bytes | str], entropy: Entropy) -> None:
    names = [name for name, content in sorted(files.items()) if isinstance(content, bytes) and content]
    if not names:
        return
    name = MANIFEST if MANIFEST in names and entropy.once_in(3) else entropy.pick(names)
    content = bytearray(files[name])  # type: ignore[arg-type]
    for _ in range(1 + entropy.below(3)):
        # half of the changes are in the first bytes, where a file has its format
        at = entropy.below(min(len(content), 300) if entropy.once_in(2) else len(content)) if content else 0
        kind = entropy.below(6)
        if kind == 0 and content:
            content[at] ^= 1 << entropy.below(8)
        elif kind == 1 and content:
            content[at] = entropy.below(256)
        elif kind == 2:
            content[at:at] = entropy.data(entropy.pick((1, 8, 64)))
        elif kind == 3:
            del content[at : at + entropy.pick((1, 8, 1000))]
        elif kind == 4:
            content[at : at + 8] = entropy.bits(64).to_bytes(8, "little")
        else:
            del content[at:]
    files[name] = bytes(content)


def _change_kind(files: dict[str, bytes | str], entropy: Entropy) -> None:
    name = entropy.pick(sorted(files)) if files else MANIFEST
    files[name] = entropy.pick(KINDS)


def _exchange(files: dict[str, bytes | str], entropy: Entropy) -> None:
    """Exchange the contents of two files, or rename one."""
    if len(files) < 2:
        return
    one, other = entropy.pick(sorted(files)), entropy.pick(sorted(files))
    if entropy.once_in(2):
        files[one], files[other] = files[other], files[one]
    else:
        files[entropy.pick((*NAMES, "shard-x", "state-x", "attached-x"))] = files.pop(one)
