"""`axon-ps run --max-restarts --standby`: a worker that fails is replaced in its place, and nobody else is.

Tests of `cli/launch/standby.py` and `cli/launch/workers.py`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_ps.testing import LocalCluster
from command_line import axon_ps, run_script

DIES_FIRST = """
import json, os, pickle, signal, sys
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
class Mine: pass
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print(json.dumps({
    "rank": os.environ["RANK"], "local": os.environ["LOCAL_RANK"], "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    "stdin": sys.stdin.read(), "standby": "axon_ps.cli.launch.standby" in sys.orig_argv,
}))
"""

OWN_JOB = ("--job", f"restarts-{os.getpid()}")
"""For `axon-ps kill` in a worker: other jobs of this machine may be there."""

FAILS = """
import json
raise ValueError("never happy")
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    return write


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, str]]:
    """Options of a run whose coordinator is elsewhere; its workers do not ask it, so anybody who listens is enough."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "--coordinator", f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("standby", [0, 1])
def test_a_worker_that_dies_is_replaced_in_its_place(
    standby: int, script: Callable[[str], str], elsewhere: tuple[str, str]
) -> None:
    path = script(DIES_FIRST)
    options = ["--standby", "1"] if standby else ["--max-restarts", "1"]
    done = axon_ps("run", *elsewhere, "--nproc-per-node", "2", *options, path, "--lr", "1")
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        name, _, text = line.partition("] ")
        told[name.strip("[")] = json.loads(text)
    assert sorted(told) == ["worker 0", "worker 1"]
    zero, one = told["worker 0"], told["worker 1"]
    assert (one["rank"], one["local"], one["restarts"], one["standby"]) == ("1", "1", "1", bool(standby))
    assert (zero["rank"], zero["local"], zero["restarts"], zero["standby"]) == ("0", "0", "0", False)
    for same in ("name", "file", "argv", "path", "main", "stdin"):
        assert one[same] == zero[same], same
    assert one["argv"] == [path, "--lr", "1"]
    how = "a standby takes its place" if standby else "it is started again"
    assert f"axon-ps: worker 1 was ended by SIGKILL; {how} (restart 1 of 1)" in done.stderr.splitlines()


def test_when_restarts_are_used_up_the_run_ends_with_the_workers_error(
    script: Callable[[str], str], elsewhere: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this job has none')")
    done = axon_ps("run", *elsewhere, "--standby", "1", script(FAILS), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "axon-ps: worker 0 failed first: it exited with code 1 after 1 restart: ValueError: never happy"
    tracebacks = [i for i, line in enumerate(lines) if line == "[worker 0] Traceback (most recent call last):"]
    first, second = (lines[i : i + 4] for i in tracebacks[:2])
    assert first == second, "a standby's traceback shows nothing of us"
    assert second[-1] == "[worker 0] ValueError: never happy"


TRAINS = """
import hashlib, os, resource, subprocess, sys, time
import torch
import axon_ps
from axon_ps.parallel import FSDP, SGD
from axon_ps.storage.manifest import list_checkpoints

def service(role):
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
            command = open(f"/proc/{name}/cmdline", "rb").read().split(bytes(1))
        except OSError:
            continue
        if int(parent) == os.getppid() and role.encode() in command:
            return int(name)

with axon_ps.World.init() as world:
    torch.manual_seed(0)
    model = FSDP(torch.nn.Linear(64, 8), world)
    optimizer, faults = SGD(model, lr=0.1), sys.argv[1:]
    while world.version < 9:
        if faults and world.version == 5:
            role, fault = faults.pop(0).split(maxsplit=1)
            while role == "shard" and not list_checkpoints(os.environ["AXON_PS_CHECKPOINT_DIR"]):
                time.sleep(0.01)
            if fault == "dies":
                subprocess.run([sys.executable, "-m", "axon_ps.cli.main", "kill", role], check=True, stdout=sys.stderr)
            else:  # nothing that it writes is written any more
                resource.prlimit(service(role), resource.RLIMIT_FSIZE, (0, 0))
        torch.manual_seed(world.version)
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(hashlib.sha256(values).hexdigest())
"""


def test_a_shard_server_that_dies_is_replaced_and_the_job_goes_on_from_a_checkpoint(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(TRAINS)
    with LocalCluster(shards=1, world_size=1) as cluster:
        (undisturbed,) = cluster.run_workers(run_script, args=(path,))
    options = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2", "--checkpoint-limit", "1"]
    done = axon_ps("run", *OWN_JOB, *options, path, "shard dies")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[worker 0] {undisturbed.output}", "the bits of a run that was not disturbed"
    lines = done.stderr.splitlines()
    assert (
        "axon-ps: shard 0 was ended by SIGKILL; it is started again: the job restores its newest checkpoint "
        "(restart 1 of 5)" in lines
    )


@pytest.mark.parametrize(
    ("fault", "ending"),
    [("dies", "was ended by SIGKILL"), ("cannot write", "exited with code 2")],
)
def test_a_coordinator_that_fails_is_started_again_and_nothing_is_lost(
    fault: str, ending: str, script: Callable[[str], str]
) -> None:
    path = script(TRAINS)
    with LocalCluster(shards=1, world_size=1) as cluster:
        (undisturbed,) = cluster.run_workers(run_script, args=(path,))
    done = axon_ps("run", *OWN_JOB, path, f"coordinator {fault}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[worker 0] {undisturbed.output}", "the bits of a run that was not disturbed"
    assert (
        f"axon-ps: coordinator {ending}; it is started again: it has its state, and all others come back to it "
        "(restart 1 of 5)" in done.stderr.splitlines()
    )


def test_a_coordinator_without_a_state_is_not_started_again(script: Callable[[str], str]) -> None:
    done = axon_ps("run", *OWN_JOB, "--state", "memory", script(TRAINS), "coordinator dies")
    assert done.returncode == 137
    assert "axon-ps: coordinator failed first: it was ended by SIGKILL" in done.stderr.splitlines()[-1]


def test_checkpoints_need_a_directory_and_a_period_that_can_be(script: Callable[[str], str]) -> None:
    path = script("")
    done = axon_ps("run", "--checkpoint-every", "5", path)
    assert done.returncode == 2
    assert "add --checkpoint-dir" in done.stderr
    done = axon_ps("run", "--checkpoint-dir", "somewhere", "--checkpoint-every", "5 minutes", path)
    assert done.returncode == 2
    assert "give steps, as 500, or a time, as 90s, 10m or 2h" in done.stderr
