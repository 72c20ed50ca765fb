"""Workers that only a launcher has started: where they meet, who starts what, what is refused, what they say.

Tests of `worker/bootstrap/private.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from axon_ps.errors import AxonError, Broken, ConfigurationError, Timeout, Unreachable
from axon_ps.observe import reminders
from axon_ps.rpc.auth.tokens import new_secret
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.worker.bootstrap import job as job_module
from axon_ps.worker.bootstrap.job import FormedJob, find_job, form_job
from axon_ps.worker.bootstrap.local_store import LocalStore
from axon_ps.worker.bootstrap.services import EmbeddedServices
from axon_ps.worker.bootstrap.stores import first_host, master_of, open_store
from axon_ps.worker.environment import launch_info
from deadlines import HANG_S

MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"test-{os.getpid()}"}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "28123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


class Dict:
    """A store of threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Services:
    """Stands in for the processes; says what it was asked for."""

    asked: list[dict[str, Any]]
    broken: str = ""

    def __init__(self, world_size: int, **asked: Any) -> None:
        if self.broken:
            raise Broken(self.broken)
        self.asked.append({"world_size": world_size, **asked})
        self.address = asked.get("coordinator") or f"{asked['advertise'] or asked['host']}:7"
        self.security = asked["security"]

    def close(self) -> None:
        pass


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> type[Services]:
    Services.asked, Services.broken = [], ""
    monkeypatch.setattr(job_module, "EmbeddedServices", Services)
    return Services


def form(
    environments: list[dict[str, str]], *, store: Dict | None = None, timeout_s: float = 5.0
) -> list[FormedJob | AxonError]:
    """Form a job with a thread for every worker."""
    at = store or Dict()

    def one(rank: int) -> FormedJob | AxonError:
        try:
            return form_job(at, environments[rank], rank, len(environments), Deadline(timeout_s))
        except AxonError as error:
            return error

    with ThreadPoolExecutor(len(environments)) as pool:
        formed = list(pool.map(one, range(len(environments))))
    _formed.extend(one for one in formed if isinstance(one, FormedJob))
    return formed


_formed: list[FormedJob] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Nothing that a test has formed serves any more."""
    yield
    while _formed:
        _formed.pop().close()


# ---------------------------------------------------------------------- who starts what


def test_rank_0_starts_the_coordinator_and_every_node_its_shard_servers(services: type[Services]) -> None:
    nodes = [{"AXON_PS_NODE": name, "AXON_PS_SHARDS": "3", "AXON_PS_TOKEN": "t"} for name in "aabb"]
    formed = form(nodes)
    first, second = sorted(services.asked, key=lambda asked: asked["shards"][0])
    assert (first["shards"], first["environment"]["AXON_PS_NODE"], first.get("coordinator", "")) == ([0, 2], "a", "")
    assert (second["shards"], second["environment"]["AXON_PS_NODE"]) == ([1], "b")
    assert second["coordinator"] == "127.0.0.1:7"
    assert {asked["num_shards"] for asked in services.asked} == {3}
    for rank, one in enumerate(formed):
        assert isinstance(one, FormedJob)
        assert (one.config.coordinator, one.config.rank, one.config.world_size) == ("127.0.0.1:7", rank, 4)
        assert (one.services is not None) == (rank in (0, 2))  # the first of each node


def test_there_is_one_shard_server_a_node_by_default(services: type[Services]) -> None:
    form([{"AXON_PS_NODE": name, "AXON_PS_TOKEN": "t"} for name in "aab"])
    assert sorted(asked["shards"] for asked in services.asked) == [[0], [1]]


class Interleaved(Dict):
    """A store on which rank 0 begins just when rank 1 is about to read its own location."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read, self.has_begun = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        is_there = super().check(keys)
        if is_there and keys == ["location/1"] and not self.is_read.is_set():
            self.is_read.set()
            assert self.has_begun.wait(HANG_S)
        return is_there

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key == "location/0":
            self.has_begun.set()


def test_a_rank_that_reads_while_rank_0_begins_is_not_left_waiting(services: type[Services]) -> None:
    """A real store's `get` would wait for a key that is gone; this one's raises."""
    store = Interleaved()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(form_job, store, {}, 1, 2, Deadline(HANG_S))
        assert store.is_read.wait(HANG_S)
        _formed.append(form_job(store, {}, 0, 2, Deadline(HANG_S)))
        _formed.append(other.result())
    assert {one.config.rank for one in _formed} == {0, 1}


def test_an_error_of_rank_0_is_announced_to_all(services: type[Services]) -> None:
    services.broken = "no room"
    errors = form([{}, {}])
    assert [str(error) for error in errors] == ["no room", "rank 0 could not start the job's services: no room"]


def test_nothing_secret_is_in_the_store(services: type[Services], caplog: pytest.LogCaptureFixture) -> None:
    for given in ({}, {"AXON_PS_TOKEN": "known-to-all-of-them"}):
        store = Dict()
        formed = form([dict(given), dict(given)], store=store)
        access = [(one.config.coordinator, one.config.security.token) for one in formed if isinstance(one, FormedJob)]
        assert len(access) == 2
        assert len(set(access)) == 1
        ((address, token),) = set(access)
        assert token == given.get("AXON_PS_TOKEN", token)
        assert len(token) > 16
        content = str(vars(store))
        assert token not in content
        assert address not in content  # or a stranger could name another one, which would get the token
        while _formed:
            _formed.pop().close()
    assert [record.getMessage().partition(", with ")[2] for record in caplog.records] == [
        "a random secret, which only processes of this user on this host get",
        "the secret given",
    ]
    assert "this worker has started one at 127.0.0.1:7" in caplog.text


def test_on_several_hosts_all_need_the_secret_in_their_environment(
    services: type[Services], monkeypatch: pytest.MonkeyPatch
) -> None:
    def formed_on(*environments: dict[str, str]) -> list[FormedJob | AxonError]:
        networks = iter("ab" * 2)
        monkeypatch.setattr(job_module, "_network", lambda: next(networks))
        return form(list(environments))

    secret = {"AXON_PS_TOKEN": new_secret()}
    for one in formed_on(secret, secret):
        assert isinstance(one, FormedJob)
        assert one.config.security.tls
        assert one.config.security.token == secret["AXON_PS_TOKEN"]
    weak = {"AXON_PS_TOKEN": "t"}
    errors = formed_on(weak, weak)
    assert all("at least 128 random bits" in str(error) for error in errors)
    first, second = formed_on(secret, {})
    assert isinstance(first, FormedJob)
    assert isinstance(second, ConfigurationError)
    for one in formed_on({"AXON_PS_INSECURE": "1"}, {"AXON_PS_INSECURE": "1"}):
        assert isinstance(one, FormedJob)
        assert one.config.security.tokens() == ()


def test_services_for_several_hosts_need_tls_or_insecure(
    services: type[Services], monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = iter("ab" * 2)
    monkeypatch.setattr(job_module, "_network", lambda: next(networks))
    errors = form([{}, {}])
    assert [type(error) for error in errors] == [ConfigurationError] * 2  # one line on each rank (`worker.refusal`)
    assert all("AXON_PS_TLS_CERT" in str(error) and "AXON_PS_INSECURE=1" in str(error) for error in errors)
    own = {"AXON_PS_INSECURE": "1", "AXON_PS_TOKEN": "t", "AXON_PS_ADVERTISE": "me"}
    assert all(isinstance(one, FormedJob) for one in form([{**own, "AXON_PS_NODE": name} for name in "ab"]))
    assert {(asked["host"], asked["advertise"]) for asked in services.asked} == {("0.0.0.0", "me")}


def test_the_name_that_others_reach_us_by_is_the_one_towards_the_store() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2"}
    assert job_module._own_name({**place, "MASTER_ADDR": "localhost"}) == "localhost"
    assert job_module._own_name({**place, "MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert job_module._own_name({**place, "MASTER_ADDR": "localhost", "AXON_PS_ADVERTISE": "me"}) == "me"


def test_workers_that_are_restarted_on_the_same_store_ignore_earlier_ones(services: type[Services]) -> None:
    store = Dict()
    services.broken = "no room"
    assert all("no room" in str(error) for error in form([{}, {}], store=store))
    services.broken = ""
    for token in ("first", "second"):
        formed = form([{"AXON_PS_TOKEN": token, "AXON_PS_NODE": name} for name in "ab"], store=store)
        assert [one.config.security.token for one in formed if isinstance(one, FormedJob)] == [token, token]
    with pytest.raises(Timeout, match="rank 1 is waiting"):  # its own rank 0 never begins
        form_job(store, {}, 1, 2, Deadline(0.2))
    with pytest.raises(Timeout, match="rank 0 is waiting for the worker of rank 1"):
        form_job(store, {}, 0, 2, Deadline(0.2))


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "waiting for the worker of rank 1"), (1, "waiting for the worker of rank 0 to start")]
)
def test_waiting_for_others_is_logged_and_times_out(
    rank: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert reminders.FIRST_REMINDER_S <= 2.0
    monkeypatch.setattr(reminders, "FIRST_REMINDER_S", 0.01)
    caplog.set_level(logging.WARNING, "axon_ps")
    with pytest.raises(Timeout, match=f"{words}.*in vain for 1 s"):
        form_job(Dict(), {}, rank, 2, Deadline(1.0))
    assert words in caplog.text


# ---------------------------------------------------------------------- where they meet


def test_a_store_of_one_host_holds_what_any_worker_stores() -> None:
    name = f"store-{os.getpid()}"
    late = LocalStore(name, serves=False, timeout_s=HANG_S)
    assert not late.check(["a"])  # nobody is there yet, and nobody waits
    storing = threading.Thread(target=late.set, args=("a", "ä" * 10_000))
    storing.start()
    first = LocalStore(name, serves=True, timeout_s=HANG_S)
    storing.join(5.0)
    first.set("b", "2")
    for store in (first, late):
        assert store.check(["a", "b"])
        assert not store.check(["a", "c"])
        assert store.get("a").decode() == "ä" * 10_000
    with pytest.raises(Unreachable, match="two of them of the same rank"):
        LocalStore(name, serves=True, timeout_s=HANG_S)
    first.close()
    first.close()
    assert not late.check(["a"])
    with pytest.raises(Unreachable, match=r"not there within 0\.05 s"):
        LocalStore(name, serves=False, timeout_s=0.05).set("a", "1")


def test_workers_of_mpirun_on_one_host_find_each_other(services: type[Services]) -> None:
    environments = [{**MPIRUN, "OMPI_COMM_WORLD_RANK": str(rank), "AXON_PS_TOKEN": "t"} for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        # As threads of one process they count the jobs they begin together, and so with one more each.
        formed = list(pool.map(_find_the_same, environments))
    assert [one.config.rank for one in formed] == [0, 1]
    assert {one.config.coordinator for one in formed} == {"127.0.0.1:7"}
    for one in formed:
        one.close()


def _find_the_same(env: Mapping[str, str]) -> FormedJob:
    place = launch_info(env)
    return form_job(open_store(env, place, 0, 5.0), env, place.rank, place.world_size, Deadline(5.0))


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}, "node0:1234"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1"}, "[fd00::1]:29500"),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}, ""),
        (SRUN, "gpu03:24123"),
        ({**SRUN, "MASTER_PORT": "7"}, "gpu03:7"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, ""),  # on one host
    ],
)
def test_the_store_is_torchs_where_there_is_one(env: dict[str, str], address: str) -> None:
    assert master_of(env, launch_info(env)) == address


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],x", "gpu03"), ("gpu[7,9]-ib", "gpu7-ib"), ("n1-2", "n1-2")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "AXON_PS_COORDINATOR is not set, and RANK and WORLD_SIZE are not: start the script with"),
        ({"MASTER_ADDR": "node0"}, "MASTER_ADDR is set, but RANK and WORLD_SIZE are not"),
        ({"RANK": "0"}, "RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR to the host of rank 0"),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "rank 0 of 2 workers, 1 of them on this host, by OMPI_COMM_WORLD_RANK.*set MASTER_ADDR",
        ),
        ({"AXON_PS_STANDBY": "1"}, "AXON_PS_COORDINATOR=host:port"),
    ],
)
def test_the_error_of_an_incomplete_environment_names_what_to_set(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        find_job(env, 1.0)


# ---------------------------------------------------------------------- the services


def test_they_do_not_listen_on_the_network_by_default() -> None:
    with pytest.raises(ConfigurationError, match="can be guessed"):
        EmbeddedServices(2, job="j", host="0.0.0.0", security=Security(token="t"), environment=os.environ)


def test_services_that_cannot_start_are_reaped_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Broken, match="embedded coordinator ended"):
        EmbeddedServices(2, job="no such\njob name", environment=os.environ | {"AXON_PS_LOG": "nonsense"})
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert "nonsense" in capfd.readouterr().err
