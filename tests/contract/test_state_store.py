"""What every state store does, and what sqlite does besides."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_ps.errors import Closed, ConfigurationError, StorageFull
from axon_ps.storage.state_store import MemoryStateStore, Record, SqliteStateStore, StateStore

Make = Callable[[], StateStore]


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens the store; a second time the same one, as after a restart, if it is one that outlives its process."""
    opened: list[StateStore] = []

    def open_store() -> StateStore:
        opened.append(MemoryStateStore() if request.param == "memory" else SqliteStateStore(tmp_path / "state.db"))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def test_a_new_store_is_empty(make: Make) -> None:
    assert make().load() == {}


def test_the_newest_value_counts_and_removed_is_gone(make: Make) -> None:
    store = make()
    store.apply([Record("a", b"1"), Record("b", b"\x00\xff"), Record("a", b"2"), Record("c", b"")])
    store.apply([Record("b", None), Record("absent", None)])
    assert store.load() == {"a": b"2", "c": b""}


def test_an_empty_batch_is_nothing(make: Make) -> None:
    store = make()
    store.apply([])
    assert store.load() == {}


def test_what_was_loaded_does_not_change(make: Make) -> None:
    store = make()
    store.apply([Record("a", b"1")])
    loaded = store.load()
    store.apply([Record("a", b"2")])
    assert loaded == {"a": b"1"}


def test_a_large_value(make: Make) -> None:
    store = make()
    value = os.urandom(1 << 20)
    store.apply([Record("kv/large", value)])
    assert store.load()["kv/large"] == value


def test_any_text_is_a_key(make: Make) -> None:
    store = make()
    keys = {"kv/ü" * 100: b"1", "kv/'; DROP TABLE records; --": b"2", "kv/\n": b"3"}
    store.apply([Record(k, v) for k, v in keys.items()])
    assert store.load() == keys


def test_a_closed_store_refuses(make: Make) -> None:
    with make() as store:
        store.apply([Record("a", b"1")])
    store.close()
    with pytest.raises(Closed):
        store.load()
    with pytest.raises(Closed):
        store.apply([Record("a", b"1")])


# ---------------------------------------------------------------------- sqlite


def test_sqlite_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it" / "state.db"
    with SqliteStateStore(path) as store:
        store.apply([Record("a", b"1")])
    with SqliteStateStore(path) as store:
        assert store.load() == {"a": b"1"}


def test_sqlite_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from axon_ps.storage.state_store import Record, SqliteStateStore\n"
        "store = SqliteStateStore(sys.argv[1])\n"
        "store.apply([Record('a', b'1'), Record('b', b'2')])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "state.db"
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=30, check=False)
    assert done.returncode == -9
    with SqliteStateStore(path) as store:
        assert store.load() == {"a": b"1", "b": b"2"}


def test_sqlite_writes_all_of_a_batch_or_nothing(tmp_path: Path) -> None:
    with SqliteStateStore(tmp_path / "state.db") as store:
        store.apply([Record("a", b"1")])
        with pytest.raises(ConfigurationError, match="cannot be written"):
            store.apply([Record("a", b"2"), Record("b", object())])  # type: ignore[arg-type]
        assert store.load() == {"a": b"1"}
        store.apply([Record("a", b"3")])
        assert store.load() == {"a": b"3"}


def test_sqlite_keeps_a_second_coordinator_out(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with SqliteStateStore(path), pytest.raises(ConfigurationError, match="in use by another coordinator"):
        SqliteStateStore(path)
    SqliteStateStore(path).close()


def test_sqlite_reports_a_full_disk_and_continues_when_there_is_space(tmp_path: Path) -> None:
    with SqliteStateStore(tmp_path / "state.db") as store:
        store.apply([Record("a", b"1")])
        db = store._connection()
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StorageFull, match="no space left on its disk"):
            store.apply([Record("small", b"2"), Record("large", bytes(1 << 20))])
        assert store.load() == {"a": b"1"}
        db.execute("PRAGMA max_page_count = 1000000")
        store.apply([Record("large", bytes(1 << 20))])
        assert set(store.load()) == {"a", "large"}


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough to be one. " * 100, b"SQLite format 3\x00"]
)
def test_sqlite_refuses_what_is_no_state_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="corrupt or not a state file"):
        SqliteStateStore(path)
    assert path.read_bytes() == content


def test_sqlite_refuses_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with SqliteStateStore(path) as store:
        store.apply([Record(f"kv/{i}", os.urandom(3000)) for i in range(50)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="corrupt"):
        SqliteStateStore(path)


def test_sqlite_refuses_a_file_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE photos (name TEXT)")
    db.close()
    with pytest.raises(ConfigurationError, match="a database of another program"):
        SqliteStateStore(path)


def test_sqlite_refuses_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    SqliteStateStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigurationError, match="has version 99, this program knows 2; upgrade axon_ps"):
        SqliteStateStore(path)


def test_sqlite_refuses_an_older_version(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    SqliteStateStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(ConfigurationError, match="has version 1, this program knows 2; an older axon_ps wrote it"):
        SqliteStateStore(path)


def test_sqlite_reports_why_a_path_is_impossible(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        SqliteStateStore(tmp_path / "file" / "state.db")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        SqliteStateStore(tmp_path)
