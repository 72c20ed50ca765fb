"""Every setting of the command line, composed from flags, environment, a file and defaults, in that order.

The variables here are called `AXON_PS_` plus the field's name; workers read the same (`worker.environment`). The file
is TOML with the same names in lower case at its top level, named by `--config` or `AXON_PS_CONFIG`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from axon_ps.errors import ConfigurationError
from axon_ps.observe.logging import LogStyle
from axon_ps.texts import suggestion

if TYPE_CHECKING:
    from axon_ps.observe.tracing.tracer import TracePolicy
    from axon_ps.rpc.security import Security

PREFIX = "AXON_PS_"
DEFAULT_JOB = "default"
DEFAULT_COORDINATOR_PORT = 7077
DEFAULT_SHARD_PORT = 7078
_FILES = ("token_file", "observer_token_file", "tls_ca", "tls_cert", "tls_key", "tls_dir", "checkpoint_key_file")
"""The settings that name files and directories: they must exist, even if the command does not use them."""


class Settings(BaseSettings):
    """The settings that several commands share; `axon-ps COMMAND --help` shows those of one.

    Attributes:
        coordinator: "host:port" of the coordinator; of several, of which one leads, with commas between them.
        job: name of the job.
        token: the job's secret, or a token of a role; the holder of the secret may do everything.
        token_file: a file that holds it, when `token` is empty; of several lines the first is sent, each is accepted.
        observer_token: services: a second token, whose holder may only read.
        observer_token_file: a file that holds it, when `observer_token` is empty.
        tls_ca: certificates of the trusted authorities (PEM); on a client it switches TLS on.
        tls_cert: this process's certificate chain (PEM).
        tls_key: its private key (PEM).
        tls_dir: a directory with all three of these, in SPIRE's layout, whose certificates name roles.
        tls: use TLS by the job's own authority on loopback, too.
        tls_lifetime_s: seconds for which a certificate of the job's own authority is valid.
        spiffe_pattern: the form of the names in these certificates, if another authority than ours made them.
        tls_mutual: whether servers ask every client for a certificate of `tls_ca`.
        insecure: bind and connect beyond loopback without TLS or without a token.
        node: name of this host, if it should not be the host name.
        http_port: services: port of the HTTP endpoint, on the address that they listen on; 0 = any free one, None =
            there is no endpoint. Of `run`: that of the embedded coordinator, its shard servers have the next ones.
        trace_every: one step in so many is traced and exported by OpenTelemetry; 0 = none.
        drain_s: shard servers: seconds that others may take to get the slices of a server that is stopped.
        bulk_port: shard servers: port of bulk connections; 0 = any free one, -1 = none.
        memory_gb: shard servers: GB of memory that one may have in all; 0 = as much as the machine allows.
        checkpoint_dir: the directory of the job's checkpoints.
        checkpoint_roots: the directories (paths or URIs, with commas between them) in which services open checkpoints;
            empty = see `storage.roots.default_roots`.
        audit_log: coordinators: the file with all changes of the job and their callers; "-" = standard error; empty =
            beside the job's state, else in `state_directory`.
        checkpoint_key_file: coordinators: a file with the secret that checkpoints are signed with; None = they are not.
        debuggable: services: whether other processes of their user may read their memory, and core dumps are written.
        plugins: names of modules that services import, with commas between them; see `axon_ps.plugins`.
        log: the format of log records.
        log_level: the lowest level that is written; empty = the command's default.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    coordinator: str = ""
    job: str = Field(default=DEFAULT_JOB, min_length=1, max_length=128)
    token: SecretStr = SecretStr("")
    token_file: Path | None = None
    observer_token: SecretStr = SecretStr("")
    observer_token_file: Path | None = None
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_dir: str = ""
    tls: bool = False
    tls_lifetime_s: float = Field(default=86400.0, ge=1, le=366 * 86400)
    spiffe_pattern: str = ""
    tls_mutual: bool = False
    insecure: bool = False
    node: str = ""
    http_port: int | None = Field(default=None, ge=0, lt=65536)
    trace_every: int = Field(default=0, ge=0)
    drain_s: float = Field(default=0.0, ge=0, lt=86400)
    bulk_port: int = Field(default=0, ge=-1, lt=65536)
    memory_gb: float = Field(default=0.0, ge=0, lt=1e6)
    checkpoint_dir: str = ""
    checkpoint_roots: str = ""
    audit_log: str = ""
    checkpoint_key_file: Path | None = None
    debuggable: bool = False
    plugins: str = ""
    log: LogStyle = LogStyle.AUTO
    log_level: str = ""

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value and value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("it must be debug, info, warning or error")
        return value.upper()

    @field_validator("coordinator")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        for address in value.split(",") if value not in ("", "-") else ():
            host, _, port = address.strip().rpartition(":")
            if not (host and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError("it must be host:port, such as 10.0.0.1:7077, or several with commas between them")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources: flags, then environment, then the file that `load` put into the class's configuration."""
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @property
    def resolved_token(self) -> str:
        """The token, read from `token_file` when it is not given itself.

        Raises:
            ConfigurationError: the file cannot be read or is empty.
        """
        return _secret(self.token, self.token_file)

    @property
    def resolved_observer_token(self) -> str:
        """The observer's token, read from `observer_token_file` when it is not given itself.

        Raises:
            ConfigurationError: the file cannot be read or is empty.
        """
        return _secret(self.observer_token, self.observer_token_file)

    def load_plugins(self) -> None:
        """Import the plugins, and those of installed packages.

        Raises:
            ConfigurationError: one cannot be imported.
        """
        from axon_ps import plugins  # not needed by `run`, which only passes the names on

        plugins.load(_names(self.plugins))

    def allow_roots(self, host: str, *configured: str, ordered: bool = False) -> None:
        """Let this process, a service, open checkpoints only in the allowed directories.

        Args:
            host: the address on which others call it.
            configured: the directories that its configuration names.
            ordered: it opens checkpoints only on its coordinator's orders. The coordinator checks its own roots, so
                this process has none unless they are configured.
        """
        from axon_ps.rpc.auth.loopback import is_private
        from axon_ps.storage import roots

        directories = (self.checkpoint_dir, *configured)
        private = is_private(host, token=bool(self.resolved_token)) or (ordered and not any(directories))
        given = _names(self.checkpoint_roots) or None
        roots.allow_roots(given or roots.default_roots(private=private, configured=directories))

    def sign_checkpoints(self, trusted: Sequence[str]) -> None:
        """Let this process, a coordinator, sign manifests and check their signatures, if it has a key.

        Args:
            trusted: the checkpoints that need no signature.

        Raises:
            ConfigurationError: the key's file cannot be used.
        """
        from axon_ps.storage.signature import ManifestKey, use_key

        key = None if self.checkpoint_key_file is None else ManifestKey.read(self.checkpoint_key_file)
        use_key(key, trusted)

    def security(self) -> Security:
        """Return token and certificates, as `rpc` takes them.

        Raises:
            ConfigurationError: they do not go together.
        """
        from axon_ps.rpc.security import Security, in_directory  # imports gRPC, which `run` does not need

        files = {"ca_file": self.tls_ca, "cert_file": self.tls_cert, "key_file": self.tls_key}
        return Security(
            token=self.token.get_secret_value(),
            token_file="" if self.token_file is None else str(self.token_file),
            observer_token=self.resolved_observer_token,
            spiffe_pattern=self.spiffe_pattern,
            tls=self.tls,
            lifetime_s=self.tls_lifetime_s,
            insecure=self.insecure,
            **in_directory(self.tls_dir, files | {"mutual": self.tls_mutual}),
        )

    def tracing(self) -> TracePolicy:
        """Return the steps that are traced, and the way in which their spans are sent."""
        from axon_ps.observe.tracing.tracer import TracePolicy

        names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocols = [os.environ[name] for name in names if os.environ.get(name)]
        return TracePolicy(every=self.trace_every, protocol=(*protocols, TracePolicy().protocol)[0])

    def environment(self, *, token: str) -> dict[str, str]:
        """Return the variables that pass to a child process the settings that it shares."""
        values = {
            "JOB": self.job,
            "OBSERVER_TOKEN": self.resolved_observer_token,
            "TLS_CA": self.tls_ca,
            "TLS_CERT": self.tls_cert,
            "TLS_KEY": self.tls_key,
            "BULK_PORT": str(self.bulk_port or ""),
            "MEMORY_GB": f"{self.memory_gb:g}" if self.memory_gb else "",
            "TLS_DIR": self.tls_dir,
            "TLS": "1" if self.tls else "",
            "TLS_MUTUAL": "1" if self.tls_mutual else "",
            "DRAIN_S": f"{self.drain_s:g}" if self.drain_s else "",
            "TLS_LIFETIME_S": "" if self.tls_lifetime_s == 86400.0 else str(self.tls_lifetime_s),
            "SPIFFE_PATTERN": self.spiffe_pattern,
            "CHECKPOINT_DIR": self.checkpoint_dir,
            "CHECKPOINT_ROOTS": self.checkpoint_roots,
            "AUDIT_LOG": self.audit_log,
            "CHECKPOINT_KEY_FILE": str(self.checkpoint_key_file or ""),
            "DEBUGGABLE": "1" if self.debuggable else "",
            "PLUGINS": self.plugins,
            "NODE": self.node,
            "TRACE_EVERY": str(self.trace_every or ""),
        }
        if self.token_file is not None and not self.token.get_secret_value():
            values["TOKEN_FILE"] = str(self.token_file.absolute())  # the child reads it again when it changes
        else:
            values["TOKEN"] = token
        return {f"{PREFIX}{name}": value for name, value in values.items() if value}


def load(config: Path | None = None, **flags: Any) -> Settings:
    """Load the settings: flags that were given (not None), environment, file, defaults.

    Args:
        config: the file; None = the one `AXON_PS_CONFIG` names, if any.
        flags: by field name.

    Raises:
        ConfigurationError: a value is invalid; the message names the flag or variable.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if config is None and os.environ.get(f"{PREFIX}CONFIG"):
        config = Path(os.environ[f"{PREFIX}CONFIG"])
    if config is not None and not config.is_file():
        raise ConfigurationError(f"the configuration file {config} does not exist")
    source = Settings if config is None else _with_file(config)
    try:
        settings = source(**given)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_format_error(e, flags) for e in error.errors())) from None
    except (OSError, ValueError) as error:  # tomllib's own error is a ValueError
        raise ConfigurationError(f"the configuration file {config} cannot be read: {error}") from error
    for name in _FILES:
        if (file := getattr(settings, name)) and not os.path.exists(file):
            raise ConfigurationError(f"{_source(name, flags)} is {str(file)!r}, and there is no such file or directory")
    return settings


def _secret(value: SecretStr, file: Path | None) -> str:
    if value.get_secret_value() or file is None:
        return value.get_secret_value()
    try:
        token = next(iter(file.read_text(encoding="utf-8").split()), "")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"the token file {file} cannot be read: {reason}") from error
    if not token:
        raise ConfigurationError(f"the token file {file} is empty")
    return token


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _with_file(config: Path) -> type[Settings]:
    class SettingsWithFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    return SettingsWithFile


def state_directory() -> Path:
    """Return the folder of the state that a user's programs keep (XDG)."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "axon-ps"
    except RuntimeError:  # a user without a home, as some containers have
        return Path("/var/lib/axon-ps")


def child_environment(values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process, overridden by `values`, for a child process."""
    return {**os.environ, **values}


def environment_report() -> dict[str, str]:
    """Return every `AXON_PS_` variable that is set, without secrets, and other variables that affect axon_ps."""
    others = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_CACHE_DIR", "GRPC_VERBOSITY", "http_proxy", "https_proxy")
    report = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
    report |= {name: "(set, not shown)" for name in report if name.endswith("_TOKEN")}
    return report | {name: os.environ[name] for name in others if name in os.environ}


def variable_is_set(name: str) -> bool:
    """Return True if an environment variable is set by the user, and so must not be changed."""
    return name in os.environ


def without_blas_threads() -> None:
    """Keep numpy's OpenBLAS from starting threads; call it before numpy is imported.

    It would start one for each processor. Services and their clients do no linear algebra, and `--threads` sets the
    threads of a shard server's arithmetic. *Measured*: this saves 0.1 of the 0.25 s of processor time that importing
    numpy takes.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def quiet_grpc() -> None:
    """Switch gRPC's C++ log off unless the user has asked for it: its errors are raised as exceptions, too."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _format_error(error: Any, flags: Mapping[str, Any]) -> str:
    field = str(error["loc"][0]) if error["loc"] else "settings"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        meant = suggestion(field, Settings.model_fields)
        return f"the configuration file sets {field!r}, which is no setting of axon-ps{meant}"
    value = "" if field.endswith("token") else f" is {error['input']!r}"
    return f"{_source(field, flags)}{value}: {message[0].lower()}{message[1:]}"


def _source(field: str, flags: Mapping[str, Any]) -> str:
    """Return the flag that a value came from; else the variable by which it can be given."""
    return f"--{field.replace('_', '-')}" if flags.get(field) is not None else f"{PREFIX}{field.upper()}"
