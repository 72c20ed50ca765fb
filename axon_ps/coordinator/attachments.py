"""Attachments: small data of workers that belong to a model, such as its buffers, in the job's key-value store.

Owns their format in the store: compressed content, cut into values that the store takes, and a header with the number
of these values and the hash of the content. Two *slots* are used alternately, and the header is written last. So a
reader has the old or the new content, and nothing half-written. Pure.

A checkpoint has the attachments of the moment of its order, except for keys that begin with `UNSAVED`. The
bounds of the store are in `core.kv`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from axon_ps.errors import InvalidRequest
from axon_ps.texts import value_of_json
from axon_ps.types import BUFFERS

PREFIX = "axon_ps/attached/"
"""The beginning of the key of every header."""

UNSAVED = "unsaved/"
"""The beginning of the keys of attachments that belong to this run of the workers, and to no checkpoint."""

MAX_BYTES = 24 << 20
"""Most compressed bytes of an attachment."""

MAX_PLAIN_BYTES = 256 << 20
"""Most bytes of an attachment before compression."""

_BLOCKS = "axon_ps/attached_parts/"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Header:
    """The record of an attachment in the store.

    Attributes:
        slot: the slot with the content, 0 or 1.
        blocks: the number of values with the content; 0 = there is no content.
        sha256: of the content; empty = there is none. A hash without blocks is of content that did not fit.
        epoch: of the model, if the content came with a restore that began it; -1 = a worker attached it.
        source: the checkpoint that it came from; empty = none.
    """

    slot: int = 0
    blocks: int = 0
    sha256: str = ""
    epoch: int = -1
    source: str = ""

    @classmethod
    def of(cls, value: bytes | None) -> Header:
        """Decode a stored header. Without a value, return a header without content.

        Raises:
            InvalidRequest: it is damaged.
        """
        try:
            header = cls(**value_of_json(value or b"{}", "an attachment's header"))
            if header.slot not in (0, 1) or not 0 <= header.blocks <= MAX_BYTES // _BLOCK_BYTES:
                raise ValueError(f"slot {header.slot}, {header.blocks} blocks")
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"the header of an attachment is damaged: {error}") from error
        return header

    def encoded(self) -> bytes:
        """Return the value to store."""
        return json.dumps(asdict(self)).encode()


def header_key(key: str) -> str:
    """Return the key of an attachment's header."""
    return f"{PREFIX}{key}"


def block_keys(key: str, header: Header) -> list[str]:
    """Return the keys of an attachment's content, in order."""
    return [f"{_BLOCKS}{key}/{header.slot}/{block}" for block in range(header.blocks)]


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """An attachment in its stored form.

    Attributes:
        header: see `Header`.
        blocks: the values with its content.
    """

    header: Header
    blocks: Sequence[bytes]

    @classmethod
    def made(cls, key: str, content: bytes, source: str = "") -> Attachment:
        """Compress content and cut it into values.

        Raises:
            InvalidRequest: it is too large.
        """
        packed = zlib.compress(content, 1)
        if len(packed) > MAX_BYTES or len(content) > MAX_PLAIN_BYTES:
            raise InvalidRequest(
                f"{key!r} has {len(content)} bytes, {len(packed)} compressed, which is too much to be saved beside the "
                f"parameters: at most {MAX_PLAIN_BYTES}, and {MAX_BYTES} compressed"
            )
        blocks = [packed[i : i + _BLOCK_BYTES] for i in range(0, len(packed), _BLOCK_BYTES)]
        sha256 = hashlib.sha256(content).hexdigest()
        return cls(header=Header(blocks=len(blocks), sha256=sha256, source=source), blocks=blocks)

    @classmethod
    def digest(cls, content: bytes) -> Attachment:
        """Return an attachment with only the hash of the content."""
        return cls(header=Header(sha256=hashlib.sha256(content).hexdigest()), blocks=())

    def content(self) -> bytes:
        """Return the stored content.

        Raises:
            InvalidRequest: the values are not those of the header.
        """
        unpacking = zlib.decompressobj()
        try:
            content = unpacking.decompress(b"".join(self.blocks), MAX_PLAIN_BYTES + 1)
        except zlib.error as error:
            raise InvalidRequest(f"an attachment is damaged: {error}") from error
        if hashlib.sha256(content).hexdigest() != self.header.sha256:
            raise InvalidRequest("an attachment is not what its header says; it was replaced meanwhile")
        return content

    def beside(self, present: Header) -> Attachment:
        """Return the same attachment, in the slot that `present` leaves free."""
        return replace(self, header=replace(self.header, slot=1 - present.slot if present.blocks else 0))

    def values(self, key: str) -> list[tuple[str, bytes]]:
        """Return keys and values in the order in which they are to be stored."""
        keys = block_keys(key, self.header)
        return [*zip(keys, self.blocks, strict=True), (header_key(key), self.header.encoded())]


class Store(Protocol):
    """The methods of the coordinator's key-value store that are used here."""

    def peek(self, key: str) -> bytes | None:
        """Return a value, if there is one."""

    def names(self, prefix: str) -> list[str]:
        """Return the keys with a prefix."""

    def remove(self, key: str) -> bool:
        """Remove a key."""


def stored(store: Store) -> dict[str, Attachment]:
    """Return all attachments in a store by key, except for those of `UNSAVED`."""
    found = {}
    for name in store.names(PREFIX):
        key, header = name.removeprefix(PREFIX), Header.of(store.peek(name))
        if header.blocks and not key.startswith(UNSAVED):
            found[key] = Attachment(header=header, blocks=[store.peek(k) or b"" for k in block_keys(key, header)])
    return found


def begin_run(store: Store) -> None:
    """Remove the attachments of the workers' previous run."""
    for name in store.names(f"{PREFIX}{UNSAVED}"):
        store.remove(name)


def restored(
    store: Store, model: str, epoch: int, uri: str, attached: Mapping[str, Attachment] | None
) -> dict[str, bytes]:
    """Return the values to store, in order, when a model begins an epoch with the attachments of a checkpoint.

    Args:
        store: the job's.
        model: its name in the job.
        epoch: the epoch that begins.
        uri: the checkpoint.
        attached: its attachments by key; None = the order of the previous epoch is repeated.
    """
    own = f"{BUFFERS}{model}"
    present = _present(store, own)
    if attached is None:
        if present.epoch == epoch - 1:
            return {header_key(own): replace(present, epoch=epoch).encoded()}
        return {}
    values: dict[str, bytes] = {}
    none = Attachment(header=Header(source=uri), blocks=())
    for key, attachment in {own: none, **attached}.items():
        beside = attachment.beside(_present(store, key))
        if key == own:
            beside = replace(beside, header=replace(beside.header, epoch=epoch))
        values.update(beside.values(key))
    return values


def _present(store: Store, key: str) -> Header:
    """Return the header that is about to be replaced. A damaged one has no content to preserve."""
    try:
        return Header.of(store.peek(header_key(key)))
    except InvalidRequest:
        return Header()
