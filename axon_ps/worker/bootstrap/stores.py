"""The key-value store by which workers that only a launcher has started find each other, before there is a job.

Note: [Whose MASTER_ADDR is]
    `MASTER_ADDR` and `MASTER_PORT` name torch's store, here as for `init_process_group`: torchrun's agent serves it
    (`TORCHELASTIC_USE_AGENT_STORE`), else the worker of rank 0 does. They never name our coordinator:
    `AXON_PS_COORDINATOR` does, and with it no store is needed. Without either, the workers must be on one host (see
    `local_store`), or be a step of Slurm's, whose rank 0 is on the first node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.channels import join_address
from axon_ps.worker.bootstrap.local_store import LocalStore
from axon_ps.worker.bootstrap.torch_store import torch_store
from axon_ps.worker.environment import SLURM, LaunchInfo, port_of

_SLURM_PORTS = range(20000, 28000)
"""A step's store listens at one of these, by the job's number, unless MASTER_PORT is set."""


class C10dStore(Protocol):
    """The methods of a c10d store that forming a job needs."""

    def set(self, key: str, value: str, /) -> Any:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Return True if all of these keys exist, without waiting."""


def open_store(env: Mapping[str, str], launch: LaunchInfo, number: int, timeout_s: float) -> C10dStore:
    """Open the store that the launcher of this worker gives it. See Note: [Whose MASTER_ADDR is].

    Args:
        env: the process's environment.
        launch: this worker's rank and launcher.
        number: number of jobs that the workers have formed before. Every job has its own keys.
        timeout_s: most seconds until the store answers.

    Raises:
        ConfigurationError: there is no store. The message says what to set.
        Unreachable: there is no server at its address.
    """
    if launch.launcher is None or launch.rank < 0 or not launch.world_size:
        master = "MASTER_ADDR is set, but " if env.get("MASTER_ADDR") else "AXON_PS_COORDINATOR is not set, and "
        raise ConfigurationError(
            f"which job? {master}RANK and WORLD_SIZE are not: start the script with `axon-ps run`, torchrun, mpirun or "
            "srun, or set AXON_PS_COORDINATOR=host:port to join a job that runs"
        )
    if address := master_of(env, launch):
        return torch_store(address, launch, f"axon_ps/{number}", timeout_s)
    if launch.run and launch.local_world_size == launch.world_size:
        return LocalStore(f"{launch.run}/{number}", serves=launch.rank == 0, timeout_s=timeout_s)
    here = f", {launch.local_world_size} of them on this host" if launch.local_world_size else ""
    raise ConfigurationError(
        f"this is rank {launch.rank} of {launch.world_size} workers{here}, by {launch.launcher.rank} and "
        f"{launch.launcher.world_size}, and nothing says where they can meet: set MASTER_ADDR to the host of rank 0 "
        f"for all of them (and MASTER_PORT, if {port_of({})} is not free there), or AXON_PS_COORDINATOR to a "
        "coordinator that runs"
    )


def master_of(env: Mapping[str, str], launch: LaunchInfo) -> str:
    """Return "host:port" of torch's store; empty when it is unknown.

    Raises:
        ConfigurationError: a variable is malformed.
    """
    if host := env.get("MASTER_ADDR"):
        return join_address(host, port_of(env))
    if launch.launcher is SLURM and launch.local_world_size != launch.world_size:
        number = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
        port = port_of(env) if env.get("MASTER_PORT") else _SLURM_PORTS[number % len(_SLURM_PORTS)]
        nodes = env.get("SLURM_STEP_NODELIST", "")
        return join_address(first_host(nodes), port) if nodes else ""
    return ""


def first_host(nodes: str) -> str:
    """Return the first of a Slurm list of hosts: "gpu03" of "gpu[03-05,9],login1"."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", nodes)
    assert match is not None  # the pattern matches the empty text, too
    return "".join(group or "" for group in match.groups())
