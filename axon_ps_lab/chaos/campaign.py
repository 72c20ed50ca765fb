"""The settings of a campaign: kinds of faults, their frequency, the target. All but `load` is pure."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from axon_ps.errors import ConfigurationError
from axon_ps_lab.faults.fault import ROLES, Fault

T = TypeVar("T")

KINDS: Final = {kind.value: kind for kind in Fault if kind.traits.roles}
"""The kinds of faults of a campaign, by name."""


@dataclass(frozen=True, kw_only=True)
class KindOptions:
    """The frequency of a kind of fault, and its parameters.

    Attributes:
        weight: its frequency, relative to the other kinds.
        roles: the roles it strikes, all equally often.
        seconds: possible durations; one is drawn for each fault.
        jump_s: clock_jump: possible jumps; one is drawn for each fault.
        bytes_per_s: slow_link: the rate.
    """

    weight: float = 1.0
    roles: tuple[str, ...] = ()
    seconds: tuple[float, ...] = (0.3,)
    jump_s: tuple[float, ...] = (-3600.0, 3600.0)
    bytes_per_s: float = 1e6


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A job of this machine, started for the campaign.

    Attributes:
        shards: shard servers.
        workers: workers; no step is made with fewer.
        standbys: further workers, which replace lost ones.
        replication: number of shard servers that hold each slice.
        lease_s: seconds of a member's silence that are tolerated.
        parameters: number of the model's parameters, approximately.
        samples: samples of the data set; a multiple of `batch`.
        batch: samples of a step.
        pause_s: seconds that a worker waits between steps, so that a campaign of an hour does not have too many steps.
        checkpoint_every: interval of the job's checkpoints.
        spared_from: the part of the faults, from 0 to 1, after which the coordinator, one shard server and one worker
            are not killed, so that the growth of their memory can be judged.
        disk: an empty directory of a small file system, which a full disk fills; empty = one is mounted (as root).
    """

    shards: int = 3
    workers: int = 2
    standbys: int = 1
    replication: int = 2
    lease_s: float = 1.0
    parameters: int = 100_000
    samples: int = 4096
    batch: int = 16
    pause_s: float = 0.08
    checkpoint_every: str = "5s"
    spared_from: float = 0.5
    disk: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that runs already.

    Attributes:
        coordinator: its "host:port"; empty = that of --coordinator or AXON_PS_COORDINATOR.
        pid_files: by role, files that contain one process id each; they are read again before every fault. Processes
            of a role without files are found by the address they listen on, if it is on this host. Workers do not
            listen.
        checkpoint_dir: directory of the job's checkpoints, for `truncated_file`.
    """

    coordinator: str = ""
    pid_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoint_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """The content of a campaign file.

    Attributes:
        seed: seed of all random choices.
        faults: number of faults.
        quiet_s: seconds without a fault between two faults, once the job is complete again and commits.
        patience_s: seconds that the job may take to be complete again after a fault is over; then the campaign ends.
        at_most_s: seconds after which no further fault is injected.
        moments: the part of the faults that strike at an exact moment of a step; the others strike at any time.
        kinds: options by kind of fault.
        target: the job that is struck.
    """

    seed: int = 1
    faults: int = 100
    quiet_s: float = 0.1
    patience_s: float = 60.0
    at_most_s: float = 3600.0
    moments: float = 0.5
    kinds: Mapping[Fault, KindOptions] = field(default_factory=dict)
    target: Embedded | Job = field(default_factory=Embedded)

    @property
    def embedded(self) -> Embedded:
        """The job that the campaign starts itself.

        Raises:
            ConfigurationError: the campaign strikes a running job.
        """
        if isinstance(self.target, Job):
            raise ConfigurationError("this campaign strikes a running job; give it [embedded] instead of [job]")
        return self.target


def load(path: Path) -> Campaign:
    """Read a campaign file.

    Raises:
        ConfigurationError: the file cannot be read, is not TOML, or has invalid content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"campaign {str(path)!r} cannot be read ({error}); give the path of a file") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Campaign:
    """Make the campaign of a file's text.

    Args:
        text: TOML.
        name: name of the file, for messages.

    Raises:
        ConfigurationError: the text is not TOML, or has invalid content.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"campaign {name!r} is no TOML: {error}") from error
    where = f"campaign {name!r}"
    tables = {key: content.pop(key, None) for key in ("kinds", "embedded", "job")}
    if tables["embedded"] is not None and tables["job"] is not None:
        raise ConfigurationError(f"{where} has [embedded] and [job]; it strikes one of them: remove the other table")
    target: Embedded | Job
    if tables["job"] is not None:
        target = _made(Job, tables["job"], f"{where}, [job]")
    else:
        target = _made(Embedded, tables["embedded"] or {}, f"{where}, [embedded]")
    campaign = dataclasses.replace(_made(Campaign, content, where), kinds=_kinds(tables["kinds"], where), target=target)
    _check(campaign, where)
    return campaign


def _kinds(table: Any, where: str) -> dict[Fault, KindOptions]:
    if not isinstance(table, dict) or not table:
        raise ConfigurationError(f"{where} names no kind of fault; give at least one table, such as [kinds.kill]")
    kinds = {}
    for name, options in table.items():
        if (kind := KINDS.get(name)) is None:
            raise ConfigurationError(f"{where}: there is no kind {name!r}; use one of {', '.join(KINDS)}")
        found = _made(KindOptions, options, f"{where}, [kinds.{name}]")
        possible = kind.traits.roles
        roles = found.roles or possible
        if impossible := [role for role in roles if role not in possible]:
            raise ConfigurationError(
                f"{where}, [kinds.{name}]: roles has {impossible[0]!r}, which it cannot strike; "
                f"use of {', '.join(possible)}"
            )
        kinds[kind] = dataclasses.replace(found, roles=roles)
    return kinds


def _made(kind: type[T], table: Any, where: str) -> T:
    """Make a dataclass from a table; every value is checked against the type of its field."""
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: {table!r} was given; it must be a table")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        if name not in fields or name in ("kinds", "target"):
            known = ", ".join(n for n in fields if n not in ("kinds", "target"))
            raise ConfigurationError(f"{where}: there is no {name!r}; use of {known}")
        values[name] = _value(fields[name].type, value, f"{where}: {name}")
    return kind(**values)


def _value(wanted: Any, value: Any, where: str) -> Any:
    if wanted == "int" and type(value) is int:
        return value
    if wanted == "float" and _is_number(value):
        return float(value)
    if wanted == "str" and isinstance(value, str):
        return value
    if wanted == "tuple[float, ...]":
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(map(_is_number, numbers)):
            return tuple(map(float, numbers))
    if wanted == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if wanted.startswith("Mapping") and isinstance(value, dict):
        return {
            _role(role, where): _value("tuple[str, ...]", files, f"{where}.{role}") for role, files in value.items()
        }
    needed = {
        "int": "a number without a fraction",
        "float": "a number",
        "str": "a text",
        "tuple[float, ...]": "a number or a list of numbers",
        "tuple[str, ...]": "a list of texts",
    }.get(wanted, "a table with a list of files for each role")
    raise ConfigurationError(f"{where} = {value!r} was given; it must be {needed}")


def _role(name: str, where: str) -> str:
    if name not in ROLES:
        raise ConfigurationError(f"{where}: there is no role {name!r}; use of {', '.join(ROLES)}")
    return name


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12


def _check(campaign: Campaign, where: str) -> None:
    """Raise if a value is out of range, or if values contradict each other."""
    _at_least(campaign, where, faults=1, quiet_s=0, patience_s=1, at_most_s=1, moments=0)
    if campaign.moments > 1:
        raise ConfigurationError(f"{where}: moments = {campaign.moments:g} was given; it is a part, from 0 to 1")
    for kind, options in campaign.kinds.items():
        table = f"{where}, [kinds.{kind.value}]"
        _at_least(options, table, weight=0, bytes_per_s=1000)
        if not all(0 < seconds <= 60 for seconds in options.seconds):
            raise ConfigurationError(
                f"{table}: seconds must be above 0 and at most 60 each; {options.seconds} were given"
            )
    if not any(options.weight for options in campaign.kinds.values()):
        raise ConfigurationError(
            f"{where}: every kind has the weight 0, so there is no fault; give one a weight above 0"
        )
    if isinstance(campaign.target, Job):
        _check_job(campaign, campaign.target, where)
    else:
        _check_embedded(campaign.target, f"{where}, [embedded]")


def _check_job(campaign: Campaign, job: Job, where: str) -> None:
    if inside := [kind.value for kind in campaign.kinds if not kind.traits.from_outside]:
        raise ConfigurationError(
            f"{where}: {', '.join(inside)} cannot be had in a running job, whose connections, disks and memory are not "
            f"the campaign's; leave {'it' if len(inside) == 1 else 'them'} out, or have the campaign start a job of "
            "its own with [embedded]"
        )
    if Fault.TRUNCATED_FILE in campaign.kinds and not job.checkpoint_dir:
        raise ConfigurationError(
            f"{where}: truncated_file needs the job's checkpoints; give checkpoint_dir in [job], or leave it out"
        )
    struck = {role for options in campaign.kinds.values() for role in options.roles}
    if "worker" in struck and not job.pid_files.get("worker"):
        raise ConfigurationError(
            f"{where}: workers listen on no address by which they could be found; give pid_files.worker in [job], or "
            "leave the role out of the kinds' roles"
        )


def _check_embedded(embedded: Embedded, where: str) -> None:
    _at_least(
        embedded, where, shards=2, workers=1, standbys=0, replication=1, lease_s=0.5, parameters=100, samples=1,
        batch=1, pause_s=0, spared_from=0,
    )  # fmt: skip
    if embedded.samples % embedded.batch:
        raise ConfigurationError(
            f"{where}: samples = {embedded.samples} is no multiple of batch = {embedded.batch}, so a step would be "
            "smaller; change one of them"
        )
    if embedded.batch < embedded.workers:
        raise ConfigurationError(
            f"{where}: batch = {embedded.batch} is less than a sample for each of {embedded.workers} workers; give more"
        )
    if not 2 <= embedded.replication <= embedded.shards:
        raise ConfigurationError(
            f"{where}: replication = {embedded.replication} was given with {embedded.shards} shard servers; it must be "
            "at least 2, since the death of a server loses values otherwise, and no more than there are servers"
        )


def _at_least(of: object, where: str, **least: float) -> None:
    for name, limit in least.items():
        if (given := getattr(of, name)) < limit:
            raise ConfigurationError(f"{where}: {name} = {given:g} was given; it must be at least {limit:g}")
