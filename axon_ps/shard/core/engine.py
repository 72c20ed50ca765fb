"""The state and the decisions of a shard server: a deterministic state machine without threads, sockets or clocks.

Its inputs are the job's spec and optimizer, first values, membership, gradient chunks and decisions. Its outputs are
the fate of each chunk (`Push`), the report that a step is ready, the slices to apply, and the frames to serve. Waits,
threads and messages to the coordinator are in the shell (`shard.server.model_shell`).

Invariants:
- The version changes by a committed decision (by one step), by a restore, or by a membership while no slice here has
  values. Every unit reaches it when its apply has finished, or at once if the unit is not changed.
- An engine is of one model only.
- A backup holds the same bits as the primary of the same slice (`shard.core.slices`).
- A step is named by (generation, step), or by (generation, replica, clock) if replicas step asynchronously. Its sums
  are in `shard.core.gradients`.

Note: [Units without gradient]
    A replica that has no gradient for a unit sends `absent`, which counts as added. A unit for which all replicas are
    absent is not touched by the optimizer, as `torch.optim` leaves a parameter without a grad. Its moments and update
    count stay, and weight decay is not applied. Its frames then have an older version than the job, and so do those of
    frozen units. The version in a frame is that of the unit's last change. It is equal on all servers, since absence
    is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from axon_ps.errors import InternalError, Misuse
from axon_ps.shard.core.digests import PARAM, SliceDigests
from axon_ps.shard.core.expected_step import ExpectedStep
from axon_ps.shard.core.gradients import GradientSums
from axon_ps.shard.core.parameters import ServedParameters
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.core.slices import OwnedSlice, OwnedSlices
from axon_ps.shard.core.updater import ModelOptimizer
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement, Server, new_placement
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, Decision, OptimizerSpec, Outcome


class ShardEngine:
    """The slices of one model on one shard server, and the step under way.

    Args:
        queue: the server's memory for gradient chunks that arrive out of order; None = they wait.

    Attributes:
        generation: of the newest membership; 0 before the first.
        step: the step attempt that gradients are summed for.
        version: committed steps.
        spec: the job's layout; None until `configure`.
        precision: element types and compression on the wire, from `configure` on.
        slices: the slices that this server holds, by number.
        placement: the holders of all slices of the model.
        parameters: the values that are served, and their state.
        gradients: the sums of gradients.
        optimizer: the model's optimizer, once it is known.
        expected: the undecided step as workers expect it to be.
        counters: see `statistics`.
    """

    def __init__(self, queue: QueueLimit | None = None) -> None:
        self.spec: JobSpec | None = None
        self.generation = 0
        self.step = 0
        self.version = 0
        self.precision = WirePrecision()
        self.slices = OwnedSlices()
        self.counters: Counter[str] = Counter()
        self.parameters = ServedParameters(self.slices, self.counters)
        self.gradients = GradientSums(self.slices, self.counters, queue)
        self.placement: Placement | None = None
        self.optimizer = ModelOptimizer(self.slices)
        self.expected = ExpectedStep(self.optimizer, self.gradients, self.counters)

    # ------------------------------------------------------------------ the job

    @property
    def configured(self) -> bool:
        """True if the layout is known."""
        return self.spec is not None

    def unit_name(self, unit: int) -> str:
        """Return the layout's name of a unit."""
        return f"unit {unit}" if self.spec is None else self.spec.layout.name_of(unit)

    def make(self, spec: JobSpec, placement: Placement, server: int) -> list[OwnedSlice]:
        """Make the slices that a placement gives to `server` and that are not here yet, with their memory.

        It may take long. It does not change this engine, and runs in any thread while nothing else changes it.
        """
        made = self.slices.make(spec, placement, server)
        self.optimizer.install(made)
        return made

    def configure(
        self,
        spec: JobSpec,
        server: int,
        num_cuts: int,
        placement: Placement | None = None,
        made: list[OwnedSlice] | None = None,
    ) -> None:
        """Hold the slices of `server`. The same spec again changes nothing.

        Args:
            spec: layout, dtypes and policy.
            server: rank of this server.
            num_cuts: number of servers that the plan cuts units over.
            placement: the holders of slices; None = the server that the plan names has the only copy.
            made: the result of `make`; None = the slices are made now.

        Raises:
            Misuse: it is configured for another spec.
        """
        if self.spec is not None:
            if self.spec != spec:
                raise Misuse(f"this server is configured for another job spec: {spec.difference(self.spec)}")
            return
        self.slices.configure(spec, num_cuts)
        self.spec, self.precision = spec, spec.precision
        self.gradients.configure(spec)
        self.optimizer.configure(spec)
        placement = placement or new_placement(spec.plan(num_cuts), [Server(rank) for rank in range(num_cuts)], 1)
        self.set_placement(placement, server, made)
        self.set_replicas(self.gradients.num_replicas)

    def set_placement(
        self, placement: Placement, server: int, made: list[OwnedSlice] | None = None
    ) -> list[OwnedSlice]:
        """Hold the slices that a placement gives to `server`; returns the removed ones, to be closed after their apply.

        Args:
            placement: the new placement.
            server: rank of this server.
            made: the result of `make` for it; None = the slices are made now.
        """
        assert self.spec is not None
        added = self.make(self.spec, placement, server) if made is None else made
        self.placement = placement
        removed = self.slices.set_placement(placement, server, added)
        for owned in added:
            owned.reached = self.version
        self.gradients.recount()
        self.parameters.count()
        return removed

    def copied(
        self,
        owned: OwnedSlice,
        moments: Mapping[str, Array],
        updates: Sequence[int],
        changed: int,
        copied: int,
        frames: Sequence[bytes] = (),
        digests: SliceDigests | None = None,
    ) -> None:
        """Make a slice whose values have come from the primary a backup.

        Args:
            owned: the slice, whose values and residual (or `sent`) are complete.
            moments: f32[slice_numel] each, by name.
            updates: per parameter of the unit, how many updates it has had.
            changed: the version that last changed it.
            copied: the version in which it last took another model's values.
            frames: the primary's frames if parameters are compressed, since they cannot be made again
                (`shard.core.wire_copy`).
            digests: of values and moments, from `OwnedSlice.digests_of_copy`; None = they are computed now.
        """
        if digests is None:
            digests = owned.digests_of_copy({PARAM: owned.master.values, **moments})
        if owned.trainable:
            owned.master.state = dict(moments)
            owned.master.set_updates(updates)
            self.optimizer.install([owned], has_moments=True)
        owned.copied_from_primary(self.version, changed, copied, frames, digests)
        self.counters["slices_copied"] += 1

    def withdraw(self, version: int) -> None:
        """Withdraw the values: a worker uploads those of a version, which may be earlier."""
        self.version = version
        self.parameters.withdraw()

    def restored(self, version: int, optimizer: OptimizerSpec | None) -> None:
        """Serve the values of a checkpoint, which the slices have published.

        Args:
            version: committed steps of the checkpoint.
            optimizer: the optimizer of the moments in it; None if it has none.
        """
        self.version = version
        for owned in self.slices.values():
            self.counters["encodings"] += len(owned.wire.frames)
        self.optimizer.restored(optimizer)
        self.parameters.restored()

    # ------------------------------------------------------------------ membership

    def membership(self, generation: int, step: int, version: int, num_replicas: int) -> None:
        """Take a new membership: gradients summed so far are dropped. A repeated generation changes nothing.

        Raises:
            InternalError: the job has committed a step whose decision this server never received.
        """
        if generation <= self.generation:
            return
        self.generation = generation
        self.step = max(self.step, step)
        self.set_replicas(num_replicas)
        if all(owned.copying for owned in self.slices.values()):
            self.version = version
        elif self.parameters.serving and version > self.version:
            raise InternalError(
                f"the job is at version {version} and this shard server at {self.version}: it missed a commit, so its "
                "parameters are stale; restore a checkpoint"
            )

    def set_replicas(self, num_replicas: int) -> None:
        """Set the number of replicas of this generation, and drop all sums."""
        self.expected.forget()
        self.gradients.begin(self.generation, self.step, num_replicas)

    def release(self) -> list[OwnedSlice]:
        """Give up all slices and return them to be closed. The engine is not used any more."""
        slices = list(self.slices.values())
        self.slices.clear()
        return slices

    # ------------------------------------------------------------------ the decision

    def decide(self, decision: Decision) -> list[OwnedSlice]:
        """Take the coordinator's decision; returns the slices to apply, in forward order (none unless it commits).

        Then run `SliceChange.apply` (`copy`, if it commits a copy) on every chunk of each, and `OwnedSlice.finish`. A
        repeated decision changes nothing.

        Raises:
            InternalError: it commits a step whose gradients are not all here, or without an optimizer.
            InvalidRequest: a hyperparameter is not valid, or there is no attempt of that replica.
        """
        if decision.step < self.step:
            return []
        if decision.outcome is not Outcome.COMMIT:
            self._drop(decision)
            return []
        if decision.version <= self.version:
            return []
        if not self.slices:  # without slices, no gradient can be missing
            self.step, self.version = decision.step + 1, decision.version
            self.gradients.end(decision)
            return []
        accumulator, under_way = self.gradients.decided(decision)
        missing = self.gradients.attempts[accumulator].missing
        is_next = under_way and (decision.step, decision.version) == (self.step, self.version + 1)
        if is_next and decision.copy is not None:
            return self._begin_copy(decision)
        if not is_next or missing:
            raise InternalError(
                f"step {decision.step} commits version {decision.version}, but this server is at step {self.step} and "
                f"version {self.version} with {missing} chunks missing; restore a checkpoint"
            )
        return self._commit(decision, accumulator)

    def _drop(self, decision: Decision) -> None:
        """Skip or abort a step. A decision without a `replica_clock` ends every attempt under way."""
        self.step = decision.step + 1
        skipped = decision.outcome is Outcome.SKIP
        self.counters["steps_skipped" if skipped else "steps_aborted"] += 1
        if decision.replica_clock is None and self.gradients.asynchronous:
            self.set_replicas(self.gradients.num_replicas)
            return
        self.expected.forget()
        self.gradients.drop(decision, summed=skipped)

    def _commit(self, decision: Decision, accumulator: int) -> list[OwnedSlice]:
        changed = {n: s for n, s in self.slices.items() if s.trainable and any(s.accumulators[accumulator].present)}
        if decision.optimizer is not None:
            self.expected.forget()  # it is of the previous optimizer
        update = self.optimizer.update(decision)
        if changed and update is None:
            raise InternalError("a step commits, but no optimizer was registered")
        as_expected = self.expected.is_met_by(decision)
        for owned in self.slices.values():
            if update is not None and owned.number in changed:
                self.counters["encodings"] += owned.begin_update(
                    update,
                    decision.version,
                    as_expected=as_expected and not owned.master.leaves(decision.untouched),
                    accumulator=accumulator,
                )
            else:
                if decision.optimizer is None:
                    owned.master.settle()
                owned.restart(accumulator)
                owned.unchanged(decision.version)
        self._committed(decision)
        return list(changed.values())

    def _begin_copy(self, decision: Decision) -> list[OwnedSlice]:
        """Begin a step that copies another model's values: all units change, and sums are dropped."""
        self.counters["encodings"] += sum(owned.begin_copy(decision.version) for owned in self.slices.values())
        self.counters["copies"] += 1
        self._committed(decision)
        return list(self.slices.values())

    def _committed(self, decision: Decision) -> None:
        self.step, self.version = decision.step + 1, decision.version
        self.expected.committed(decision)
        self.gradients.end(decision)
        self.counters["steps_committed"] += 1

    def scratch(self, chunks: int = 1) -> Array:
        """Return a buffer for a thread that applies at most `chunks` chunks at once; see `WireCopy.scratch`.

        Raw parameters, which have another form on the wire, need none.
        """
        any_slice = next((owned for owned in self.slices.values() if not owned.raw), None)
        return np.empty(0, np.uint8) if any_slice is None else any_slice.wire.scratch(chunks)

    def mappable(self, owned: OwnedSlice) -> bool:
        """Return True if workers of this host may map the wire copy of a slice, which must be all of its unit.

        See `shard.same_host.shared_copy`, Note: [When a mapped unit may change].
        """
        assert self.spec is not None
        owns_unit = owned.chunks.numel == self.spec.layout.units[owned.chunks.unit].numel
        return owns_unit and not self.gradients.asynchronous and not owned.wire.compressed

    def digests(self) -> dict[int, int]:
        """Return the digests of the slices that other servers hold, too, by number, as far as they are known.

        Empty if replicas step asynchronously: servers then report on an attempt at different versions.
        """
        if self.gradients.asynchronous:
            return {}
        return {s.number: s.digest for s in self.slices.values() if s.replicated and s.digest is not None}

    # ------------------------------------------------------------------ what is going on

    def statistics(self) -> dict[str, float]:
        """Return counters and sizes by name.

        Some are: streams and bytes in and out, encodings, duplicates, waits, steps by outcome; payload bytes of sums
        forwarded to backups and received from primaries, and of slices copied; versions published to subscribers,
        chunks encoded for them and sent; memory by kind (see `shard.core.slices`); generation, step, version, and
        missing chunks.
        """
        values: Counter[str] = Counter(dict.fromkeys((*_MEMORY, *_COUNTERS), 0))
        values.update(self.counters)
        for owned in self.slices.values():
            values.update(owned.memory())
        values.update(
            generation=self.generation,
            step=self.step,
            version=self.version,
            slices=len(self.slices),
            primary_slices=len(self.slices.primaries),
            missing_chunks=sum(a.missing for a in self.gradients.attempts),
            lacking_chunks=self.parameters.lacking,
        )
        return {name: float(value) for name, value in sorted(values.items())}


_MEMORY = (
    "master_bytes",
    "accumulator_bytes",
    "queued_bytes",
    "state_bytes",
    "residual_bytes",
    "frame_bytes",
    "shared_bytes",
)
_COUNTERS = (
    "bytes_copied_in",
    "bytes_copied_out",
    "bytes_followed",
    "bytes_forwarded",
    "bytes_in",
    "bytes_out",
    "chunks_in",
    "chunks_out",
    "copies",
    "corruptions",
    "duplicates",
    "encodings",
    "gathers",
    "mapped_bytes_in",
    "published",
    "published_bytes_out",
    "published_chunks_out",
    "published_comparisons",
    "published_dropped",
    "published_encodings",
    "published_pulls",
    "pushes",
    "queued",
    "restores",
    "steps_aborted",
    "steps_committed",
    "steps_skipped",
    "waits",
)
