"""Records in a sqlite file on a local disk: the store of one machine."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from axon_ps.errors import AxonError, Closed, ConfigurationError, StorageFull
from axon_ps.storage.state_store.base import Record, StateStore, register

SCHEMA_VERSION: Final = 2
"""Version of the sqlite file's schema and records; stored in its `user_version`. In 1 the records were JSON."""

FREE_PAGES: Final = 256
"""Pages of the file that may hold nothing (1 MiB). After a batch that removes records, more are given back."""

GIVEN_BACK_PAGES: Final = 2048
"""Most pages given back with one batch, so that no decision is delayed long: 8 MiB."""

JOURNAL_BYTES: Final = 16 << 20
"""Bytes to which a larger journal file is cut."""

UNSYNCED: Final = "?synchronous=off"
"""The end of the address of a store that does not wait for the disk."""

APPLICATION_ID: Final = 0x41584F4E
"""Marks a sqlite file as one of axon_ps: "AXON"."""


@register("sqlite")
class SqliteStateStore(StateStore):
    """Records in a sqlite file, on a local disk.

    WAL journal with `synchronous=FULL`: a committed batch has been synced to the disk. An exclusive lock excludes a
    second coordinator. It ends with the process. Only the coordinator's user can read or write the file, its journal
    and its index, from their creation on: values of the key-value store may be secret (NCCL ids, tokens of a
    rendezvous). `--state sqlite:PATH?synchronous=off` does not wait for the disk: a committed batch outlives the
    process, but not the machine.

    Args:
        path: the file; created (with its directory) if it does not exist.
        synchronous: whether a batch is synced to the disk.

    Attributes:
        path: the same.
        synchronous: likewise.

    Raises:
        ConfigurationError: the file is another program's, is corrupt, is of another version, is in use by another
            coordinator, or cannot be opened.
        StorageFull: there is no space to create it.
    """

    def __init__(self, path: str | os.PathLike[str], *, synchronous: bool = True) -> None:
        self.path = os.fspath(path)
        self.synchronous = synchronous
        self._db: sqlite3.Connection | None = None
        self._shrinking = False
        self._has_begun = False
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), mode=_DIRECTORY_MODE, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE))
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0.0)
            self._open(self._db)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise self._translated(error, "opened") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, address: str) -> SqliteStateStore:
        """Open the store at a path, which may end with `UNSYNCED`."""
        path = address.removesuffix(UNSYNCED)
        return cls(path, synchronous=path == address)

    def load(self) -> Mapping[str, bytes]:
        """Return everything stored.

        Raises:
            ConfigurationError: the file is corrupt.
        """
        try:
            return dict(self._connection().execute("SELECT key, value FROM records"))
        except sqlite3.Error as error:
            raise self._translated(error, "read") from error

    def apply(self, records: Sequence[Record]) -> None:
        """Commit the changes in one transaction."""
        db = self._connection()
        try:
            db.execute("BEGIN IMMEDIATE")
            for record in records:
                if record.value is None:
                    db.execute("DELETE FROM records WHERE key = ?", (record.key,))
                else:
                    db.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (record.key, record.value))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # sqlite rolls back by itself when it has to
                    db.execute("ROLLBACK")
            raise self._translated(error, "written") from error
        self._shrinking |= any(record.value is None for record in records)
        with contextlib.suppress(sqlite3.Error):  # the batch is committed; the next one tries again
            if not self._has_begun:  # the job's identity is then in the file itself: a journal may lose its end
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
                self._has_begun = True
            if self._shrinking:
                self._shrink(db)

    def _shrink(self, db: sqlite3.Connection) -> None:
        """Give free pages back to the file system, a part of them at a time."""
        free = db.execute("PRAGMA freelist_count").fetchone()[0]
        self._shrinking = free > FREE_PAGES
        if self._shrinking:
            db.executescript(f"PRAGMA incremental_vacuum({GIVEN_BACK_PAGES})")  # `execute` gives one page back

    @property
    def begin_anew(self) -> str:
        """See `StateStore.begin_anew`."""
        path = os.path.abspath(self.path)
        return (
            f"stop the coordinator, remove its state ({path}, and {path}-wal if that is there) and start it again; or "
            "start another job, by --job, with a state of its own"
        )

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise Closed(f"the state store {self.path!r} was closed")
        return self._db

    def _open(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if tables and application != APPLICATION_ID:
            raise ConfigurationError(f"state file {self.path!r} is a database of another program; give another path")
        if version > SCHEMA_VERSION or (tables and version < SCHEMA_VERSION):
            old = "an older axon_ps wrote it: remove it or give another path, and resume from a checkpoint"
            cure = "upgrade axon_ps" if version > SCHEMA_VERSION else old
            raise ConfigurationError(
                f"state file {self.path!r} has version {version}, this program knows {SCHEMA_VERSION}; {cure}"
            )
        if (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ConfigurationError(f"state file {self.path!r} is corrupt ({damage}); restore it or give another path")
        if db.execute("PRAGMA auto_vacuum").fetchone()[0] != _INCREMENTAL:
            db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            if tables:  # an older axon_ps made it; only rewriting the file changes that
                db.execute("VACUUM")
        _make_private(self.path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
        db.execute(f"PRAGMA synchronous = {'FULL' if self.synchronous else 'OFF'}")
        db.execute("BEGIN IMMEDIATE")  # takes the lock now: a second coordinator fails here, not later
        db.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _translated(self, error: sqlite3.Error | OSError, what: str) -> AxonError:
        code = getattr(error, "sqlite_errorname", "") or ""
        if code.startswith("SQLITE_FULL") or getattr(error, "errno", None) in _NO_SPACE:
            return StorageFull(f"state file {self.path!r} cannot be {what}: no space left on its disk")
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return ConfigurationError(f"state file {self.path!r} is in use by another coordinator; stop it first")
        if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return ConfigurationError(
                f"state file {self.path!r} is corrupt or not a state file ({error}); restore it or give another path"
            )
        return ConfigurationError(f"state file {self.path!r} cannot be {what}: {error}")


def _make_private(path: str) -> None:
    """Make a state file and sqlite's files beside it private to their user: an older axon_ps may have made them.

    Raises:
        OSError: one is readable by others, and another user's.
    """
    for each in (path, f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_IMODE(os.stat(each).st_mode) & 0o077:
                os.chmod(each, _FILE_MODE)


_FILE_MODE: Final = 0o600  # sqlite gives the files that it makes beside it the same
_DIRECTORY_MODE: Final = 0o700
_INCREMENTAL = 2  # PRAGMA auto_vacuum: pages are given back when we ask for it
_NO_SPACE = (28, 122)  # ENOSPC, EDQUOT
