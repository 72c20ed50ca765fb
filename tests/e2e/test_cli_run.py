"""`axon-ps run` and the services in the foreground, as real processes: what a user sees and what is left behind.

Every case ends with a clean stop or a clear error, an exit code that says which, and no process left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from axon_ps.host.ports import free_ports
from axon_ps.testing import LocalCluster
from command_line import AXON_PS, axon_ps, environment
from deadlines import WHOLE_S

GONE_S = 20.0
WRONG_TOKEN = "the token is none of this server's; is it the token of this job?"

SHOW_ENVIRONMENT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
         "AXON_PS_COORDINATOR", "AXON_PS_JOB", "AXON_PS_TOKEN", "AXON_PS_CHECKPOINT_DIR")
print(json.dumps({"args": sys.argv[1:], **{n: os.environ.get(n) for n in names}}))
"""

MEET = """
import axon_ps
with axon_ps.World.init(join_timeout_s=120) as world:
    print("everybody:", world.gather_json(world.rank))
"""

TRAIN = """
import torch, axon_ps
from axon_ps.parallel import FSDP, SGD
with axon_ps.World.init(join_timeout_s=120) as world:
    model = FSDP(torch.nn.Linear(1024, 1024), world.default_group)
    optimizer = SGD(model, lr=1.0)
    model(torch.ones(1, 1024)).sum().backward()
    print("committed:", optimizer.step().committed, flush=True)
"""

ONE_FAILS = """
import axon_ps
world = axon_ps.World.init(join_timeout_s=120)
if world.rank == 1:
    raise ValueError("rank one is unhappy")
world.kv_wait("never")
"""

FAILS_FIRST = """
import os, sys
(pipe,) = sys.argv[1:]
if os.environ["RANK"] == "1":
    held = open(pipe, "w")
    FAILS
open(pipe).read()  # until the other one is gone
raise OSError("rank one does not answer")
"""

SLOW_TO_END = """
import os, sys
begun, ended = sys.argv[1:]
if os.environ["RANK"] == "1":
    try:
        raise ValueError("rank one is unhappy")
    except ValueError:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    open(begun, "w").close()
    open(ended).read()  # until the other one is gone
    os._exit(1)
open(begun).read()
held = open(ended, "w")
raise OSError("rank one does not answer")
"""

REPORT = """
import axon_ps
with axon_ps.World.init(join_timeout_s=120) as world:
    world.report(step=5, steps=10, loss=0.125, tokens_per_s=12_000)
    world.kv_wait("axon_ps/progress")
    print("half way", flush=True)
    world.kv_wait("never")
"""

WAIT = """
import os, subprocess, sys, axon_ps
world = axon_ps.World.init(join_timeout_s=120)
child = subprocess.Popen(["sleep", "1000"])
print("pids", os.getpid(), child.pid, flush=True)
world.kv_wait("never")
"""


@contextlib.contextmanager
def started(*arguments: str, **values: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is running; killed at the end, if it has not ended by itself."""
    process = subprocess.Popen(
        [*AXON_PS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(values),
        process_group=0,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], words: str, count: int = 1) -> list[str]:
    """Read lines until `count` of them held `words`; those."""
    assert process.stdout is not None
    found: list[str] = []
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            found.append(line)
            if len(found) == count:
                return found
    raise AssertionError(f"it ended before it wrote {words!r}:\n{''.join(seen)}")


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one."""
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """All of them end."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert alive == []


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def elsewhere(used_port: int) -> tuple[str, str]:
    """Options of a run whose coordinator is elsewhere; its workers do not ask it, so anybody who listens is enough."""
    return "--coordinator", f"127.0.0.1:{used_port}"


@pytest.fixture
def unused_port() -> int:
    return free_ports()


def test_workers_are_told_what_torchrun_tells_them_and_more(script: Callable[..., str], tmp_path: Path) -> None:
    done = axon_ps(
        "run", "--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path), script(SHOW_ENVIRONMENT), "--lr", "1"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        name, _, text = line.partition("] ")
        told[name.strip("[")] = json.loads(text)
    assert sorted(told) == ["worker 0", "worker 1"]
    one = told["worker 1"]
    assert (one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) == ("1", "2", "1", "2")
    assert one["args"] == ["--lr", "1"]
    assert one["AXON_PS_CHECKPOINT_DIR"] == str(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT", "AXON_PS_COORDINATOR", "AXON_PS_TOKEN", "AXON_PS_JOB"):
        assert one[name], name
        assert one[name] == told["worker 0"][name]
    assert one["MASTER_PORT"] != one["AXON_PS_COORDINATOR"].rpartition(":")[2]
    assert int(one["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_workers_meet_through_the_embedded_cluster(script: Callable[..., str]) -> None:
    done = axon_ps("run", "--nproc-per-node", "2", script(MEET))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] everybody: [0, 1]", "[worker 1] everybody: [0, 1]"]


def test_a_second_terminal_is_told_how_to_watch_and_sees_how_far_the_job_is(script: Callable[..., str]) -> None:
    with started("run", script(REPORT)) as process:
        (said,) = lines_until(process, "to watch it", 1)
        assert said.startswith("axon-ps: to watch it from another terminal: axon-ps status --coordinator 127.0.0.1:")
        command = said.partition("terminal: axon-ps ")[2].split()
        token = Path(command[command.index("--token-file") + 1])
        assert token.stat().st_mode & 0o77 == token.parent.stat().st_mode & 0o77 == 0  # ours alone
        lines_until(process, "half way", 1)
        seen = axon_ps(*command)
        assert (
            ": running, no model on the shard servers\nstep 5 of 10 (50 %), loss 0.125, 12,000 tokens/s" in seen.stdout
        ), seen.stderr
        process.send_signal(signal.SIGINT)
        process.wait(GONE_S)
    assert not token.parent.exists()


def test_a_module_runs_too(script: Callable[..., str], tmp_path: Path, elsewhere: tuple[str, str]) -> None:
    script("import sys; print('module', sys.argv[1:])", "some_training.py")
    done = axon_ps("run", *elsewhere, "-m", "some_training", "--deep", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "[worker 0] module ['--deep']\n")


def test_a_dead_workers_traceback_is_what_is_seen_last(script: Callable[..., str]) -> None:
    done = axon_ps("run", "--nproc-per-node", "2", script(ONE_FAILS))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-2:] == [
        "[worker 1] ValueError: rank one is unhappy",
        "axon-ps: worker 1 failed first: it exited with code 1: ValueError: rank one is unhappy",
    ]
    assert "[worker 0]" not in done.stderr


@pytest.mark.parametrize(
    ("fails", "ending"),
    [
        ("raise ValueError('rank one is unhappy')", "exited with code 1: ValueError: rank one is unhappy"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_of_workers_that_all_fail_the_first_one_is_named_last(
    fails: str, ending: str, script: Callable[..., str], tmp_path: Path, elsewhere: tuple[str, str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    fails_first = script(FAILS_FIRST.replace("FAILS", fails))
    done = axon_ps("run", *elsewhere, "--nproc-per-node", "2", fails_first, str(tmp_path / "pipe"))
    assert done.returncode == (137 if "kill" in fails else 1)
    assert done.stderr.splitlines()[-1] == f"axon-ps: worker 1 failed first: it {ending}"


@pytest.mark.parametrize("options", ["size=1m", "size=64m", "ro"])
def test_a_job_trains_whatever_dev_shm_is(options: str, script: Callable[..., str]) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("another /dev/shm needs root and the program unshare")
    run = shlex.join([*AXON_PS, "run", "--nproc-per-node", "2", "--shards", "2", script(TRAIN)])
    command = f"mount -t tmpfs -o {options} tmpfs /dev/shm && exec {run}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=WHOLE_S,
        env=environment({}),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "committed" in line) == [
        "[worker 0] committed: True",
        "[worker 1] committed: True",
    ]


def test_one_that_is_still_ending_when_others_have_ended_is_named(
    script: Callable[..., str], tmp_path: Path, elsewhere: tuple[str, str]
) -> None:
    pipes = [str(tmp_path / name) for name in ("begun", "ended")]
    for pipe in pipes:
        os.mkfifo(pipe)
    done = axon_ps("run", *elsewhere, "--nproc-per-node", "2", script(SLOW_TO_END), *pipes)
    lines = done.stderr.splitlines()
    assert lines[-1] == "axon-ps: worker 1 failed first: it exited with code 1: ValueError: rank one is unhappy"


@pytest.mark.parametrize(("statement", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_dead_workers_exit_code_is_ours(
    statement: str, code: int, script: Callable[..., str], elsewhere: tuple[str, str]
) -> None:
    done = axon_ps("run", *elsewhere, script(f"import os, sys\n{statement}\n"))
    assert done.returncode == code
    assert "axon-ps: worker 0 " in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_ends_everything(number: signal.Signals, code: int, script: Callable[..., str]) -> None:
    with started("run", "--nproc-per-node", "2", script(WAIT)) as process:
        lines_until(process, "pids", 2)
        below = descendants(process.pid)
        assert len(below) == 6  # a coordinator, a shard server, two workers, and a child of each worker
        process.send_signal(number)
        rest, _ = process.communicate(timeout=WHOLE_S)
        assert process.returncode == code
        assert "Traceback" not in rest
        assert_gone(below)


def test_a_dead_service_ends_the_run_too(script: Callable[..., str]) -> None:
    with started("run", "--shards", "2", "--replication", "1", script(WAIT)) as process:
        lines_until(process, "pids")
        below = descendants(process.pid)
        next(p for p in below if "shard" in p.cmdline()).kill()
        rest, _ = process.communicate(timeout=WHOLE_S)
        assert process.returncode == 137
        assert "was ended by SIGKILL" in rest
        assert_gone(below)


def test_a_reader_that_goes_away_ends_the_run(script: Callable[..., str], elsewhere: tuple[str, str]) -> None:
    talk = "import itertools\nfor i in itertools.count():\n    print(i)\n"
    with started("run", *elsewhere, script(talk)) as process:
        lines_until(process, "[worker 0] 3")
        below = descendants(process.pid)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(40) == 128 + signal.SIGPIPE
        assert_gone(below)


def test_nothing_outlives_a_killed_launcher(script: Callable[..., str]) -> None:
    text = WAIT.replace("child = subprocess.Popen(", "child = (lambda _: type('', (), {'pid': 0}))(")
    with started("run", "--nproc-per-node", "2", script(text)) as process:
        lines_until(process, "pids", 2)
        below = descendants(process.pid)
        assert len(below) == 4
        process.kill()
        assert_gone(below)


def test_a_port_in_use_is_said_so(script: Callable[..., str], used_port: int) -> None:
    done = axon_ps("run", "--coordinator-port", str(used_port), script(MEET))
    assert done.returncode == 2
    assert f"port {used_port} is in use by another process" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_coordinator_is_named(script: Callable[..., str], unused_port: int) -> None:
    address = f"127.0.0.1:{unused_port}"
    done = axon_ps("run", "--coordinator", address, "--connect-timeout-s", "0.3", script(MEET))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"axon-ps: nobody answers at {address} (Connection refused), waited 0.3 s; is the coordinator running there?\n"
    )
    done = axon_ps("status", "--coordinator", address)
    assert done.returncode == 1
    assert address in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_token_or_job_is_refused(script: Callable[..., str]) -> None:
    with LocalCluster(shards=1, world_size=1, token="right") as cluster:
        for arguments in (["--token", "wrong"], [], ["--token", "right", "--job", "another"]):
            done = axon_ps("status", "--coordinator", cluster.address, "--job", "test", *arguments)
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith("axon-ps: ")
            assert done.stderr.count("\n") == 1
        done = axon_ps("run", "--coordinator", cluster.address, "--job", "test", "--token", "wrong", script(MEET))
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if line.startswith("[worker 0]")]
        assert len(said) == 1, done.stderr
        assert said[0].startswith(f"[worker 0] axon-ps: this worker could not join its job: {WRONG_TOKEN}")


def test_two_launchers_are_two_nodes_of_one_job(script: Callable[..., str], unused_port: int) -> None:
    arguments = ["run", "--nnodes", "2", "--host", "127.0.0.1", "--token", "t", "--shards", "2"]
    arguments += ["--coordinator-port", str(unused_port), "--node-rank"]
    with started(*arguments, "1", script(MEET)) as other:
        done = axon_ps(*arguments, "0", script(MEET))
        rest, _ = other.communicate(timeout=WHOLE_S)
    assert (done.returncode, done.stdout) == (0, "[worker 0] everybody: [0, 1]\n")
    assert other.returncode == 0, rest
    assert "[worker 1] everybody: [0, 1]" in rest.splitlines(), "a shard server may say more"


def test_status_and_health_of_a_cluster(script: Callable[..., str]) -> None:
    with LocalCluster(shards=2, world_size=1, job="look") as cluster:
        told = cluster.env(0)
        done = axon_ps("status", "--json", **told)
        assert done.returncode == 0, done.stderr
        reply = json.loads(done.stdout)
        assert (reply["job"], reply["version"], len(reply["membership"]["shards"])) == ("look", 0, 2)
        assert reply["membership"]["complete"] is False
        done = axon_ps("status", **told)
        assert "job look" in done.stdout
        assert cluster.address in done.stdout
        assert axon_ps("health", cluster.address).stdout == "SERVING\n"
        assert axon_ps("health", cluster.address, "--service", "axon_ps.wire.v1.Coordinator").stdout == "SERVING\n"
        assert axon_ps("health", cluster.address, "--service", "nobody").returncode == 2
        cluster.run_workers(script(MEET))
        assert ": finished: its worker has done all there was to do\n" in axon_ps("status", **told).stdout


def test_services_drain_on_sigterm_and_end_on_ctrl_c(unused_port: int) -> None:
    coordinator = ["coordinator", "--port", str(unused_port), "--state", "memory", "--log", "plain", "--token", "t"]
    with started(*coordinator) as first:
        lines_until(first, f"listening on 127.0.0.1:{unused_port}")
        address = f"127.0.0.1:{unused_port}"
        with started("shard", "--coordinator", address, "--port", "0", "--token", "t", "--log", "plain") as shard:
            lines_until(shard, "shard server 0 of job 'default'")
            shard.send_signal(signal.SIGTERM)
            rest, _ = shard.communicate(timeout=WHOLE_S)
            assert shard.returncode == 0, rest
            assert "Traceback" not in rest
        first.send_signal(signal.SIGINT)
        rest, _ = first.communicate(timeout=WHOLE_S)
        assert first.returncode == 130, rest
        assert "Traceback" not in rest


def test_doctor_finds_this_machine_in_order() -> None:
    done = axon_ps("doctor", "--json")
    findings = {f["what"]: f for f in json.loads(done.stdout)}
    assert findings["numpy"]["problem"] == ""
    assert findings["coordinator"]["found"].startswith("none named")
    assert "grpcio" in axon_ps("doctor").stdout
