"""The models of the job: each with its layout, optimizer and current step. Pure.

A model gets its number when its name is registered for the first time. The first model has number 0, and a number is
never used again. Before anything is registered the first model exists without a name, so that every job has a status.
Messages name a model by its number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.first_values import FirstValues
from axon_ps.coordinator.core.placement.holders import SliceHolders
from axon_ps.coordinator.core.records import Durable, DurableModel, deletions, models_record
from axon_ps.coordinator.core.registration import Registration, covering
from axon_ps.coordinator.core.steps.attempts import Attempts
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import num_slices
from axon_ps.storage.state_store.base import Record
from axon_ps.types import EACH_WORKER, Decision, Grouping, Hyper, Member, ModelProgress, OptimizerSpec, Outcome
from axon_ps.wire.events import JobState, ModelPosition, ModelStatus

MAX_MODELS = 256
"""Most models that a job has at a time."""

MAX_NUMBERS = 1 << 14
"""Most models that a job may ever have had: members receive the numbers that are released."""

MAX_SLICES = 1 << 15
"""Most slices of all models of a job.

A new placement costs the coordinator and every member time in proportion to them, on its event loop.
"""

MAX_SERVER_SLICES = 1 << 12
"""Most copies of slices for each shard server of a job: each costs it time in every step."""

MAX_SPEC_BYTES = 256 << 20
"""Most bytes of the layouts and optimizers that a job has registered, as they are stored."""


class Model:
    """One model.

    Args:
        number: its number.
        durable: as it was before the coordinator's restart.
        num_shards: shard servers of the job.

    Attributes:
        name: its name; empty until registered.
        registration: its layout and optimizer.
        holders: the servers that hold its slices.
        first_values: the workers that may give it its first values.
        attempts: the votes and reports in its step.
        step: the current step attempt.
        version: committed steps.
        open: whether an attempt is in progress.
        decisions: the newest ones.
        last_norm: gradient norm of the newest step that committed.
        committed: the newest values that were committed with its steps, by name.
        stored_bytes: of its layout and optimizer.
        hyper: per parameter group, the hyperparameters of the newest step that committed; empty = as registered.
        refused: the number of newest steps in a row that were aborted because of the votes.
        restored: the optimizer of the checkpoint that the values are from; None = from none since our start.
    """

    def __init__(self, number: int, durable: DurableModel, num_shards: int) -> None:
        self.number = number
        self.name = durable.name
        self.registration = Registration(durable.spec, durable.optimizer, number=number, name=durable.name)
        self.holders = SliceHolders(self.registration, durable.parameters, num_shards)
        self.first_values = FirstValues(self.registration, self.holders)
        self.attempts = Attempts()
        self.step = durable.step
        self.version = durable.version
        self.open = False
        self.decisions = list(durable.decisions)
        self.committed: Mapping[str, str] = dict(durable.committed)
        known = (records.spec_record(number, s) for s in (durable.spec,) if s is not None)
        known_too = (records.optimizer_record(number, o) for o in (durable.optimizer,) if o is not None)
        self.stored_bytes = sum(len(record.value or b"") for record in (*known, *known_too))
        self.hyper: tuple[Hyper, ...] = next((d.hyper for d in reversed(durable.decisions) if d.hyper), ())
        self.restored: OptimizerSpec | None = None
        self.refused = durable.decisions[-1].refused if durable.decisions else 0
        steps = (d for d in reversed(durable.decisions) if d.outcome is Outcome.COMMIT and d.copy is None)
        self.last_norm = next((d.grad_norm for d in steps), 0.0)

    @property
    def registered(self) -> bool:
        """True if it has a layout."""
        return self.registration.spec is not None

    @property
    def progress(self) -> ModelProgress:
        """Its step and version."""
        return ModelProgress(model=self.number, step=self.step, version=self.version)

    @property
    def position(self) -> ModelPosition:
        """The newest known epoch, step, version and placement."""
        return ModelPosition(
            model=self.number,
            epoch=self.holders.parameters.epoch,
            initialized=self.holders.parameters.initialized,
            optimized=self.registration.optimizer is not None,
            step=self.step,
            version=self.version,
            placement=self.holders.placement_number,
        )

    def state(self, shards: list[Member], *, full: bool = False) -> JobState:
        """Return its state for members, with layout and optimizer only when `full`."""
        r, p = self.registration, self.holders.parameters
        return JobState(
            spec=r.spec if full else None,
            optimizer=r.optimizer if full else None,
            initialized=p.initialized and not self.holders.lost_with_parameters(shards),
            version=self.version,
            epoch=p.epoch,
            model=self.number,
            name=self.name,
            copied=p.copied,
            placement=p.placement,
            out_of_memory=self.holders.out_of_memory_reason,
            committed=self.committed,
        )

    @property
    def run_began(self) -> int:
        """The version with which the present run of the workers began, or the one restored in it."""
        return self.holders.parameters.run_began

    def updated(self, decision: Decision) -> list[Record]:
        """Apply the hyperparameters and the change of optimizer of a committed step; return the records to write."""
        before = self.registration.optimizer
        self.registration.change_optimizer(decision)
        self.hyper = decision.hyper
        return self._changed(before)

    def restore(self, saved: OptimizerSpec | None) -> list[Record]:
        """Note the optimizer of the checkpoint that the values come from; return the records to write."""
        before = self.registration.optimizer
        self.restored, self.hyper = saved, ()
        if saved is not None and before is not None and saved.name == before.name:
            self.hyper = saved.groups
            self.registration.optimizer = self.with_restored(before)
        return self._changed(before)

    def with_restored(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        """Return an optimizer, extended by the moments that came from the checkpoint."""
        saved = self.restored
        of_it = saved is not None and saved.name == optimizer.name
        return covering(optimizer, (*saved.groups, *saved.moments)) if of_it and saved is not None else optimizer

    def _changed(self, before: OptimizerSpec | None) -> list[Record]:
        after = self.registration.optimizer
        return [] if after is None or after == before else [records.optimizer_record(self.number, after)]

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer with the present hyperparameters, as a checkpoint has it."""
        registered = self.registration.optimizer
        if registered is None or len(self.hyper) != len(registered.groups):
            return registered
        return covering(replace(registered, groups=self.hyper), registered.groups)

    def status(
        self, shards: list[Member], copies: int, steps_per_s: float, awaited: Collection[int] = ()
    ) -> ModelStatus:
        """Return its current state, for users.

        Args:
            shards: the live shard servers.
            copies: the number of copies that each slice is to have.
            steps_per_s: its rate.
            awaited: ranks of servers that may be dead, since they have not come back yet. Their copies do not count.
        """
        spec, placement = self.registration.spec, self.holders.parameters.placement
        state = self.state(shards)
        return ModelStatus(
            model=self.number,
            name=self.name,
            version=self.version,
            step=self.step,
            epoch=state.epoch,
            initialized=state.initialized,
            parameters=0 if spec is None else spec.layout.numel,
            slices=0 if placement is None else len(placement.holders),
            lacking=0 if placement is None else placement.lacking(copies, awaited),
            steps_per_s=steps_per_s,
        )


class Models:
    """All models of the job.

    Args:
        durable: as they were before the coordinator's restart.
        num_shards: shard servers of the job.
        out: gets the records to write.
    """

    def __init__(self, durable: Durable, num_shards: int, out: Outbox) -> None:
        self._num_shards = num_shards
        self._out = out
        self._next = durable.next_model
        self._models = {number: Model(number, stored, num_shards) for number, stored in sorted(durable.models.items())}

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def get(self, number: int) -> Model | None:
        """Return the model of a number, if the job has it."""
        return self._models.get(number)

    def named(self, name: str) -> Model | None:
        """Return the model of a name, if the job has it."""
        return next((m for m in self if m.name == name), None)

    def described(self, name: str) -> Model:
        """Return the registered model of a name, or the only one.

        Raises:
            InvalidRequest: there is none (yet), or the name is missing.
        """
        there = [m for m in self.registered if name in ("", m.name)]
        if len(there) == 1:
            return there[0]
        names = ", ".join(repr(m.name) for m in self.registered)
        if there:
            raise InvalidRequest(f"the job has the models {names}; say which one")
        wanted = f"model {name!r}" if name else "a model"
        raise InvalidRequest(f"the job does not have {wanted} (yet); it has {names or 'none'}")

    def step_of(self, name: str) -> tuple[int, int]:
        """Return the number of a registered model, and its present step. Errors are those of `described`."""
        model = self.described(name)
        return model.number, model.step

    @property
    def registered(self) -> list[Model]:
        """The models that have a layout, by number."""
        return [m for m in self if m.registered]

    @property
    def specs(self) -> dict[str, JobSpec]:
        """The registered layouts with their dtypes and policies, by name."""
        return {m.name: m.registration.spec for m in self if m.registration.spec is not None}

    @property
    def position(self) -> tuple[tuple[int, int, int], ...]:
        """The (number, epoch, version) of every model's parameters."""
        return tuple((m.number, m.holders.parameters.epoch, m.version) for m in self)

    @property
    def values_replaced(self) -> bool:
        """True if a model's values ever came from another source than a worker's first values and steps from these."""
        return any(model.holders.parameters.replaced for model in self.registered)

    def is_asynchronous(self, number: int) -> bool:
        """Return True if replicas of a model step asynchronously."""
        model = self.get(number)
        return model is not None and model.attempts.asynchronous

    @property
    def first(self) -> Model | None:
        """The model of the lowest number."""
        return next(iter(self), None)

    def norms(self) -> dict[str, float]:
        """Return the newest gradient norms as counters: of the first model, and by name if there are several."""
        named, first = self.registered, self.first
        norms = {f"model/{m.name}/last_grad_norm": m.last_norm for m in named} if len(named) > 1 else {}
        return {"last_grad_norm": 0.0 if first is None else first.last_norm, **norms}

    @property
    def grouping(self) -> Grouping:
        """The workers that make a replica together in the membership: those of the first model."""
        return next((m.registration.spec.grouping for m in self if m.registration.spec is not None), EACH_WORKER)

    @property
    def released(self) -> tuple[int, ...]:
        """The numbers of released models."""
        return tuple(number for number in range(self._next) if number not in self._models)

    def rank_held_by(self, incarnation: str) -> int | None:
        """Return the rank whose slices this incarnation of a shard server holds."""
        ranks = (m.holders.rank_held_by(incarnation) for m in self)
        return next((rank for rank in ranks if rank is not None), None)

    def still_held_by(self, incarnation: str) -> bool:
        """Return True if a lost shard server holds slices at a model's present version."""
        return any(m.holders.still_held_by(incarnation, m.version) for m in self)

    def message_prefix(self, model: Model) -> str:
        """Return the beginning of a message about a model: its name; empty if the job has only one."""
        return f"model {model.name!r}: " if len(self._models) > 1 else ""

    def find_or_create(self, name: str) -> Model:
        """Return the model of a name; if there is none, a new one, still to be added by `add`."""
        if (known := self.named(name)) is not None:
            return known
        first = self._models.get(0)
        if first is not None and not first.registered:
            return first
        if len(self._models) >= MAX_MODELS or self._next >= MAX_NUMBERS:
            raise Busy(
                f"the job has {len(self._models)} models and has had {self._next}, and model {name!r} is one too many: "
                f"at most {MAX_MODELS} at a time and {MAX_NUMBERS} in all; release those that are not needed"
            )
        return Model(self._next, DurableModel(name=name), self._num_shards)

    def check_stored(self, model: Model, more_bytes: int, name: str) -> None:
        """Check that `more_bytes` of a model may be stored."""
        others = sum(m.stored_bytes for m in self if m is not model)
        if (total := others + model.stored_bytes + more_bytes) > MAX_SPEC_BYTES:
            raise Busy(
                f"with model {name!r} the job's layouts and optimizers would take {total} bytes; at most "
                f"{MAX_SPEC_BYTES} are stored: release models that are not needed"
            )

    def check_slices(self, model: Model, name: str, spec: JobSpec, servers: int, copies: int) -> None:
        """Check that the job's shard servers can also have the slices of a model.

        Args:
            model: gets the spec.
            name: its future name.
            spec: the spec.
            servers: the number of shard servers.
            copies: the number of servers that hold each slice.
        """
        mine = num_slices(spec.layout, self._num_shards, spec.options)
        others = sum(len(m.holders.placement.holders) for m in self.registered if m is not model)
        most = min(MAX_SLICES, MAX_SERVER_SLICES * servers // copies)
        if mine + others > most:
            beside = f", beside {others} of other models" if others else ""
            raise Busy(
                f"the registration of model {name!r} is refused, nothing has changed: its {len(spec.layout.units)} "
                f"units are cut into {mine} slices{beside}; a job with {servers} shard servers and {copies} copies of "
                f"each slice has at most {most}: put more parameters into each unit (unit_types, or fully_shard on "
                "larger modules), start more shard servers (--shards), or release models that are not needed"
            )

    def add(self, model: Model, name: str) -> None:
        """Add a model that is being registered."""
        model.name = model.registration.name = name
        self._models[model.number] = model
        self._next = max(self._next, model.number + 1)
        self._persist()

    def remove(self, model: Model) -> None:
        """Remove a model."""
        del self._models[model.number]
        self._out.persist(deletions(model.number, model.decisions))
        self._persist()

    def _persist(self) -> None:
        self._out.persist([models_record({m.number: m.name for m in self}, self._next)])
