"""Registering and releasing models: checks before anything changes, then the changes. Pure.

The worker of lowest rank registers a model first, since its layout and its values count: see Note: [Whose values are
first] of `first_values`. The calls of the others are held until it has registered, is not a member any more, or was
refused.

Note: [Nothing is durable before it can be held]
    Stored models come back after every restart. So a stored model that no server can hold would end every server, again
    and again. Therefore a registration is checked in this order: the model itself, the optimizers and compressors that
    the shard servers know, their memory (see `placement.capacity`), and the limits of the store. Only then is anything
    changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller, Callers
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.checkpoints.restores import Restores, Resume
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import MAX_MODELS, MAX_SLICES, Model, Models
from axon_ps.coordinator.core.registration import check_known
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.waiting import Waiting
from axon_ps.errors import AxonError, Busy, InvalidRequest, MemberLost, Timeout
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.memory import slice_bytes
from axon_ps.sharding.placement import Placement, new_placement
from axon_ps.sharding.plan import num_slices
from axon_ps.storage.state_store.base import Record
from axon_ps.types import OptimizerSpec, Role
from axon_ps.wire import codec
from axon_ps.wire.events import FIRST_NAME, JobState, Registered

MAX_WAITERS = 1 << 14
"""Most calls that may be held until other workers have registered."""


class Registrations:
    """Registers and releases the models of the job.

    Args:
        config: of the job.
        callers: finds the members among callers.
        assembly: the members.
        models: the models.
        members: joins, leaves and losses.
        snapshots: the checkpoint being written.
        restores: the holders of all parameters.
        out: gets the records to write and the events to send.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        callers: Callers,
        assembly: Assembly,
        models: Models,
        members: Members,
        snapshots: Snapshots,
        restores: Restores,
        out: Outbox,
    ) -> None:
        self._config = config
        self._callers = callers
        self._assembly = assembly
        self._models = models
        self._members = members
        self._snapshots = snapshots
        self._restores = restores
        self._out = out
        self._waiting = Waiting("registrations", MAX_WAITERS)
        self._calls: dict[int, tuple[str, str]] = {}  # waiting calls: incarnation and name of the model
        self._refused: dict[str, set[str]] = {}  # by incarnation, the models whose registration was refused
        members.on_change.append(lambda _now: self.settle())

    def wants_resume(self, caller: Caller, name: str) -> bool:
        """Return True if a layout that the caller registers now must come with the manifest of `config.resume`."""
        known = self._models.named(name)
        gives_layout = (known is None or not known.registered) and not self._first(caller.incarnation, name)
        return bool(self._config.resume) and gives_layout

    def preparation(self, spec: JobSpec) -> Callable[[], None]:
        """Return the long part of a registration, for any thread, before `register`: its results are cached."""
        cuts, servers, copies = self._config.num_shards, self._assembly.servers(), self._config.copies

        def prepare() -> None:
            if servers and num_slices(spec.layout, cuts, spec.options) <= MAX_SLICES:  # else it is refused
                new_placement(spec.plan(cuts), servers, copies)
                slice_bytes(spec, 0, cuts)
                codec.job_spec_to_proto(spec)

        return prepare

    def register(
        self,
        call: int,
        caller: Caller,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        resume: Resume | None = None,
        *,
        now: float,
        name: str = FIRST_NAME,
        later: bool = False,
    ) -> list[Action]:
        """Give a model the layout or optimizer of a worker, or compare the worker's with the job's.

        Args:
            call: gets a `Registered`, or the error with which it is refused. If another worker's layout comes first it
                gets None; then call `wait` before registering again.
            caller: the worker.
            spec: layout, dtypes and policy.
            optimizer: the optimizer.
            resume: the checkpoint to begin with instead of uploaded values; used by the first spec only.
            now: the time.
            name: of the model. A new name adds a model to the job.
            later: whether the optimizer is to replace the model's with a later step. Now it is only checked.

        It is refused with:
            LayoutMismatch: it differs from the job's.
            InvalidRequest: it is invalid, or a shard server does not know the optimizer or a compressor.
            Misuse: an optimizer comes before any layout.
            Busy: the job can have no more models, or the shard servers have no memory for it. The message has the bytes
                that each needs and has. Nothing is durable then.
            MemberLost: a shard server that is to hold some of it is absent.

        Raises:
            GenerationChanged: the caller is not a member.
        """
        entry = self._callers.member(caller, Role.WORKER, "registers")
        incarnation = entry.member.incarnation
        self._refused.get(incarnation, set()).discard(name)
        answer: Registered | AxonError | None = None
        try:
            if spec is None or not self._first(incarnation, name):
                answer = self._register(entry, spec, optimizer, resume, now, name, later=later)
        except AxonError as error:  # nothing has changed
            answer = error
            registers_again = isinstance(error, MemberLost)  # a shard server is not there yet
            refused = self._refused.setdefault(incarnation, set())
            if spec is not None and not registers_again and len(refused) < MAX_MODELS:
                refused.add(name)
        self._out.reply(call, answer)
        self.settle()
        return self._out.take()

    def wait(self, call: int, caller: Caller, name: str, now: float, timeout_s: float) -> list[Action]:
        """Answer `call` with None when its worker is to register a model's layout again.

        Raises:
            GenerationChanged: the caller is not a member.
            Busy: too many calls are held.
        """
        entry = self._callers.member(caller, Role.WORKER, "registers")
        self._waiting.add(call, entry.member.incarnation, now, timeout_s)
        self._calls[call] = entry.member.incarnation, name
        self.settle()
        return self._out.take()

    def release(self, call: int, caller: Caller, number: int, name: str) -> list[Action]:
        """Release a model. `call` gets True if it was registered.

        Raises:
            InvalidRequest: it has another name.
            Busy: a checkpoint is being written.
        """
        self._callers.check_takes_away(caller)
        model = self._models.get(number)
        if is_there := model is not None and model.registered:
            assert model is not None
            if model.name != name:
                raise InvalidRequest(f"model {number} is {model.name!r}, not {name!r}; nothing is released")
            self._snapshots.check_free()
            self._release(model)
        self._out.reply(call, is_there)
        return self._out.take()

    def settle(self) -> None:
        """Answer the calls that need not be held any more."""
        for call, waiting in list(self._calls.items()):
            if not self._first(*waiting):
                self.cancel(call)
                self._out.reply(call, None)

    def lost(self, incarnation: str, error: AxonError) -> None:
        """Fail the waiting calls of a former member."""
        self._refused.pop(incarnation, None)
        for call in [call for call, (waiting, _) in self._calls.items() if waiting == incarnation]:
            self.cancel(call)
            self._out.reply(call, error)

    def cancel(self, call: int) -> None:
        """Forget a call that its caller does not wait for any more."""
        if self._calls.pop(call, None) is not None:
            self._waiting.remove(call)

    def tick(self, now: float) -> None:
        """Answer the calls that have timed out."""
        for call in self._waiting.late(now):
            waiting, waited_s = self._calls[call], self._waiting.timeout_s(call)
            self.cancel(call)
            self._out.reply(call, Timeout(f"{self._text(*waiting)} after {waited_s:g} s"))

    def next_deadline(self) -> float:
        """Return the time at which the next call times out."""
        return self._waiting.next_deadline()

    def pending(self) -> list[str]:
        """Return the reasons for which registrations are held, as text."""
        return sorted({self._text(*waiting) for waiting in self._calls.values()})

    def _first(self, incarnation: str, name: str) -> str:
        """Return the worker that must register a model before another one; empty = none."""
        there = self._candidates(name)
        if (model := self._models.named(name)) is not None:
            return model.first_values.comes_before(incarnation, there)
        return there[0] if there and there[0] != incarnation else ""

    def _candidates(self, name: str) -> list[str]:
        """Return the workers whose layout and values of a model may count, by rank."""
        there = (entry.member.incarnation for entry in self._assembly.roster.of_role(Role.WORKER))
        return [incarnation for incarnation in there if name not in self._refused.get(incarnation, ())]

    def _text(self, incarnation: str, name: str) -> str:
        first = self._assembly.roster.get(self._first(incarnation, name))
        who = "a worker" if first is None else first.name
        return (
            f"model {name!r} still waits for {who}, whose layout and values it begins with, to wrap it (every worker "
            "must wrap the same models)"
        )

    def _register(
        self,
        entry: RosterEntry,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        resume: Resume | None,
        now: float,
        name: str,
        *,
        later: bool,
    ) -> Registered:
        a, rank = self._assembly, entry.member.rank
        model = self._models.find_or_create(name)
        r = model.registration
        if spec is None and optimizer is None:
            raise InvalidRequest(f"worker {rank} registers neither a layout nor an optimizer")
        ranks = () if spec is None else (r for row in spec.grouping.rows for r in row)
        if (highest := max(ranks, default=-1)) >= max(a.world_size, 1):
            raise InvalidRequest(
                f"worker {rank} registers replicas that name rank {highest}; the job has {a.world_size} workers"
            )
        if spec is not None and model.holders.out_of_memory:
            raise Busy(model.holders.out_of_memory_reason)
        new_spec = spec if spec is not None and r.check_spec(spec, rank) else None
        new_optimizer = None
        if optimizer is not None:
            new_optimizer = r.check_optimizer(optimizer, spec or r.spec, rank, later=later)
        if later:
            self._check_change(model, new_optimizer)
            new_optimizer = None
        is_new = new_spec is not None or new_optimizer is not None
        grouping, with_resume = self._models.grouping, new_spec is not None and resume is not None
        if is_new:
            self._set(model, name, new_spec, new_optimizer, rank)
        upload = spec is not None and not with_resume and self._claim_upload(model, entry)
        self._restores.persist()
        if new_spec is not None and resume is not None:
            self._restores.order([dataclasses.replace(resume, model=name)], now)
        elif is_new:
            a.announce(model)
            if self._models.grouping != grouping:  # replicas are numbered otherwise from now on
                self._members.change(
                    f"worker {rank} registered a layout whose replicas are {self._models.grouping}", now=now
                )
        return Registered(
            first=is_new,
            initialized=model.state(a.shards()).initialized,
            version=model.version,
            upload=upload,
            generation=a.generation,
            model=model.number,
        )

    def _release(self, model: Model) -> None:
        self._models.remove(model)
        for refused in self._refused.values():
            refused.discard(model.name)
        self._restores.released(model)
        event = JobState(model=model.number, name=model.name, released=True)
        self._out.push(self._assembly.roster.sessions(), event)
        self._assembly.counters["models_released"] += 1
        self._restores.try_again()

    def _check_change(self, model: Model, optimizer: OptimizerSpec | None) -> None:
        """Check that an optimizer can replace a model's."""
        r = model.registration
        if optimizer is None or r.spec is None:
            raise InvalidRequest(f"model {model.name!r} is to get another optimizer, and none was given")
        for server in self._assembly.roster.of_role(Role.SHARD):
            check_known(server.name, server.known, model.name, None, optimizer)
        self._check_capacity(model, model.name, model.holders.placement, None, optimizer)
        more_bytes = len(records.optimizer_record(model.number, optimizer).value or b"")
        self._models.check_stored(model, more_bytes, model.name)

    def _set(self, model: Model, name: str, spec: JobSpec | None, optimizer: OptimizerSpec | None, rank: int) -> None:
        """Set the layout or the optimizer of a model. See Note: [Nothing is durable before it can be held]."""
        a, r, holders = self._assembly, model.registration, model.holders
        for server in a.roster.of_role(Role.SHARD):
            check_known(server.name, server.known, name, spec, optimizer)
        optimizer = None if optimizer is None else model.with_restored(optimizer)
        if spec is not None:
            servers = a.servers()
            copies = min(self._config.copies, len(servers))
            self._models.check_slices(model, name, spec, len(servers), copies)
        placement = holders.placement if spec is None else holders.new_placement(spec, servers, self._config.copies)
        self._check_capacity(model, name, placement, spec, optimizer)
        stored: list[Record] = [] if spec is None else [records.spec_record(model.number, spec)]
        stored += [] if optimizer is None else [records.optimizer_record(model.number, optimizer)]
        stored_bytes = sum(len(record.value or b"") for record in stored)
        self._models.check_stored(model, stored_bytes, name)
        if spec is not None:
            r.set_spec(spec, rank)
            holders.set_placement(placement)
            self._models.add(model, name)
            a.stepping.begin_model(model)
            self._out.persist(a.records())
        r.optimizer = optimizer or r.optimizer
        model.stored_bytes += stored_bytes
        self._out.persist(stored)

    def _check_capacity(
        self, model: Model, name: str, placement: Placement, spec: JobSpec | None, optimizer: OptimizerSpec | None
    ) -> None:
        what, capacity = f"the registration of model {name!r}", self._assembly.capacity()
        if spec is not None:
            capacity.check_there(placement, what)
        capacity.check({model.number: (model, placement)}, what, spec, optimizer)

    def _claim_upload(self, model: Model, entry: RosterEntry) -> bool:
        if not model.state(self._assembly.shards()).initialized:
            model.first_values.waiting.add(entry.member.incarnation)
        there = self._candidates(model.name)
        rows = () if model.registration.spec is None else model.registration.spec.grouping.rows
        by_rank = {e.member.rank: e.member.incarnation for e in self._assembly.roster.of_role(Role.WORKER)}
        complete = [[by_rank[rank] for rank in row] for row in rows if all(rank in by_rank for rank in row)]
        mine = next((row for row in complete if entry.member.incarnation in row), ())
        if complete:
            there = [incarnation for incarnation in there if any(incarnation in row for row in complete)]
        return model.first_values.claim_upload(entry.member.incarnation, there, mine)
