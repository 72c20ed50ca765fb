"""A model, a job and a cluster, as a TOML file describes them.

Owns: the tables and keys of the file, their defaults, and what they must be. `docs/simulate.md` has a file with all.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.partitions import even_options
from axon_ps.sharding.plan import default_options
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "local_steps")
DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
_ETHERNET, _IP_AND_TCP = 14, 52  # bytes of headers; TCP's with timestamps
_FLOPS = 6
"""Operations of a parameter and token, forward 2 and backward 4 (Kaplan et al. 2020, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """`[model]`: how many elements are gathered together, in forward order.

    Attributes:
        blocks: equal units, as the layers of a transformer.
        block_numel: elements of each.
        root_numel: elements of what is in none of them: embeddings, head.
    """

    blocks: int = 0
    block_numel: int = 0
    root_numel: int = 1

    def check(self) -> None:
        """Raise if it cannot be."""
        _at_least(self, "model", blocks=1, block_numel=1, root_numel=1)

    @classmethod
    def transformer(cls, *, layers: int, width: int, vocabulary: int, tied: bool = True) -> Self:
        """A decoder of `layers` layers: 12 width² + 13 width each, embedding and head besides (as GPT-2)."""
        heads = 1 if tied else 2
        return cls(blocks=layers, block_numel=12 * width**2 + 13 * width, root_numel=heads * vocabulary * width)

    @property
    def numel(self) -> int:
        """Elements of all."""
        return self.blocks * self.block_numel + self.root_numel


@dataclass(frozen=True, kw_only=True)
class Job:
    """`[job]`: how the model is trained.

    Attributes:
        strategy: one of `STRATEGIES`.
        compute: dtype that the workers compute in.
        wire: what parameters travel as: a dtype, "int8" or "int4".
        reduce: what gradients travel as; empty = as `wire`.
        optimizer: of the shard servers.
        clip: whether gradients are clipped by their global norm.
        offload_params: whether host memory retains what is gathered (`CPUOffload.PARAMS`).
        replication: copies of a slice on servers.
        steps: how many the job makes; 0 = not known.
        tokens: of a worker (or of each device of its node) in a step, or samples: what throughput is counted in.
        inner_steps: between two outer steps of a parameter, under "local_steps".
        fragments: of the model, under "local_steps".
        overlap_steps: inner steps while an outer step is under way.
    """

    strategy: str = "full_shard"
    compute: str = "bfloat16"
    wire: str = "bfloat16"
    reduce: str = ""
    optimizer: str = "adamw"
    clip: bool = False
    offload_params: bool = False
    replication: int = 1
    steps: int = 0
    tokens: int = 1
    inner_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0

    def check(self) -> None:
        """Raise if it cannot be."""
        _one_of("job.strategy", self.strategy, STRATEGIES)
        _one_of("job.compute", self.compute, tuple(DTYPES))
        for what, value in (("job.wire", self.wire), ("job.reduce", self.reduced)):
            _one_of(what, value, (*DTYPES, "int8", "int4"))
        create(self.optimizer)
        _at_least(self, "job", replication=1, steps=0, tokens=1, inner_steps=1, fragments=1, overlap_steps=0)
        if self.inner_steps % self.fragments or not self.overlap_steps < max(1, self.inner_steps // self.fragments):
            raise InvalidRequest(
                f"job.inner_steps is {self.inner_steps}, fragments {self.fragments} and overlap_steps "
                f"{self.overlap_steps}; inner_steps must be a multiple of fragments, overlap_steps below the quotient"
            )

    @property
    def reduced(self) -> str:
        """What gradients travel as."""
        return self.reduce or self.wire


@dataclass(frozen=True, kw_only=True)
class Workers:
    """`[[workers]]`: worker hosts that are alike.

    Attributes:
        count: how many hosts.
        devices: GPUs of each; above 1 under "hybrid_shard", where they share the model.
        compute_s: seconds that forward and backward of a step take on a device, alone; or else `flops`.
        flops: operations a second that a device achieves with this model; `tokens` tell how many there are.
        device: what it computes on: "gpu"; "cpu", the host's own cores; or "emulated", an accelerator that works on
            host memory and takes no core, as in benchmarks.
        cores: of a host; 0 = as the profile's machine.
        rate_mbit: of its network card, each way.
        device_gb_per_s: bandwidth between the devices of a host, each way.
        per_hour: price of a host.
    """

    count: int = 1
    devices: int = 1
    compute_s: float = 0.0
    flops: float = 0.0
    device: str = "gpu"
    cores: int = 0
    rate_mbit: float = 1000.0
    device_gb_per_s: float = 20.0
    per_hour: float = 0.0

    def check(self) -> None:
        """Raise if it cannot be."""
        _at_least(self, "workers", count=1, devices=1, cores=0, per_hour=0, compute_s=0, flops=0)
        _above_0(self, "workers", "rate_mbit", "device_gb_per_s")
        _one_of("workers.device", self.device, ("gpu", "cpu", "emulated"))
        if (self.compute_s > 0) == (self.flops > 0):
            raise InvalidRequest(
                f"workers.compute_s is {self.compute_s:g} and workers.flops {self.flops:g}; give one of them: seconds "
                "of forward and backward of a step, or the operations a second that a device achieves"
            )

    def step_s(self, model: Model, job: Job) -> float:
        """Seconds of forward and backward of a step on a device."""
        return self.compute_s or _FLOPS * model.numel * job.tokens / self.flops


@dataclass(frozen=True, kw_only=True)
class Servers:
    """`[servers]`: hosts with a shard server each.

    Attributes:
        count: how many; 0 = one on each worker's host, behind its card.
        cores: of a host; 0 = as the profile's machine.
        rate_mbit: of its network card, each way.
        per_hour: price of a host.
    """

    count: int = 1
    cores: int = 0
    rate_mbit: float = 1000.0
    per_hour: float = 0.0

    def check(self) -> None:
        """Raise if it cannot be."""
        _at_least(self, "servers", count=0, cores=0, per_hour=0)
        _above_0(self, "servers", "rate_mbit")


@dataclass(frozen=True, kw_only=True)
class Network:
    """`[network]`: what is between the hosts.

    Attributes:
        rtt_ms: round trip between a worker and a server, and to the coordinator.
        mtu: bytes of a packet at most, its IP header included.
        shared_cores: all hosts are containers of one machine with so many cores; 0 = each has its own.
    """

    rtt_ms: float = 0.2
    mtu: int = 1500
    shared_cores: int = 0

    def check(self) -> None:
        """Raise if it cannot be."""
        _at_least(self, "network", rtt_ms=0, mtu=576, shared_cores=0)

    def payload_rate(self, rate_mbit: float) -> float:
        """Bytes of TCP streams that a card carries a second: without the headers of Ethernet, IP and TCP."""
        return rate_mbit * 1e6 / 8 * (self.mtu - _IP_AND_TCP) / (self.mtu + _ETHERNET)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """`[failures]`: how often hosts die, and what happens then.

    Attributes:
        worker_mtbf_h: mean time between failures of one worker host, in hours; 0 = they do not fail.
        notice_s: until the job goes on without a worker that died: nothing where its connection breaks, the lease where
            its host is silent.
        worker_away_s: until it, or its successor, trains again: notice, replacement, start.
        min_workers: of hosts, with which the job goes on; 0 = it needs all.
        server_mtbf_h: mean time between failures of one shard server; 0 = they do not fail.
        server_away_s: until its successor is up.
        promote_s: until a replica has taken over, where `job.replication` is above 1.
        checkpoint_every_s: seconds between checkpoints; 0 = none: what is lost begins anew.
        restore_s: until a job that lost a slice goes on from its checkpoint, beside `server_away_s`.
        regular: whether workers die one after the other at even times, as in a test, and not at random ones.
    """

    worker_mtbf_h: float = 0.0
    notice_s: float = 1.0
    worker_away_s: float = 120.0
    min_workers: int = 0
    server_mtbf_h: float = 0.0
    server_away_s: float = 60.0
    promote_s: float = 2.0
    checkpoint_every_s: float = 600.0
    restore_s: float = 20.0
    regular: bool = False

    def check(self) -> None:
        """Raise if it cannot be."""
        numbers = (each.name for each in dataclasses.fields(self) if each.name != "regular")
        _at_least(self, "failures", **dict.fromkeys(numbers, 0.0))


Table: TypeAlias = Model | Job | Workers | Servers | Network | Failures


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is to be simulated: the whole file.

    Raises:
        InvalidRequest: a value cannot be.
    """

    TABLES: ClassVar[Mapping[str, type[Table]]] = {
        "model": Model, "job": Job, "servers": Servers, "network": Network, "failures": Failures,
    }  # fmt: skip

    model: Model
    workers: tuple[Workers, ...]
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
        """The scenario of a TOML file.

        Raises:
            InvalidRequest: it cannot be read, or a table, key or value in it cannot be.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the scenario {str(path)!r} cannot be read: {error}") from error
        return cls.of(content)

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> Self:
        """The scenario of these tables."""
        _known(tables, ("workers", *cls.TABLES), "the file")
        groups = tables.get("workers", [])
        made: dict[str, Any] = {
            "workers": tuple(
                _made(Workers, group, "workers") for group in (groups if isinstance(groups, list) else [groups])
            )
        }
        for name, table in cls.TABLES.items():
            if name in tables or name == "model":
                values = dict(tables.get(name, {}))
                if name == "model" and "transformer" in values:
                    made[name] = _transformer(values)
                else:
                    made[name] = _made(table, values, name)
        return cls(**made)

    def with_servers(self, count: int) -> Self:
        """The same with so many servers."""
        return dataclasses.replace(self, servers=dataclasses.replace(self.servers, count=count))

    @property
    def num_hosts(self) -> int:
        """Worker hosts."""
        return sum(group.count for group in self.workers)

    @property
    def num_servers(self) -> int:
        """Shard servers."""
        return self.servers.count or self.num_hosts

    @property
    def servers_optimizer(self) -> str:
        """What the servers update with: under "local_steps" the outer SGD."""
        return "sgd" if self.job.strategy == "local_steps" else self.job.optimizer

    @property
    def moments(self) -> int:
        """State arrays of the optimizer on the servers."""
        momentum = {"momentum": 0.9} if self.job.strategy == "local_steps" else {}
        return len(create(self.servers_optimizer).state_names([momentum]))

    @property
    def wire_itemsize(self) -> int:
        """Bytes of an element that has come, and lies in a buffer: decompressed, as it is computed with."""
        return DTYPES.get(self.job.wire, DTYPES[self.job.compute]).itemsize

    def buffered(self, group: Workers) -> bool:
        """Whether workers gather into buffers, and not into the memory that they compute with."""
        return group.device == "gpu" or DTYPES.get(self.job.wire, DTYPES[self.job.compute]) != DTYPES[self.job.compute]

    @property
    def _unit_numels(self) -> list[int]:
        """Elements of the units: the root first, as in a wrapped model; or of the fragments."""
        model, fragments = self.model, self.job.fragments
        if self.job.strategy != "local_steps":
            return [model.root_numel, *([model.block_numel] * model.blocks)]
        return [model.numel // fragments + (i < model.numel % fragments) for i in range(fragments)]

    @cached_property
    def spec(self) -> JobSpec:
        """What workers would register."""
        dtype = DTYPES[self.job.compute]
        units = [
            build_unit(f"units.{i}", [(f"units.{i}.weight", (n,), dtype)]) for i, n in enumerate(self._unit_numels)
        ]
        precision = WirePrecision(
            param=DTYPES.get(self.job.wire, DType.F32),
            grad=DTYPES.get(self.job.reduced, DType.F32),
            param_compression=None if self.job.wire in DTYPES else compressor(self.job.wire),
            grad_compression=None if self.job.reduced in DTYPES else compressor(self.job.reduced),
        )
        layout = Layout(units=tuple(units))
        options = even_options(layout, self.num_servers, self.workers[0].devices, default_options(precision))
        return JobSpec(
            layout=layout, precision=precision, options=options, replica_is_node=self.job.strategy == "hybrid_shard"
        )


def wire_bytes(wire: str, numel: int) -> int:
    """Bytes of so many elements on their way."""
    return DTYPES[wire].itemsize * numel if wire in DTYPES else compressor(wire).compressed_bytes(numel)


# ---------------------------------------------------------------------- checks


def _transformer(values: dict[str, Any]) -> Model:
    _known(values, ("transformer",), "[model] with a transformer")
    shape = values["transformer"]
    names = ("layers", "width", "vocabulary")
    if not isinstance(shape, dict) or not {*names} <= shape.keys():
        raise InvalidRequest(f"model.transformer is {shape!r}; it needs {', '.join(names)}")
    _known(shape, (*names, "tied"), "model.transformer")
    for name in names:
        if not isinstance(shape[name], int) or isinstance(shape[name], bool) or shape[name] < 1:
            raise InvalidRequest(f"model.transformer.{name} is {shape[name]!r}; it must be an integer above 0")
    return Model.transformer(**shape)


def _made(table: type[Table], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise InvalidRequest(f"{where} is {values!r}; it must be a table")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(table)}
    _known(values, tuple(kinds), f"[{where}]")
    return table(**{name: _converted(f"{where}.{name}", value, kinds[name]) for name, value in values.items()})


def _converted(what: str, value: Any, kind: type[Any]) -> Any:
    """A value of the file; an integer is a number, too, and true is none."""
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(f"{what} is {value!r}; it must be {_KINDS[kind]}")
    return float(value) if kind is float else value


_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    if unknown := sorted(values.keys() - set(names)):
        raise InvalidRequest(f"{where} has {', '.join(unknown)}; known are {', '.join(names)}")


def _at_least(table: Any, where: str, **least: float) -> None:
    for name, low in least.items():
        if not low <= getattr(table, name) < float("inf"):
            raise InvalidRequest(f"{where}.{name} is {getattr(table, name)}; it must be at least {low:g}")


def _above_0(table: Any, where: str, *names: str) -> None:
    for name in names:
        if not 0 < getattr(table, name) < float("inf"):
            raise InvalidRequest(f"{where}.{name} is {getattr(table, name)}; it must be above 0")


def _one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidRequest(f"{what} is {value!r}; it is one of {', '.join(allowed)}")
