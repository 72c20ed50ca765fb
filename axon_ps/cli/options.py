"""The options that several commands share, as types with one spelling and one help text each, and their settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer

from axon_ps.errors import ConfigurationError

_SECURITY = "Security"
_LOG = "Log"

Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; flags and environment win.", show_default=False)
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="host:port of the coordinator, or of several with commas between them \\[env: AXON_PS_COORDINATOR].",
        show_default=False,
    ),
]
Job = Annotated[str | None, typer.Option(help="Name of the job \\[env: AXON_PS_JOB].", show_default="default")]
Token = Annotated[
    str | None,
    typer.Option(
        help="The job's secret, or a token of a role \\[env: AXON_PS_TOKEN, which other users of the host cannot see].",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File that holds it; read again when it changes.", show_default=False, rich_help_panel=_SECURITY),
]
ObserverTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File that holds a second token, with which one can only read \\[env: AXON_PS_OBSERVER_TOKEN].",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(help="Trusted authorities (PEM).", show_default=False, rich_help_panel=_SECURITY),
]
TlsCert = Annotated[
    str | None,
    typer.Option(help="Our certificate chain (PEM).", show_default=False, rich_help_panel=_SECURITY),
]
TlsKey = Annotated[str | None, typer.Option(help="Its key (PEM).", show_default=False, rich_help_panel=_SECURITY)]
TlsDir = Annotated[
    str | None,
    typer.Option(
        help="Directory with svid.pem, svid.key and bundle.pem, as `axon-ps auth issue` and SPIRE's helper write them.",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
Tls = Annotated[
    bool | None,
    typer.Option(
        "--tls",
        help="TLS by the job's own authority on loopback, too \\[env: AXON_PS_TLS].",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
TlsMutual = Annotated[
    bool | None,
    typer.Option(
        "--tls-mutual", help="Ask clients for a certificate too.", show_default=False, rich_help_panel=_SECURITY
    ),
]
Debuggable = Annotated[
    bool | None,
    typer.Option(
        "--debuggable",
        help="Let debuggers of the same user in, and core dumps be written \\[env: AXON_PS_DEBUGGABLE].",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Listen, and connect, beyond loopback without TLS or token.",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
Log = Annotated[
    str | None,
    typer.Option(help="auto, rich, plain or json.", show_default="auto", rich_help_panel=_LOG),
]
LogLevel = Annotated[
    str | None,
    typer.Option(help="debug, info, warning or error.", show_default="info", rich_help_panel=_LOG),
]
ReadyFd = Annotated[
    int | None,
    typer.Option(
        help="File descriptor that gets a line as soon as the service listens: its address, the URL of its HTTP.",
        hidden=True,
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        help="Port of an HTTP endpoint for metrics and the page, on the address of --host; 0 = any free one "
        "\\[env: AXON_PS_HTTP_PORT].",
        show_default="none",
    ),
]
TraceEvery = Annotated[
    int | None,
    typer.Option(
        help="Trace one step in so many, and export it by OpenTelemetry (extra otel), to where the OTEL_ variables say "
        "[env: AXON_PS_TRACE_EVERY].",
        min=0,
        show_default="none",
    ),
]
Plugins = Annotated[
    str | None,
    typer.Option(
        help="Modules of your own optimizers and compressors, with commas between them \\[env: AXON_PS_PLUGINS].",
        show_default=False,
    ),
]
StepTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that workers wait in a step for one that takes no part, before the job continues without it.",
        show_default="for ever",
    ),
]
CheckpointEvery = Annotated[
    str,
    typer.Option(
        help="Write a checkpoint to --checkpoint-dir every so many steps (500), or after a time (90s, 10m, 2h).",
        show_default="never",
    ),
]
AuditLog = Annotated[
    str | None,
    typer.Option(
        help="File that says who has changed the job, as JSON lines; - = standard error \\[env: AXON_PS_AUDIT_LOG].",
        show_default="beside the state, or under ~/.local/state",
        rich_help_panel=_SECURITY,
    ),
]
CheckpointKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that manifests are signed with \\[env: AXON_PS_CHECKPOINT_KEY_FILE].",
        show_default="they are not signed",
    ),
]
Replication = Annotated[
    int,
    typer.Option(
        help="How many shard servers hold each slice of the parameters; 0 = 2 if there are two or more, else 1.", min=0
    ),
]
CheckpointLimit = Annotated[
    int, typer.Option(help="How many of the checkpoints remain that are written by themselves.", min=1)
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Do not show how far it is.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_OF_A_JOB: Final[dict[str, Any]] = {
    "coordinator": Coordinator, "job": Job, "token": Token, "token_file": TokenFile, "tls_ca": TlsCa,
    "tls_cert": TlsCert, "tls_key": TlsKey, "tls_dir": TlsDir, "tls": Tls, "insecure": Insecure, "config": Config,
}  # fmt: skip


def of_a_job(command: Callable[..., None], *, named: bool = True) -> Callable[..., None]:
    """Give a command the options that name the job and the caller's credentials; it gets them as keyword `settings`.

    Args:
        command: the command.
        named: whether it needs a coordinator.
    """

    @functools.wraps(command)
    def with_settings(**given: Any) -> None:
        from axon_ps.cli.settings import load, without_blas_threads

        without_blas_threads()
        settings = load(**{name: given.pop(name) for name in _OF_A_JOB})
        if named and not settings.coordinator:
            raise ConfigurationError("which coordinator? Give --coordinator host:port or set AXON_PS_COORDINATOR")
        command(**given, settings=settings)

    types = get_type_hints(command, localns={"Settings": Any}, include_extras=True)
    own = [p.replace(annotation=types[p.name]) for p in inspect.signature(command).parameters.values()]
    added = [inspect.Parameter(name, _KEYWORD, default=None, annotation=kind) for name, kind in _OF_A_JOB.items()]
    parameters = [*(p for p in own if p.name != "settings"), *added]
    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_settings


_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


class Commands(typer.Typer):
    """A typer application that leaves exceptions to `main` and takes `--nproc_per_node` for `--nproc-per-node`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": dashes},
            **options,
        )


def dashes(name: str) -> str:
    """Return an option's name with dashes: torchrun spells `--nproc_per_node`."""
    return name.replace("_", "-")


def leave(code: int) -> NoReturn:
    """End the command with an exit code."""
    raise typer.Exit(code)


def is_auto(resume: str, checkpoint_dir: str | None) -> bool:
    """Return True if a job is to resume from the newest checkpoint of a directory.

    Raises:
        ConfigurationError: no directory was given.
    """
    if resume == "auto" and not checkpoint_dir:
        raise ConfigurationError("--resume auto takes the newest checkpoint of --checkpoint-dir, which was not given")
    return resume == "auto"
