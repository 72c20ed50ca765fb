"""testing.LocalCluster: real processes that start, work, fail visibly and leave nothing behind.

Tests of `testing/cluster.py` and `testing/worker_main.py`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import axon_ps
from axon_ps.errors import AxonError, InvalidRequest, Misuse
from axon_ps.testing import LocalCluster, WorkerFailed
from axon_ps.types import Role
from deadlines import HANG_S


def meet(factor: int, *, plus: int = 0) -> tuple[int, list[int]]:
    with axon_ps.World.init(join_timeout_s=HANG_S) as world:
        return os.getpid(), world.gather_json(world.rank * factor + plus)


def environment() -> dict[str, str]:
    return dict(os.environ)


def fail_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        raise KeyError("no such thing")
    print("rank 0 is fine")
    return 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    print("waiting", flush=True)
    signal.pause()


def give_a_function() -> object:
    return lambda: None


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=1, world_size=2) as running:
        yield running


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_functions_run_in_workers_and_their_results_come_back() -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        results = cluster.run_workers(meet, args=(10,), kwargs={"plus": 1})
        assert [r.value[1] for r in results] == [[1, 11], [1, 11]]
        assert len({r.value[0] for r in results} | {os.getpid()}) == 3
        assert [(r.rank, r.error, r.exit_code) for r in results] == [(0, "", 0), (1, "", 0)]
        pids = [cluster.process(role, i).pid for role, i in (("coordinator", 0), (Role.SHARD, 0), ("shard", 1))]
        address, directory = cluster.address, cluster.directory
        assert listens(address)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not listens(address)
    assert not directory.exists()


def test_workers_learn_where_they_are_and_nothing_of_another_launcher(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXON_PS_COORDINATOR", "elsewhere:1")
    monkeypatch.setenv("AXON_PS_TLS_CA", "nowhere.pem")
    monkeypatch.setenv("WORLD_SIZE", "77")
    seen = cluster.run_workers(environment, env={"EXTRA": "yes"})[1].value
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["EXTRA"]) == ("1", "2", "yes")
    assert seen["AXON_PS_COORDINATOR"] == cluster.address
    assert seen["AXON_PS_TOKEN"] == cluster.token
    assert "AXON_PS_TLS_CA" not in seen


def test_scripts_run_too(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    results = cluster.run_workers(script, args=("--lr", 0.1))
    assert [r.output for r in results] == [f"rank {r} ['--lr', '0.1']\n" for r in range(2)]


def test_a_workers_exception_is_shown_with_its_traceback(cluster: LocalCluster) -> None:
    with pytest.raises(WorkerFailed, match="no such thing") as caught:
        cluster.run_workers(fail_on_rank_1)
    good, bad = caught.value.results
    assert (good.error, good.output) == ("", "rank 0 is fine\n")
    assert "in fail_on_rank_1" in bad.error
    assert bad.exit_code == 1


def test_failures_may_be_expected(cluster: LocalCluster) -> None:
    results = cluster.run_workers(die, 1, check=False)
    assert (results[0].error, results[0].exit_code) == ("it was ended by signal 9", -9)


def test_who_hangs_is_killed_and_shows_where(cluster: LocalCluster) -> None:
    with pytest.raises(WorkerFailed, match="did not end in time") as caught:
        cluster.run_workers(hang, 1, timeout_s=2.0)
    assert "in hang" in caught.value.results[0].output


def test_workers_can_be_killed_while_they_run(cluster: LocalCluster) -> None:
    (worker,) = cluster.start_workers(hang, ranks=[1])
    worker.kill()
    assert worker.result().exit_code == -signal.SIGKILL


def test_what_cannot_travel_is_said_so(cluster: LocalCluster) -> None:
    with pytest.raises(WorkerFailed, match="cannot be sent"):
        cluster.run_workers(give_a_function, 1)


def test_functions_in_no_file_travel_by_value(cluster: LocalCluster) -> None:
    @dataclass(frozen=True)
    class Seen:
        rank: int

    def meets(factor: int) -> Any:
        with axon_ps.World.init() as world:
            return Seen(factor * sum(world.gather_json(world.rank)))

    results = cluster.run_workers(meets, args=(7,))
    assert [r.value for r in results] == [Seen(7), Seen(7)]
    assert cluster.run_workers(lambda x: x + 1, 1, args=(1,))[0].value == 2


def test_a_prompt_and_standard_input_may_run_workers() -> None:
    text = (
        "from axon_ps.testing import LocalCluster\n"
        "class Seen:\n    pass\n"
        "def rank():\n    import os\n    seen = Seen()\n    seen.rank = os.environ['RANK']\n    return seen\n"
        "with LocalCluster(shards=1, world_size=2) as cluster:\n"
        "    found = [r.value for r in cluster.run_workers(rank)]\n"
        "print([type(s) is Seen for s in found], [s.rank for s in found])\n"
    )
    ran = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True)
    assert ran.stdout == "[True, True] ['0', '1']\n", ran.stderr
    cell = f"exec(compile({text!r}, '<ipython-input-1>', 'exec'))"
    assert subprocess.run([sys.executable, "-c", cell], capture_output=True, text=True).stdout == ran.stdout


def test_a_module_in_a_package_that_cannot_be_imported_runs_from_its_file(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.py").write_text("class Seen:\n    pass\ndef see():\n    return Seen()\n")
    spec = importlib.util.spec_from_file_location("no.such.tasks", tmp_path / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    for name, module in (("no", ModuleType("no")), ("no.such", ModuleType("no.such")), ("no.such.tasks", tasks)):
        monkeypatch.setitem(sys.modules, name, module)
    assert type(cluster.run_workers(tasks.see, 1)[0].value) is tasks.Seen


def test_without_cloudpickle_it_is_said_what_to_do(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'axon-ps\[notebook\]', or put it at the top of a module"):
        cluster.run_workers(lambda: None, 1)


def test_asking_for_what_is_not_there(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidRequest, match="no shard 9"):
        cluster.kill("shard", 9)
    with pytest.raises(Misuse, match="still runs"):
        cluster.restart("coordinator")
    with pytest.raises(Misuse, match="not running"):
        _ = LocalCluster().address


def test_a_service_that_dies_by_itself_is_an_error_with_its_log() -> None:
    with pytest.raises(AxonError, match="shard 0 ended by itself with exit code -9") as caught, LocalCluster(1) as c:
        os.kill(c.process("shard").pid, signal.SIGKILL)
        c.process("shard").wait(10)
    assert "--- log of shard 0" in str(caught.value)


def test_an_error_in_the_body_carries_the_logs() -> None:
    with pytest.raises(ZeroDivisionError) as caught, LocalCluster(1):
        _ = 1 / 0
    assert "listening on" in caught.value.__notes__[0]


def test_a_service_that_cannot_start_shows_why() -> None:
    with pytest.raises(AxonError, match="coordinator did not start") as caught, LocalCluster(shards=0):
        pass
    assert "num_shards is 0" in str(caught.value)


def test_the_coordinator_restarts_on_its_port_and_killed_services_are_no_error() -> None:
    with LocalCluster(shards=1, world_size=1, durable=True) as cluster:
        address = cluster.address
        cluster.kill("coordinator")
        cluster.restart("coordinator")
        assert cluster.address == address
        cluster.kill("shard", 0, signal.SIGSTOP)  # a frozen process is ended too
