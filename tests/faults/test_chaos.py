"""Campaigns against real jobs: a short one, one that is interrupted, and one of a job of somebody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from axon_ps.errors import ConfigurationError
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from axon_ps_lab.chaos import campaign as campaigns
from axon_ps_lab.chaos import run
from axon_ps_lab.chaos.outside import RunningJob
from axon_ps_lab.chaos.plan import planned
from axon_ps_lab.faults.fault import Fault
from checkpointed_job import until
from command_line import AXON_PS, environment
from deadlines import HANG_S

SHORT = """
seed = 32
faults = 6
at_most_s = 60
[embedded]
pause_s = 0.03
parameters = 20_000
samples = 64
checkpoint_every = "1s"
[kinds.kill]
weight = 3
[kinds.partition]
seconds = 0.2
[kinds.clock_jump]
seconds = 0.1
[kinds.truncated_file]
"""


def test_a_short_campaign_loses_nothing() -> None:
    campaign = campaigns.parse(SHORT, "short.toml")
    killed = {fault.role for fault in planned(campaign) if fault.kind is Fault.KILL}
    assert killed == {"coordinator", "shard", "worker"}, "choose another seed"
    lines: list[str] = []
    result = run.run_embedded(campaign, lines.append)
    assert result.problems == []
    assert result.is_good
    assert result.samples is not None
    assert result.samples.steps == result.steps
    assert result.bits_different == 0
    kills = [o for o in result.outcomes if o.dealt.fault.kind is Fault.KILL]
    assert all(o.detection_s is not None and o.next_commit_s is not None for o in kills)
    assert len(lines) >= campaign.faults


def test_a_campaign_that_is_interrupted_writes_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(SHORT.replace("faults = 6", "faults = 500"))
    command = [*AXON_PS, "chaos", "run", str(tmp_path / "c.toml"), "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment({})) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("2/500"):
            pass
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(40.0) == 130
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert content["stopped"] == "it was interrupted"
    assert content["faults"] >= 2
    assert content["samples_lost"] == 0
    assert "<svg" in (tmp_path / "chaos.html").read_text()


def test_servers_of_a_running_job_are_killed_and_frozen(tmp_path: Path) -> None:
    """Whoever has started them starts them again: here the test, a launcher elsewhere."""
    text = (
        "faults = 4\nseed = 4\n[kinds.kill]\nroles=['shard']\n[kinds.freeze]\nseconds = 0.2\nroles = ['coordinator']\n"
    )
    done = threading.Event()
    with LocalCluster(shards=3, world_size=1, replication=2, lease_s=2.0) as cluster:
        (worker,) = cluster.start_workers(_train, args=(str(tmp_path / "stop"),))
        until(lambda: cluster.status().version > 2)
        campaign = campaigns.parse(f"{text}[job]\ncoordinator = '{cluster.address}'", "running.toml")
        result: list[Any] = []

        def strike() -> None:
            try:
                result.append(run.run_outside(campaign, "", cluster.security, cluster.job, lambda _: None))
            finally:
                done.set()

        thread = threading.Thread(target=strike)
        thread.start()
        while not done.wait(0.05):
            for index in range(3):
                if cluster.process(Role.SHARD, index).exit_code is not None:
                    cluster.process(Role.SHARD, index).was_signalled = True
                    cluster.restart(Role.SHARD, index)
        thread.join(5.0)
        (tmp_path / "stop").touch()
        assert worker.result().error == ""
    (found,) = result
    assert found.problems == []
    assert {dealt.fault.kind for dealt in found.events.dealt} == {Fault.KILL, Fault.FREEZE}
    assert sum(outcome.steps_lost for outcome in found.outcomes) == 0
    assert found.samples is None
    assert all(o.next_commit_s is not None for o in found.outcomes[:-1])


def _train(stop: str) -> None:
    import torch

    import axon_ps
    from axon_ps.parallel import FSDP, SGD

    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = FSDP(torch.nn.Linear(32, 32), world.default_group)
        optimizer = SGD(model.parameters(), lr=0.01)
        while not os.path.exists(stop):
            model(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("content", "words"), [("none", "correct pid_files in"), ("", "correct pid_files in"), (None, "No such file")]
)
def test_a_process_that_cannot_be_found_is_an_error_with_the_remedy(
    content: str | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    if content is not None:
        file.write_text(content)
    text = f"[kinds.freeze]\nroles = ['worker']\n[job.pid_files]\nworker = ['{file}']\n"
    campaign = campaigns.parse(text, "c.toml")
    assert isinstance(campaign.target, campaigns.Job)
    with (
        LocalCluster(shards=1, world_size=1) as cluster,
        RunningJob(campaign.target, cluster.address, cluster.security, cluster.job) as job,
        pytest.raises(ConfigurationError, match=words),
    ):
        job.deal(planned(campaign)[0])
