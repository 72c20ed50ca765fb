"""`axon-ps logs` of a job, and `axon-ps drain`, as a user has them. Tests of `cli/operate.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

from axon_ps.testing import LocalCluster
from command_line import AXON_PS, axon_ps, environment

SCRIPT = """
import logging, os, axon_ps
world = axon_ps.World.init()
logging.getLogger("axon_ps.train").warning("the token is %s", os.environ["AXON_PS_TOKEN"])
raise ValueError("the data is gone")
"""


def of(cluster: LocalCluster) -> dict[str, str]:
    return {
        "AXON_PS_COORDINATOR": cluster.address, "AXON_PS_TOKEN": cluster.token, "AXON_PS_JOB": cluster.job,
    }  # fmt: skip


def until_logged(words: str, cluster: LocalCluster) -> None:
    with subprocess.Popen([*AXON_PS, "logs", "--follow"], stdout=PIPE, text=True, env=environment(of(cluster))) as logs:
        try:
            assert logs.stdout is not None
            assert any(words in line for line in logs.stdout)
        finally:
            logs.kill()


def test_what_every_process_logs_is_in_one_stream_without_secrets(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with LocalCluster(shards=1, world_size=1) as cluster:
        ended = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment(of(cluster)))
        until_logged("shard server 0 of job", cluster)  # its next heartbeat brings it
        printed = axon_ps("logs", "--json", **of(cluster))
        plain = axon_ps("logs", "--rank", "0", "--level", "error", **of(cluster))
        command = " ".join([*AXON_PS, "logs", "|", "head", "-n", "1"])
        head = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment(of(cluster)))
    assert "the token is" in ended.stderr  # it is printed as if nobody collected it
    assert printed.returncode == 0, printed.stderr
    records = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {(r["role"], r["rank"]) for r in records} == {("coordinator", None), ("shard", 0), ("worker", 0)}
    messages = [r["message"] for r in records if r["role"] == "worker"]
    assert messages[0] == "the token is ***"
    assert "ValueError: the data is gone" in messages[-1]
    assert cluster.token not in printed.stdout + plain.stdout
    first, *others = plain.stdout.splitlines()
    assert first.endswith("ERROR worker 0 script: the script has failed")
    assert others[-1] == "    ValueError: the data is gone"
    assert (head.stdout.count("\n"), head.stderr) == (1, "")


def test_following_goes_on_with_the_next_coordinator() -> None:
    with LocalCluster(shards=1, world_size=1, durable=True) as cluster:
        command = [*AXON_PS, "logs", "--follow"]
        variables = environment({**of(cluster), "PYTHONUNBUFFERED": "1"})
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=variables) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                assert any("shard server 0 of job" in line for line in process.stdout)
                cluster.kill("coordinator")
                assert "no answer, trying again" in process.stderr.readline()
                cluster.restart("coordinator")
                assert "has begun a new log" in process.stderr.readline()
                assert any("lost its session with the coordinator" in line for line in process.stdout)
            finally:
                process.kill()


def test_a_server_is_drained_and_leaves() -> None:
    with LocalCluster(shards=2, world_size=1) as cluster:
        leaving = cluster.process("shard", 1)
        drained = axon_ps("drain", "1", **of(cluster))
        assert (drained.returncode, drained.stdout) == (0, "shard server 1 has left the job\n"), drained.stderr
        assert leaving.wait(20) == 0
        cluster.restart("shard", 1)
