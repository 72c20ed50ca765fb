"""What a shard server holds and decides: a deterministic state machine without threads, sockets or clocks.

Events in: the job's spec and optimizer, first values, membership, gradient chunks, decisions. Out: whether a chunk was
summed, is a duplicate or must wait, when the step is ready, which chunks must be applied, and frames to serve. The
shell (`shard.shell`) performs: it waits, runs `apply_chunk` in threads and talks to the coordinator.

Invariants:
- Chunks are summed in replica order, whatever the order of arrival, so a step's result does not depend on timing.
- Version moves only by a committed decision (one step) or by a restore. Every unit reaches it when its apply has
  finished, or at once when it is not changed.
- A step is named by (generation, step). A chunk of another step is never summed: of a decided one it is a duplicate or
  an abort, of a later one it waits.

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
from collections.abc import Sequence

import numpy as np

from axon_ps.errors import InternalError, InvalidRequest, Misuse, StepAborted
from axon_ps.shard.slices import OwnedSlice
from axon_ps.shard.updater import Updater
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, Outcome


class Push(enum.Enum):
    """What became of a gradient chunk."""

    SUMMED = "summed"
    DUPLICATE = "duplicate"  # it was summed before; acknowledge and drop it
    WAIT = "wait"  # a replica before it, the decision, or the unit's apply has to come first; ask again


class ShardEngine:
    """The slices of one shard server and the step under way.

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
        self._missing = 0
        self._lacking = 0
        self._last_committable = -1  # the last step that ended with all gradients summed
        self._last_committed: Decision | None = None
        self._assumed: tuple[tuple[Hyper, ...], tuple[Hyper, ...]] | None = None  # of this step: as given, validated
        self._restoring = False
        self._moments_of = ""

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
                spec.precision.param,
                spec.precision.grad,
            )
        self.spec = spec
        self._missing = sum(s.missing for s in self.slices.values())
        self._lacking = sum(s.lacking for s in self.slices.values())

    def set_optimizer(self, optimizer: OptimizerSpec) -> Updater:
        """Take the job's optimizer: moments are made, and parameters find their groups. Again changes nothing.

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
        if self.version:
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

    def begin_restore(self) -> None:
        """Other values are on their way: nothing is served until `restored` or `cancel_restore`."""
        self._restoring = True

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
        self._restart()
        if self.initialized and not self._restoring and version > self.version:
            raise InternalError(
                f"the job is at version {version} and this shard server at {self.version}: it missed a commit, so its "
                "parameters are stale; restore a checkpoint"
            )

    def _restart(self) -> None:
        self._assumed = None
        for owned in self.slices.values():
            owned.restart()
        self._missing = sum(s.missing for s in self.slices.values())

    # ------------------------------------------------------------------ gradients

    def push(self, step: int, unit: int, offset: int, replica: int, dtype: DType, grad: Array | None) -> Push:
        """Add one replica's gradient chunk to the step's sum, if it is its turn.

        Args:
            step: the step attempt it belongs to.
            unit: which unit.
            offset: where the chunk begins in the unit.
            replica: whose gradient.
            dtype: of `grad`.
            grad: wire[c]; None when this replica has none for the unit.

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
        if step != self.step:
            return self._other_step(step)
        summed = owned.summed[index]
        if summed > replica:
            self.counters["duplicates"] += 1
            return Push.DUPLICATE
        if owned.applying or summed < replica:
            self.counters["waits"] += 1
            return Push.WAIT
        last = replica == self.num_replicas - 1
        owned.add(index, grad, last)
        if last:
            self._missing -= 1
        return Push.SUMMED

    @property
    def param_dtype(self) -> DType:
        """The dtype that frames hold."""
        assert self.spec is not None
        return self.spec.precision.param

    @property
    def grad_dtype(self) -> DType:
        """The dtype gradients travel in."""
        assert self.spec is not None
        return self.spec.precision.grad

    def _other_step(self, step: int) -> Push:
        if step > self.step:  # the caller knows a decision that is still on its way to us
            self.counters["waits"] += 1
            return Push.WAIT
        if step == self._last_committable:
            self.counters["duplicates"] += 1
            return Push.DUPLICATE
        raise StepAborted(f"step {step} is over and did not commit; the current step is {self.step}")

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
        if step != self.step:
            return begin  # what becomes of its chunks is for `push` to say
        for (offset, _), summed in zip(owned.bounds[first:], owned.summed[first:], strict=True):
            if summed <= replica:
                return offset
        return owned.end

    def ready(self) -> float | None:
        """The sum of squares of all summed gradients here, once every chunk has every replica; None before.

        A server without trainable slices has nothing to wait for and is never asked: None.
        """
        if self._missing or self.num_replicas == 0:
            return None
        trainable = [s for s in self.slices.values() if s.trainable]
        if not trainable or any(s.applying for s in trainable):
            return None
        return math.fsum(x for s in trainable for x in s.squares) if self._finite(trainable) else math.nan

    @staticmethod
    def _finite(slices: Sequence[OwnedSlice]) -> bool:
        return all(math.isfinite(x) for s in slices for x in s.squares)

    # ------------------------------------------------------------------ the decision

    def decide(self, decision: Decision) -> tuple[int, ...]:
        """Take the coordinator's word: the units to apply, in forward order (none unless it commits).

        Run `apply_chunk` on every chunk of each, then `finish`. A decision known already changes nothing.

        Raises:
            InternalError: it commits a step whose gradients are not all here, or without an optimizer.
        """
        if decision.step < self.step:
            return ()
        if decision.outcome is not Outcome.COMMIT:
            self.step = decision.step + 1
            if decision.outcome is Outcome.SKIP:
                self._last_committable = decision.step
                self.counters["steps_skipped"] += 1
            else:
                self.counters["steps_aborted"] += 1
            self._restart()
            return ()
        if decision.version <= self.version:
            return ()
        if not self.slices:  # more servers than slices: there is nothing to miss
            self.step, self.version = decision.step + 1, decision.version
            return ()
        if decision.step != self.step or self._missing or decision.version != self.version + 1:
            raise InternalError(
                f"step {decision.step} commits version {decision.version}, but this server is at step {self.step} and "
                f"version {self.version} with {self._missing} chunks missing; restore a checkpoint"
            )
        return self._commit(decision)

    def _commit(self, decision: Decision) -> tuple[int, ...]:
        changed = [u for u, owned in self.slices.items() if owned.trainable and any(owned.present)]
        if self.updater is not None:
            self.updater.prepare(decision.hyper, decision.clip_factor, self.slices.values())
        elif changed:
            raise InternalError("a step commits, but no optimizer was registered")
        foreseen = decision.clip_factor == 1.0 and self._assumed is not None and self._assumed[0] == decision.hyper
        for unit, owned in self.slices.items():
            if unit in changed:
                owned.begin_update(foreseen=foreseen)
            else:
                owned.restart()
                owned.reached = decision.version
        self._last_committable = decision.step
        self._last_committed = decision
        self.step = decision.step + 1
        self.version = decision.version
        self._assumed = None
        self._missing = sum(s.missing for s in self.slices.values())
        self.counters["steps_committed"] += 1
        return tuple(changed)

    def scratch(self) -> Array:
        """What a thread that calls `apply_chunk` brings along: wire[chunk_numel]."""
        assert self.spec is not None
        return np.empty(self.spec.options.chunk_numel, self.spec.precision.param.numpy)

    def apply_chunk(self, unit: int, index: int, scratch: Array) -> None:
        """Update one chunk of a unit that `decide` named. Any thread; chunks in any order, each once."""
        assert self.updater is not None
        self.updater.apply_chunk(self.slices[unit], index, self.version, scratch)

    def finish(self, unit: int) -> None:
        """All chunks of `unit` have been applied: it is at the new version."""
        owned = self.slices[unit]
        owned.end_update(self.version)
        self.counters["encodings"] += len(owned.frames)

    # ------------------------------------------------------------------ parameters

    def available(self, unit: int, min_version: int) -> bool:
        """Whether `unit` can be served at `min_version` or later. A frozen unit is at every version.

        Raises:
            Misuse: the layout is not known.
            InvalidRequest: there is no such unit here.
        """
        owned = self.slice_of(unit)
        there = bool(owned.frames) or not (owned.lacking or owned.applying)
        return there and not self._restoring and (owned.reached >= min_version or not owned.trainable)

    def frames(self, unit: int, begin: int, end: int) -> tuple[bytes, ...]:
        """The encoded chunks of elements [begin, end) of a unit in the job's wire dtype, all of one version.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
        """
        owned = self.slice_of(unit)
        first, last = owned.range_of(begin, end)
        self.counters["encodings"] += owned.ensure_frames()
        return owned.frames if last - first == len(owned.bounds) else owned.frames[first:last]

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
        if not owned.present[index]:
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
        `shard.slices`); generation, step, version and what is missing.
        """
        memory = ("master_bytes", "accumulator_bytes", "state_bytes", "frame_bytes")
        values: Counter[str] = Counter(dict.fromkeys((*memory, *_COUNTERS), 0))
        values.update(self.counters)
        for owned in self.slices.values():
            values.update(owned.memory())
        values.update(
            generation=self.generation,
            step=self.step,
            version=self.version,
            slices=len(self.slices),
            missing_chunks=self._missing,
            lacking_chunks=self._lacking,
        )
        return {name: float(value) for name, value in sorted(values.items())}


_COUNTERS = (
    "bytes_in",
    "bytes_out",
    "chunks_in",
    "chunks_out",
    "duplicates",
    "encodings",
    "gathers",
    "pushes",
    "restores",
    "steps_aborted",
    "steps_committed",
    "steps_skipped",
    "waits",
)
