"""Every state store keeps records alike; sqlite and etcd survive more.

Tests of `storage/state_store/base.py`, `storage/state_store/memory.py`, `storage/state_store/sqlite.py` and
`storage/state_store/etcd_leadership.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from axon_ps.errors import Broken, Closed, ConfigurationError, InvalidRequest, NotLeader, StorageFull
from axon_ps.rpc.security import Security
from axon_ps.storage.state_store import EtcdStateStore, Record, SqliteStateStore, StateStore, open_store
from axon_ps.storage.state_store import etcd as etcd_module
from axon_ps.storage.state_store.etcd_cluster import EtcdAddress, EtcdCluster, Operation
from axon_ps_lab.etcd import NEEDED, LocalEtcd, is_installed
from deadlines import HANG_S

Make = Callable[[], StateStore]

SOON_S = HANG_S


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """The address of a real etcd server; empty when there is none here."""
    if not is_installed():
        yield ""
        return
    with LocalEtcd() as server:
        yield server.address


@pytest.fixture
def at(etcd: str) -> str:
    """Where a test has an etcd of its own."""
    if not etcd:
        pytest.skip(NEEDED)
    return f"{etcd}/test/{uuid.uuid4().hex}"


def leading(address: str) -> EtcdStateStore:
    """An open store that leads."""
    store = opened(address)
    store.address = "here:1"
    deadline = time.monotonic() + SOON_S
    while not leads(store):
        assert time.monotonic() < deadline, "nobody else may lead"
        time.sleep(0.01)
    return store


def opened(address: str) -> EtcdStateStore:
    """An open store; of a test that does not say how long a lease lasts, for longer than a busy machine is away."""
    return EtcdStateStore(address if "?" in address else f"{address}?ttl=20")


def leads(store: EtcdStateStore) -> bool:
    """Whether it could be made to lead; a busy machine's etcd may be late."""
    with contextlib.suppress(Broken):
        return not store.campaign()
    return False


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def make(request: pytest.FixtureRequest, tmp_path: Path, etcd: str) -> Iterator[Make]:
    """Opens the store; a second time the same one, as after a restart, if it is one that outlives its process."""
    stores: list[StateStore] = []
    address = request.getfixturevalue("at") if request.param == "etcd" else str(tmp_path / "state.db")

    def open_it() -> StateStore:
        stores.append(leading(address) if request.param == "etcd" else open_store(request.param, address))
        return stores[-1]

    yield open_it
    for store in stores:
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


def test_many_records_and_large_ones_in_one_batch(make: Make) -> None:
    store = make()
    first = {f"kv/{i}": bytes([i % 256]) * 5000 for i in range(700)} | {"spec": os.urandom(3 << 20)}
    store.apply([Record(key, value) for key, value in first.items()])
    assert store.load() == first
    second = {key: None if key.endswith("7") else b"" for key in first} | {"spec": os.urandom(600 << 10)}
    store.apply([Record(key, value) for key, value in second.items()])
    assert store.load() == {key: value for key, value in second.items() if value is not None}
    store.apply([Record("spec", None), Record("optimizer", bytes(1 << 20))])
    store.apply([Record("spec", b"short")])
    assert {key: len(value) for key, value in store.load().items() if value} == {"optimizer": 1 << 20, "spec": 5}


def test_who_has_it_open_leads(make: Make) -> None:
    assert make().leads()


# ---------------------------------------------------------------------- sqlite


def test_it_says_how_a_job_begins_anew(make: Make) -> None:
    with make() as store:
        assert "start" in store.begin_anew


def test_sqlite_begins_anew_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with SqliteStateStore(path) as store:
        store.apply([Record("a", b"1")])
        (file, wal) = re.findall(rf"{tmp_path}[^ ,]*", store.begin_anew)
    assert file == str(path)
    for name in (file, wal):
        Path(name).unlink(missing_ok=True)
    with SqliteStateStore(path) as store:
        assert store.load() == {}


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
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=HANG_S, check=False)
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


def size_of(path: Path) -> int:
    """Bytes of a state file and its journal."""
    return sum(p.stat().st_size for p in path.parent.iterdir() if p.name.startswith(path.name))


def test_what_sqlite_is_given_first_outlives_its_journal(tmp_path: Path) -> None:
    """It is what a job is known by: whoever lacks it takes the job's members for those of another."""
    path, damaged = tmp_path / "state.sqlite", tmp_path / "damaged.sqlite"
    with SqliteStateStore(path) as store:
        store.apply([Record("job", b"id")])
        store.apply([Record("progress", b"1")])
        shutil.copy(path, damaged)
        assert store.load() == {"job": b"id", "progress": b"1"}
    with SqliteStateStore(damaged) as store:
        assert store.load() == {"job": b"id"}


@pytest.mark.parametrize("made_before", [False, True])
def test_sqlite_gives_the_space_of_what_was_deleted_back(tmp_path: Path, *, made_before: bool) -> None:
    path = tmp_path / "state.sqlite"
    if made_before:  # by an axon_ps whose files kept all space
        with SqliteStateStore(path):
            pass
        db = sqlite3.connect(path)
        db.execute("PRAGMA auto_vacuum = 0")
        db.execute("VACUUM")
        db.close()
    with SqliteStateStore(path) as store:
        for i in range(64):
            store.apply([Record(f"kv/{i}", bytes(1 << 20))])
        assert size_of(path) > 64 << 20
        for i in range(64):
            store.apply([Record(f"kv/{i}", None)])
        for i in range(16):  # what a job writes anyway
            store.apply([Record("progress", bytes(100 + i))])
        assert set(store.load()) == {"progress"}
    assert size_of(path) < 2 << 20


def test_a_batch_that_sqlite_has_committed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space cannot be given back once: it is with the next batch."""
    with SqliteStateStore(tmp_path / "state.sqlite") as store:
        store.apply([Record("large", bytes(4 << 20)), Record("small", b"1")])
        db, shrink = store._connection(), store._shrink

        def fail(db: sqlite3.Connection) -> None:
            monkeypatch.setattr(store, "_shrink", shrink)
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(store, "_shrink", fail)
        store.apply([Record("large", None)])
        assert store.load() == {"small": b"1"}
        free = db.execute("PRAGMA freelist_count").fetchone()[0]
        store.apply([Record("small", b"2")])
        assert db.execute("PRAGMA freelist_count").fetchone()[0] < free


@pytest.mark.parametrize("made_before", [False, True])
def test_sqlite_files_are_their_owners_alone(tmp_path: Path, *, made_before: bool) -> None:
    path = tmp_path / "new" / "st.sqlite"
    before = os.umask(0o022)
    try:
        if made_before:  # by an older axon_ps
            with SqliteStateStore(path):
                pass
            path.chmod(0o644)
            (path.parent / "st.sqlite-wal").touch(mode=0o644)
        with SqliteStateStore(path) as store:
            store.apply([Record("a", b"secret")])
            files = sorted(path.parent.iterdir())
            assert [file.name for file in files] == ["st.sqlite", "st.sqlite-wal"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


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
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="a database of another program"):
        SqliteStateStore(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


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


# ---------------------------------------------------------------------- etcd


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def cluster_of(at: str) -> EtcdCluster:
    return EtcdCluster(EtcdAddress.parse(at), 5.0)


def deposed(store: EtcdStateStore, at: str) -> None:
    """End the lease of a leader without its knowledge, as if it had been frozen for too long."""
    term = store._leadership._term
    assert term is not None
    cluster = cluster_of(at)
    cluster.revoke(term.lease)
    cluster.close()


def test_etcd_survives_a_kill_of_its_leader(at: str) -> None:
    program = (
        "import os, signal, sys\n"
        "from axon_ps.storage.state_store import Record, open_store\n"
        "store = open_store('etcd', sys.argv[1])\n"
        "assert store.campaign() == ''\n"
        "store.apply([Record('a', b'1'), Record('b', b'2')])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, f"{at}?ttl=2"], timeout=HANG_S, check=False)
    assert done.returncode == -9
    with leading(at) as store:
        assert store.load() == {"a": b"1", "b": b"2"}


def test_etcd_has_one_leader_and_the_others_know_where_it_is(at: str) -> None:
    at += "?ttl=3"  # renewed twice a second: only then a leader looks for standbys
    with leading(at) as store, opened(at) as other:
        assert other.campaign() == "here:1"
        assert store.leads()
        assert not other.leads()
        with pytest.raises(NotLeader):
            other.load()
        with pytest.raises(NotLeader):
            other.apply([Record("a", b"1")])
        until(store.has_standby)
        assert not store.has_standby(asked=True)
        other.refused()
        until(lambda: store.has_standby(asked=True))
        store.resign()
        assert other.campaign() == ""
        assert other.load() == {}
        assert not store.leads()


def test_of_a_leader_that_does_not_know_yet_that_it_is_none_nothing_is_written(at: str) -> None:
    with leading(at) as frozen, opened(at) as other:
        frozen.load()
        frozen.apply([Record("a", b"1")])
        deposed(frozen, at)
        assert frozen.leads(), "it cannot know"
        assert other.campaign() == ""
        assert other.load() == {"a": b"1"}
        with pytest.raises(NotLeader):
            frozen.apply([Record("a", b"2")])
        assert not frozen.leads()
        other.apply([Record("b", b"3")])
        assert other.load() == {"a": b"1", "b": b"3"}


def test_a_decision_is_one_round_trip(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Sequence[Operation]] = []
    with leading(at) as store:
        store.load()
        transaction = store._cluster.transaction
        monkeypatch.setattr(store._cluster, "transaction", lambda *a: (sent.append(a[1]), transaction(*a))[1])
        store.apply([Record("progress", b"8"), Record("decision/8", b"commit")])
    assert len(sent) == 1


def test_a_batch_whose_answer_was_lost_is_written_once(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with leading(at) as store:
        store.load()
        cluster, transaction, revisions = store._cluster, store._cluster.transaction, []

        def deaf(*request: Any) -> Any:
            reply = transaction(*request)
            revisions.append(reply[1])
            if len(revisions) == 1:
                raise Broken("the answer was lost")
            return reply

        monkeypatch.setattr(cluster, "transaction", deaf)
        store.apply([Record("a", b"1")])
        store.apply([Record("a", b"2")])
        assert revisions == [revisions[0], revisions[0], revisions[0] + 1]
        assert store.load() == {"a": b"2"}


def test_a_batch_that_arrives_late_and_again_is_not_written(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    with leading(at) as store:
        store.load()
        transaction = store._cluster.transaction
        monkeypatch.setattr(store._cluster, "transaction", lambda *a: (sent.append(a), transaction(*a))[1])
        store.apply([Record("a", b"1")])
        store.apply([Record("a", b"2")])
        assert [transaction(*request)[0] for request in sent] == [False, False]
        assert store.load() == {"a": b"2"}


@pytest.mark.parametrize("after", range(9))
def test_a_large_batch_that_its_leader_did_not_finish_is_there_or_is_not(
    at: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, batch = {"a": b"0", "b": b"0"}, {"a": b"1", "c": b"1" * 600_000, "d": b"1" * 1_200_000}
    with leading(at) as dying, opened(at) as other:
        dying.load()
        dying.apply([Record(key, value) for key, value in before.items()])
        write, written = dying._write, []

        def write_some(operations: Sequence[Operation]) -> None:
            if len(written) == after:
                raise NotLeader("it has died")
            written.append(operations)
            write(operations)

        monkeypatch.setattr(dying, "_write", write_some)
        died = False
        try:
            dying.apply([Record("b", None), *(Record(key, value) for key, value in batch.items())])
        except NotLeader:
            died = True
        deposed(dying, at)
        assert other.campaign() == ""
        there = other.load()
        assert there == (batch if len(written) >= 4 else before), "three are pending, the fourth makes them valid"
        assert died == (after < 8)
        assert list(other._read(other._pending)) == []


def test_a_leader_that_cannot_reach_etcd_stops_leading_by_itself() -> None:
    if not is_installed():
        pytest.skip(NEEDED)
    with LocalEtcd() as server, leading(f"{server.address}/cut?ttl=2") as store:
        store.load()
        server.kill(0)
        began_s = time.monotonic()
        with pytest.raises(NotLeader, match="was not renewed in 2 s"):
            store.apply([Record("a", b"1")])
        assert 0.5 < time.monotonic() - began_s < 4.0
        assert not store.leads()
        with pytest.raises(Broken, match="etcd cannot be used"):
            store.campaign()


def test_a_lease_is_renewed_as_long_as_its_leader_lives(at: str) -> None:
    with leading(f"{at}?ttl=2") as store:
        ends_s = time.monotonic() + 2.6
        until(lambda: time.monotonic() > ends_s)
        store.apply([Record("a", b"1")])


def test_members_of_the_cluster_that_do_not_answer_are_passed_over(at: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [each.getsockname()[1] for each in (silent, gone)]
        gone.close()
        with leading(f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]},{at}?ttl=4") as store:
            store.apply([Record("a", b"1")])
            assert store.load() == {"a": b"1"}


def test_etcd_reports_that_its_quota_is_used_up() -> None:
    if not is_installed():
        pytest.skip(NEEDED)
    with LocalEtcd(quota_bytes=8 << 20) as server, leading(f"{server.address}/full") as store:
        store.load()
        with pytest.raises(StorageFull, match="quota is used up"):
            for i in range(20):
                store.apply([Record("large", os.urandom(500 << 10)), Record("a", str(i).encode())])
        stored = store.load()
        assert len(stored["large"]) == 500 << 10
        assert store.leads()


def test_etcd_refuses_another_version(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with leading(at) as store:
        store.load()
    monkeypatch.setattr(etcd_module, "SCHEMA", b"2")
    with leading(at) as store, pytest.raises(ConfigurationError, match="has version 1, this program knows 2"):
        store.load()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("node1", "is no member of an etcd cluster"),
        ("node1:2379,node2", "'node2' is no member"),
        ("node1:2379/job?color=red", "no option 'color'"),
        ("node1:2379/job?ttl=1", "must be 2 to 60 seconds"),
    ],
)
def test_etcd_refuses_an_address_that_is_none(address: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        open_store("etcd", address)


def test_etcd_over_tls_and_with_a_certificate(tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip(NEEDED)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"ca_file": str(tmp_path / "ca.pem")}
    certificate = authority.issue_cert("127.0.0.1")
    for kind, blobs in (("cert", certificate.cert_chain_pems), ("key", [certificate.private_key_pem])):
        (tmp_path / kind).write_bytes(b"".join(blob.bytes() for blob in blobs))
        files[f"{kind}_file"] = str(tmp_path / kind)
    options = f"ca={files['ca_file']}&cert={files['cert_file']}&key={files['key_file']}"
    with LocalEtcd(security=Security(**files)) as server:
        with leading(f"{server.address}/tls?ttl=20&{options}") as store:
            store.apply([Record("a", b"1")])
            assert store.load() == {"a": b"1"}
        for wrong in ("", f"?ca={files['ca_file']}"):
            with EtcdStateStore(f"{server.address}/tls{wrong}") as other, pytest.raises(Broken, match="cannot be used"):
                other.campaign()


def test_etcd_needs_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'axon-ps\[etcd\]'"):
        open_store("etcd", "127.0.0.1:2379")
