"""What a shard server holds and decides: a deterministic state machine without threads, sockets or clocks.

Events in: the job's spec and optimizer, first values, membership, gradient chunks, decisions. Out: whether a chunk was
summed, is a duplicate or must wait, when the step is ready, which chunks must be applied, and frames to serve. The
shell (`shard.server.shell`) performs: it waits, runs `apply` in threads and talks to the coordinator.

Invariants:
- Chunks are summed in replica order, whatever the order of arrival, so a step's result does not depend on timing.
- Version moves only by a committed decision (one step) or by a restore. Every unit reaches it when its apply has
  finished, or at once when it is not changed.
- An engine is of one model; it knows of no other but in `copy`, where the slices to copy are given to it.
- A step is named by (generation, step), or by (generation, replica, clock) where replicas step alone. A chunk of
  another step is never summed: of a decided one it is a duplicate or an abort, of a later one it waits.

Note: [Units without gradient]
    A replica that has no gradient for a unit says so (`absent`), and its turn passes. A unit for which all replicas are
    absent is not touched by the optimizer: moments, weight decay and the update count stay, as `torch.optim` leaves a
    parameter whose grad is None. Its frames then say an older version than the job has; so do those of frozen units.
    What frames say is the version that last changed the unit: equal on all servers, since absence is.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import compressor_of
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
        generation: of the membership, as last told; 0 before the first.
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
        self._assumed: tuple[tuple[Hyper, ...], tuple[Hyper, ...]] | None = None  # of this step: as given, validated
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
        for piece in spec.plan(num_servers).by_server[server]:
            self.slices[piece.unit] = OwnedSlice(
                piece,
                spec.layout.units[piece.unit],
                first_parameter[piece.unit],
                spec.options.chunk_numel,
                spec.precision,
            )
        self.spec = spec
        grads = spec.precision.grad_compression
        self._grad_compressor = None if grads is None else compressor_of(grads)
        self._begin_attempts()
        self._lacking = sum(s.lacking for s in self.slices.values())

    @property
    def alone(self) -> bool:
        """Whether each replica's gradient is a step of its own."""
        return self.spec is not None and self.spec.policy.asynchronous

    def set_optimizer(self, optimizer: OptimizerSpec) -> Updater:
        """Take the model's optimizer: moments are made, and parameters find their groups. Again changes nothing.

        Moments that a restore brought are kept if they are of this optimizer.

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
        """Store the first values of one chunk; says whether every slice here now has its values.

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
            InternalError: the job is ahead of this server by a step it was never told of.
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
        """Forget what was summed; as many attempts as there are in this generation begin."""
        self._attempts.begin(alone=self.alone, step=self.step, num_replicas=self.num_replicas)
        for owned in self.slices.values():
            owned.set_sums(len(self._attempts))
        self._restart(range(len(self._attempts)))

    def _restart(self, lanes: Iterable[int]) -> None:
        self._assumed = None
        for lane in lanes:
            for owned in self.slices.values():
                owned.restart(lane)
            self._attempts[lane].missing = self._count_missing(lane)

    def _count_missing(self, lane: int) -> int:
        return sum(s.sums[lane].missing for s in self.slices.values())

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
        lane, turn = self._attempts.place(replica)
        attempt = self._attempts[lane]
        if step != attempt.step:
            return self._other_step(step, attempt)
        summed = owned.sums[lane].summed[index]
        if summed > turn:
            self.counters["duplicates"] += 1
            return Push.DUPLICATE
        if not owned.takes(lane) or summed < turn:
            self.counters["waits"] += 1
            return Push.WAIT
        last = turn == attempt.replicas - 1
        owned.add(index, grad, last, lane)
        if last:
            attempt.missing -= 1
        return Push.SUMMED

    def is_last(self, replica: int) -> bool:
        """Whether a chunk of this replica's may be what a step was waiting for."""
        return self.alone or replica == self.num_replicas - 1

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
        lane, turn = self._attempts.place(replica)
        if not 0 <= lane < len(self._attempts) or step != self._attempts[lane].step:
            return begin  # what becomes of its chunks is for `push` to say
        for (offset, _), summed in zip(owned.bounds[first:], owned.sums[lane].summed[first:], strict=True):
            if summed <= turn:
                return offset
        return owned.end

    def complete(self) -> Iterator[tuple[int, int]]:
        """Every attempt that has all its gradients, as (replica, step); replica is 0 where all step together."""
        for lane, attempt in enumerate(self._attempts):
            if not attempt.missing:
                yield lane, attempt.step

    def ready(self, replica: int = 0) -> float | None:
        """The sum of squares of all summed gradients here, once every chunk has every replica; None before.

        A server without trainable slices has nothing to wait for and is never asked: None.

        Args:
            replica: whose attempt, where replicas step alone.
        """
        lane, _ = self._attempts.place(replica)
        if self._attempts[lane].missing or self.num_replicas == 0:
            return None
        trainable = [s for s in self.slices.values() if s.trainable]
        if not trainable or not all(s.takes(lane) for s in trainable):
            return None
        squares = [x for s in trainable for x in s.sums[lane].squares]
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan

    # ------------------------------------------------------------------ the decision

    def decide(self, decision: Decision) -> tuple[int, ...]:
        """Take the coordinator's word: the units to apply, in forward order (none unless it commits).

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
        lane, name, _ = self._attempts.decided(decision)
        attempt = self._attempts[lane]
        in_step = (decision.step, decision.version, name) == (self.step, self.version + 1, attempt.step)
        if in_step and decision.copy is not None:
            return self._begin_copy(decision)
        if not in_step or attempt.missing:
            raise InternalError(
                f"step {decision.step} commits version {decision.version}, but this server is at step {self.step} and "
                f"version {self.version} with {attempt.missing} chunks missing; restore a checkpoint"
            )
        return self._commit(decision, lane)

    def _drop(self, decision: Decision) -> None:
        """A step is skipped or aborted; without a turn, every attempt under way is."""
        self.step = decision.step + 1
        skipped = decision.outcome is Outcome.SKIP
        self.counters["steps_skipped" if skipped else "steps_aborted"] += 1
        if decision.turn is None and self.alone:
            self._begin_attempts()
            return
        self._restart([self._end_attempt(decision, summed=skipped)])

    def _end_attempt(self, decision: Decision, *, summed: bool = True) -> int:
        lane, _, following = self._attempts.decided(decision)
        self._attempts[lane].end(following, self._count_missing(lane), summed=summed)
        return lane

    def _commit(self, decision: Decision, lane: int) -> tuple[int, ...]:
        changed = [u for u, owned in self.slices.items() if owned.trainable and any(owned.sums[lane].present)]
        if self.updater is not None:
            self.updater.prepare(decision.hyper, decision.clip_factor, self.slices.values())
        elif changed:
            raise InternalError("a step commits, but no optimizer was registered")
        foreseen = decision.clip_factor == 1.0 and self._assumed is not None and self._assumed[0] == decision.hyper
        for unit, owned in self.slices.items():
            if unit in changed:
                self.counters["encodings"] += owned.begin_update(foreseen=foreseen, lane=lane)
            else:
                owned.restart(lane)
                owned.unchanged(decision.version)
        self._last_committed = decision
        self.step = decision.step + 1
        self.version = decision.version
        self._assumed = None
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
        self._assumed = None
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
        """What a thread that calls `apply` for at most so many chunks brings along; see `OwnedSlice.scratch`."""
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
        """Whether `unit` can be served at `min_version` or later; who asks for a frozen unit asks for that of a copy.

        Raises:
            Misuse: the layout is not known.
            InvalidRequest: there is no such unit here.
        """
        owned = self.slice_of(unit)
        there = bool(owned.frames) or not (owned.lacking or owned.applying)
        return there and not self._restoring and owned.reached >= min_version

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
        whole = owned.numel == self.spec.layout.units[unit].numel
        many = owned.shared is None and sum(s.shared is not None for s in self.slices.values()) >= MOST_SHARED
        return owned.share() if whole and not many and not self.alone else None

    def foresee(self, step: int, unit: int, index: int, hypers: tuple[Hyper, ...], scratch: Array) -> bytes | None:
        """The frame of a chunk as it will be if `step` commits unclipped with `hypers`; None: wait, not yet known.

        Args:
            step: an undecided step attempt, or the last one that committed.
            unit: which unit.
            index: number of the chunk here.
            hypers: per parameter group.
            scratch: from `scratch()`.

        Raises:
            Misuse: there is no layout or optimizer, or the unit is frozen.
            InvalidRequest: there is no such unit or group, or another worker assumes other hyperparameters.
            StepAborted: the step ended otherwise, or what it will do cannot be told.
        """
        owned = self.slice_of(unit)
        if self.updater is None or not owned.trainable:
            raise Misuse(f"unit {unit} is frozen or there is no optimizer yet; no step will change it")
        if self.alone:
            raise Misuse("replicas step alone, so what the next version will be is not known before it is decided")
        if step > self.step or owned.applying:
            return None
        if step < self.step:
            last = self._last_committed
            if last is None or (last.step, last.hyper, last.clip_factor) != (step, hypers, 1.0):
                raise StepAborted(f"step {step} did not commit as assumed")
            self.counters["encodings"] += owned.ensure_frames()
            return owned.frames[index]
        if self.num_replicas == 0 or owned.summed[index] < self.num_replicas:
            return None
        if not owned.sums[0].present[index]:
            raise StepAborted(f"no replica has a gradient for a part of unit {unit}; its step cannot be foreseen")
        if self._assumed is None:
            self._assumed = hypers, self.updater.validate(hypers)
        elif self._assumed[0] != hypers:
            raise InvalidRequest(f"workers assume different hyperparameters for step {step}")
        made = bool(owned.ahead) and bool(owned.ahead[index])
        self.counters["encodings"] += not made
        return self.updater.foresee_chunk(owned, index, self._assumed[1], self.version + 1, scratch)

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


MOST_SHARED = 200
"""How many units are mapped at most: each takes two file descriptors here and one in a worker, of often 1024."""

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
