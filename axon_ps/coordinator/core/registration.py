"""The registration of a model: layout, optimizer, and which servers hold the parameters. Pure.

The worker of lowest rank defines layout and optimizer, and every other worker must agree. The first values come from
exactly one worker (the *uploader*), also that of lowest rank, or from a checkpoint. From then on a shard server holds
slices in the incarnation in which it received them. When it is lost, the other holders of a slice go on with it
(`sharding.placement`). A lost server stays the holder of a slice that has no other holder, since it may come back.
Another incarnation of it holds nothing, and the job waits until a checkpoint is restored.

Note: [Whose values are first]
    Every worker has a module. Its layout and values may differ from the others': it was built otherwise, has loaded
    weights, or had another seed. Those of the lowest rank count, as in torch's DDP and in FSDP's `sync_module_states`.
    The other workers' registrations are held until that worker has registered. A worker with a refused layout counts no
    more, and the others do not wait for it. If the uploader dies, the generation changes, the others register again,
    and the lowest rank among them uploads. While it lives, no other worker replaces it, since the servers may have some
    of its values. When a job begins again, a worker that has trained has no first values any more. Then the lowest rank
    among the workers that wait for first values counts.

Note: [A connection that broke]
    A server counts as lost when its connection breaks, since a death is noticed soonest in this way. But it may live
    and be back at once. Meanwhile another holder of its slices may have died unnoticed. So a server that comes back in
    the same incarnation, before another step was committed, still holds its slices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress

from axon_ps.coordinator.core.records import ParameterState
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import Busy, InvalidRequest, LayoutMismatch, Misuse
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement, Server, new_placement
from axon_ps.types import Decision, Hyper, Member, OptimizerSpec
from axon_ps.wire.events import FIRST_VALUES, Copied, Corrupted, JobState, KnownNames, RestoreOrder

RESTORE_HINT = "restore a checkpoint (axon-ps checkpoint restore URI)"


class Registration:
    """Spec, optimizer and parameters of a model.

    Args:
        spec: as it was before the coordinator's restart.
        optimizer: likewise.
        parameters: likewise.
        num_shards: shard servers of the job.
        number: of the model.
        name: its name in the job.
    """

    def __init__(
        self,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        parameters: ParameterState,
        num_shards: int,
        *,
        number: int = 0,
        name: str = "",
    ) -> None:
        self.number = number
        self.name = name
        self.spec = spec
        self.optimizer = optimizer
        self.parameters = parameters
        self.num_shards = num_shards
        self._copying_since: dict[tuple[int, int], int] = {}  # by slice and server: number of the placement
        self.given_by: int | None = None  # the rank that gave the layout, if it was since the coordinator's start
        self.waiting: set[str] = set()
        """Incarnations of workers that registered the layout while it had no values, and wait for first ones."""
        self.owners: tuple[int, ...] = ()
        """Shard servers that hold trainable slices: a step needs their reports."""
        self.out_of_memory: dict[int, str] = {}  # by rank, the reason why a shard server cannot hold its slices
        self._find_owners()

    def check_spec(self, spec: JobSpec, rank: int) -> bool:
        """Return True if `spec` is the first; a later one must be equal.

        Raises:
            LayoutMismatch: it differs from the job's.
            InvalidRequest: it has no units.
            Busy: the shard servers cannot hold the job's.
        """
        if self.out_of_memory:
            raise Busy(self.out_of_memory_reason)
        if self.spec is None:
            if not spec.layout.units:
                raise InvalidRequest(f"worker {rank} registers a layout without units; a model needs parameters")
            return True
        if spec.model and self.spec.model and spec.model != self.spec.model:
            raise LayoutMismatch(
                f"worker {rank} registers {spec.described} as {self.name!r}, and that is {self.spec.described} in the "
                f"job{self._giver}; every worker must build the same models, by the same names or in the same order"
            )
        if difference := spec.difference(self.spec):
            raise LayoutMismatch(
                f"worker {rank} registers another model as {self.name!r} than the job has{self._giver}: {difference}; "
                "every worker must build the same"
            )
        return False

    @property
    def _giver(self) -> str:
        """The worker that gave the layout, as part of a message; empty if it is not known."""
        return "" if self.given_by is None else f" from worker {self.given_by}"

    def set_spec(self, spec: JobSpec, placement: Placement, rank: int) -> None:
        """Set the first spec, given by the worker of `rank`, and the placement of its slices."""
        self.spec, self.given_by = spec, rank
        self.set_placement(placement)

    def new_placement(self, spec: JobSpec, servers: Sequence[Server], replication: int) -> Placement:
        """Return a fresh placement of a spec's slices."""
        return new_placement(spec.plan(self.num_shards), servers, replication, self.placement_number + 1)

    # ------------------------------------------------------------------ placement

    @property
    def placement_number(self) -> int:
        """Number of the placement; 0 before there is one."""
        return 0 if self.parameters.placement is None else self.parameters.placement.number

    @property
    def placement(self) -> Placement:
        """The placement of the slices; only of a registered model."""
        assert self.parameters.placement is not None
        return self.parameters.placement

    @cached_property
    def slice_numels(self) -> tuple[int, ...]:
        """Elements of each slice, by number."""
        assert self.spec is not None
        return tuple(s.numel for s in self.spec.plan(self.num_shards).numbered)

    @cached_property
    def _trainable(self) -> tuple[bool, ...]:
        """True for each slice that steps change, by number."""
        assert self.spec is not None
        units = self.spec.layout.units
        return tuple(units[s.unit].trainable for s in self.spec.plan(self.num_shards).numbered)

    def set_placement(self, placement: Placement) -> None:
        """Set the placement of the slices from now on."""
        self.parameters.placement = placement
        self._find_owners()

    def change_placement(self, placement: Placement) -> None:
        """Set the next placement, and record the copies that begin with it."""
        number = self.placement_number + 1
        for index, (before, after) in enumerate(zip(self.placement.holders, placement.holders, strict=True)):
            if after is not before:
                for rank in after.copying:
                    if rank not in before.copying:
                        self._copying_since[index, rank] = number
        self.set_placement(replace(placement, number=number))

    def copied(self, shard: Member, report: Copied, shards: Sequence[Member]) -> bool:
        """Take a server's report that it has received slices; return True if that is new."""
        p = self.parameters
        if p.placement is None or report.epoch != p.epoch:
            return False
        indexes = [i for i in report.slices if self._copying_since.get((i, shard.rank), math.inf) <= report.placement]
        after = p.placement.copied(indexes, shard.rank, {s.rank for s in shards if self.is_loaded(s)})
        if after.holders == p.placement.holders:
            return False
        p.holders[shard.rank] = shard.incarnation
        self.change_placement(after)
        return True

    def is_holding(self, shard: Member, report: Corrupted) -> bool:
        """Return True if a server's report is about a slice that it holds now, and not about an earlier copy of it."""
        p = self.parameters
        if p.placement is None or not p.initialized or report.epoch != p.epoch:
            return False
        holders = p.placement.holders
        is_holder = report.slice < len(holders) and shard.rank in holders[report.slice].complete
        return (
            is_holder
            and self.is_loaded(shard)
            and report.placement >= self._copying_since.get((report.slice, shard.rank), 0)
        )

    def corrupted(self, rank: int, index: int) -> bool:
        """Have a server receive a slice again that it has lost; return False if no other server holds the slice.

        A lost server that holds it may come back.
        """
        if len(self.placement.holders[index].complete) == 1:
            self.parameters.corrupt[index] = self.parameters.holders[rank]
            return False
        self.change_placement(self.placement.corrupted(index, rank))
        return True

    def described(self, report: Corrupted, server: str) -> str:
        """Return a text about the memory that failed."""
        assert self.spec is not None
        s = self.spec.plan(self.num_shards).numbered[report.slice]
        blocks = ", ".join(f"{array} from element {begin} to {end}" for array, begin, end in report.blocks)
        unit = self.spec.layout.units[s.unit].name
        return (
            f"memory of {server} is corrupt: {blocks} of unit {unit!r}, slice {report.slice}, found at version "
            f"{report.version}"
        )

    def lose(self, rank: int, version: int) -> None:
        """Remove a lost shard server from the placement; the job is at `version`.

        Other holders go on with its slices.
        """
        p = self.parameters
        self.out_of_memory.pop(rank, None)
        if p.initialized and p.placement is not None and rank in p.placement.servers:
            if p.lost_version != version:
                p.lost, p.lost_version = {}, version
            if (incarnation := p.holders.get(rank)) is not None:
                complete = (i for i, h in enumerate(p.placement.holders) if rank in h.complete)
                held = tuple(i for i in complete if p.corrupt.get(i) != incarnation)
                p.lost[incarnation] = held
            self.change_placement(p.placement.without(rank))
            if rank not in self.placement.servers:
                p.holders.pop(rank, None)

    def still_held_by(self, incarnation: str, version: int) -> tuple[int, ...]:
        """Return the slices of a server lost at this `version`, else none. See Note: [A connection that broke]."""
        p = self.parameters
        now = p.initialized and p.lost_version == version
        return p.lost.get(incarnation, ()) if now else ()

    def take_back(self, shard: Member, shards: Sequence[Member], version: int) -> None:
        """Give a joined server those slices back that it still holds; the job is at `version`."""
        p = self.parameters
        if held := self.still_held_by(shard.incarnation, version):
            present = {s.incarnation: s.rank for s in shards if self.is_loaded(s)}
            after = self.placement.taken_back(held, shard.rank, present.values())
            for index in set(held) & p.corrupt.keys():  # another server was the only holder, and lost it
                if (rank := present.get(p.corrupt.pop(index))) is not None:
                    after = after.corrupted(index, rank)
                p.failure = p.failure if p.corrupt else ""
            if after.holders != self.placement.holders:
                self.change_placement(after)
            p.holders[shard.rank] = shard.incarnation
        p.lost.pop(shard.incarnation, None)

    def cancel_copies(self, rank: int) -> bool:
        """Cancel the copies to a server with a broken session; they begin anew later. Return True if there were any."""
        placement = self.parameters.placement
        if placement is None or not any(rank in h.copying for h in placement.counts):
            return False
        self.change_placement(placement.not_copying(rank))
        return True

    def check_optimizer(
        self, optimizer: OptimizerSpec, spec: JobSpec | None, rank: int, *, later: bool = False
    ) -> OptimizerSpec | None:
        """Return the optimizer with every hyperparameter filled in if it is the first, else None.

        A later one must be equal. With `later` it replaces the job's with a step, and may differ.

        Raises:
            Misuse: there is no layout yet.
            InvalidRequest: it does not fit the layout, or a hyperparameter is invalid.
            LayoutMismatch: it differs from the job's.
        """
        if spec is None:
            raise Misuse(f"worker {rank} registers an optimizer before a layout; register the layout first")
        _check_groups(optimizer, spec)
        algorithm = create(optimizer.name)
        groups = tuple(algorithm.validate(g) for g in optimizer.groups)
        optimizer = dataclasses.replace(optimizer, groups=groups)
        if self.optimizer is None or later:
            return optimizer
        if difference := _optimizer_difference(optimizer, self.optimizer, spec):
            raise LayoutMismatch(
                f"worker {rank} registers another optimizer of {self.name!r} than the job has: {difference}; "
                "every worker must make the same"
            )
        return None

    def change_optimizer(self, decision: Decision) -> None:
        """Apply a committed step: the named optimizer replaces this one, with the moments that it needs.

        If only hyperparameters differ, the optimizer stays as registered, so that joining workers find it unchanged.
        """
        if self.optimizer is not None:
            self.optimizer = optimizer_after(self.optimizer, decision)

    def is_loaded(self, shard: Member) -> bool:
        """Return True if a shard server has its parameters."""
        return self.parameters.holders.get(shard.rank) == shard.incarnation

    def is_holder(self, shard: Member) -> bool:
        """Return True if a shard server has values of slices that the placement gives to it."""
        placement = self.parameters.placement
        return placement is not None and shard.rank in placement.servers and self.is_loaded(shard)

    def initialized_by(self, shard: Member, version: int, epoch: int, now_version: int) -> bool:
        """Take a shard server's report that it holds its parameters; return True if all may hold them now.

        A server that was away reports again, since the others may have reported meanwhile.

        Raises:
            InvalidRequest: it holds another version than the job is at.
        """
        p = self.parameters
        if p.placement is None or p.initialized or epoch != p.epoch:
            return False
        if version != now_version:
            raise InvalidRequest(
                f"shard server {shard.rank} holds version {version} of epoch {epoch} of {self.name!r}; the job is at "
                f"{now_version}"
            )
        p.holders[shard.rank] = shard.incarnation
        self.out_of_memory.pop(shard.rank, None)
        return True

    def all_loaded(self, shards: Sequence[Member]) -> bool:
        """Return True if every shard server of the placement is a member and has its slices."""
        return self.placement.servers <= {s.rank for s in shards if self.is_loaded(s)}

    @property
    def awaits_values(self) -> bool:
        """True if shard servers have yet to receive first values, or those of a checkpoint."""
        p = self.parameters
        return p.placement is not None and not p.initialized and not p.failure

    def missing(self, shards: Sequence[Member]) -> list[int]:
        """Return the ranks of absent shard servers with slices that no live server has.

        No step can be made without them.
        """
        placement, here = self.parameters.placement, {s.rank for s in shards}
        if placement is None:
            return []
        if not self.parameters.initialized:
            return sorted(placement.servers - here)
        return sorted({h.primary for h in placement.counts if here.isdisjoint(h.complete)})

    def lost_with_parameters(self, shards: Sequence[Member]) -> list[int]:
        """Return the ranks whose shard server was lost with the only copy of a slice.

        It came back empty, or other servers came in its place.
        """
        placement = self.parameters.placement
        if not self.parameters.initialized or placement is None:
            return []
        here = {s.rank for s in shards}
        loaded = {s.rank for s in shards if self.is_loaded(s)}
        gone = {h.primary for h in placement.counts if loaded.isdisjoint(h.complete)}
        return sorted(rank for rank in gone if rank in here or len(shards) >= self.num_shards)

    def loss(self, shards: Sequence[Member]) -> str:
        """Return the reason for a restore of the parameters, as text; empty when none is needed."""
        if lost := self.lost_with_parameters(shards):
            return f"shard server {format_ranks(lost)} was lost with its parameters"
        return self.parameters.failure

    def trouble(self, shards: Sequence[Member]) -> str:
        """Return a text that says why the values allow no step, and what to do; empty when they allow one."""
        return f"{loss}; {RESTORE_HINT}" if (loss := self.loss(shards)) else ""

    @property
    def _begins_again(self) -> bool:
        restore = self.parameters.restore
        return restore is not None and restore.uri == FIRST_VALUES

    @property
    def _needs_first_values(self) -> bool:
        p = self.parameters
        return not p.initialized and (p.epoch == 0 or self._begins_again)

    def comes_before(self, incarnation: str, there: Sequence[str]) -> str:
        """Return the worker that must register before another one; empty = none.

        Args:
            incarnation: the other worker.
            there: the incarnations of the workers that count, by rank. See Note: [Whose values are first].
        """
        if self.spec is not None and (not self._needs_first_values or self._begins_again):
            return ""
        if self.parameters.uploader in there:
            return ""
        first = there[0] if there else ""
        return "" if first == incarnation or first in self.waiting else first

    def claim_upload(self, incarnation: str, there: Sequence[str]) -> bool:
        """Return True if the caller is to upload the first values; `there` are the workers that count, by rank.

        See Note: [Whose values are first].
        """
        p = self.parameters
        if not self._needs_first_values:
            return False
        self.waiting.intersection_update(there)
        if p.uploader not in there:
            p.uploader = next((w for w in there if w in self.waiting or not self._begins_again), "")
        return p.uploader == incarnation

    def begin_restore(
        self, uri: str, version: int, placement: Placement, section: str = "", sha256: str = ""
    ) -> RestoreOrder:
        """Forget all holders, and order the servers of a placement to load `section` of `uri`."""
        p = self.parameters
        order = RestoreOrder(
            epoch=p.epoch + 1, uri=uri, version=version, model=self.number, section=section, sha256=sha256
        )
        replaced = p.replaced or uri != FIRST_VALUES
        self.parameters = ParameterState(epoch=order.epoch, restore=order, replaced=replaced, run_began=version)
        self.out_of_memory.clear()
        self.set_placement(placement)
        return order

    def set_out_of_memory(self, rank: int, why: str) -> None:
        """Record that a shard server lacks memory for its slices; it holds nothing of the model."""
        self.out_of_memory[rank] = why

    @property
    def out_of_memory_reason(self) -> str:
        """The reason why the model cannot be held, with advice, as text; empty when it can."""
        if not self.out_of_memory:
            return ""
        return (
            f"model {self.name!r} is not held: {'; '.join(self.out_of_memory.values())}; release it (axon-ps release "
            f"{self.name!r}), or start shard servers with more memory"
        )

    def fail_restore(self, failure: str) -> None:
        """End a restore that a shard server could not perform, also for the others."""
        self.parameters.restore = None
        self.parameters.failure = failure

    def rank_held_by(self, incarnation: str) -> int | None:
        """Return the rank whose slices this incarnation of a shard server holds."""
        return next((rank for rank, holder in self.parameters.holders.items() if holder == incarnation), None)

    def state(self, shards: Sequence[Member], version: int, *, full: bool) -> JobState:
        """Return the state for members, with layout and optimizer only when `full`."""
        p = self.parameters
        return JobState(
            spec=self.spec if full else None,
            optimizer=self.optimizer if full else None,
            initialized=p.initialized and not self.lost_with_parameters(shards),
            version=version,
            epoch=p.epoch,
            model=self.number,
            name=self.name,
            copied=p.copied,
            placement=p.placement,
            out_of_memory=self.out_of_memory_reason,
        )

    def _find_owners(self) -> None:
        if self.spec is not None and self.parameters.placement is not None:
            holders = set(compress(self.parameters.placement.holders, self._trainable))
            self.owners = tuple(sorted({rank for h in holders for rank in h.servers}))


def check_known(
    server: str, known: KnownNames | None, model: str, spec: JobSpec | None, optimizer: OptimizerSpec | None
) -> None:
    """Check that a shard server knows the optimizer and compressors of a model.

    Args:
        server: its name in errors.
        known: the optimizers and compressors that it can make; None = not known.
        model: the model's name.
        spec, optimizer: of the model; None = not registered, or checked before.

    Raises:
        InvalidRequest: it cannot.
    """
    if known is None:
        return
    missing = [] if optimizer is None or optimizer.name in known.optimizers else [f"optimizer {optimizer.name!r}"]
    if spec is not None:
        compressors = (spec.precision.param_compression, spec.precision.grad_compression)
        names = {c.name for c in compressors if c is not None} - known.compressors
        missing += [f"compressor {name!r}" for name in sorted(names)]
    if missing:
        raise InvalidRequest(
            f"{server} does not know {' and '.join(missing)} of model {model!r}; start it with --plugins MODULE (or "
            "AXON_PS_PLUGINS), the module that registers it"
        )


def _check_groups(optimizer: OptimizerSpec, spec: JobSpec) -> None:
    parameters = list(spec.layout.parameters())
    if len(optimizer.group_of) != len(parameters):
        raise InvalidRequest(
            f"the optimizer names the group of {len(optimizer.group_of)} parameters; the layout has {len(parameters)}"
        )
    for (unit, p), group in zip(parameters, optimizer.group_of, strict=True):
        trainable = spec.layout.units[unit].trainable
        if not trainable and group != -1:
            raise InvalidRequest(
                f"parameter {p.name!r} is frozen and in group {group}; frozen parameters have group -1"
            )
        if not -1 <= group < len(optimizer.groups):
            raise InvalidRequest(
                f"parameter {p.name!r} is in group {group}; the optimizer has groups 0 to {len(optimizer.groups) - 1}"
            )


def optimizer_after(optimizer: OptimizerSpec, decision: Decision) -> OptimizerSpec:
    """Return the optimizer after a committed step; see `Registration.change_optimizer`."""
    if (change := decision.optimizer) is not None:
        same = dataclasses.replace(optimizer, groups=change.spec.groups, moments=())
        if same != change.spec:
            moments = optimizer.moments if change.retains_moments else ()
            optimizer = dataclasses.replace(change.spec, moments=moments)
    return covering(optimizer, decision.hyper) if decision.hyper else optimizer


def covering(optimizer: OptimizerSpec, hypers: Sequence[Hyper]) -> OptimizerSpec:
    """Return the optimizer, extended by the moments that steps with these hyperparameters need."""
    names, there = create(optimizer.name).state_names, (*optimizer.groups, *optimizer.moments)
    if names((*there, *hypers)) == names(there):
        return optimizer
    return dataclasses.replace(optimizer, moments=(*optimizer.moments, *hypers))


def _optimizer_difference(ours: OptimizerSpec, job: OptimizerSpec, spec: JobSpec) -> str:
    """Return the first difference of two optimizers, as text; empty when they are equal."""
    if ours.name != job.name:
        return f"it is {ours.name} here and {job.name} in the job"
    if len(ours.groups) != len(job.groups):
        return f"it has {len(ours.groups)} parameter groups here and {len(job.groups)} in the job"
    for index, (a, b) in enumerate(zip(ours.groups, job.groups, strict=True)):
        if difference := _hyper_difference(a, b):
            return f"{difference} of group {index}"
    for (_, p), a_group, b_group in zip(spec.layout.parameters(), ours.group_of, job.group_of, strict=True):
        if a_group != b_group:
            return f"parameter {p.name!r} is in group {a_group} here and {b_group} in the job"
    return ""


def _hyper_difference(ours: Hyper, job: Mapping[str, float]) -> str:
    for name in sorted({*ours, *job}):
        a, b = ours.get(name, math.nan), job.get(name, math.nan)
        if a != b:
            return f"{name} is {a} here and {b} in the job, in the hyperparameters"
    return ""
