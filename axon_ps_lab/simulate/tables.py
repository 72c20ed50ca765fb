"""The tables of a scenario's file: their keys, default values and conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from axon_ps.errors import InvalidRequest
from axon_ps.optim.registry import create
from axon_ps.types import WIRE_DTYPES

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "local_steps")
DTYPES = {dtype.torch_name: dtype for dtype in WIRE_DTYPES}
_ETHERNET, _IP_AND_TCP = 14, 52  # bytes of headers; TCP's with timestamps
_FLOPS = 6
"""Operations for a parameter and token: 2 of forward and 4 of backward (Kaplan et al. 2020, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """`[model]`: numbers of elements of its units, in forward order.

    Attributes:
        blocks: number of equal units, such as the layers of a transformer.
        block_numel: elements of each block.
        root_numel: elements outside all blocks: embeddings, head.
    """

    blocks: int = 0
    block_numel: int = 0
    root_numel: int = 1

    def check(self) -> None:
        """Raise if a value is invalid."""
        _at_least(self, "model", blocks=1, block_numel=1, root_numel=1)

    @classmethod
    def transformer(cls, *, layers: int, width: int, vocabulary: int, tied: bool = True) -> Self:
        """Make a decoder like GPT-2: layers of 12 width² + 13 width elements, and an embedding and a head beside."""
        heads = 1 if tied else 2
        return cls(blocks=layers, block_numel=12 * width**2 + 13 * width, root_numel=heads * vocabulary * width)

    @property
    def numel(self) -> int:
        """Elements of the model."""
        return self.blocks * self.block_numel + self.root_numel


@dataclass(frozen=True, kw_only=True)
class Job:
    """`[job]`: settings of the training. Defaults are those of the library (a test compares them).

    Attributes:
        strategy: one of `STRATEGIES`.
        compute: dtype of the workers' computation.
        wire: form in which parameters are sent: a dtype, "int8" or "int4"; empty = as `compute`.
        reduce: form in which gradients are sent; empty = as parameters.
        optimizer: optimizer of the shard servers.
        clip: whether gradients are clipped by their global norm.
        offload_params: whether host memory retains gathered parameters (`CPUOffload.PARAMS`).
        replication: copies of a slice on servers; 0 = two if there are two servers or more, else one.
        steps: number of steps of the job; 0 = unknown.
        tokens: tokens, or samples, of a worker (or of each device of its node) in a step; the unit of throughput.
        inner_steps: inner steps between two outer steps of a parameter, under "local_steps".
        fragments: number of fragments of the model, under "local_steps".
        overlap_steps: inner steps during an outer step.
    """

    strategy: str = "full_shard"
    compute: str = "float32"
    wire: str = ""
    reduce: str = ""
    optimizer: str = "adamw"
    clip: bool = False
    offload_params: bool = False
    replication: int = 0
    steps: int = 0
    tokens: int = 1
    inner_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0

    def check(self) -> None:
        """Raise if a value is invalid."""
        _one_of("job.strategy", self.strategy, STRATEGIES)
        _one_of("job.compute", self.compute, tuple(DTYPES))
        for what, value in (("job.wire", self.sent), ("job.reduce", self.reduced)):
            _one_of(what, value, (*DTYPES, "int8", "int4"))
        create(self.optimizer)
        _at_least(self, "job", replication=0, steps=0, tokens=1, inner_steps=1, fragments=1, overlap_steps=0)
        if self.inner_steps % self.fragments or not self.overlap_steps < max(1, self.inner_steps // self.fragments):
            raise InvalidRequest(
                f"job.inner_steps is {self.inner_steps}, fragments {self.fragments} and overlap_steps "
                f"{self.overlap_steps}; inner_steps must be a multiple of fragments, overlap_steps below the quotient"
            )

    @property
    def sent(self) -> str:
        """The form in which parameters are sent."""
        return self.wire or self.compute

    @property
    def reduced(self) -> str:
        """The form in which gradients travel."""
        return self.reduce or self.sent


@dataclass(frozen=True, kw_only=True)
class WorkersTable:
    """`[[workers]]`: equal worker hosts.

    Attributes:
        count: number of hosts.
        devices: GPUs of each host; above 1 under "hybrid_shard", where they share the model.
        compute_s: seconds that forward and backward of a step take on a device without transfers; 0 = by `flops`.
        flops: operations a second that a device achieves with this model, for times by `tokens`; 0 = by `compute_s`.
        device: the kind of device: "gpu"; "cpu", the host's own cores; or "emulated", an accelerator that works on host
            memory and takes no core, as in benchmarks.
        cores: cores of a host; 0 = as many as the profile's machine has.
        rate_mbit: rate of a host's network card, each way.
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
        """Raise if a value is invalid."""
        _at_least(self, "workers", count=1, devices=1, cores=0, per_hour=0, compute_s=0, flops=0)
        _above_0(self, "workers", "rate_mbit", "device_gb_per_s")
        _one_of("workers.device", self.device, ("gpu", "cpu", "emulated"))
        if (self.compute_s > 0) == (self.flops > 0):
            raise InvalidRequest(
                f"workers.compute_s is {self.compute_s:g} and workers.flops {self.flops:g}; give one of them: seconds "
                "of forward and backward of a step, or the operations a second that a device achieves"
            )

    def step_s(self, model: ModelTable, job: Job) -> float:
        """Return the seconds of forward and backward of a step on a device."""
        return self.compute_s or _FLOPS * model.numel * job.tokens / self.flops


@dataclass(frozen=True, kw_only=True)
class Servers:
    """`[servers]`: hosts with one shard server each.

    Attributes:
        count: number of hosts; 0 = one shard server on each worker's host, with the same network card.
        cores: cores of a host; 0 = as many as the profile's machine has.
        rate_mbit: rate of a host's network card, each way.
        per_hour: price of a host.
    """

    count: int = 1
    cores: int = 0
    rate_mbit: float = 1000.0
    per_hour: float = 0.0

    def check(self) -> None:
        """Raise if a value is invalid."""
        _at_least(self, "servers", count=0, cores=0, per_hour=0)
        _above_0(self, "servers", "rate_mbit")


@dataclass(frozen=True, kw_only=True)
class Network:
    """`[network]`: the network between the hosts.

    Attributes:
        rtt_ms: round trip between a worker and a server, and to the coordinator.
        mtu: the most bytes of a packet, its IP header included.
        shared_cores: cores of the machine if all hosts are its containers; 0 = each host has its own cores.
    """

    rtt_ms: float = 0.2
    mtu: int = 1500
    shared_cores: int = 0

    def check(self) -> None:
        """Raise if a value is invalid."""
        _at_least(self, "network", rtt_ms=0, mtu=576, shared_cores=0)

    def payload_rate(self, rate_mbit: float) -> float:
        """Return the bytes of TCP streams that a card carries a second, without headers of Ethernet, IP and TCP."""
        return rate_mbit * 1e6 / 8 * (self.mtu - _IP_AND_TCP) / (self.mtu + _ETHERNET)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """`[failures]`: frequency of the deaths of hosts, and their effects.

    Attributes:
        worker_mtbf_h: mean time between failures of one worker host, in hours; 0 = they do not fail.
        notice_s: seconds until the job goes on without a dead worker: 0 if its connection breaks, the lease if its
            host is silent.
        worker_away_s: seconds until the worker, or its successor, trains again: notice, replacement, start.
        min_workers: the fewest hosts with which the job goes on; 0 = all.
        server_mtbf_h: mean time between failures of one shard server; 0 = they do not fail.
        server_away_s: seconds until the server's successor runs.
        promote_s: seconds until a backup has taken over, where slices have several copies.
        checkpoint_every_s: seconds between checkpoints; 0 = there are none, and a job that lost a slice begins anew.
        restore_s: seconds until a job that lost a slice goes on from its checkpoint, beside `server_away_s`.
        regular: whether deaths come at even times, and the oldest worker dies each time; else all is random.
    """

    worker_mtbf_h: float = 0.0
    notice_s: float = 1.0
    worker_away_s: float = 120.0
    min_workers: int = 0
    server_mtbf_h: float = 0.0
    server_away_s: float = 60.0
    promote_s: float = 2.0
    checkpoint_every_s: float = 0.0
    restore_s: float = 20.0
    regular: bool = False

    def check(self) -> None:
        """Raise if a value is invalid."""
        numbers = (each.name for each in dataclasses.fields(self) if each.name != "regular")
        _at_least(self, "failures", **dict.fromkeys(numbers, 0.0))


Table: TypeAlias = ModelTable | Job | WorkersTable | Servers | Network | Failures


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
