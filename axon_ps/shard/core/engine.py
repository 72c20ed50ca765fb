"""What a shard server holds and decides: a deterministic state machine without threads, sockets or clocks.

Events in: the job's spec and optimizer, first values, membership, gradient chunks, decisions. Out: whether a chunk was
summed, is a duplicate or must wait, when the step is ready, which chunks must be applied, and frames to serve. The
shell (`shard.server.shell`) performs: it waits, runs `apply` in threads and talks to the coordinator.

Invariants:
- Chunks are summed in replica order, whatever the order of arrival, so a step's result does not depend on timing.
- Version moves only by a committed decision (one step) or by a restore. Every unit reaches it when its apply has
  finished, or at once when it is not changed.
- An engine is of one model; it knows of no other but in `copy`, where the slices to copy are given to it.
- A step is named by (generation, step), or by (generation, replica, clock) where replicas step
  asynchronously. A chunk of another step is never summed: of a decided one it is a duplicate or an abort, of a later
  one it waits.

Note: [Units without gradient]
    A replica that has no gradient for a unit sends `absent`, and its turn passes. A unit for which all replicas are
    absent is not touched by the optimizer: moments, weight decay and the update count stay, as `torch.optim` leaves a
    parameter whose grad is None. Its frames then have an older version than the job; so do those of frozen units. The
    version in a frame is the one that last changed the unit: equal on all servers, since absence is.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InternalError, InvalidRequest, Misuse, StepAborted
from axon_ps.shard.core.attempts import Attempt, Attempts
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.core.updater import Updater
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, Outcome


class Push(enum.Enum):
    """What became of a gradient chunk."""

    SUMMED = "summed"
    DUPLICATE = "duplicate"  # it was summed before; acknowledge and drop it
    WAIT = "wait"  # a replica before it, the decision, or the unit's apply has to come first; ask again


class ShardEngine:
    """The slices of one model on one shard server, and the step under way.

    Attributes:
        generation: of the newest membership; 0 before the first.
        step: the step attempt that gradients are summed for.
        version: committed steps.
        slices: per unit of which this server owns a slice, that slice.
        spec: the job's layout; None until `configure`.
        updater: the optimizer; None until `set_optimizer`.
        counters: see `statistics`.
    """

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.updater: Updater | None = None
        self.generation = 0
        self.step = 0
        self.version = 0
        self.num_replicas = 0
        self.slices: dict[int, OwnedSlice] = {}
        self.counters: Counter[str] = Counter()
        self._attempts = Attempts()
        self._lacking = 0
        self._last_committed: Decision | None = None
        # hyperparameters that this step is expected to have: as given, and validated
        self._expected: tuple[tuple[Hyper, ...], tuple[Hyper, ...]] | None = None
        self._restoring = False
        self._replacing = False
        self._moments_of = ""
        self._grad_compressor: Compressor | None = None

    # ------------------------------------------------------------------ the job

    @property
    def configured(self) -> bool:
        """Whether the layout is known."""
        return self.spec is not None

    @property
    def initialized(self) -> bool:
        """Whether every owned slice has values."""
        return self.spec is not None and self._lacking == 0

    @property
    def replacing(self) -> bool:
        """Whether other values are on their way, and those from before are gone."""
        return self._replacing and self._lacking > 0

    def replaced(self) -> None:
        """A worker has uploaded every value anew: serve them. Moments and version are those from before."""
        self._restoring = self._replacing = False
        self.counters["restores"] += 1

    @property
    def serving(self) -> bool:
        """Whether the values here are those of `version`, or will be when every unit has been applied."""
        return self.initialized and not self._restoring

    def configure(self, spec: JobSpec, server: int, num_servers: int) -> None:
        """Make the slices that `server` of `num_servers` owns. The same spec again changes nothing.

        Raises:
            Misuse: another spec is in place.
        """
        if self.spec is not None:
            if self.spec != spec:
                raise Misuse(f"this server is configured for another job spec: {spec.difference(self.spec)}")
            return
        first_parameter = [0]
        for unit in spec.layout.units:
            first_parameter.append(first_parameter[-1] + len(unit.parameters))
        for s in spec.plan(num_servers).by_server[server]:
            self.slices[s.unit] = OwnedSlice(
                s,
                spec.layout.units[s.unit],
                first_parameter[s.unit],
                spec.options.chunk_numel,
                spec.precision,
            )
        self.spec = spec
        self._grad_compressor = spec.precision.grad_compression
        self._begin_attempts()
        self._lacking = sum(s.lacking for s in self.slices.values())

    @property
    def asynchronous(self) -> bool:
        """Whether each replica's gradient is a step of its own."""
        return self.spec is not None and self.spec.policy.asynchronous

    def set_optimizer(self, optimizer: OptimizerSpec) -> Updater:
        """Take the model's optimizer: moments are made, and parameters find their groups. Again changes nothing.

        Moments that a restore brought stay if they are of this optimizer.

        Raises:
            Misuse: the layout is not known yet, or another optimizer is in place.
            InvalidRequest: the optimizer or a hyperparameter is unknown, or groups do not cover the layout.
        """
        if self.updater is not None:
            if self.updater.spec != optimizer:
                raise Misuse(f"this server runs {self.updater.spec.name} already; a job has one optimizer")
            return self.updater
        if self.spec is None:
            raise Misuse("the optimizer came before the layout")
        self.updater = Updater(optimizer, sum(len(u.parameters) for u in self.spec.layout.units))
        self.updater.install(self.slices.values(), self._moments_of)
        return self.updater

    def slice_of(self, unit: int) -> OwnedSlice:
        """The slice of `unit` that this server owns.

        Raises:
            Misuse: the layout is not known yet.
            InvalidRequest: there is no such unit, or none of it is here.
        """
        owned = self.slices.get(unit)
        if owned is not None:
            return owned
        if self.spec is None:
            raise Misuse("this shard server has no layout yet; register the job's spec first")
        units = len(self.spec.layout.units)
        if not 0 <= unit < units:
            raise InvalidRequest(f"there is no unit {unit}; the layout has {units}")
        raise InvalidRequest(f"this shard server owns nothing of unit {unit}; ask the owner that the plan names")

    # ------------------------------------------------------------------ first values

    def upload(self, unit: int, offset: int, values: Array) -> bool:
        """Store the first values of one chunk; returns whether every slice here now has its values.

        Once all are there, further uploads are acknowledged and dropped, so that a retry does no harm.

        Args:
            unit: which unit.
            offset: where the chunk begins in it.
            values: f32[c].

        Raises:
            Misuse: no layout yet, or steps were committed already.
            InvalidRequest: nothing of that unit is here, no chunk begins there, or the length is wrong.
        """
        owned = self.slice_of(unit)
        index = owned.index_of(offset)
        if self.version and not self._replacing:
            raise Misuse(f"first values came at version {self.version}; restore a checkpoint to replace parameters")
        if self._lacking == 0:
            self.counters["duplicates"] += 1
            return True
        before = owned.lacking
        owned.store(index, values)
        if before and owned.lacking == 0:
            self.counters["encodings"] += owned.publish(self.version)
        self._lacking += owned.lacking - before
        return self._lacking == 0

    def begin_restore(self, *, uploaded: bool = False) -> None:
        """Other values are on their way: nothing is served until `restored`, `replaced` or `cancel_restore`.

        Args:
            uploaded: a worker brings them.
        """
        self._restoring = True
        self._replacing = uploaded

    def withdraw(self) -> None:
        """The values are being overwritten: without `restored` there are none. Not while a unit is being applied."""
        for owned in self.slices.values():
            assert not owned.applying
            owned.withdraw()
        self._lacking = sum(s.lacking for s in self.slices.values())

    def cancel_restore(self) -> None:
        """The restore failed: serve what is there, if it was not withdrawn."""
        self._restoring = False

    def restored(self, version: int, optimizer: str) -> None:
        """The slices hold and have published what a checkpoint had at `version`: serve it.

        Args:
            version: committed steps of the checkpoint.
            optimizer: name of the optimizer whose moments came with it; "" when there were none.
        """
        self.version = version
        self._moments_of = optimizer
        for owned in self.slices.values():
            self.counters["encodings"] += len(owned.frames)
        if self.updater is not None:
            self.updater.install(self.slices.values(), optimizer)
        self._lacking = 0
        self._restoring = False
        self.counters["restores"] += 1

    # ------------------------------------------------------------------ membership

    def membership(self, generation: int, step: int, version: int, num_replicas: int) -> None:
        """Take a new membership: gradients summed so far are dropped. The same generation again changes nothing.

        Raises:
            InternalError: the job has committed a step whose decision this server never received.
        """
        if generation <= self.generation:
            return
        self.generation = generation
        self.step = max(self.step, step)
        self.num_replicas = num_replicas
        self._begin_attempts()
        if self.initialized and not self._restoring and version > self.version:
            raise InternalError(
                f"the job is at version {version} and this shard server at {self.version}: it missed a commit, so its "
                "parameters are stale; restore a checkpoint"
            )

    def set_replicas(self, num_replicas: int) -> None:
        """Take another number of replicas in the same generation, before any has pushed."""
        self.num_replicas = num_replicas
        self._begin_attempts()

    def release(self) -> None:
        """Give the memory of all slices back. Nothing is asked of this engine any more."""
        for owned in self.slices.values():
            owned.close()
        self.slices = {}

    def _begin_attempts(self) -> None:
        """Empty all accumulators; the attempts of this generation begin."""
        self._attempts.begin(asynchronous=self.asynchronous, step=self.step, num_replicas=self.num_replicas)
        for owned in self.slices.values():
            owned.set_accumulators(len(self._attempts))
        self._restart(range(len(self._attempts)))

    def _restart(self, accumulators: Iterable[int]) -> None:
        self._expected = None
        for accumulator in accumulators:
            for owned in self.slices.values():
                owned.restart(accumulator)
            self._attempts[accumulator].missing = self._count_missing(accumulator)

    def _count_missing(self, accumulator: int) -> int:
        return sum(s.accumulators[accumulator].missing for s in self.slices.values())

    # ------------------------------------------------------------------ gradients

    def push(self, step: int, unit: int, offset: int, replica: int, dtype: DType, grad: Array | None) -> Push:
        """Add one replica's gradient chunk to the step's sum, if it is its turn.

        Args:
            step: the step attempt it belongs to.
            unit: which unit.
            offset: where the chunk begins in the unit.
            replica: whose gradient.
            dtype: of `grad`.
            grad: wire[c], u8 when compressed; None when this replica has none for the unit.

        Raises:
            Misuse: the layout is not known, or the unit is frozen.
            InvalidRequest: unit, offset, replica, dtype or length is wrong.
            StepAborted: the step ended without a commit.
        """
        owned = self.slice_of(unit)
        if not owned.trainable:
            raise Misuse(f"unit {unit} is frozen; it takes no gradients")
        if not 0 <= replica < self.num_replicas:
            raise InvalidRequest(f"there is no replica {replica}; generation {self.generation} has {self.num_replicas}")
        if grad is not None and dtype is not self.grad_dtype:
            raise InvalidRequest(f"a gradient chunk travels as {dtype.value}; the job's is {self.grad_dtype.value}")
        index = owned.index_of(offset)
        accumulator, turn = self._attempts.place(replica)
        attempt = self._attempts[accumulator]
        if step != attempt.step:
            return self._other_step(step, attempt)
        summed = owned.accumulators[accumulator].summed[index]
        if summed > turn:
            self.counters["duplicates"] += 1
            return Push.DUPLICATE
        if not owned.accepts(accumulator) or summed < turn:
            self.counters["waits"] += 1
            return Push.WAIT
        last = turn == attempt.replicas - 1
        owned.add(index, grad, last, accumulator)
        if last:
            attempt.missing -= 1
        return Push.SUMMED

    def is_last(self, replica: int) -> bool:
        """Whether a chunk of this replica's may be what a step was waiting for."""
        return self.asynchronous or replica == self.num_replicas - 1

    @property
    def param_dtype(self) -> DType:
        """The dtype that frames hold."""
        assert self.spec is not None
        return self.spec.precision.param

    @property
    def grad_dtype(self) -> DType:
        """The element type that gradients come in; U8 when they are compressed."""
        assert self.spec is not None
        return self.spec.precision.grad if self.spec.precision.grad_compression is None else DType.U8

    @property
    def grad_compressor(self) -> Compressor | None:
        """What gradients are compressed with; None when they are not."""
        return self._grad_compressor

    @property
    def compresses_params(self) -> bool:
        """Whether frames are compressed."""
        return self.spec is not None and self.spec.precision.param_compression is not None

    def _other_step(self, step: int, attempt: Attempt) -> Push:
        if step > attempt.step:  # the caller knows a decision that is still on its way to us
            self.counters["waits"] += 1
            return Push.WAIT
        if step == attempt.last_committable:
            self.counters["duplicates"] += 1
            return Push.DUPLICATE
        raise StepAborted(f"step {step} is over and did not commit; the current step is {attempt.step}")

    def resume_offset(self, step: int, unit: int, begin: int, replica: int) -> int:
        """From which element on a replica's chunks of this slice are missing; the slice's end when none is.

        Args:
            step: the step attempt.
            unit: which unit.
            begin: where the replica's stream began, in the unit.
            replica: whose chunks.

        Raises:
            Misuse: the layout is not known.
            InvalidRequest: nothing of that unit is here, or no chunk begins there.
        """
        owned = self.slice_of(unit)
        first = owned.index_of(begin)
        accumulator, turn = self._attempts.place(replica)
        if not 0 <= accumulator < len(self._attempts) or step != self._attempts[accumulator].step:
            return begin  # `push` decides what becomes of its chunks
        for (offset, _), summed in zip(
            owned.bounds[first:], owned.accumulators[accumulator].summed[first:], strict=True
        ):
            if summed <= turn:
                return offset
        return owned.end

    def complete(self) -> Iterator[tuple[int, int]]:
        """Every attempt that has all its gradients, as (replica, step); replica is 0 where all step together."""
        for accumulator, attempt in enumerate(self._attempts):
            if not attempt.missing:
                yield accumulator, attempt.step

    def ready(self, replica: int = 0) -> float | None:
        """The sum of squares of all summed gradients here, once every chunk has every replica; None before.

        A server without trainable slices has nothing to wait for and is never asked: None.

        Args:
            replica: whose attempt, where replicas step asynchronously.
        """
        accumulator, _ = self._attempts.place(replica)
        if self._attempts[accumulator].missing or self.num_replicas == 0:
            return None
        trainable = [s for s in self.slices.values() if s.trainable]
        if not trainable or not all(s.accepts(accumulator) for s in trainable):
            return None
        squares = [x for s in trainable for x in s.accumulators[accumulator].squares]
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan

    # ------------------------------------------------------------------ the decision

    def decide(self, decision: Decision) -> tuple[int, ...]:
        """Take the coordinator's decision: the units to apply, in forward order (none unless it commits).

        Run `apply` on every chunk of each, then `finish`. A decision known already changes nothing.

        Raises:
            InternalError: it commits a step whose gradients are not all here, or without an optimizer.
        """
        if decision.step < self.step:
            return ()
        if decision.outcome is not Outcome.COMMIT:
            self._drop(decision)
            return ()
        if decision.version <= self.version:
            return ()
        if not self.slices:  # more servers than slices: there is nothing to miss
            self.step, self.version = decision.step + 1, decision.version
            self._end_attempt(decision)
            return ()
        accumulator, name, _ = self._attempts.decided(decision)
        attempt = self._attempts[accumulator]
        is_next = (decision.step, decision.version, name) == (self.step, self.version + 1, attempt.step)
        if is_next and decision.copy is not None:
            return self._begin_copy(decision)
        if not is_next or attempt.missing:
            raise InternalError(
                f"step {decision.step} commits version {decision.version}, but this server is at step {self.step} and "
                f"version {self.version} with {attempt.missing} chunks missing; restore a checkpoint"
            )
        return self._commit(decision, accumulator)

    def _drop(self, decision: Decision) -> None:
        """A step is skipped or aborted; without a turn, every attempt under way is."""
        self.step = decision.step + 1
        skipped = decision.outcome is Outcome.SKIP
        self.counters["steps_skipped" if skipped else "steps_aborted"] += 1
        if decision.turn is None and self.asynchronous:
            self._begin_attempts()
            return
        self._restart([self._end_attempt(decision, summed=skipped)])

    def _end_attempt(self, decision: Decision, *, summed: bool = True) -> int:
        accumulator, _, following = self._attempts.decided(decision)
        self._attempts[accumulator].end(following, self._count_missing(accumulator), summed=summed)
        return accumulator

    def _commit(self, decision: Decision, accumulator: int) -> tuple[int, ...]:
        changed = [
            u for u, owned in self.slices.items() if owned.trainable and any(owned.accumulators[accumulator].present)
        ]
        if self.updater is not None:
            self.updater.begin_step(decision.hyper, decision.clip_factor, self.slices.values())
        elif changed:
            raise InternalError("a step commits, but no optimizer was registered")
        as_expected = decision.clip_factor == 1.0 and self._expected is not None and self._expected[0] == decision.hyper
        for unit, owned in self.slices.items():
            if unit in changed:
                self.counters["encodings"] += owned.begin_update(as_expected=as_expected, accumulator=accumulator)
            else:
                owned.restart(accumulator)
                owned.unchanged(decision.version)
        self._last_committed = decision
        self.step = decision.step + 1
        self.version = decision.version
        self._expected = None
        self._end_attempt(decision)
        self.counters["steps_committed"] += 1
        return tuple(changed)

    def _begin_copy(self, decision: Decision) -> tuple[int, ...]:
        """A step takes another model's values: all units change, and what was summed is dropped."""
        for owned in self.slices.values():
            owned.begin_copy()
        self._last_committed = decision
        self.step = decision.step + 1
        self.version = decision.version
        self._expected = None
        self._end_attempt(decision)
        self.counters["steps_committed"] += 1
        self.counters["copies"] += 1
        self.counters["encodings"] += sum(len(s.bounds) for s in self.slices.values() if s.shared is None)
        return tuple(self.slices)

    def copy(self, unit: int, first: int, last: int, source: OwnedSlice, weight: float, scratch: Array) -> None:
        """Copy chunks [first, last) of a unit that `decide` named. Any thread; in any order, each chunk once."""
        self.slices[unit].copy(first, last, source, weight, self.version, scratch)

    def end_copy(self, unit: int) -> None:
        """All chunks of `unit` have been copied: it is at the new version."""
        self.slices[unit].end_copy(self.version)

    def scratch(self, chunks: int = 1) -> Array:
        """A buffer for a thread that calls `apply` for at most so many chunks; see `OwnedSlice.scratch`."""
        any_slice = next(iter(self.slices.values()), None)
        return np.empty(0, np.uint8) if any_slice is None else any_slice.scratch(chunks)

    def apply(self, unit: int, first: int, last: int, scratch: Array) -> None:
        """Update chunks [first, last) of a unit that `decide` named. Any thread; in any order, each chunk once."""
        assert self.updater is not None
        self.updater.apply(self.slices[unit], first, last, self.version, scratch)

    def finish(self, unit: int) -> None:
        """All chunks of `unit` have been applied: it is at the new version."""
        self.slices[unit].end_update(self.version)

    # ------------------------------------------------------------------ parameters

    def available(self, unit: int, min_version: int) -> bool:
        """Whether `unit` can be served at `min_version` or later; a frozen unit's version is that of its last copy.

        Raises:
            Misuse: the layout is not known.
            InvalidRequest: there is no such unit here.
        """
        owned = self.slice_of(unit)
        has_values = bool(owned.frames) or not (owned.lacking or owned.applying)
        return has_values and not self._restoring and owned.reached >= min_version

    def frames(self, unit: int, begin: int, end: int) -> tuple[bytes, ...]:
        """The encoded chunks of elements [begin, end) of a unit in the job's wire dtype, all of one version.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
        """
        owned = self.slice_of(unit)
        first, last = owned.range_of(begin, end)
        self.counters["encodings"] += owned.ensure_frames()
        return owned.frames if last - first == len(owned.bounds) else owned.frames[first:last]

    def shared(self, unit: int) -> SharedCopy | None:
        """A unit's wire copy in memory that workers of this host map; None where they must gather copies.

        Only while the unit is `available`. See `shard.same_host.shared_copy`, Note: [When a mapped unit may change].
        """
        owned = self.slice_of(unit)
        assert self.spec is not None
        owns_unit = owned.numel == self.spec.layout.units[unit].numel
        full = owned.shared is None and sum(s.shared is not None for s in self.slices.values()) >= MAX_MAPPED_UNITS
        return owned.share_memory() if owns_unit and not full and not self.asynchronous else None

    def prepare_chunk(
        self, step: int, unit: int, index: int, hypers: tuple[Hyper, ...], scratch: Array
    ) -> bytes | None:
        """The frame of a chunk as it will be if `step` commits unclipped with `hypers`; None = not known yet, wait.

        See `shard.core.slices`, Note: [Speculative update].

        Args:
            step: an undecided step attempt, or the last one that committed.
            unit: which unit.
            index: number of the chunk here.
            hypers: per parameter group.
            scratch: from `scratch()`.

        Raises:
            Misuse: there is no layout or optimizer, or the unit is frozen.
            InvalidRequest: there is no such unit or group, or another worker expects other hyperparameters.
            StepAborted: the step ended otherwise, or its result cannot be known before the decision.
        """
        owned = self.slice_of(unit)
        if self.updater is None or not owned.trainable:
            raise Misuse(f"unit {unit} is frozen or there is no optimizer yet; no step will change it")
        if self.asynchronous:
            raise Misuse("replicas step asynchronously: the next version is not known before it is decided")
        if step > self.step or owned.applying:
            return None
        if step < self.step:
            last = self._last_committed
            if last is None or (last.step, last.hyper, last.clip_factor) != (step, hypers, 1.0):
                raise StepAborted(f"step {step} did not commit as expected")
            self.counters["encodings"] += owned.ensure_frames()
            return owned.frames[index]
        if self.num_replicas == 0 or owned.summed[index] < self.num_replicas:
            return None
        if not owned.accumulators[0].present[index]:
            raise StepAborted(f"no replica has a gradient for a chunk of unit {unit}; its update cannot be prepared")
        if self._expected is None:
            self._expected = hypers, self.updater.validate(hypers)
        elif self._expected[0] != hypers:
            raise InvalidRequest(f"workers expect different hyperparameters for step {step}")
        prepared = bool(owned.speculative) and bool(owned.speculative[index])
        self.counters["encodings"] += not prepared
        return self.updater.prepare_chunk(owned, index, self._expected[1], self.version + 1, scratch)

    def encode(self, unit: int, index: int, dtype: DType) -> bytes:
        """One chunk in another dtype, encoded now. Only while the unit is not `applying`."""
        self.counters["encodings"] += 1
        return self.slices[unit].encode(index, dtype)

    # ------------------------------------------------------------------ what is going on

    def statistics(self) -> dict[str, float]:
        """Counters and sizes by name.

        Streams and bytes in and out, encodings, duplicates, waits, steps by outcome; memory by kind (see
        `shard.core.slices`); generation, step, version and what is missing.
        """
        memory = ("master_bytes", "accumulator_bytes", "state_bytes", "residual_bytes", "frame_bytes", "shared_bytes")
        values: Counter[str] = Counter(dict.fromkeys((*memory, *_COUNTERS), 0))
        values.update(self.counters)
        for owned in self.slices.values():
            values.update(owned.memory())
        values.update(
            generation=self.generation,
            step=self.step,
            version=self.version,
            slices=len(self.slices),
            missing_chunks=sum(a.missing for a in self._attempts),
            lacking_chunks=self._lacking,
        )
        return {name: float(value) for name, value in sorted(values.items())}


MAX_MAPPED_UNITS = 200
"""Most units that are mapped: each takes two file descriptors here and one in a worker, of often 1024."""

_COUNTERS = (
    "bytes_in",
    "bytes_out",
    "chunks_in",
    "chunks_out",
    "copies",
    "duplicates",
    "encodings",
    "gathers",
    "mapped_bytes_in",
    "pushes",
    "restores",
    "steps_aborted",
    "steps_committed",
    "steps_skipped",
    "waits",
)
