"""A worker's configuration from its environment."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from axon_ps.errors import ConfigurationError
from axon_ps.worker.environment import launch_info, node_of, worker_config

AT = {"AXON_PS_COORDINATOR": "there:7077"}


def test_a_coordinator_is_named_by_one_variable_only() -> None:
    torchrun = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    config = worker_config({**AT, **torchrun})
    assert (config.coordinator, config.rank, config.world_size, config.local_rank) == ("there:7077", 3, 4, 1)
    with pytest.raises(ConfigurationError, match="AXON_PS_COORDINATOR=host:port"):
        worker_config(torchrun)  # MASTER_ADDR is where torch's store is
    assert worker_config(AT).rank == -1


LAUNCHED = {
    "torchrun": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "1321074689",
    },
    "srun": {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "8",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
    "mpiexec": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_every_launcher_gives_the_rank_of_this_worker(launcher: str) -> None:
    place = launch_info(LAUNCHED[launcher])
    assert place.launcher is not None
    assert place.launcher.name == launcher
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    config = worker_config({**AT, **LAUNCHED[launcher], "AXON_PS_NODE": "n"})
    assert (config.rank, config.world_size, config.local_rank, config.local_world_size) == (3, 4, 1, 2)
    assert (config.node, config.job) == ("n", "default")


def test_the_launcher_closest_to_the_worker_is_believed() -> None:
    both = {**LAUNCHED["srun"], "RANK": "0", "WORLD_SIZE": "1"}
    assert (launch_info(both).rank, launch_info(both).world_size) == (0, 1)
    of_axon_ps_run = {**LAUNCHED["srun"], "WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # which says no rank
    assert (launch_info(of_axon_ps_run).rank, launch_info(of_axon_ps_run).world_size) == (-1, 2)
    batch_script = {k: v for k, v in LAUNCHED["srun"].items() if "STEP" not in k}
    assert launch_info(batch_script).launcher is None
    assert launch_info({}).rank == -1


def test_only_what_names_one_run_names_it() -> None:
    assert launch_info(LAUNCHED["mpirun"]).run == "mpirun/1321074689"
    assert launch_info(LAUNCHED["srun"]).run == "srun/8/0"
    assert launch_info(LAUNCHED["torchrun"]).run == launch_info(LAUNCHED["mpiexec"]).run == ""


def test_agents_of_torchrun_on_one_host_are_nodes() -> None:
    agents = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert node_of(agents) == f"{socket.gethostname()}/1"
    assert node_of({**agents, "GROUP_WORLD_SIZE": "1"}) == socket.gethostname()
    assert node_of({**agents, "AXON_PS_NODE": "n"}) == "n"


def test_a_token_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert worker_config({**AT, "AXON_PS_TOKEN_FILE": str(path)}).security.tokens() == ("secret",)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "AXON_PS_COORDINATOR=host:port"),
        ({"AXON_PS_COORDINATOR": "there"}, "'there'; it must be host:port"),
        ({"AXON_PS_COORDINATOR": "there:0"}, "host:port"),
        ({"AXON_PS_COORDINATOR": "here:7077,there"}, "'there'; it must be host:port"),
        ({**AT, "RANK": "one"}, "RANK is 'one'; it must be an integer"),
        ({**AT, "RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2; it must be below that"),
        ({**AT, "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; it must be at least 0"),
        ({**AT, **LAUNCHED["srun"], "SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE is '2x2'"),
        ({**AT, "AXON_PS_TOKEN_FILE": "/nowhere/token"}, "cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        worker_config(env)
