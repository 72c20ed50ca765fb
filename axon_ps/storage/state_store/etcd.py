"""Records in etcd: the store of several coordinators, of which one leads and the others stand by.

    PREFIX/records/KEY       a record. If it is longer than `CHUNK_BYTES`, it goes on in KEY#0001, KEY#0002, ...
    PREFIX/writer            the id of the newest transaction's writer, and its number: "ID N"
    PREFIX/schema            the version of keys and records
    PREFIX/pending/I         see Note: [Large batches]
    PREFIX/commit            likewise

`etcd_leadership` has the keys by which a leader is elected.

Note: [Fenced and in order]
    Every transaction compares the revision at which the leader's key was created with that of our own key, so a process
    that does not lead any more writes nothing. It also compares the revision of PREFIX/writer, which it changes. So it
    is performed at most once, and never after a later transaction, however often and to whichever member of the cluster
    it was sent. When it fails because it was performed before, PREFIX/writer shows that.

Note: [Large batches]
    A batch is one transaction: one round trip. A batch that does not fit into one (a layout, many keys released at
    once) is first written to PREFIX/pending/, transaction by transaction. PREFIX/commit makes it valid. Then each
    transaction is performed, and both are removed. A leader that finds PREFIX/commit performs the transactions again. A
    leader that finds only PREFIX/pending/ removes it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote, unquote

from axon_ps.errors import Broken, Closed, ConfigurationError, NotLeader, StorageFull
from axon_ps.storage.state_store.base import Record, SharedStateStore, register
from axon_ps.storage.state_store.etcd_cluster import (
    EtcdAddress,
    EtcdCluster,
    Found,
    Operation,
    created_at,
    delete,
    found,
    modified_at,
    put,
    read,
)
from axon_ps.storage.state_store.etcd_leadership import Leadership

SCHEMA: Final = b"1"
"""Version of keys and records; stored in PREFIX/schema."""

CHUNK_BYTES: Final = 512 << 10
GROUP_BYTES: Final = 5 << 18
"""Most bytes of a transaction as JSON, which may become a value in PREFIX/pending: etcd takes 1.5 MiB."""

GROUP_OPERATIONS: Final = 120
"""Most requests of a transaction: etcd takes 128."""

PAGE_KEYS: Final = 256
RETRY_S: Final = 0.1
TIMEOUTS: Final = 4
"""Requests that may time out, one after the other, while a lease lasts; with a single etcd, half as many."""

_CHUNK: Final = "#"  # in no quoted key
_AFTER_CHUNKS: Final = "$"

_logger = logging.getLogger(__name__)


@register("etcd")
class EtcdStateStore(SharedStateStore):
    """Records under a prefix of an etcd cluster.

    Args:
        address: see `EtcdAddress`.

    Raises:
        ConfigurationError: the address is malformed, or the client is not installed.
    """

    def __init__(self, address: str) -> None:
        self._at = at = EtcdAddress.parse(address)
        timeout_s = at.ttl_s / (TIMEOUTS if len(at.endpoints) > 1 else TIMEOUTS / 2)
        self._cluster, self._renewals = EtcdCluster(at, timeout_s), EtcdCluster(at, timeout_s)
        self._leadership = Leadership(self._cluster, self._renewals, at.prefix, at.ttl_s)
        self._closed = threading.Event()
        self._records = f"{at.prefix}/records/"
        self._pending = f"{at.prefix}/pending/"
        self._writer, self._schema, self._commit = (
            f"{at.prefix}/{name}".encode() for name in ("writer", "schema", "commit")
        )
        self._number = 0
        self._written = 0  # the revision of PREFIX/writer, as far as we know
        self._chunks: dict[str, int] = {}  # of each record, by quoted key

    @property
    def begin_anew(self) -> str:
        """See `StateStore.begin_anew`."""
        return (
            f"stop its coordinators, remove their state (etcdctl del --prefix {self._at.prefix}/) and start them "
            "again; or start another job, by --job"
        )

    # ------------------------------------------------------------------ leading

    def campaign(self) -> str:
        """Try once to lead."""
        self._leadership.address = self.address
        return self._leadership.campaign()

    def leads(self) -> bool:
        """Return True if we lead at this moment."""
        return self._leadership.leads()

    def resign(self) -> None:
        """End our lease."""
        self._leadership.resign()

    def refused(self) -> None:
        """Note that a member has asked us while we do not lead."""
        self._leadership.refused()

    def has_standby(self, *, asked: bool = False) -> bool:
        """Return True if others stand by."""
        return self._leadership.has_standby(asked=asked)

    # ------------------------------------------------------------------ records

    def load(self) -> Mapping[str, bytes]:
        """Return everything stored, once the last leader's batch is complete.

        Raises:
            NotLeader: `campaign` was not won, or we do not lead any more.
            Broken: the cluster cannot be reached.
            ConfigurationError: another version of axon_ps wrote it.
        """
        self._check()
        if not self.leads():
            raise self._not_leader()
        _, _, replies = self._cluster.transaction([], [read(self._writer), read(self._schema), read(self._commit)])
        writer, schema, commit = (found(reply) for reply in replies)
        self._written = writer[0].modified if writer else 0
        if schema and schema[0].value != SCHEMA:
            raise ConfigurationError(
                f"the state in etcd at {self._at}{self._at.prefix} has version {schema[0].value.decode()}, this "
                f"program knows {SCHEMA.decode()}; give another prefix, and resume from a checkpoint"
            )
        if not schema:
            self._write([put(self._schema, SCHEMA)])
        self._finish_batch(int(commit[0].value) if commit else 0)
        values = {kv.key.decode()[len(self._records) :]: kv.value for kv in self._read(self._records)}
        return self._joined(values)

    def apply(self, records: Sequence[Record]) -> None:
        """Write the changes in one transaction if they fit. See Note: [Fenced and in order] and [Large batches].

        Raises:
            NotLeader: we do not lead, or could not reach the cluster for so long that we must not lead any more.
        """
        self._check()
        newest = {_quoted(record.key): record.value for record in records}
        groups = list(_grouped([o for key, value in newest.items() for o in self._operations(key, value)]))
        if len(groups) == 1:
            self._write(groups[0])
        elif groups:
            self._write_in_groups(groups)
        for key, value in newest.items():
            if value is None:
                self._chunks.pop(key, None)
            else:
                self._chunks[key] = len(_chunks(value))

    def close(self) -> None:
        """Resign, and close the connections."""
        if not self._closed.is_set():
            self._closed.set()
            self._leadership.close()
            self._cluster.close()
            self._renewals.close()

    def _write(self, operations: Sequence[Operation]) -> None:
        """Perform a transaction, once. See Note: [Fenced and in order]."""
        leadership, number = self._leadership, self._number + 1
        writer = f"{leadership.id} {number}".encode()
        while leadership.leads():
            compare = [created_at(leadership.leader_key, leadership.created), modified_at(self._writer, self._written)]
            try:
                done, revision, replies = self._cluster.transaction(
                    compare, [put(self._writer, writer), *operations], [read(self._writer)]
                )
            except Broken as error:
                _logger.debug("a transaction is tried again: %s", error)
                if self._closed.wait(RETRY_S):
                    raise Closed("this state store was closed") from error
                continue
            there = [] if done else found(replies[0])
            if not done and not (there and there[0].value == writer):
                leadership.resign()
                break
            self._number, self._written = number, revision if done else there[0].modified
            return
        raise self._not_leader()

    def _write_in_groups(self, groups: Sequence[Sequence[Operation]]) -> None:
        for number, group in enumerate(groups):
            self._write([put(self._pending_key(number), json.dumps(group).encode())])
        self._write([put(self._commit, str(len(groups)).encode())])
        while True:
            try:
                self._finish_batch(len(groups))
                return
            except StorageFull as error:  # it is valid already: the leader has to finish it
                _logger.error("%s", error)
                if self._closed.wait(RETRY_S):
                    raise Closed("this state store was closed") from error

    def _finish_batch(self, groups: int) -> None:
        """Perform the pending transactions, if they are valid, and remove them."""
        pending = list(self._read(self._pending))
        for kv in pending[:groups]:
            self._write(json.loads(kv.value))
        if pending:
            self._write([delete(self._commit), delete(self._pending.encode(), _end(self._pending))])

    def _operations(self, key: str, value: bytes | None) -> list[Operation]:
        """Return the operations that store a record."""
        name, chunks = self._records + key, _chunks(value)
        operations = [put(_chunk_key(name, i), chunk) for i, chunk in enumerate(chunks)] or [delete(name.encode())]
        if self._chunks.get(key, 0) > len(operations):
            operations.append(delete(_chunk_key(name, len(operations)), (name + _AFTER_CHUNKS).encode()))
        return operations

    def _joined(self, values: Mapping[str, bytes]) -> dict[str, bytes]:
        """Join chunks, which are in order, into records."""
        chunks: dict[str, list[bytes]] = {}
        for name, value in values.items():
            chunks.setdefault(name.partition(_CHUNK)[0], []).append(value)
        self._chunks = {key: len(values) for key, values in chunks.items()}
        return {unquote(key, errors="surrogatepass"): b"".join(values) for key, values in chunks.items()}

    def _read(self, prefix: str) -> Iterator[Found]:
        """Yield all keys with a prefix, in order. No other process writes them."""
        start = prefix.encode()
        while True:
            page = found(self._cluster.transaction([], [read(start, _end(prefix), limit=PAGE_KEYS)])[2][0])
            yield from page
            if len(page) < PAGE_KEYS:
                return
            start = page[-1].key + b"\x00"

    def _pending_key(self, number: int) -> bytes:
        return f"{self._pending}{number:06d}".encode()

    def _not_leader(self) -> NotLeader:
        return NotLeader(
            f"this coordinator does not lead any more: its lease in etcd at {self._at} is over, or was not renewed in "
            f"{self._at.ttl_s} s"
        )

    def _check(self) -> None:
        if self._closed.is_set():
            raise Closed(f"the state store in etcd at {self._at} was closed")


def _grouped(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield operations in groups that fit into a transaction."""
    group: list[Operation] = []
    group_bytes = 0
    for operation in operations:
        size = len(json.dumps(operation))
        if group and (group_bytes + size > GROUP_BYTES or len(group) == GROUP_OPERATIONS):
            yield group
            group, group_bytes = [], 0
        group.append(operation)
        group_bytes += size
    if group:
        yield group


def _quoted(key: str) -> str:
    return quote(key, errors="surrogatepass")


def _chunks(value: bytes | None) -> list[bytes]:
    """Cut a value into chunks; None has no chunks."""
    if value is None:
        return []
    return [value[i : i + CHUNK_BYTES] for i in range(0, len(value), CHUNK_BYTES)] or [b""]


def _chunk_key(key: str, number: int) -> bytes:
    return (f"{key}{_CHUNK}{number:04d}" if number else key).encode()


def _end(prefix: str) -> bytes:
    """Return the key after all keys with a prefix. The prefix ends with "/"."""
    return prefix[:-1].encode() + b"0"
