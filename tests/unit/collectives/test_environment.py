"""A worker's configuration from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_ps.collectives.environment import worker_config
from axon_ps.errors import ConfigurationError

AT = {"AXON_PS_COORDINATOR": "there:7077"}


def test_torchrun_variables_are_enough() -> None:
    config = worker_config(
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    )
    assert config.coordinator == "node1:29500"
    assert (config.rank, config.world_size, config.local_rank) == (3, 4, 1)


def test_open_mpi_and_defaults() -> None:
    config = worker_config({**AT, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "AXON_PS_NODE": "n"})
    assert (config.rank, config.world_size, config.node, config.job) == (1, 2, "n", "default")
    assert worker_config(AT).rank == -1
    assert worker_config({"MASTER_ADDR": "node1"}).coordinator == "node1:7077"


def test_a_token_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert worker_config({**AT, "AXON_PS_TOKEN_FILE": str(path)}).security.token == "secret"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "AXON_PS_COORDINATOR=host:port"),
        ({"AXON_PS_COORDINATOR": "there"}, "'there'; it must be host:port"),
        ({"AXON_PS_COORDINATOR": "there:0"}, "host:port"),
        ({**AT, "RANK": "one"}, "RANK is 'one'; it must be an integer"),
        ({**AT, "RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({**AT, "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; it must be at least 0"),
        ({**AT, "AXON_PS_TOKEN_FILE": "/nowhere/token"}, "cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        worker_config(env)
