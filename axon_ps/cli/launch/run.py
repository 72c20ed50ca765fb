"""The command `run`: checks the settings before anything is started. `perform.perform` then runs the launch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from axon_ps.cli import options as o
from axon_ps.cli.launch.plan import Launch
from axon_ps.cli.options import leave
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings

DEFAULT_MASTER_PORT = 29500


def run(
    program: Annotated[list[str], typer.Argument(help="Script (or module) and its arguments.", show_default=False)],
    nproc_per_node: Annotated[int, typer.Option(help="Workers on this machine.", min=1)] = 1,
    shards: Annotated[int | None, typer.Option(help="Shard servers of the job.", min=0, show_default="1")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, as python -m does.")] = False,
    nnodes: Annotated[int, typer.Option(help="Machines; start the same command on each.", min=1)] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="Which of them this is, from 0.", min=0, show_default=False)
    ] = None,
    master_addr: Annotated[str, typer.Option(help="Address of machine 0.")] = "127.0.0.1",
    master_port: Annotated[
        int | None, typer.Option(help="Port for torch.distributed's own store.", show_default="free, or 29500")
    ] = None,
    coordinator_port: Annotated[
        int | None, typer.Option(help="Port of the coordinator on machine 0.", show_default="free, or master port + 1")
    ] = None,
    coordinator: o.Coordinator = None,
    connect_timeout_s: Annotated[float, typer.Option(help="Seconds to wait for that coordinator.")] = 60.0,
    host: Annotated[
        str | None,
        typer.Option(help="Address that services listen on.", show_default="loopback; all with --nnodes"),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(help="Address at which other machines reach this one's shard servers.", show_default=False),
    ] = "",
    min_workers: Annotated[
        int | None, typer.Option(help="Fewest workers to continue with.", min=1, show_default="all")
    ] = None,
    step_timeout_s: o.StepTimeout = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="How often each worker is restarted when it fails.", min=0, show_default="--standby"),
    ] = None,
    standby: Annotated[
        int, typer.Option(help="Processes that wait, everything imported, to take a dead worker's place.", min=0)
    ] = 0,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(help="Where checkpoints go: AXON_PS_CHECKPOINT_DIR of the workers.", show_default=False),
    ] = None,
    resume: Annotated[
        str, typer.Option(help="Checkpoint to start from; 'auto' = newest in --checkpoint-dir.", show_default=False)
    ] = "",
    checkpoint_every: o.CheckpointEvery = "",
    checkpoint_limit: o.CheckpointLimit = 3,
    replication: o.Replication = 0,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Have this machine's workers share one session with the coordinator.")
    ] = False,
    state: Annotated[
        str,
        typer.Option(
            help="State of the coordinator: sqlite file, 'memory', or NAME:ADDRESS.",
            show_default="a file that goes with the command",
        ),
    ] = "",
    audit_log: o.AuditLog = None,
    http_port: o.HttpPort = None,
    trace_every: o.TraceEvery = None,
    job: o.Job = None,
    plugins: o.Plugins = None,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    tls_dir: o.TlsDir = None,
    tls: o.Tls = None,
    insecure: o.Insecure = None,
    debuggable: o.Debuggable = None,
    config: o.Config = None,
    log: o.Log = None,
    log_level: o.LogLevel = None,
) -> None:
    """Start a cluster on this machine, run a script on it with N workers, and end everything with it."""
    from axon_ps.cli.launch.perform import perform
    from axon_ps.cli.settings import load
    from axon_ps.rpc.auth.tokens import check_strong

    settings = load(
        config, coordinator=coordinator, checkpoint_dir=checkpoint_dir, job=job, plugins=plugins, token=token,
        token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_dir=tls_dir, tls=tls,
        insecure=insecure, log=log, log_level=log_level, http_port=http_port, trace_every=trace_every,
        audit_log=audit_log, debuggable=debuggable,
    )  # fmt: skip
    embedded = not settings.coordinator
    if node_rank is None:
        node_rank = -1 if nnodes > 1 and not embedded else 0
    listens_at = host or ("127.0.0.1" if nnodes == 1 else "0.0.0.0")
    launch = Launch(
        program=_program(program, module=module),
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        shards=shards if shards is not None else int(embedded),
        min_workers=min_workers,
        step_timeout_s=step_timeout_s,
        max_restarts=max_restarts if max_restarts is not None else standby,
        standby=standby,
        master_addr=master_addr,
        master_port=master_port if master_port is not None else DEFAULT_MASTER_PORT * (nnodes > 1),
        coordinator_port=_coordinator_port(coordinator_port, master_port, nnodes),
        host=listens_at,
        advertise=advertise,
        state=state,
        resume=resume,
        checkpoint_dir=settings.checkpoint_dir if checkpoint_every else "",
        checkpoint_every=checkpoint_every,
        checkpoint_limit=checkpoint_limit,
        proxy=proxy,
        replication=replication,
        connect_timeout_s=connect_timeout_s,
        token=_token(settings, nnodes=nnodes, embedded=embedded),
        tls=settings.tls or (embedded and _uses_own_authority(settings, listens_at)),
        http_port=settings.http_port,
    )
    _check(launch, embedded=embedded)
    launch = replace(launch, resume=_resume(launch, settings.checkpoint_dir))
    if launch.tls:
        check_strong(
            launch.token, "mutual TLS among the job's processes", "; or give --tls-cert and --tls-key, or --insecure"
        )
    leave(asyncio.run(perform(launch, settings)))


def _program(program: Sequence[str], *, module: bool) -> tuple[str, ...]:
    if module:
        return ("-m", *program)
    if not os.path.isfile(program[0]):
        hint = "; give a module as -m NAME" if os.sep not in program[0] and not program[0].endswith(".py") else ""
        raise ConfigurationError(f"the script {program[0]!r} does not exist{hint}")
    return tuple(program)


def _coordinator_port(given: int | None, master_port: int | None, nnodes: int) -> int:
    if given is not None:
        return given
    return (master_port or DEFAULT_MASTER_PORT) + 1 if nnodes > 1 or master_port else 0


def _token(settings: Settings, *, nnodes: int, embedded: bool) -> str:
    from axon_ps.rpc.auth.tokens import new_secret

    token = settings.resolved_token
    if token or not embedded:
        return token
    if nnodes == 1:
        return new_secret()
    if not settings.insecure:
        raise ConfigurationError(
            "a job on several machines needs the same secret on each: `axon-ps auth init FILE` makes one for "
            "--token-file or AXON_PS_TOKEN (or --insecure to go without)"
        )
    return ""


def _uses_own_authority(settings: Settings, host: str) -> bool:
    """Return True if services listen for the network, and neither certificates nor --insecure are given."""
    from axon_ps.rpc.auth.loopback import is_loopback

    return not (is_loopback(host) or settings.insecure or settings.tls_cert or settings.tls_dir)


def _resume(launch: Launch, checkpoint_dir: str) -> str:
    """Return the checkpoint that the coordinator resumes from; a checkpoint found by `auto` is printed.

    Raises:
        ConfigurationError: there is no directory to look in.
        CheckpointError: it cannot be read, or none of the checkpoints in it can.
    """
    auto = o.is_auto(launch.resume, checkpoint_dir)
    if launch.node_rank > 0 or not launch.resume:
        return ""  # node 0 starts the coordinator
    from axon_ps.storage.manifest import newest, nothing_at, read_manifest

    if not auto:
        if not launch.has_state:  # else the coordinator reads it: its state may have the job
            read_manifest(launch.resume)
        return launch.resume
    found = newest(checkpoint_dir)
    if launch.checkpoint_every:
        return ""  # the coordinator takes and logs the newest, unless its state has the job
    if found is None:
        then = "the job begins anew" if not launch.has_state else "the job begins anew, unless its state has it"
        print(f"axon-ps: --resume auto: {nothing_at(checkpoint_dir)}; {then}", file=sys.stderr)
        return ""
    print(f"axon-ps: --resume auto: {found.uri}, version {found.version}", file=sys.stderr)
    return found.uri


def _check(launch: Launch, *, embedded: bool) -> None:
    if launch.node_rank >= launch.nnodes:
        raise ConfigurationError(
            f"--node-rank is {launch.node_rank} and --nnodes {launch.nnodes}; it must be below that"
        )
    if launch.nnodes > 1 and embedded and launch.master_addr in ("127.0.0.1", "localhost") and launch.host == "0.0.0.0":
        print("axon-ps: --master-addr is this machine itself; other machines will not find it", file=sys.stderr)
    if embedded and launch.shards < 1:
        raise ConfigurationError("--shards is 0, but a job without --coordinator needs a shard server of its own")
    of_coordinator = launch.resume, launch.min_workers, launch.step_timeout_s, launch.checkpoint_every
    if not embedded and (any(of_coordinator) or launch.state):
        raise ConfigurationError(
            "--resume, --state, --min-workers, --step-timeout-s and --checkpoint-every are the coordinator's; give "
            "them where you start it, since --coordinator names one that runs already"
        )
    if launch.checkpoint_every:
        from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy

        CheckpointPolicy.of(launch.checkpoint_dir, launch.checkpoint_every, launch.checkpoint_limit)
    if launch.standby and not launch.max_restarts:
        raise ConfigurationError(
            f"--standby is {launch.standby}, but --max-restarts 0 says that a worker that fails is not replaced"
        )
    if launch.min_workers is not None and launch.min_workers > launch.world_size:
        raise ConfigurationError(f"--min-workers is {launch.min_workers}; the job has {launch.world_size} workers")
