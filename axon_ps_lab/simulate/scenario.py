"""A model, a job and a cluster, described by a TOML file.

Owns: reading the file, and the conditions on values of several tables. `docs/simulate.md` has a file with all tables.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from axon_ps.errors import InvalidRequest
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.partitions import even_options
from axon_ps.sharding.plan import default_options
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType, Grouping
from axon_ps_lab.simulate.tables import DTYPES, Failures, Job, ModelTable, Network, Servers, Table, WorkersTable


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The subject of a simulation: all tables of the file.

    Raises:
        InvalidRequest: a value is invalid.
    """

    TABLES: ClassVar[Mapping[str, type[Table]]] = {
        "model": ModelTable, "job": Job, "servers": Servers, "network": Network, "failures": Failures,
    }  # fmt: skip

    model: ModelTable
    workers: tuple[WorkersTable, ...]
    job: Job = field(default_factory=Job)
    servers: Servers = field(default_factory=Servers)
    network: Network = field(default_factory=Network)
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self) -> None:
        if not self.workers:
            raise InvalidRequest("there are no workers; describe them in [[workers]]")
        tables: tuple[Table, ...] = (
            self.model,
            self.job,
            *self.workers,
            self.servers,
            self.network,
            self.failures,
        )
        for table in tables:
            table.check()
        if self.job.replication > self.num_servers:
            raise InvalidRequest(
                f"job.replication is {self.job.replication} with {self.num_servers} servers; each copy of a slice "
                "needs another one"
            )
        if self.job.fragments > self.model.numel:
            raise InvalidRequest(f"job.fragments is {self.job.fragments} and the model has {self.model.numel} elements")
        if not self.servers.count and len(self.workers) > 1:
            raise InvalidRequest(
                "servers.count is 0, one on each worker's host, so all hosts must be in one [[workers]]"
            )
        many = [group.devices for group in self.workers if group.devices > 1]
        if many and self.job.strategy != "hybrid_shard":
            raise InvalidRequest(
                f"workers.devices is {many[0]} under {self.job.strategy}, where every device is a worker of its own; "
                "give hosts of one device, or job.strategy = 'hybrid_shard'"
            )
        if self.failures.min_workers > self.num_hosts:
            raise InvalidRequest(f"failures.min_workers is {self.failures.min_workers} of {self.num_hosts} hosts")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the scenario of a TOML file.

        Raises:
            InvalidRequest: the file cannot be read, or a table, key or value in it is invalid.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the scenario {str(path)!r} cannot be read: {error}") from error
        return cls.of(content)

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> Self:
        """Make the scenario of these tables.

        Raises:
            InvalidRequest: a table, key or value is invalid.
        """
        _known(tables, ("workers", *cls.TABLES), "the file")
        groups = tables.get("workers", [])
        made: dict[str, Any] = {
            "workers": tuple(
                _made(WorkersTable, group, "workers") for group in (groups if isinstance(groups, list) else [groups])
            )
        }
        for name, table in cls.TABLES.items():
            if name in tables or name == "model":
                values = tables.get(name, {})
                if name == "model" and isinstance(values, dict) and "transformer" in values:
                    made[name] = _transformer(values)
                else:
                    made[name] = _made(table, values, name)
        return cls(**made)

    def with_servers(self, count: int) -> Self:
        """Return the same scenario with so many servers."""
        return dataclasses.replace(self, servers=dataclasses.replace(self.servers, count=count))

    @property
    def num_hosts(self) -> int:
        """Number of worker hosts."""
        return sum(group.count for group in self.workers)

    @property
    def num_servers(self) -> int:
        """Number of shard servers."""
        return self.servers.count or self.num_hosts

    @property
    def copies(self) -> int:
        """Number of shard servers that hold each slice; as `CoordinatorConfig.copies`."""
        return self.job.replication or min(2, self.num_servers)

    @property
    def servers_optimizer(self) -> str:
        """The optimizer of the servers: under "local_steps" the outer SGD."""
        return "sgd" if self.job.strategy == "local_steps" else self.job.optimizer

    @property
    def moments(self) -> int:
        """Number of state arrays of the servers' optimizer."""
        momentum = {"momentum": 0.9} if self.job.strategy == "local_steps" else {}
        return len(create(self.servers_optimizer).state_names([momentum]))

    @property
    def gathered_as(self) -> DType:
        """The dtype of parameters at a worker after their arrival: decompressed, for computing."""
        return DTYPES.get(self.job.sent, DTYPES[self.job.compute])

    def buffered(self, group: WorkersTable) -> bool:
        """Return True if workers gather into buffers, and not into the memory that they compute with."""
        return group.device == "gpu" or self.gathered_as != DTYPES[self.job.compute]

    @property
    def _unit_numels(self) -> list[int]:
        """Elements of each unit, the root first as in a wrapped model; under "local_steps", of each fragment."""
        model, fragments = self.model, self.job.fragments
        if self.job.strategy != "local_steps":
            return [model.root_numel, *([model.block_numel] * model.blocks)]
        return [model.numel // fragments + (i < model.numel % fragments) for i in range(fragments)]

    @cached_property
    def spec(self) -> JobSpec:
        """The spec that workers would register."""
        dtype = DTYPES[self.job.compute]
        units = [
            build_unit(f"units.{i}", [(f"units.{i}.weight", (n,), dtype)]) for i, n in enumerate(self._unit_numels)
        ]
        precision = WirePrecision.of(self.job.sent, self.job.reduced, ("job.wire", "job.reduce"))
        layout = Layout(units=tuple(units))
        options = even_options(
            layout, self.num_servers, max(group.devices for group in self.workers), default_options(precision)
        )
        return JobSpec(
            layout=layout,
            precision=precision,
            options=options,
            grouping=Grouping(by_node=self.job.strategy == "hybrid_shard"),
        )


def _transformer(values: dict[str, Any]) -> ModelTable:
    _known(values, ("transformer",), "[model] with a transformer")
    shape = values["transformer"]
    names = ("layers", "width", "vocabulary")
    if not isinstance(shape, dict) or not {*names} <= shape.keys():
        raise InvalidRequest(f"model.transformer is {shape!r}; it needs {', '.join(names)}")
    _known(shape, (*names, "tied"), "model.transformer")
    for name in names:
        if not isinstance(shape[name], int) or isinstance(shape[name], bool) or shape[name] < 1:
            raise InvalidRequest(f"model.transformer.{name} is {shape[name]!r}; it must be an integer above 0")
    return ModelTable.transformer(**shape)


def _made(table: type[Table], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise InvalidRequest(f"{where} is {values!r}; it must be a table")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(table)}
    _known(values, tuple(kinds), f"[{where}]")
    return table(**{name: _converted(f"{where}.{name}", value, kinds[name]) for name, value in values.items()})


def _converted(what: str, value: Any, kind: type[Any]) -> Any:
    """Check and convert a value of the file; an integer is also a number, a boolean is not."""
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(f"{what} is {value!r}; it must be {_KINDS[kind]}")
    return float(value) if kind is float else value


_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    if unknown := sorted(values.keys() - set(names)):
        raise InvalidRequest(f"{where} has {', '.join(unknown)}; known are {', '.join(names)}")
