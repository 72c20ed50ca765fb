"""Registering and releasing models: what is checked before anything changes, and what follows from it. Pure.

Note: [Nothing is durable before it can be held]
    What is stored comes back after every restart, so a model that no server can hold would end all of them, for good.
    So a registration is checked in this order: the model itself, what the shard servers know, their memory (see
    `placement.room`), what the job may store. Only then it changes anything.
"""

from __future__ import annotations

import dataclasses

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.checkpoints.restores import Restores, Resume
from axon_ps.coordinator.core.events import JobState, Registered
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.registration import check_known
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.storage.state_store.base import Record
from axon_ps.types import OptimizerSpec, Role


class Registrations:
    """Registers and releases the models of the job.

    Args:
        assembly: the members.
        models: the models.
        members: joins, leaves and losses.
        restores: which servers hold which parameters.
        out: gets the records to write and the events to send.
        replication: how many shard servers hold each slice.
    """

    def __init__(
        self, assembly: Assembly, models: Models, members: Members, restores: Restores, out: Outbox, replication: int
    ) -> None:
        self._assembly = assembly
        self._models = models
        self._members = members
        self._restores = restores
        self._out = out
        self._replication = replication

    def register(
        self,
        entry: RosterEntry,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        resume: Resume | None,
        now: float,
        name: str,
        *,
        later: bool = False,
    ) -> Registered:
        """A worker gives a model its layout or optimizer, or checks its own; see `CoordinatorState.register`."""
        a, rank = self._assembly, entry.member.rank
        model = self._models.find_or_create(name)
        r = model.registration
        if spec is None and optimizer is None:
            raise InvalidRequest(f"worker {rank} registers neither a layout nor an optimizer")
        new_spec = spec if spec is not None and r.check_spec(spec, rank) else None
        new_optimizer = None
        if optimizer is not None:
            new_optimizer = r.check_optimizer(optimizer, spec or r.spec, rank, later=later)
        if later:
            self._check_change(model, new_optimizer)
            new_optimizer = None
        is_new = new_spec is not None or new_optimizer is not None
        by_node, with_resume = self._models.by_node, new_spec is not None and resume is not None
        if is_new:
            self._set(model, name, new_spec, new_optimizer)
        upload = spec is not None and not with_resume and self._claim_upload(model, entry)
        self._restores.persist()
        if new_spec is not None and resume is not None:
            self._restores.order([dataclasses.replace(resume, model=name)], now)
        elif is_new:
            a.announce(model)
            if self._models.by_node != by_node:  # replicas are numbered otherwise from now on
                self._members.change(f"worker {rank} registered a layout in which a node is a replica", now=now)
        return Registered(
            first=is_new,
            initialized=model.state(a.shards()).initialized,
            version=model.version,
            upload=upload,
            generation=a.generation,
            model=model.number,
        )

    def release(self, number: int) -> bool:
        """Release a model; False if there is none."""
        model = self._models.get(number)
        if model is None or not model.registered:
            return False
        self._models.remove(model)
        self._restores.released(model)
        event = JobState(model=number, name=model.name, released=True)
        self._out.push(self._assembly.roster.sessions(), event)
        self._assembly.counters["models_released"] += 1
        self._restores.try_again()
        return True

    def _check_change(self, model: Model, optimizer: OptimizerSpec | None) -> None:
        """Check that an optimizer can take the place of a model's."""
        r = model.registration
        if optimizer is None or r.spec is None:
            raise InvalidRequest(f"model {model.name!r} is to get another optimizer, and none was given")
        for server in self._assembly.roster.of_role(Role.SHARD):
            check_known(server.name, server.known, model.name, None, optimizer)
        self._check_room(model, model.name, r.placement, None, optimizer)
        more_bytes = len(records.optimizer_record(model.number, optimizer).value or b"")
        self._models.check_stored(model, more_bytes, model.name)

    def _set(self, model: Model, name: str, spec: JobSpec | None, optimizer: OptimizerSpec | None) -> None:
        """Set the layout or the optimizer of a model. See Note: [Nothing is durable before it can be held]."""
        a, r = self._assembly, model.registration
        for server in a.roster.of_role(Role.SHARD):
            check_known(server.name, server.known, name, spec, optimizer)
        optimizer = None if optimizer is None else model.with_restored(optimizer)
        placement = r.placement if spec is None else r.new_placement(spec, a.servers(), self._replication)
        self._check_room(model, name, placement, spec, optimizer)
        stored: list[Record] = [] if spec is None else [records.spec_record(model.number, spec)]
        stored += [] if optimizer is None else [records.optimizer_record(model.number, optimizer)]
        stored_bytes = sum(len(record.value or b"") for record in stored)
        self._models.check_stored(model, stored_bytes, name)
        if spec is not None:
            r.set_spec(spec, placement)
            self._models.add(model, name)
            a.stepping.begin_model(model)
            self._out.persist(a.records())
        r.optimizer = optimizer or r.optimizer
        model.stored_bytes += stored_bytes
        self._out.persist(stored)

    def _check_room(
        self, model: Model, name: str, placement: Placement, spec: JobSpec | None, optimizer: OptimizerSpec | None
    ) -> None:
        what, room = f"the registration of model {name!r}", self._assembly.room()
        if spec is not None:
            room.check_there(placement, what)
        room.check({model.number: (model, placement)}, what, spec, optimizer)

    def _claim_upload(self, model: Model, entry: RosterEntry) -> bool:
        a, r = self._assembly, model.registration
        if not model.state(a.shards()).initialized:
            r.waiting.add(entry.member.incarnation)
        return r.claim_upload(entry.member.incarnation, [other.member for other in a.roster.of_role(Role.WORKER)])
