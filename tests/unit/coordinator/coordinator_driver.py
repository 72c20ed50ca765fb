"""Drives a `CoordinatorState` as a shell would, with a manual clock and a memory store, and records its replies.

Performing an action checks what holds for every one of them: nothing is announced that is not in the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action, CloseSession, Happened, Persist, Reply, SendEvent
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.errors import AxonError
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.placement import Placement
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Decision, DType, Membership, OptimizerSpec, Role
from axon_ps.wire.events import (
    FIRST_NAME,
    Arrived,
    Connectivity,
    Copied,
    JobState,
    JoinRequest,
    KnownNames,
    Ready,
    ServerMemory,
    Vote,
    Welcome,
)
from axon_ps.wire.v1 import membership_pb2, state_pb2, watch_pb2
from axon_ps_lab.clock import ManualClock

T = TypeVar("T")

LAYOUT = Layout(
    units=(
        build_unit("embed", [("embed.weight", (64, 256), DType.F32)]),
        build_unit("head", [("head.weight", (64, 256), DType.F32)], trainable=False),
    )
)
SPEC = JobSpec(layout=LAYOUT)
OPTIMIZER = OptimizerSpec(name="adamw", groups=({"lr": 0.1},), group_of=(0, -1))


class Peer:
    """A member as the coordinator sees it: its current session and all events that it received."""

    def __init__(self, driver: Driver, role: Role, node: str, rank: int) -> None:
        self.driver, self.role, self.node = driver, role, node
        self.incarnation = uuid.UUID(int=next_id()).hex
        self.address = f"127.0.0.1:{next_id()}"
        self.rank = rank
        self.session = -1
        self.inbox: list[Any] = []
        self.error: Exception | None = None
        self.open = False
        self.known: KnownNames | None = None
        self.memory: ServerMemory | None = None
        self.connectivity: Connectivity | None = None
        self.state_id = ""
        self.placements: dict[int, Placement] = {}  # the newest one received, by model
        self.given_rank = -1  # in the newest Welcome

    def receive(self, event: Any) -> None:
        self.inbox.append(event)
        if isinstance(event, Welcome):
            self.given_rank = event.rank
        if isinstance(event, JobState) and event.placement is not None:
            self.placements[event.model] = event.placement

    def placement_number(self, model: int = 0) -> int:
        """The number of the newest placement that it received; 0 before the first."""
        return self.placements[model].number if model in self.placements else 0

    @property
    def caller(self) -> Caller:
        return Caller(job="job", incarnation=self.incarnation)

    @property
    def membership(self) -> Membership:
        return self.last(Membership)

    def received(self, kind: type[T]) -> list[T]:
        return [e for e in self.inbox if isinstance(e, kind)]

    def last(self, kind: type[T]) -> T:
        return self.received(kind)[-1]

    def join(self, *, rank: int | None = None, world_size: int = 0, job: str = "job", standby: bool = False) -> Peer:
        """Open a (new) session."""
        d = self.driver
        session = d.next_session()
        request = JoinRequest(
            job=job,
            incarnation=self.incarnation,
            node=self.node,
            address=self.address if self.role is Role.SHARD else "",
            requested_rank=self.rank if rank is None else rank,
            world_size=world_size,
            standby=standby,
            known=self.known,
            memory=self.memory,
            state_id=self.state_id,
            connectivity=self.connectivity,
        )
        actions = d.state.join(session, self.role, request, d.clock())
        self.session, self.open, self.error = session, True, None
        d.peers[session] = self
        d.perform(actions)
        return self

    def lose(self) -> None:
        """The stream breaks."""
        self.open = False
        self.driver.perform(self.driver.state.streams_lost([self.session], self.driver.clock()))

    def leave(self, *, finished: bool = False) -> None:
        self.driver.perform(self.driver.state.leave(self.session, "", self.driver.clock(), finished=finished))

    def arrive(self, **changes: Any) -> None:
        """It has computed its gradients, and its pushes wait."""
        fields = {**self._attempt(changes), **changes}
        self.driver.perform(self.driver.state.arrived(self.session, Arrived(**fields), self.driver.clock()))

    def beat(self, **metrics: float) -> None:
        self.driver.perform(
            self.driver.state.heartbeat(self.session, metrics, self.driver.clock(), connectivity=self.connectivity)
        )

    def reaches(self, *reached: Peer, unreachable: Sequence[Peer] = ()) -> None:
        """It says whom it reaches, now and in every heartbeat."""
        self.connectivity = Connectivity(
            unreachable=frozenset(p.incarnation for p in unreachable), reached=frozenset(p.incarnation for p in reached)
        )
        if self.open:
            self.beat()

    def vote(self, **changes: Any) -> None:
        fields = {**self._attempt(changes), "max_norm": 0.0, "hyper": (), **changes}
        self.driver.perform(self.driver.state.vote([self.session], Vote(**fields), self.driver.clock()))

    def ready(self, *sums_of_squares: float, **changes: Any) -> None:
        placement = self.placement_number(changes.get("model", 0))
        sums = sums_of_squares or (4.0,)
        fields = {**self._attempt(changes), "sums_of_squares": sums, "placement": placement, **changes}
        self.driver.perform(self.driver.state.ready(self.session, Ready(**fields), self.driver.clock()))

    def copying(self, model: int = 0) -> tuple[int, ...]:
        """The slices that it is to copy, as far as it knows."""
        holders = self.placements[model].holders if model in self.placements else ()
        return tuple(i for i, h in enumerate(holders) if self.given_rank in h.copying)

    def copied(self, *slices: int, model: int = 0, **changes: Any) -> None:
        """It has got slices, all that it is to copy unless some are named."""
        got = slices or self.copying(model)
        placement = self.placement_number(model)
        report = Copied(**{"model": model, "epoch": 0, "slices": got, "placement": placement, **changes})
        self.driver.perform(self.driver.state.copied(self.session, report, self.driver.clock()))

    def _attempt(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The attempt of a model (the first, unless `changes` say another) that is under way."""
        status = self.driver.state.status()
        steps = {m.model: m.step for m in status.models}
        step = steps.get(changes.get("model", 0), status.step)
        return {"generation": status.membership.generation, "step": step}

    def initialized(self, version: int = 0, epoch: int = 0, model: int = 0) -> None:
        now = self.driver.clock()
        self.driver.perform(self.driver.state.initialized(self.session, version, epoch, now, model=model))


class Driver:
    def __init__(self, **config: Any) -> None:
        self.clock = ManualClock(100.0)
        self.store = MemoryStateStore()
        self.config = CoordinatorConfig(**{"job": "job", "world_size": 2, "num_shards": 1, **config})
        self.peers: dict[int, Peer] = {}
        self.replies: dict[int, Any] = {}
        self.performed: list[Action] = []
        self._number = 0
        self.state = CoordinatorState(self.config, self.clock(), new_id=uuid.UUID(int=next_id()).hex)

    def restart(self, **config: Any) -> None:
        """The coordinator dies and comes back with what is in the store; every session is gone."""
        for peer in self.peers.values():
            peer.open = False
        self.peers.clear()
        self.replies.clear()
        self.config = CoordinatorConfig(**{**vars(self.config), **config})
        self.state = CoordinatorState(self.config, self.clock(), self.store.load(), new_id=uuid.UUID(int=next_id()).hex)

    def next_session(self) -> int:
        self._number += 1
        return self._number

    def peer(self, role: Role = Role.WORKER, node: str = "a", rank: int = -1) -> Peer:
        return Peer(self, role, node, rank)

    def worker(self, node: str = "a", rank: int = -1, world_size: int = 0) -> Peer:
        return self.peer(Role.WORKER, node, rank).join(world_size=world_size)

    def shard(self, rank: int = -1, memory: ServerMemory | None = None, node: str = "s") -> Peer:
        peer = self.peer(Role.SHARD, node, rank)
        peer.memory = memory
        return peer.join()

    def assembled(self, workers: int = 2, shards: int = 1) -> tuple[list[Peer], list[Peer]]:
        """A complete job whose servers hold first values."""
        servers = [self.shard() for _ in range(shards)]
        members = [self.worker() for _ in range(workers)]
        for w in members:
            self.register(w)
        for s in servers:
            s.initialized()
        return members, servers

    def register(
        self,
        peer: Peer,
        spec: Any = SPEC,
        optimizer: Any = OPTIMIZER,
        resume: Any = None,
        name: str = FIRST_NAME,
    ) -> Any:
        """The answer to a registration; None where another worker's comes first.

        Raises:
            AxonError: it is refused.
        """
        answer = self.call(
            lambda call: self.state.registrations.register(
                call, peer.caller, spec, optimizer, resume, now=self.clock(), name=name
            )
        )
        if isinstance(answer, AxonError):
            raise answer
        return answer

    def await_registration(self, peer: Peer, timeout_s: float = 1000.0, name: str = FIRST_NAME) -> int:
        """A call that waits until a worker is to register again; `replies` get its answer."""
        call = self._number + 1
        self.call(lambda _: self.state.registrations.wait(call, peer.caller, name, self.clock(), timeout_s))
        return call

    def call(self, event: Any) -> Any:
        """Make a call and return its answer, or its number while there is none."""
        self._number += 1
        number = self._number
        self.perform(event(number))
        return self.replies.get(number, number)

    def kv(self, peer: Peer | None, op: str, *args: Any) -> Any:
        caller = peer.caller if peer else Caller(job="job")

        def event(call: int) -> list[Action]:
            getattr(self.state.kv(caller), op)(call, *args)
            return self.state.flush()

        return self.call(event)

    def advance(self, seconds: float, *, beat: bool = False) -> None:
        """Let time pass in small steps; with `beat`, every open session sends heartbeats."""
        left = seconds
        while left > 0:
            nap = min(left, 0.5)
            self.clock.advance(nap)
            left -= nap
            if beat:
                for peer in list(self.peers.values()):
                    if peer.open:
                        peer.beat()
            self.perform(self.state.tick(self.clock()))

    def perform(self, actions: list[Action]) -> None:
        self.performed.extend(actions)
        for i, action in enumerate(actions):
            if isinstance(action, Persist):
                assert i == 0, "records come before everything else"
                self.store.apply(action.records)
            elif isinstance(action, SendEvent):
                self._check_durable(action.event)
                for session in action.sessions:
                    self.peers[session].receive(action.event)
            elif isinstance(action, Reply):
                assert action.call not in self.replies, "a call is answered once"
                self.replies[action.call] = action.result
            elif isinstance(action, CloseSession):
                peer = self.peers.pop(action.session, None)
                if peer is not None and peer.session == action.session:
                    peer.open, peer.error = False, action.error

    def store_only(self, actions: list[Action]) -> None:
        """The coordinator dies when it has written and before it says anything."""
        for action in actions:
            if isinstance(action, Persist):
                self.store.apply(action.records)

    def _check_durable(self, event: Any) -> None:
        stored = self.store.load()
        if isinstance(event, Decision):
            record = records.decision_record(event)
            assert stored[record.key] == record.value
        if isinstance(event, Membership):
            members = state_pb2.MembersRecord.FromString(stored["members"])
            assert members.membership.generation >= event.generation
            if "progress" in stored:  # the first model was not released
                assert membership_pb2.ModelProgress.FromString(stored["progress"]).step >= event.step


class Recording(Driver):
    """A driver that passes what is announced to the history, as the shell does."""

    def perform(self, actions: list[Action]) -> None:
        super().perform(actions)
        for action in actions:
            if isinstance(action, SendEvent):
                self.state.history.published(action.event, self.clock())
            elif isinstance(action, Happened):
                self.state.history.happened(action.kind, action.text, self.clock())

    def everything(self) -> watch_pb2.WatchEvent:
        return self.state.history.everything(self.clock())


_ids = 0


def next_id() -> int:
    global _ids
    _ids += 1
    return _ids
