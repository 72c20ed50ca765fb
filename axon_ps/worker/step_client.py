"""A worker's part in the training steps of one model: gather parameters, push gradients, vote, get the decision.

`StepClient` uses the two connections that a step needs, the coordinator's session and the shard servers, and holds the
state that a worker has about the model: the current step and version. Gathers and pushes run on the background loop and
return `Work` handles; votes block until the decision. The members of the job, and the lock, are in the `JobView` that
the clients of all models share.

Invariants:
- A *ticket* (generation, step, replica, number of replicas) is taken when the first gradient of a step is pushed and
  used for all of that step. When the membership changes, the ticket is void: its pushes are dropped and the vote
  returns an aborted decision without being sent.
- The version moves only by a decision or by a membership event, never by the result of a gather; where replicas
  step asynchronously, only at the end of a step of ours (`worker.staleness`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from axon_ps.collectives.work import Awaited, LoopWork
from axon_ps.coordinator.client.session import CoordinatorClient, Event, JobState, Registered, SessionLost
from axon_ps.errors import AxonError, GenerationChanged, InvalidRequest, Misuse, StepAborted, Timeout
from axon_ps.observe.moments import Moment, reached
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.same_host.shared_copy import MappedCopy
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, CopyFrom, Decision, DType, Hyper, Member, Membership, OptimizerSpec, Outcome
from axon_ps.wire.v1.common_pb2 import CallContext
from axon_ps.worker.job_view import JobView
from axon_ps.worker.staleness import Staleness

T = TypeVar("T")

NO_GENERATION = -1
"""The generation of a void ticket."""

_ARRIVED_INTERVAL_S = 1.0
"""How often, while pushes last, this worker reports that it waits, so that it does not count as a straggler."""

_STATUS_TIMEOUT_S = 2.0
"""How long the coordinator may take to reply for whom a step waits, once that has timed out."""

_MAX_DECISIONS = 16
"""After a reconnect several decisions come at once; a vote cast before it waits for one of the first."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Identifies one step attempt of this worker: all its pushes carry it."""

    generation: int
    step: int
    replica: int
    num_replicas: int
    why_void: str = ""

    @property
    def is_void(self) -> bool:
        """Whether its step cannot commit."""
        return self.generation == NO_GENERATION

    def void(self, why: str) -> Self:
        """The same, void: nothing is pushed with it, and its vote is an abort."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why)


class StepClient:
    """Gather, push, vote; thread-safe.

    Args:
        loop: the background loop that everything runs on.
        coordinator: the joined session; its events about the model must be passed to `on_event`.
        shards: the connections to the shard servers, for this model.
        view: the job's members.
        model: number of the model.
        timeout_s: default deadline of every operation, in seconds.

    Attributes:
        view: as given.
        model: as given.
        name: name of the model in the job, once it was registered here.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        coordinator: CoordinatorClient,
        shards: ShardGroup,
        view: JobView,
        *,
        model: int = 0,
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._shards = shards
        self.timeout_s = timeout_s
        self.view = view
        self.model = model
        self.name = ""
        self._changed = view.changed
        self._spec: JobSpec | None = None
        self._released = False
        self._copied = 0
        self._job: JobState | None = None
        self._decisions: dict[int, Decision] = {}
        self._own_decision: Decision | None = None  # the newest on this replica's asynchronous step
        self._step = 0
        self._version = 0
        self._staleness = Staleness()
        self._staleness_wait_s = 0.0
        self._calls: dict[
            asyncio.Task[Any], int | None
        ] = {}  # running, with the epoch they are of; on the loop's thread
        self.asked_epoch = 0
        """The newest epoch that this worker requested, or waited for."""
        self._pushes: set[asyncio.Task[None]] = set()  # those of them that end with their generation
        self._mapped: dict[int, tuple[int, int, MappedCopy]] = {}  # by unit: generation and epoch of the request
        self._mapped_bytes = 0
        if view.known is not None:
            self._begin(view.known)

    # ------------------------------------------------------------------ the state of the model

    @property
    def membership(self) -> Membership:
        """The current members, with replicas numbered as this model has them.

        Raises:
            Misuse: the session has not received one yet.
        """
        return self._numbered(self.view.membership)

    def _numbered(self, membership: Membership) -> Membership:
        return membership if self._spec is None else membership.numbered(self._spec.replica_is_node)

    @property
    def version(self) -> int:
        """Committed steps, as this worker knows it; with asynchronous steps, the version its step is computed from."""
        with self._changed:
            return self._staleness.view(self._version).version if self._staleness.asynchronous else self._version

    @property
    def latest_version(self) -> int:
        """Committed steps of the model, as this worker knows it."""
        return self._version

    @property
    def copied(self) -> int:
        """The newest version that copied another model's values; 0 = none in this epoch. Frozen units are of it."""
        return self._copied

    def _version_of(self, unit: int, *, exact: bool = False) -> int:
        """The version that a unit must be at to be current."""
        units = () if self._spec is None else self._spec.layout.units
        if 0 <= unit < len(units) and not units[unit].trainable:  # the servers refuse an unknown unit
            return self._copied
        return self._version if exact else self.version

    @property
    def epoch(self) -> int:
        """How often the model was restored from a checkpoint; a change makes every copy of its parameters stale."""
        return self._job.epoch if self._job else 0

    @property
    def me(self) -> Member:
        """This worker in the current membership.

        Raises:
            MemberLost: this worker is no member any more.
        """
        return self.view.me(self.membership)

    @property
    def lease_s(self) -> float:
        """How long a member may be silent before it is lost."""
        return self._coordinator.lease_s

    @property
    def latest(self) -> tuple[int, int]:
        """(epoch, version), read together."""
        with self._changed:
            return self.epoch, self.version

    def ticket(self, began: tuple[int, int] | None = None) -> Ticket:
        """The ticket of the step attempt that starts now.

        Args:
            began: (epoch, version) that the step is computed from. If that is not `latest` any more the ticket is
                void, since gradients of an older version must not count in a newer generation. None = any.
        """
        with self._changed:
            self.check_released()
            latest = self.latest
            membership = self.membership
            if self._staleness.asynchronous:
                begun = self._staleness.view(self._version).generation
                ticket = Ticket(generation=begun, step=self._staleness.clock, replica=self.me.replica, num_replicas=1)
            else:
                ticket = Ticket(
                    generation=membership.generation,
                    step=self._step,
                    replica=self.me.replica,
                    num_replicas=membership.num_replicas,
                )
        if began in (None, latest):
            return ticket
        return ticket.void(
            f"the step began at version {began[1]} and the model is at {latest[1]}: it went on while this worker was "
            "no member, or was restored"
        )

    def valid(self, ticket: Ticket) -> bool:
        """Whether the step that `ticket` names can still commit."""
        return self.view.known is not None and self.view.known.generation == ticket.generation

    @property
    def released(self) -> bool:
        """Whether the model has been released."""
        return self._released

    def check_released(self) -> None:
        """Refuse a model that has been released.

        Raises:
            Misuse: it has been released.
        """
        if self._released:
            raise Misuse(f"model {self.name!r} was released: its parameters are on the shard servers no more")

    def statistics(self) -> dict[str, float]:
        """Counters of the data plane: bytes, streams, retries; where replicas step asynchronously, clocks and waiting.

        `mapped_bytes_in` are those of the `bytes_in` that were mapped without a copy.
        """
        staleness = {"clock": float(self._staleness.clock), "slowest_clock": float(self._staleness.slowest)}
        waits = {**staleness, "staleness_wait_s": self._staleness_wait_s} if self._staleness.asynchronous else {}
        counters = self._shards.statistics() | {"mapped_bytes_in": 0.0}
        for name in ("bytes_in", "leased_bytes_in", "mapped_bytes_in"):
            counters[name] += self._mapped_bytes
        return {**counters, **waits}

    # ------------------------------------------------------------------ events from the coordinator

    def on_event(self, event: Event) -> None:
        """Apply one event of the session, in order, on the loop's thread; a membership after the view has it."""
        with self._changed:
            if isinstance(event, Membership):
                self._begin(event)
                self._cancel_stale_pushes(event.generation)
            elif isinstance(event, JobState):
                self._on_job(event)
            elif isinstance(event, Decision):
                self._on_decision(event)
            elif isinstance(event, SessionLost) and event.final:
                for task in self._calls:
                    task.cancel()
            self._changed.notify_all()

    def _begin(self, membership: Membership) -> None:
        """A generation begins, or this model is new in it."""
        self._step, self._version = membership.progress(self.model)
        me = self.view.member_in(self._numbered(membership))
        self._staleness.begin(membership.generation, -1 if me is None else me.replica)

    def _on_job(self, event: JobState) -> None:
        if event.released:
            self._released = True
            self._shards.release()
        elif self._job is None or event.epoch != self._job.epoch:
            self._copied = event.copied
            if self._job is not None:
                self._version = event.version
                self._staleness.end_step()
                self._shards.forget_residuals()
        else:
            self._copied = max(self._copied, event.copied)
        if not event.released:
            self._job = event
        for task in [t for t, epoch in self._calls.items() if event.released or epoch not in (None, event.epoch)]:
            task.cancel()
        if event.spec is not None:
            self._shards.set_spec(event.spec)

    def _on_decision(self, event: Decision) -> None:
        if event.turn is None:
            self._decisions[event.step] = event
            if event.outcome is Outcome.COMMIT:
                self.view.acknowledge()
        elif self._staleness.decided(event):
            self._own_decision = event
        for old in [s for s in self._decisions if s <= event.step - _MAX_DECISIONS]:
            del self._decisions[old]
        if event.generation == self.view.membership.generation:  # of an earlier one, the membership has it already
            self._step = event.step + 1
        self._version = event.version
        if event.copy is not None and event.outcome is Outcome.COMMIT:
            self._copied = event.version

    def _cancel_stale_pushes(self, generation: int) -> None:
        for task in self._pushes:
            if getattr(task, "generation", generation) != generation:
                task.cancel()

    def wait_complete(self, timeout_s: float | None = None) -> Membership:
        """See `JobView.wait_complete`."""
        return self.view.wait_complete(timeout_s)

    def wait_members(self, ready: Callable[[Membership], bool], timeout_s: float, what: str) -> None:
        """See `JobView.wait_members`."""
        self.view.wait_members(ready, timeout_s, what)

    def wait_generation(self, generation: int, timeout_s: float) -> None:
        """See `JobView.wait_generation`."""
        self.view.wait_generation(generation, timeout_s)

    def wait_epoch(self, epoch: int, timeout_s: float | None = None, *, initialized: bool = True) -> None:
        """Block until the parameters were replaced `epoch` times and, if `initialized`, the servers hold all of them.

        Raises:
            Timeout: they were not.
        """
        self.view.wait_until(
            lambda: self._at_epoch(epoch, initialized),
            self.timeout_s if timeout_s is None else timeout_s,
            lambda: f"the parameters were not replaced for the {epoch}. time",
        )
        self.asked_epoch = max(self.asked_epoch, epoch)

    def wait_epoch_or_generation(self, epoch: int, generation: int, timeout_s: float) -> None:
        """Block until the parameters are being replaced for the `epoch`. time, or the membership has changed.

        Raises:
            Timeout: neither happened.
        """
        self.view.wait_until(
            lambda: True if self.epoch >= epoch or self.membership.generation >= generation else None,
            timeout_s,
            lambda: f"the parameters were not replaced for the {epoch}. time",
        )

    def _at_epoch(self, epoch: int, initialized: bool) -> bool | None:
        job = self._job
        return True if job is not None and job.epoch >= epoch and (job.initialized or not initialized) else None

    def wait_latest(self, position: tuple[int, int]) -> None:
        """Block until this worker has received (epoch, version) `position`, which another has already.

        Raises:
            Timeout: it has not.
        """
        self.view.wait_until(
            lambda: True if self.latest >= position else None,
            self.timeout_s,
            lambda: f"version {position[1]} of epoch {position[0]} has not been announced to this worker",
        )

    def wait_version(self, version: int, timeout_s: float | None = None) -> None:
        """Block until this worker has received the commit of a version, by any worker.

        Raises:
            Timeout: it has not.
        """
        self.view.wait_until(
            lambda: True if self._version >= version else None,
            self.timeout_s if timeout_s is None else timeout_s,
            lambda: f"version {version} was not committed, the newest known is {self._version},",
        )

    # ------------------------------------------------------------------ registration

    def register(self, spec: JobSpec) -> Registered:
        """Set the layout of the first model, or check ours against the one it has; `Models.register` is for any.

        Raises:
            LayoutMismatch: another rank registered something else; the message says where they first differ.
        """
        self._shards.warm_up(spec)
        reply = self._loop.run(self._coordinator.register(spec=spec, timeout_s=self.timeout_s), self.timeout_s)
        self.registered(spec, reply)
        return reply

    def registered(self, spec: JobSpec, reply: Registered, name: str = "") -> None:
        """This process has registered the model, with this layout and this reply."""
        with self._changed:
            self.name = name
            self._shards.set_spec(spec)
            if self._spec is None:
                self._spec = spec
                self._staleness = Staleness()
                self._staleness.policy = spec.policy
                me = self.view.member_in(self.membership)
                self._staleness.begin(self.membership.generation, -1 if me is None else me.replica)
            self._version = max(self._version, reply.version)

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Set the model's optimizer, or check ours against the one it has.

        Raises:
            LayoutMismatch: another rank registered other groups or hyperparameters.
        """
        registering = self._coordinator.register(optimizer=optimizer, timeout_s=self.timeout_s, name=self.name)
        self._loop.run(registering, self.timeout_s)

    def wait_initialized(self, registered: Registered) -> bool:
        """Block until every shard server holds its parameters.

        Args:
            registered: the reply of `register`.

        Returns:
            False if the membership changed before: register again, since the worker that uploads may have died, or a
            shard server may have been replaced.

        Raises:
            Timeout: they do not; usually because the rank that uploads has died.
        """

        def known() -> bool | None:
            if self._job is not None and self._job.initialized:
                return True
            self.check_released()
            return False if self.membership.generation > registered.generation else None

        return self.view.wait_until(
            known,
            self.timeout_s,
            lambda: "the shard servers still lack first values from the rank that uploads them",
            reminds=True,
        )

    # ------------------------------------------------------------------ data

    def upload(self, unit: int, values: Array, *, epoch: int = 0) -> None:
        """Store first values of a unit.

        Args:
            unit: its number.
            values: f32[unit_numel].
            epoch: how often the model has been restored: 0, unless other values are replaced by these.

        After an error: some slices may be stored; uploading again is harmless.
        """
        self._loop.run(
            self._shards.upload(unit, values, context=self._context, timeout_s=self.timeout_s, epoch=epoch),
            self.timeout_s,
        )

    def gather(
        self, unit: int, out: Array, *, begin: int = 0, end: int | None = None, exact: bool = False
    ) -> LoopWork[int]:
        """Fill `out` with the unit at this worker's version or later; its element type is the wire dtype.

        Args:
            unit: its number.
            out: wire[unit_numel]; must stay alive and untouched until the work is done.
            begin: first element wanted.
            end: one past the last element wanted; None = the unit's end.
            exact: transfer them uncompressed even if the job compresses parameters, and at the newest version that this
                worker knows of: what the servers hold, not what training computes with.

        Returns:
            A handle whose result is the version gathered.

        After an error: the content of `out` is undefined.
        """
        with self._changed:
            epoch, version = self.epoch, self._version_of(unit, exact=exact)

        def gather() -> Coroutine[Any, Any, int]:
            return self._shards.gather(
                unit,
                out,
                min_version=version,
                epoch=epoch,
                context=self._context,
                timeout_s=self.timeout_s,
                begin=begin,
                end=end,
                compressed=not exact,
            )

        found = self._explained(lambda: self._await_new_epoch(gather, epoch), epoch)
        return LoopWork(self._loop, found, f"gathering unit {unit}")

    def mapped(self, unit: int) -> MappedCopy | None:
        """The memory that a unit lies in, if this worker has mapped it and it is at this worker's version.

        Needs no message. It must not be read after this worker's next vote.

        Raises:
            Misuse: the model was released; the servers may still have its memory.
        """
        with self._changed:
            self.check_released()
            known = self._mapped.get(unit)
            if known is None or known[:2] != (self.membership.generation, self.epoch):
                return None
            if not known[2].is_at(self._version_of(unit, exact=True)):
                return None
            self._mapped_bytes += known[2].values.nbytes
        return known[2]

    def map(self, unit: int, dtype: DType) -> LoopWork[MappedCopy | None]:
        """Map the memory that a unit lies in, at this worker's version or later.

        Args:
            unit: its number.
            dtype: the wanted dtype.

        Returns:
            A handle; its result is None where the unit must be gathered (see `ShardGroup.map`). It must not be
            read after this worker's next vote.
        """
        with self._changed:
            epoch, version = self.epoch, self._version_of(unit)
        found = self._explained(
            lambda: self._await_new_epoch(lambda: self._map(unit, dtype, epoch, version), epoch), epoch
        )
        return LoopWork(self._loop, found, f"mapping unit {unit}")

    def buffer(self, size_bytes: int) -> Array:
        """u8[size_bytes] for a gradient to push: in memory that servers of this host can map, if possible."""
        return self._shards.buffer(size_bytes)

    async def _map(self, unit: int, dtype: DType, epoch: int, version: int) -> MappedCopy | None:
        asked = self.membership.generation, epoch
        copy = await self._shards.map(
            unit,
            dtype=dtype,
            min_version=version,
            epoch=epoch,
            context=self._context,
            timeout_s=self.timeout_s,
        )
        with self._changed:
            if copy is not None:
                self._mapped[unit] = *asked, copy
                self._mapped_bytes += copy.values.nbytes
        return copy

    async def _explained(self, call: Callable[[], Coroutine[Any, Any, T]], epoch: int | None = None) -> T:
        """A call that ends when this worker is no member any more, and whose time-out names what the job waits for.

        Args:
            call: starts it.
            epoch: it ends, too, when the parameters are no longer those of this epoch; None = of any. (A request for a
                version from before a restore could wait for ever: it may never exist again.)

        Raises:
            StepAborted: the parameters were replaced.
        """
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = epoch
        try:
            self._check_current(epoch)
            return await call()
        except asyncio.CancelledError:
            self._check_current(epoch)
            raise
        except Timeout as error:
            if not (reason := self.view.waiting_for()):
                raise
            raise Timeout(f"{error}{reason}") from error
        finally:
            del self._calls[task]

    async def _await_new_epoch(self, call: Callable[[], Coroutine[Any, Any, T]], epoch: int) -> T:
        """A call for the parameters of an epoch; after a restore it fails only once this worker knows of the new epoch.

        A server may receive a restore before this worker does. The call then waits for the event here, so that a retry
        requests the new epoch.
        """
        try:
            return await call()
        except StepAborted:
            if epoch == self.epoch:
                await asyncio.sleep(self.timeout_s)  # `on_event` ends this call
            raise

    def _check_current(self, epoch: int | None) -> None:
        """Raise the error that ends a call of `epoch`, if there is one."""
        if self.view.failure is not None:
            raise self.view.failure
        self.check_released()
        if epoch is not None and epoch != self.epoch:
            raise StepAborted(f"the parameters were replaced meanwhile: this is epoch {self.epoch}, no longer {epoch}")

    def gather_speculative(
        self,
        unit: int,
        out: Array,
        ticket: Ticket,
        hyper: Sequence[Hyper],
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> LoopWork[int]:
        """Before the step is decided, fill `out` with the unit as it will be if it commits unclipped with `hyper`.

        Args:
            unit: its number.
            out: wire[end - begin]; must stay alive and untouched until the work is done.
            ticket: the step.
            hyper: per parameter group, the hyperparameters this worker will vote for.
            begin: first element wanted, counted from the unit's start.
            end: one past the last element wanted; None = the unit's end.

        Returns:
            A handle; what was gathered is the next version's only if the decision is a commit with clip factor 1 and
            these hyperparameters.

        After an error: `out` holds anything; gather the unit in the ordinary way.
        """
        return LoopWork(
            self._loop,
            self._explained(
                lambda: self._shards.gather_speculative(
                    unit,
                    out,
                    step=ticket.step,
                    hyper=tuple(hyper),
                    context=lambda: self._context_of(ticket),
                    timeout_s=self.timeout_s,
                    begin=begin,
                    end=end,
                ),
                self.epoch,
            ),
            f"gathering unit {unit} as step {ticket.step} is expected to leave it",
        )

    def push(
        self,
        unit: int,
        grad: Array | None,
        ticket: Ticket,
        done: Callable[[], None] | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> LoopWork[None]:
        """Push the gradient of a unit, of one replica; None when it has none.

        Args:
            unit: its number.
            grad: wire[end - begin]; must stay alive and untouched until the work is done.
            ticket: the step it belongs to.
            done: called on the loop's thread when the buffer is free again, however it ended.
            begin: first element; must begin a chunk. Other workers of the replica push the rest.
            end: one past the last; must end a chunk; None = the unit's end.

        After an error: the step cannot commit; `vote` returns an abort.
        """
        return LoopWork(self._loop, self._push(unit, grad, ticket, done, begin, end), f"pushing unit {unit}")

    async def _push(
        self,
        unit: int,
        grad: Array | None,
        ticket: Ticket,
        done: Callable[[], None] | None,
        begin: int,
        end: int | None,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.generation = ticket.generation  # type: ignore[attr-defined]
        self._pushes.add(task)
        try:
            if not self.valid(ticket):
                raise GenerationChanged("the membership changed before the push", self.membership.generation)
            await self._explained(
                lambda: self._shards.reduce_scatter(
                    unit,
                    grad,
                    step=ticket.step,
                    replica=ticket.replica,
                    context=lambda: self._context_of(ticket),
                    timeout_s=self.timeout_s,
                    begin=begin,
                    end=end,
                )
            )
        except asyncio.CancelledError:
            if self.valid(ticket):
                raise
            raise GenerationChanged("the membership changed during the push", self.membership.generation) from None
        finally:
            self._pushes.discard(task)
            if done is not None:
                done()

    def _context(self) -> CallContext:
        """The context of a call about this model."""
        context = self._coordinator.context()
        context.model = self.model
        return context

    def _context_of(self, ticket: Ticket) -> CallContext:
        context = self._context()
        context.generation = ticket.generation
        return context

    # ------------------------------------------------------------------ the decision

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """A step in which the model becomes (1 - weight) * its values + weight * another's; every worker calls it.

        Args:
            source: the client of the other model.
            weight: above 0, at most 1.

        Returns:
            The decision, as of `vote`.

        Raises:
            InvalidRequest: the models are not sharded alike, or replicas of one of them step asynchronously.
            Misuse: one of them is not registered here, or was released.
            Timeout: no decision came; the step may still commit.
        """
        self.check_released()
        source.check_released()
        if self._spec is None or source._spec is None:
            raise Misuse("copy_from needs two models that were registered by this process")
        if self._staleness.asynchronous or source._staleness.asynchronous:
            raise InvalidRequest(
                "copy_from needs a version that all workers agree on; replicas of one model step asynchronously"
            )
        if difference := self._spec.cut_difference(source._spec):
            raise InvalidRequest(f"model {self.name!r} cannot take the values of {source.name!r}: {difference}")
        copy = CopyFrom(source=source.model, weight=weight)
        return self.vote(self.ticket(), (), max_norm=0.0, hyper=(), copy=copy)

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        copy: CopyFrom | None = None,
    ) -> Decision:
        """Report that this worker has pushed everything, and wait for the decision.

        Args:
            ticket: the step.
            pushes: its pushes; they are waited for first.
            max_norm: global L2 norm to clip to; 0 = do not clip.
            hyper: per parameter group, this step's hyperparameters.
            copy: the copy from another model; None = the step takes gradients.

        Returns:
            The decision; an abort when the membership changed meanwhile. By then this worker has received the
            generation that the next attempt runs in.

        Raises:
            Timeout: no decision came; the step may still commit.
            AxonError: a push failed for another reason than a membership change.
        """
        try:
            decision = self._vote(ticket, pushes, max_norm, hyper, copy)
            self.wait_generation(decision.next_generation, self.timeout_s)
            if self._staleness.asynchronous or decision.outcome is not Outcome.COMMIT:
                with self._changed:
                    self.view.acknowledge()
            self._shards.settle(ticket.step, committed=decision.outcome is Outcome.COMMIT)
            self._wait_for_slowest(ticket)
        finally:
            self._staleness.end_step()
        return decision

    def _wait_for_slowest(self, ticket: Ticket) -> None:
        """If the policy bounds staleness: block until the next step may begin."""
        began = time.perf_counter()
        self.view.wait_until(
            lambda: True if self._staleness.may_proceed(ticket.generation) else None,
            self.timeout_s,
            lambda: (
                f"this worker is at clock {self._staleness.clock} and the slowest at {self._staleness.slowest}, which "
                f"is more than {self._staleness.policy} allows; its step is decided, the next may not begin"
            ),
        )
        self._staleness_wait_s += time.perf_counter() - began

    def _vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        max_norm: float,
        hyper: Sequence[Hyper],
        copy: CopyFrom | None,
    ) -> Decision:
        blocked = self.view.blocks()
        try:
            self._wait_pushed(ticket, pushes, blocked)
        except (GenerationChanged, StepAborted) as error:
            return self._aborted(ticket, str(error))
        if self.valid(ticket) and not self.membership.complete:
            # No attempt is in progress; the reason names who is missing.
            reason = f"the job was waiting for {self.membership.waiting_for}"
            self.view.wait_until(
                lambda: None if self.valid(ticket) else True,
                self.timeout_s,
                lambda: f"step {ticket.step} is not begun",
                reminds=True,
            )
            return self._aborted(ticket, reason)
        if not self.valid(ticket):
            return self._aborted(ticket, ticket.why_void or "the membership changed")
        reached(Moment.VOTE)
        self._coordinator.vote(
            generation=ticket.generation,
            step=ticket.step,
            max_norm=max_norm,
            hyper=tuple(hyper),
            version=self.version,
            replica=ticket.replica if self._staleness.asynchronous else None,
            model=self.model,
            copy=copy,
            blocked=blocked,
        )
        try:
            return self.view.wait_until(
                lambda: self._decided(ticket),
                self.timeout_s,
                lambda: f"step {ticket.step} is not decided: a worker has not voted or a shard server is not ready",
            )
        except Timeout as error:
            raise Timeout(f"{error}{self._stragglers()}") from error

    def _wait_pushed(self, ticket: Ticket, pushes: Sequence[Awaited], blocked: bool) -> None:
        """Wait for the pushes; servers sum in replica order, so that may take as long as another worker's pushes."""
        deadline = Deadline(self.timeout_s)
        for work in pushes:
            while True:
                try:
                    work.wait(min(_ARRIVED_INTERVAL_S, deadline.remaining()))
                    break
                except Timeout as error:
                    if work.is_completed():
                        raise
                    if deadline.expired:
                        raise Timeout(f"{error}{self._stragglers()}") from error
                if not self._staleness.asynchronous and self.valid(ticket):
                    self._coordinator.arrived(
                        generation=ticket.generation, step=ticket.step, model=self.model, blocked=blocked
                    )

    def _stragglers(self) -> str:
        """For whom the current step waits, by the coordinator's status; empty if it does not reply."""
        try:
            pending = self._loop.run(self._coordinator.status(_STATUS_TIMEOUT_S), _STATUS_TIMEOUT_S).pending
        except AxonError:
            return ""
        return f"; the coordinator waits for: {'; '.join(pending)}" if pending else ""

    def _received_decision(self, ticket: Ticket) -> Decision | None:
        """The decision on the step of `ticket`, if it has come."""
        decision = self._decisions.get(ticket.step)
        if self._staleness.asynchronous:
            own = self._own_decision
            decision = own if own is not None and own.turn is not None and own.turn.clock == ticket.step else None
        return decision if decision is not None and decision.generation == ticket.generation else None

    def _decided(self, ticket: Ticket) -> Decision | None:
        if (decision := self._received_decision(ticket)) is not None:
            return decision
        if not self.valid(ticket):
            return self._aborted(ticket, "the membership changed")
        self.check_released()
        return None

    def _aborted(self, ticket: Ticket, reason: str) -> Decision:
        """An abort: the coordinator's, or one with `reason` once it has announced a new membership."""
        if self.valid(ticket):
            self.view.wait_until(
                lambda: True if self._received_decision(ticket) is not None or not self.valid(ticket) else None,
                self.timeout_s,
                lambda: f"a shard server reports that step {ticket.step} is over; the coordinator does not",
            )
        if (decision := self._received_decision(ticket)) is not None:
            return decision
        return Decision(
            step=ticket.step,
            generation=ticket.generation,
            outcome=Outcome.ABORT,
            version=self._version,
            reason=reason,
            model=self.model,
        )
