"""The registration of a model: the layout, its cut, and its forms on the wire. Equal on every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Layout, Unit, first_difference
from axon_ps.sharding.plan import Plan, PlanOptions, make_plan
from axon_ps.sharding.policy import Policy, Synchronous
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import EACH_WORKER, Grouping


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Everything about a model's parameters that all members must agree on.

    Attributes:
        layout: units and parameters.
        precision: dtypes and compression on the wire; see `precision_of`.
        options: chunk and slice sizes.
        grouping: the workers that contribute one gradient together: with HYBRID_SHARD those of a node.
        policy: the replicas that wait for each other between steps.
        model: class of the module, for messages; empty = not known. Ignored when specs are compared.

    Raises:
        InvalidRequest: parameters are sent as differences, and replicas step asynchronously.
    """

    layout: Layout
    precision: WirePrecision = field(default_factory=WirePrecision)
    options: PlanOptions = field(default_factory=PlanOptions)
    grouping: Grouping = EACH_WORKER
    policy: Policy = field(default_factory=Synchronous)
    model: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.policy.asynchronous and self.precision.differs:
            raise InvalidRequest(
                f"parameters travel as {self.precision.param_compression}, differences against the version before, and "
                f"with {self.policy} others commit any number of versions between two gathers of a worker; use int8 or "
                "a dtype for parameters (wire_dtype), or the policy Synchronous"
            )

    def precision_of(self, unit: Unit) -> WirePrecision:
        """Return the forms of a unit's values on the wire; see `WirePrecision.of_unit`."""
        return self.precision.of_unit(unit)

    @property
    def described(self) -> str:
        """The model in words."""
        return f"{self.model or 'a model'} ({self.layout.count} parameters)"

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        return {}

    def plan(self, num_servers: int) -> Plan:
        """Return the plan over `num_servers` shard servers (computed once)."""
        if num_servers not in self._plans:
            self._plans[num_servers] = make_plan(self.layout, num_servers, self.options)
        return self._plans[num_servers]

    @cached_property
    def sizes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """A cache: bytes of each slice, by (bytes of a trainable element, number of servers cut over); see `memory`."""
        return {}

    @cached_property
    def encoded(self) -> list[bytes]:
        """A cache: the spec's message, once it has been made; see `wire.codec.job_spec_to_proto`."""
        return []

    def is_cut_like(self, other: JobSpec) -> bool:
        """Return True if `cut_difference` is empty (computed once for each other spec)."""
        if id(other) not in self._alike:
            self._alike[id(other)] = other, not self.cut_difference(other)
        return self._alike[id(other)][1]

    @cached_property
    def _alike(self) -> dict[int, tuple[JobSpec, bool]]:
        return {}

    def cut_difference(self, other: JobSpec) -> str:
        """Return the reason, in words, why servers cannot copy another model's values to this one; empty if they can.

        They can if each server has the same elements of both models: units hold the same parameters and are cut alike.
        """
        ours, theirs = self.layout.units, other.layout.units
        if len(ours) != len(theirs):
            return f"it has {len(ours)} units and the other {len(theirs)}; wrap both models alike"
        for a, b in zip(ours, theirs, strict=True):
            here, there = ([(p.name, tuple(p.shape), p.raw, p.float8) for p in unit.parameters] for unit in (a, b))
            if here != there:
                what = next((p for p, q in zip(here, there, strict=False) if p != q), None)
                which = f"parameter {what[0]!r} of shape {list(what[1])}" if what else f"{len(here)} parameters"
                return (
                    f"unit {a.name!r} has {which}, and the other model has something else there; both must be built "
                    "and wrapped alike, and what is frozen in only a part of one must be so in the other"
                )
        if self.options != other.options:
            return f"its units are cut as {self.options} and the other's as {other.options}; give both the same"
        return ""

    def difference(self, job: JobSpec) -> str:
        """Return the first difference of this spec from the job's, in words; empty when they are equal."""
        if difference := first_difference(self.layout, job.layout):
            return difference
        for what, ours, theirs in (
            ("wire dtype of parameters", self.precision.param.value, job.precision.param.value),
            ("wire dtype of gradients", self.precision.grad.value, job.precision.grad.value),
            ("compression of parameters", self.precision.param_compression, job.precision.param_compression),
            ("compression of gradients", self.precision.grad_compression, job.precision.grad_compression),
            ("chunk_numel", self.options.chunk_numel, job.options.chunk_numel),
            ("min_slice_numel", self.options.min_slice_numel, job.options.min_slice_numel),
            ("a replica", self.grouping, job.grouping),
            ("policy", self.policy, job.policy),
        ):
            if ours != theirs:
                return f"{what} is {ours} here and {theirs} in the job"
        return ""
