"""The models of the job in this process: by number all of the job, by name those that the process has wrapped.

The coordinator numbers models by their names, so all workers agree on the numbers in whatever order they make the
models. A process cannot have two models of one name: both would be bound to the same parameters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from axon_ps.coordinator.client.session import CoordinatorClient, Event, Registered, SessionLost
from axon_ps.errors import Misuse
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.observe.reminders import reminding
from axon_ps.observe.work import process_measures
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.shard.client.client import ShardGroup
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Membership
from axon_ps.wire.events import FIRST_NAME
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.client import StepClient

_logger = logging.getLogger(__name__)


class Names:
    """The names of the models of a process, with a description of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._described: dict[str, str] = {}
        self._made = 0

    @contextmanager
    def claiming(self, name: str | None, described: str) -> Iterator[str]:
        """Claim a name while a model is registered with the job. If the block raises, the name is free again.

        A model stays the job's when its wrapper is deleted: its parameters are still on the servers.

        Args:
            name: its name in the job; None = by its number in the order made.
            described: a description, for messages.

        Returns:
            Its name.

        Raises:
            Misuse: the process has registered another model by that name. The message says which.
        """
        with self._lock:
            name = name or f"model {self._made}"
            if (first := self._described.get(name)) is not None:
                raise Misuse(
                    f"{described} cannot be wrapped as {name!r}: this process has wrapped {first} by that name, whose "
                    "parameters the second would get. Give it another name=, or release() the first; to give a model "
                    "other values, use its load_state_dict()"
                )
            self._described[name] = described
            self._made += 1
        try:
            yield name
        except BaseException:
            with self._lock:
                del self._described[name]
                self._made -= 1
            raise

    def free(self, name: str) -> None:
        """Free the name of a released model."""
        with self._lock:
            self._described.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._described))

    def __len__(self) -> int:
        return len(self._described)


class Models:
    """The models of the job in this process.

    Args:
        loop: the background loop.
        coordinator: the session.
        shards: the shard servers, for the first model. The others use its connections.
        view: the members.

    Attributes:
        names: those of the models that this process has wrapped.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        coordinator: CoordinatorClient,
        shards: ShardGroup,
        view: JobView,
    ) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._shards = shards
        self._view = view
        self._clients: dict[int, StepClient] = {}
        self._by_name: dict[str, StepClient] = {}
        self.names = Names()
        self.client(0)

    def client(self, number: int) -> StepClient:
        """Return the client of a model, by number. It is made by the first call."""
        with self._view.changed:
            if number not in self._clients:
                self._clients[number] = StepClient(
                    self._loop,
                    self._coordinator,
                    self._shards.for_another_model() if number else self._shards,
                    self._view,
                    number,
                )
            return self._clients[number]

    @property
    def wrapped(self) -> list[StepClient]:
        """The models that this process has registered and not released, by number."""
        with self._view.changed:
            return sorted(self._by_name.values(), key=lambda client: client.view.model)

    def named(self, name: str) -> StepClient:
        """Return the model of a name.

        Raises:
            Misuse: this process has none of that name.
        """
        with self._view.changed:
            if (client := self._by_name.get(name)) is not None:
                return client
            known = ", ".join(map(repr, self._by_name)) or "none"
        raise Misuse(f"this process has no model {name!r}; it has {known}")

    def only(self) -> StepClient:
        """Return the only model, or the first while there is none.

        Raises:
            Misuse: there are several.
        """
        found = self.wrapped
        if len(found) > 1:
            names = ", ".join(repr(client.view.name) for client in found)
            raise Misuse(f"the job has several models ({names}); ask the one that is meant, as in model.version")
        return found[0] if found else self.client(0)

    def register(self, spec: JobSpec, name: str = FIRST_NAME) -> tuple[StepClient, Registered]:
        """Set the layout of a model, or check ours against the layout it has.

        Args:
            spec: the layout.
            name: of the model in the job.

        Returns:
            This worker's part in its steps, and the coordinator's reply.

        Raises:
            LayoutMismatch: the job has another layout by that name. The message says where they differ.
            Busy: a shard server has no memory for it.
            Timeout: the worker of lowest rank has registered nothing by that name.
            CheckpointError: the job is to resume from a checkpoint that cannot be read.
            MemberLost: a shard server that is to hold slices of the model did not come in time.
        """
        self._shards.warm_up(spec)
        registering = self._coordinator.register(spec=spec, timeout_s=self._view.timeout_s, name=name)
        first = min((w.rank for w in self._view.membership.workers), default=0)
        with reminding(_logger, lambda: f"model {name!r} is to be registered, first of all by rank {first}"):
            reply = self._loop.run(registering)
        client = self.client(reply.model)

        async def take() -> None:  # on the loop, where gathers may wait for the layout
            client.registered(spec, reply, name)

        self._loop.run(take())
        with self._view.changed:
            self._by_name[name] = client
            self._view.models = len(self._by_name)
        return client, reply

    def release(self, client: StepClient) -> None:
        """Release a model, which another worker may have released already.

        Raises:
            Busy: a checkpoint is being written.
        """
        timeout_s, view = self._view.timeout_s, client.view
        self._loop.run(self._coordinator.release(view.model, view.name, timeout_s=timeout_s), timeout_s)
        self._view.wait_until(
            lambda: True if client.view.released else None,
            timeout_s,
            lambda: f"the release of model {client.view.name!r} has not been announced to this worker",
        )
        with self._view.changed:
            self._by_name.pop(client.view.name, None)
            self._view.models = len(self._by_name)
        self.names.free(client.view.name)

    def on_event(self, event: Event) -> None:
        """Apply one event of the session that is not about one model, in order, on the loop's thread."""
        with self._view.changed:
            if isinstance(event, Membership):
                self._view.update(event)
                me = self._view.member_in(event)
                self._shards.set_members(event, "" if me is None else me.id)
            elif isinstance(event, SessionLost) and event.final:
                self._view.failure = event.error
            for client in list(self._clients.values()):
                client.on_event(event)
            self._view.changed.notify_all()

    def statistics(self) -> dict[str, float]:
        """Return the counters of the data plane of all models together; see `StepClient.statistics`."""
        with self._view.changed:
            clients = sorted(self._clients.items())
        total: dict[str, float] = {}
        for _, client in clients:
            for name, value in client.statistics().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def histograms(self) -> dict[str, Histogram]:
        """Return the times of gathers, pushes, votes and steps of all models."""
        with self._view.changed:
            clients = list(self._clients.values())
        total: dict[str, Histogram] = {}
        for client in clients:
            for name, histogram in client.trace.seconds.items():
                total.setdefault(name, Histogram()).merge(histogram)
        return total

    def measures(self) -> dict[str, float]:
        """Return the measures in heartbeats: bytes from and to the servers, memory, CPU time, retries, version."""
        measures = process_measures(statistics := self.statistics())
        measures["retries"] = statistics.get("retries", 0.0)
        with self._view.changed:
            if (first := self._clients.get(0)) is not None:
                measures["version"] = float(first.view.latest_version)
        return measures


__all__ = ["Models", "Names"]
