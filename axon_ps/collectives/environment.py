"""What a worker learns from its environment: where the coordinator is, which rank it is, how to prove who it is.

A pure function of a mapping, so tests need no real environment. The names are torchrun's where torchrun has one, so a
script works under `axon-ps run`, `torchrun`, `mpirun` and compose alike.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_ps.errors import ConfigurationError
from axon_ps.transport.security import Security

DEFAULT_JOB = "default"
DEFAULT_PORT = 7077


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How one worker joins its job.

    Attributes:
        coordinator: "host:port" of the coordinator.
        job: name of the job.
        rank: wanted rank; -1 = whichever is free.
        world_size: workers the job starts with; 0 = as the coordinator was told.
        local_rank: position among the workers of this node.
        local_world_size: workers of this node.
        node: name of the host or container; workers of one node share it.
        security: token and certificates.
        backend: name of the backend of the default group, or "auto" = by where the workers are.
        standby: whether to wait, without a rank, until the job has lost a worker, and take its place.
        direct_memory: whether chunks are read from the memory of shard servers of this host, and by them from ours.
    """

    coordinator: str
    job: str = DEFAULT_JOB
    rank: int = -1
    world_size: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    node: str = field(default_factory=socket.gethostname)
    security: Security = field(default_factory=Security)
    backend: str = "auto"
    direct_memory: bool = True
    standby: bool = False


def worker_config(env: Mapping[str, str]) -> WorkerConfig:
    """Read a worker's configuration from environment variables.

    `AXON_PS_COORDINATOR` ("host:port"), or `MASTER_ADDR` and `MASTER_PORT`; `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `LOCAL_WORLD_SIZE`; `AXON_PS_JOB`, `AXON_PS_NODE`, `AXON_PS_BACKEND`, `AXON_PS_DIRECT_MEMORY` ("0" = send chunks to
    and from servers of this host too), `AXON_PS_STANDBY` ("1" = no rank until the job has lost a worker, and then its),
    `AXON_PS_TOKEN` or `AXON_PS_TOKEN_FILE`, `AXON_PS_TLS_CA`, `AXON_PS_TLS_CERT`, `AXON_PS_TLS_KEY`.
    Under Open MPI its own rank variables are understood.

    Raises:
        ConfigurationError: a variable is missing or malformed; the message names it.
    """
    world_size = _integer(env, ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), 0, least=0)
    standby = env.get("AXON_PS_STANDBY", "") not in ("", "0")
    rank = -1 if standby else _integer(env, ("RANK", "OMPI_COMM_WORLD_RANK"), -1, least=-1)
    if world_size and rank >= world_size:
        raise ConfigurationError(f"RANK is {rank} and WORLD_SIZE is {world_size}; RANK must be below WORLD_SIZE")
    return WorkerConfig(
        coordinator=_coordinator(env),
        job=env.get("AXON_PS_JOB") or DEFAULT_JOB,
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), 0, least=0),
        local_world_size=_integer(env, ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), 1, least=1),
        node=env.get("AXON_PS_NODE") or socket.gethostname(),
        backend=env.get("AXON_PS_BACKEND") or "auto",
        direct_memory=env.get("AXON_PS_DIRECT_MEMORY") != "0",
        standby=standby,
        security=Security(
            token=_token(env),
            ca_file=env.get("AXON_PS_TLS_CA", ""),
            cert_file=env.get("AXON_PS_TLS_CERT", ""),
            key_file=env.get("AXON_PS_TLS_KEY", ""),
        ),
    )


def _coordinator(env: Mapping[str, str]) -> str:
    address = env.get("AXON_PS_COORDINATOR", "")
    if not address and env.get("MASTER_ADDR"):
        address = f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT') or DEFAULT_PORT}"
    if not address:
        raise ConfigurationError(
            "no coordinator is named; set AXON_PS_COORDINATOR=host:port (or MASTER_ADDR and MASTER_PORT), "
            "or start the script with `axon-ps run`"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the coordinator's address is {address!r}; it must be host:port, such as node1:7077")
    return address


def _token(env: Mapping[str, str]) -> str:
    path = env.get("AXON_PS_TOKEN_FILE", "")
    if not path:
        return env.get("AXON_PS_TOKEN", "")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise ConfigurationError(f"AXON_PS_TOKEN_FILE is {path!r}, which cannot be read: {error.strerror}") from error


def _integer(env: Mapping[str, str], names: tuple[str, ...], default: int, *, least: int) -> int:
    for name in names:
        text = env.get(name, "")
        if not text:
            continue
        try:
            value = int(text)
        except ValueError:
            raise ConfigurationError(f"{name} is {text!r}; it must be an integer") from None
        if value < least:
            raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        return value
    return default
