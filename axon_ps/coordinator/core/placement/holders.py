"""The present and the planned holders of a model's slices. Pure.

From the time of its first values on, a shard server holds slices in the incarnation in which it received them. When it
is lost, the other holders of a slice go on with it (`sharding.placement`). A lost server stays the holder of a slice
that has no other holder, since it may come back. Another incarnation of it holds nothing. Then a checkpoint must
be restored before the job goes on.

Note: [A connection that broke]
    A server counts as lost when its connection breaks, since a death is noticed soonest in this way. But it may live
    and be back at once. Meanwhile another holder of its slices may have died unnoticed. So a server that comes back in
    the same incarnation, before another step was committed, still holds its slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress

from axon_ps.coordinator.core.records import ParameterState
from axon_ps.coordinator.core.registration import Registration
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement, Server, new_placement
from axon_ps.types import Member
from axon_ps.wire.events import FIRST_VALUES, Copied, Corrupted, RestoreOrder

RESTORE_HINT = "restore a checkpoint (axon-ps checkpoint restore URI)"


class SliceHolders:
    """The holders of one model's slices.

    Args:
        registration: of the model. Its layout is cut into the slices.
        parameters: as they were before the coordinator's restart.
        num_shards: shard servers of the job.

    Attributes:
        owners: shard servers that hold or receive trainable slices. A step needs their reports.
        out_of_memory: by rank, the reason why a shard server cannot hold its slices.
    """

    def __init__(self, registration: Registration, parameters: ParameterState, num_shards: int) -> None:
        self._registration = registration
        self.parameters = parameters
        self.num_shards = num_shards
        self._copying_since: dict[tuple[int, int], int] = {}  # by slice and server: number of the placement
        self.owners: tuple[int, ...] = ()
        self.out_of_memory: dict[int, str] = {}
        self._find_owners()

    def new_placement(self, spec: JobSpec, servers: Sequence[Server], replication: int) -> Placement:
        """Return a fresh placement of a spec's slices."""
        return new_placement(spec.plan(self.num_shards), servers, replication, self.placement_number + 1)

    @property
    def placement_number(self) -> int:
        """Number of the placement; 0 before there is one."""
        return 0 if self.parameters.placement is None else self.parameters.placement.number

    @property
    def placement(self) -> Placement:
        """The placement of the slices; only of a registered model."""
        assert self.parameters.placement is not None
        return self.parameters.placement

    @property
    def _spec(self) -> JobSpec:
        assert self._registration.spec is not None
        return self._registration.spec

    @cached_property
    def slice_numels(self) -> tuple[int, ...]:
        """Elements of each slice, by number."""
        return tuple(s.numel for s in self._spec.plan(self.num_shards).numbered)

    @cached_property
    def _trainable(self) -> tuple[bool, ...]:
        """True for each slice that steps change, by number."""
        units = self._spec.layout.units
        return tuple(units[s.unit].trainable for s in self._spec.plan(self.num_shards).numbered)

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

    def cancel_copies(self, rank: int) -> bool:
        """Cancel the copies to a server with a broken session. They begin anew later. Return True if there were any."""
        placement = self.parameters.placement
        if placement is None or not any(rank in h.copying for h in placement.counts):
            return False
        self.change_placement(placement.not_copying(rank))
        return True

    # ------------------------------------------------------------------ values

    def is_loaded(self, shard: Member) -> bool:
        """Return True if a shard server has its parameters."""
        return self.parameters.holders.get(shard.rank) == shard.incarnation

    def is_holder(self, shard: Member) -> bool:
        """Return True if a shard server has values of slices that the placement gives to it."""
        placement = self.parameters.placement
        return placement is not None and shard.rank in placement.servers and self.is_loaded(shard)

    def all_loaded(self, shards: Sequence[Member]) -> bool:
        """Return True if every shard server of the placement is a member and has its slices."""
        return self.placement.servers <= {s.rank for s in shards if self.is_loaded(s)}

    def rank_held_by(self, incarnation: str) -> int | None:
        """Return the rank whose slices this incarnation of a shard server holds."""
        return next((rank for rank, holder in self.parameters.holders.items() if holder == incarnation), None)

    def initialized_by(self, shard: Member, version: int, epoch: int, now_version: int) -> bool:
        """Take a shard server's report that it holds its parameters; return True if all may hold them now.

        A server that was away reports again, since the others may have reported meanwhile.
        """
        p = self.parameters
        if p.placement is None or p.initialized or epoch != p.epoch:
            return False
        if version != now_version:
            raise InvalidRequest(
                f"shard server {shard.rank} holds version {version} of epoch {epoch} of {self._registration.name!r}; "
                f"the job is at {now_version}"
            )
        p.holders[shard.rank] = shard.incarnation
        self.out_of_memory.pop(shard.rank, None)
        return True

    @property
    def awaits_values(self) -> bool:
        """True if shard servers have yet to receive first values, or those of a checkpoint."""
        p = self.parameters
        return p.placement is not None and not p.initialized and not p.failure

    def begin_restore(
        self, uri: str, version: int, placement: Placement, section: str = "", sha256: str = ""
    ) -> RestoreOrder:
        """Forget all holders, and order the servers of a placement to load `section` of `uri`."""
        p = self.parameters
        order = RestoreOrder(
            epoch=p.epoch + 1, uri=uri, version=version, model=self._registration.number, section=section, sha256=sha256
        )
        replaced = p.replaced or uri != FIRST_VALUES
        self.parameters = ParameterState(epoch=order.epoch, restore=order, replaced=replaced, run_began=version)
        self.out_of_memory.clear()
        self.set_placement(placement)
        return order

    # ------------------------------------------------------------------ servers that are lost

    def lose(self, rank: int, version: int) -> None:
        """Remove a lost shard server from the placement. The job is at `version`.

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
        """Give a joined server those slices back that it still holds. The job is at `version`."""
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

        Such a server came back empty, or another one came instead.
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

    # ------------------------------------------------------------------ memory that failed or is too small

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

        In that case a lost server that holds it may come back.
        """
        if len(self.placement.holders[index].complete) == 1:
            self.parameters.corrupt[index] = self.parameters.holders[rank]
            return False
        self.change_placement(self.placement.corrupted(index, rank))
        return True

    def described(self, report: Corrupted, server: str) -> str:
        """Return a text about the memory that failed."""
        s = self._spec.plan(self.num_shards).numbered[report.slice]
        blocks = ", ".join(f"{array} from element {begin} to {end}" for array, begin, end in report.blocks)
        unit = self._spec.layout.units[s.unit].name
        return (
            f"memory of {server} is corrupt: {blocks} of unit {unit!r}, slice {report.slice}, found at version "
            f"{report.version}"
        )

    @property
    def out_of_memory_reason(self) -> str:
        """The reason why the model cannot be held, with advice, as text; empty when it can."""
        if not self.out_of_memory:
            return ""
        name = self._registration.name
        return (
            f"model {name!r} is not held: {'; '.join(self.out_of_memory.values())}; release it (axon-ps release "
            f"{name!r}), or start shard servers with more memory"
        )

    def _find_owners(self) -> None:
        if self._registration.spec is not None and self.parameters.placement is not None:
            holders = set(compress(self.parameters.placement.holders, self._trainable))
            self.owners = tuple(sorted({rank for h in holders for rank in h.servers}))
