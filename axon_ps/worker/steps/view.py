"""This worker's knowledge of one model: its version, epoch and members, and the decisions on its steps.

Owns the waits for changes of these. Refuses: data, messages. The members of the job, and the lock, are in the `JobView`
that all models share.

Invariant: the version changes only by an event of the session or a registration, never by the result of a gather. Where
replicas step asynchronously, it changes only between two steps of ours (`stepping`).
"""

from __future__ import annotations

from collections.abc import Mapping

from axon_ps.coordinator.client.session import JobState, Registered
from axon_ps.errors import Busy, MemberLost, Misuse
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, Member, Membership, Outcome
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.stepping import AsynchronousSteps, Stepping, SynchronousSteps
from axon_ps.worker.steps.ticket import Ticket


class ModelView:
    """One worker's knowledge of a model; thread-safe.

    Args:
        job: the job's members.
        model: number of the model.

    Attributes:
        job: as given.
        model: as given.
        name: name of the model in the job, once it was registered here.
        spec: the layout with which it was registered here.
        stepping: the order of its replicas' steps, and this worker's progress in it.
        released: True if the model has been released.
        asked_epoch: the newest epoch that this worker requested, or waited for.
        requested_attempt: (generation, step) of the newest attempt that others wait in, with a quorum of `LocalSteps`.
    """

    def __init__(self, job: JobView, model: int = 0) -> None:
        self.job = job
        self.model = model
        self.name = ""
        self.spec: JobSpec | None = None
        self.stepping: Stepping = SynchronousSteps()
        self.released = False
        self.asked_epoch = 0
        self.requested_attempt = (0, -1)
        self._state: JobState | None = None
        self._copied = 0
        self._committed: Mapping[str, str] = {}
        self._version = 0
        if job.known is not None:
            self.begin(job.known)

    @property
    def membership(self) -> Membership:
        """The current members, with replicas numbered as this model has them.

        Raises:
            Misuse: the session has not received one yet.
        """
        return self._numbered(self.job.membership)

    def _numbered(self, membership: Membership) -> Membership:
        return membership if self.spec is None else membership.numbered(self.spec.grouping)

    @property
    def me(self) -> Member:
        """This worker in the current membership.

        Raises:
            MemberLost: this worker is not a member any more.
        """
        return self.job.me(self.membership)

    @property
    def version(self) -> int:
        """Committed steps that this worker knows of; with asynchronous steps, the version its step is computed from."""
        with self.job.changed:
            return self.stepping.version(self._version)

    @property
    def latest_version(self) -> int:
        """Committed steps of the model that this worker knows of."""
        return self._version

    @property
    def copied(self) -> int:
        """The newest version that copied another model's values; 0 = none in this epoch. Frozen units are at it."""
        return self._copied

    @property
    def committed(self) -> Mapping[str, str]:
        """The newest values that were committed with steps of the model, by name."""
        return self._committed

    def version_of(self, unit: int, *, exact: bool = False) -> int:
        """Return the version that a unit must be at to be current; if `exact`, to equal the servers' values."""
        units = () if self.spec is None else self.spec.layout.units
        if 0 <= unit < len(units) and not units[unit].trainable:  # the servers refuse an unknown unit
            return self._copied
        return self._version if exact else self.version

    @property
    def epoch(self) -> int:
        """The number of times that the model was restored. A change makes every copy of its parameters stale."""
        return self._state.epoch if self._state else 0

    @property
    def latest(self) -> tuple[int, int]:
        """(epoch, version), read together."""
        with self.job.changed:
            return self.epoch, self.version

    def valid(self, ticket: Ticket) -> bool:
        """Return True if the step that `ticket` names can still commit."""
        return self.job.known is not None and self.job.known.generation == ticket.generation

    def check_released(self) -> None:
        """Refuse a model that has been released.

        Raises:
            Misuse: it has been released.
        """
        if self.released:
            raise Misuse(f"model {self.name!r} was released: its parameters are on the shard servers no more")

    # ------------------------------------------------------------------ events

    def registered(self, spec: JobSpec, reply: Registered, name: str) -> None:
        """Record that this process has registered the model, with this layout and this reply."""
        with self.job.changed:
            self.name = name
            if self.spec is None:
                self.spec = spec
                if spec.policy.asynchronous:
                    self.stepping = AsynchronousSteps(spec.policy)
                    self._begin_generation(self.job.membership, 0)
            self._version = max(self._version, reply.version)

    # These methods are called in the order of the session, under `JobView.changed`.

    def begin(self, membership: Membership) -> None:
        """Begin a generation, or begin this model in it; `job` has the membership already."""
        step, self._version = membership.progress(self.model)
        self._begin_generation(membership, step)

    def _begin_generation(self, membership: Membership, step: int) -> None:
        me = self.job.member_in(self._numbered(membership))
        self.stepping.begin(membership.generation, step, -1 if me is None else me.replica)

    def on_state(self, event: JobState) -> None:
        """Apply a state: the model was initialized, restored or released."""
        if event.released:
            self.released = True
            return
        if self._state is None or event.epoch != self._state.epoch:
            self._copied = event.copied
            if self._state is not None:
                self._version = event.version
                self.stepping.end_step()
        else:
            self._copied = max(self._copied, event.copied)
        self._state, self._committed = event, event.committed

    def on_decision(self, event: Decision) -> None:
        """Apply the decision on a step."""
        if self.stepping.acknowledges(event):
            self.job.acknowledge()
        self.stepping.decided(event)
        self._version = event.version
        if event.commit:
            self._committed = {**self._committed, **event.commit}
        if event.copy is not None and event.outcome is Outcome.COMMIT:
            self._copied = event.version

    # ------------------------------------------------------------------ waiting

    def wait_in_replica(self) -> Membership:
        """Block until this worker is in a replica: others may be missing that it makes one with.

        Returns:
            The membership, with replicas numbered as this model has them.

        Raises:
            Timeout: no other worker has taken their place.
            MemberLost: one of them has finished, so that none takes its place; or this worker is not a member any more.
        """

        def why() -> str:
            return f"{self.membership.why_no_replica(self.me.rank)}; start a worker in its place, or the job anew:"

        def is_in_one() -> Membership | None:
            membership, me = self.membership, self.me
            if me.replica >= 0:
                return membership
            row = membership.grouping.row_of(me.rank)
            here = {m.rank for m in membership.workers}
            if done := [m.rank for m in membership.finished if m.rank in row and m.rank not in here]:
                raise MemberLost(f"{membership.why_no_replica(me.rank)}: worker {done[0]} has finished its part")
            if not row:
                raise MemberLost(f"{membership.why_no_replica(me.rank)}; it takes part in no step")
            return None

        return self.job.wait_until(is_in_one, self.job.timeout_s, lambda: f"{why()} none came", reminds=True)

    def wait_epoch(self, epoch: int, timeout_s: float | None = None, *, initialized: bool = True) -> None:
        """Block until the parameters were replaced `epoch` times and, if `initialized`, the servers hold all of them.

        Raises:
            Timeout: they were not.
        """
        self.job.wait_until(
            lambda: self._at_epoch(epoch, initialized),
            self.job.timeout_s if timeout_s is None else timeout_s,
            lambda: f"the parameters were not replaced for the {epoch}. time",
        )
        self.asked_epoch = max(self.asked_epoch, epoch)

    def _at_epoch(self, epoch: int, initialized: bool) -> bool | None:
        state = self._state
        return True if state is not None and state.epoch >= epoch and (state.initialized or not initialized) else None

    def wait_epoch_or_generation(self, epoch: int, generation: int, timeout_s: float) -> None:
        """Block until the parameters are being replaced for the `epoch`-th time, or `generation` has begun.

        Raises:
            Timeout: neither happened.
        """
        self.job.wait_until(
            lambda: True if self.epoch >= epoch or self.membership.generation >= generation else None,
            timeout_s,
            lambda: f"the parameters were not replaced for the {epoch}. time",
        )

    def wait_latest(self, position: tuple[int, int]) -> None:
        """Block until this worker has received (epoch, version) `position`, which another has already.

        Raises:
            Timeout: it has not.
        """
        self.job.wait_until(
            lambda: True if self.latest >= position else None,
            self.job.timeout_s,
            lambda: f"version {position[1]} of epoch {position[0]} has not been announced to this worker",
        )

    def wait_version(self, version: int, timeout_s: float | None = None) -> None:
        """Block until this worker has received the commit of a version, by any worker.

        Raises:
            Timeout: it has not.
        """
        self.job.wait_until(
            lambda: True if self._version >= version else None,
            self.job.timeout_s if timeout_s is None else timeout_s,
            lambda: f"version {version} was not committed, the newest known is {self._version},",
        )

    def wait_initialized(self, registered: Registered) -> bool:
        """Block until every shard server holds its parameters.

        Args:
            registered: the reply of `Models.register`.

        Returns:
            False if the membership changed before: register again, since the worker that uploads may have died, or a
            shard server may have been replaced.

        Raises:
            Timeout: they do not, usually because the rank that uploads has died.
            Busy: one has no memory for it.
            Misuse: the model was released.
        """

        def known() -> bool | None:
            if self._state is not None and self._state.initialized:
                return True
            self.check_released()
            if self._state is not None and self._state.out_of_memory:
                raise Busy(self._state.out_of_memory)
            return False if self.membership.generation > registered.generation else None

        return self.job.wait_until(
            known,
            self.job.timeout_s,
            lambda: (
                f"the shard servers still lack first values of model {self.name!r}, which rank "
                f"{min((w.rank for w in self.membership.workers), default=0)} gives them when it wraps it,"
            ),
            reminds=True,
        )
