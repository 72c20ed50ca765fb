"""A worker's environment variables: the coordinator's address, its rank, token and certificates.

All functions take a mapping, so tests need no real environment. The names are torchrun's where torchrun has one,
so a script works under `axon-ps run`, `torchrun`, `mpirun`, `srun` and compose alike. See docs/environment.md.
`worker.bootstrap` is for workers that only a launcher has started: it lets them find each other.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axon_ps.errors import ConfigurationError
from axon_ps.observe.tracing.tracer import NO_TRACES, TracePolicy
from axon_ps.rpc.auth.certificates import LIFETIME_S
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.security import Security, in_directory

DEFAULT_JOB = "default"
DEFAULT_MASTER_PORT = 29500
_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The names of the environment variables by which a program that starts workers gives each its rank.

    Attributes:
        name: as in messages.
        rank: the worker's rank.
        world_size: the number of workers.
        local_rank: its position among those of its host.
        local_world_size: the number of those of its host.
        run: variables that together name this run, and no other on the host; empty = none.
        needs: variables without which the others mean something else.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    run: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def is_behind(self, env: Mapping[str, str]) -> bool:
        """Return True if it has started this process."""
        names = self.rank, self.world_size, self.local_rank, self.local_world_size
        return any(env.get(name) for name in names) and all(env.get(name) for name in self.needs)


TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
)
"""torchrun, `axon-ps run`, and variables set by hand."""

OPEN_MPI = Launcher(
    name="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    run=("PMIX_NAMESPACE",),
)
SLURM = Launcher(
    name="srun",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="",  # see `_tasks_here`
    run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    needs=("SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"),  # a batch script that calls no srun has the others, too
)
HYDRA = Launcher(
    name="mpiexec",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
"""MPICH and Intel MPI."""

LAUNCHERS = (TORCHRUN, OPEN_MPI, SLURM, HYDRA)
"""In order of precedence: a worker that torchrun starts inside of `srun` is torchrun's."""


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """The rank of this process, and the number of workers, by its launcher's variables.

    Attributes:
        launcher: the program that started it; None = unknown.
        rank: its rank; -1 = not given.
        world_size: the number of workers; 0 = not given.
        local_rank: its position among those of its host.
        local_world_size: the number of those of its host; 0 = not given.
        run: a name of this run of the launcher, and of no other on the host; empty = unknown.
    """

    launcher: Launcher | None
    rank: int = -1
    world_size: int = 0
    local_rank: int = 0
    local_world_size: int = 0
    run: str = ""


def launch_info(env: Mapping[str, str]) -> LaunchInfo:
    """Return the rank of this process, by the first launcher whose variables are set.

    Raises:
        ConfigurationError: a variable is malformed, or the rank is not below the number of workers.
    """
    launcher = next((one for one in LAUNCHERS if one.is_behind(env)), None)
    if launcher is None:
        return LaunchInfo(launcher=None)
    rank, world_size = _integer(env, launcher.rank, -1, least=-1), _integer(env, launcher.world_size, 0, least=0)
    if world_size and rank >= world_size:
        names = launcher.rank, launcher.world_size
        raise ConfigurationError(f"{names[0]} is {rank} and {names[1]} is {world_size}; it must be below that")
    local_world_size = _tasks_here(env) if launcher is SLURM else _integer(env, launcher.local_world_size, 0, least=1)
    run = [env.get(name, "") for name in launcher.run]
    return LaunchInfo(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, launcher.local_rank, 0, least=0),
        local_world_size=local_world_size,
        run="/".join([launcher.name, *run]) if run and all(run) else "",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of one worker.

    Attributes:
        coordinator: "host:port" of the coordinator.
        job: name of the job.
        rank: wanted rank; -1 = whichever is free.
        world_size: workers the job starts with; 0 = as the coordinator is configured.
        local_rank: position among the workers of this node.
        local_world_size: workers of this node.
        node: name of the host or container, the same for all workers of a node.
        security: token and certificates.
        backend: name of the backend of the default group, or "auto" = by where the workers are.
        standby: True to wait, without a rank, until the job has lost a worker, and replace it.
        http_port: of this worker's HTTP endpoint; 0 = any free one, None = it has none.
        http_host: the address that it listens on.
        tracing: the steps that are traced.
        direct_memory: True if memory is shared with shard servers of this host, so that chunks are not sent.
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
    http_port: int | None = None
    http_host: str = "127.0.0.1"
    tracing: TracePolicy = NO_TRACES

    def __post_init__(self) -> None:
        object.__setattr__(self, "security", self.security.acting(Principal.WORKER, self.job))


def worker_config(env: Mapping[str, str]) -> WorkerConfig:
    """Read a worker's configuration from environment variables; see docs/environment.md.

    Raises:
        ConfigurationError: a variable is missing or malformed. The message names it.
    """
    standby = env.get("AXON_PS_STANDBY", "") not in ("", "0")
    launch = launch_info(env)
    return WorkerConfig(
        coordinator=_coordinator(env),
        job=job_of(env),
        rank=-1 if standby else launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size or 1,
        node=node_of(env),
        backend=env.get("AXON_PS_BACKEND") or "auto",
        direct_memory=env.get("AXON_PS_DIRECT_MEMORY") != "0",
        standby=standby,
        http_port=_http_port(env, launch.local_rank),
        http_host=env.get("AXON_PS_HTTP_HOST") or "127.0.0.1",
        tracing=tracing_of(env),
        security=security_of(env),
    )


def _http_port(env: Mapping[str, str], local_rank: int) -> int | None:
    """Return the HTTP port. Workers of one node have consecutive ports."""
    if not env.get("AXON_PS_HTTP_PORT"):
        return None
    first = _integer(env, "AXON_PS_HTTP_PORT", 0, least=0)
    return first and first + local_rank


def tracing_of(env: Mapping[str, str]) -> TracePolicy:
    """Return the steps that are traced, and their exporter. (OpenTelemetry reads its other variables itself.)

    Raises:
        ConfigurationError: a variable is malformed.
    """
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    every = _integer(env, "AXON_PS_TRACE_EVERY", 0, least=0)
    return TracePolicy(every=every, protocol=protocol or TracePolicy.protocol)


def security_of(env: Mapping[str, str]) -> Security:
    """Read the token and the certificates.

    Raises:
        ConfigurationError: they do not go together, or the token's file cannot be read.
    """
    files = {
        "ca_file": env.get("AXON_PS_TLS_CA", ""),
        "cert_file": env.get("AXON_PS_TLS_CERT", ""),
        "key_file": env.get("AXON_PS_TLS_KEY", ""),
    }
    token = env.get("AXON_PS_TOKEN", "")
    return Security(
        token=token,
        token_file="" if token else env.get("AXON_PS_TOKEN_FILE", ""),
        spiffe_pattern=env.get("AXON_PS_SPIFFE_PATTERN", ""),
        tls=env.get("AXON_PS_TLS", "").lower() in _TRUE,
        lifetime_s=_seconds(env, "AXON_PS_TLS_LIFETIME_S", LIFETIME_S),
        **in_directory(env.get("AXON_PS_TLS_DIR", ""), files),
        insecure=env.get("AXON_PS_INSECURE", "").lower() in _TRUE,
    )


def security_variables(security: Security) -> dict[str, str]:
    """Return the variables by which a child process gets the same security; the inverse of `security_of`."""
    directory = security.spiffe and str(Path(security.cert_file).parent)
    values = {
        "AXON_PS_TOKEN": security.token,
        "AXON_PS_TOKEN_FILE": security.token_file,
        "AXON_PS_TLS_CA": "" if directory else security.ca_file,
        "AXON_PS_TLS_CERT": "" if directory else security.cert_file,
        "AXON_PS_TLS_KEY": "" if directory else security.key_file,
        "AXON_PS_TLS_DIR": directory or "",
        "AXON_PS_SPIFFE_PATTERN": security.spiffe_pattern,
        "AXON_PS_TLS": "1" if security.tls else "",
        "AXON_PS_TLS_LIFETIME_S": "" if security.lifetime_s == LIFETIME_S else str(security.lifetime_s),
        "AXON_PS_INSECURE": "1" if security.insecure else "",
    }
    return {name: value for name, value in values.items() if value}


def node_of(env: Mapping[str, str]) -> str:
    """Return the name of this host or container, common to its workers.

    Two agents of torchrun on one host are two nodes, as two launches of `axon-ps run` are.
    """
    if given := env.get("AXON_PS_NODE"):
        return given
    agents = env.get("GROUP_WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in env else "1"
    return socket.gethostname() if agents == "1" else f"{socket.gethostname()}/{env.get('GROUP_RANK', '0')}"


def job_of(env: Mapping[str, str]) -> str:
    """Return the job's name."""
    return env.get("AXON_PS_JOB") or DEFAULT_JOB


def port_of(env: Mapping[str, str]) -> int:
    """Return the port of torch's store."""
    return _integer(env, "MASTER_PORT", DEFAULT_MASTER_PORT, least=1)


def shards_of(env: Mapping[str, str]) -> int:
    """Return the number of shard servers that workers start if there are none; 0 = one per node."""
    return _integer(env, "AXON_PS_SHARDS", 0, least=1)


def _coordinator(env: Mapping[str, str]) -> str:
    address = env.get("AXON_PS_COORDINATOR", "")
    if not address:
        raise ConfigurationError(
            "no coordinator is named: set AXON_PS_COORDINATOR=host:port, or start the script with `axon-ps run` or "
            "torchrun"
        )
    for each in address.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigurationError(f"the coordinator's address is {each!r}; it must be host:port, such as node1:7077")
    return address


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number of seconds") from None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of tasks of a Slurm step that run on this node, of a list such as "2(x3),1"; 0 = not given."""
    counts: list[int] = []
    for item in filter(None, env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE is {env['SLURM_STEP_TASKS_PER_NODE']!r}; it must be like 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(env, "SLURM_NODEID", 0, least=0)
    return counts[node] if node < len(counts) else 0


def _integer(env: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; it must be an integer") from None
    if value < least:
        raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
    return value
