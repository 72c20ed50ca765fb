"""Workers of a job as Ray actors: each runs a function, again from its first line when its process or node has died.

Ray starts the actor again. Once the actor replies, the driver calls the function again, and the worker joins the
running job with the same rank. (Ray's own retries of the call are used up within seconds while it has not noticed a
node's death.)
An error that the function itself raises ends the run: it would be raised again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from axon_ps.errors import Broken, Busy
from axon_ps.ray.placement import in_bundle
from axon_ps.worker.world import World

POLL_S: Final = 1.0
_logger = logging.getLogger(__name__)


def set_environment(values: Mapping[str, str]) -> None:
    """Give this worker's process the variables by which it finds its job."""
    os.environ.update(values)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Leave the job at the block's end, finished or not: Ray ends processes without running exit handlers."""
    try:
        yield
    except BaseException:
        _leave(finished=False)
        raise
    _leave(finished=True)


def _leave(*, finished: bool) -> None:
    if (world := World.current()) is not None:
        world.close(finished=finished)


class WorkerActor:
    """A worker's process. Its methods run in threads, so that it replies to `ping` while it trains."""

    def __init__(self) -> None:
        self._outcome: Future[object] | None = None

    def ping(self) -> int:
        """Return its process id."""
        return os.getpid()

    def run(
        self,
        environment: Mapping[str, str],
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> object:
        """Call the function as a worker of the job. Its node is the one where Ray has started this process.

        A second call in the same process, made because the connection to the driver was lost, returns the result of the
        first.
        """
        if self._outcome is not None:
            return self._outcome.result()
        self._outcome = Future()
        try:
            set_environment({**environment, "AXON_PS_NODE": ray.get_runtime_context().get_node_id()})
            with leaving():
                self._outcome.set_result(function(*args, **kwargs))
        except BaseException as error:
            self._outcome.set_exception(error)
        return self._outcome.result()


@dataclass
class _Worker:
    """One worker: its actor, its calls, and the deaths of its process.

    Attributes:
        actor: Ray starts it again.
        arguments: of `WorkerActor.run`.
        call: the running call; None while its process is to reply first.
        ping: a call that shows that the process lives.
        deaths: number of calls that failed because the process was gone.
        seen_s: time of its last reply.
    """

    actor: Any
    arguments: Sequence[Any] = ()
    call: Any = None
    ping: Any = None
    deaths: int = 0
    seen_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Call the function."""
        self.call = self.actor.run.remote(*self.arguments)

    def ask(self) -> None:
        """Take a reply of its process, if there is one, and ask again. Call the function if it is not running."""
        if self.ping is not None and ray.wait([self.ping], timeout=0)[0]:
            reply, self.ping = self.ping, None
            with contextlib.suppress(RayActorError):
                ray.get(reply, timeout=POLL_S)
                self.seen_s = time.monotonic()
                if self.call is None:
                    self.start()
        if self.ping is None:
            self.ping = self.actor.ping.remote()


class WorkerRun:
    """One function in all workers, from their start to their end.

    Args:
        group: has a bundle for each.
        num_workers: number of workers.
        resources: of a bundle.
        max_restarts: times that each may be started again; -1 = always.

    Attributes:
        actors: by rank.
    """

    def __init__(
        self, group: PlacementGroup, num_workers: int, resources: Mapping[str, float], max_restarts: int
    ) -> None:
        actor = ray.remote(WorkerActor)
        options = {"max_restarts": -1, "max_concurrency": 3}
        self.actors: list[Any] = [
            actor.options(**in_bundle(group, rank, resources), **options).remote() for rank in range(num_workers)
        ]
        self._max_restarts = max_restarts
        self._running: dict[int, _Worker] = {}
        self._results: list[object] = [None] * num_workers
        self._finished = 0

    def start(
        self,
        environment: Mapping[str, str],
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Call the function in all of them, each with its rank in its environment."""
        for rank, actor in enumerate(self.actors):
            self._running[rank] = _Worker(actor, ({**environment, "RANK": str(rank)}, function, args, kwargs))
            self._running[rank].start()

    def results(self, *, absent_s: float, grace_s: float) -> list[object]:
        """Return the function's results, by rank; None for a lost worker that is not needed any more.

        Args:
            absent_s: seconds for which all workers may be dead.
            grace_s: seconds that a lost worker may still take to come back, when others have finished and none lives.

        Raises:
            Broken: a worker raised, or its process died once too often.
            Busy: Ray could not start any again.
        """
        while self._running:
            calls = {worker.call: rank for rank, worker in self._running.items() if worker.call is not None}
            if not calls:  # all have died
                time.sleep(POLL_S)
            for call in ray.wait(list(calls), num_returns=1, timeout=POLL_S)[0] if calls else ():
                self._take(calls[call])
            for worker in self._running.values():
                worker.ask()
            self._check_alive(grace_s if self._finished else absent_s)
        return self._results

    def end(self) -> None:
        """End their processes. A repeated call is harmless."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()
        self._running.clear()

    def _take(self, rank: int) -> None:
        worker = self._running[rank]
        try:
            self._results[rank] = ray.get(worker.call, timeout=POLL_S)
        except RayTaskError as error:
            raise Broken(f"worker {rank} raised {type(error.cause).__name__}:\n{error}") from error.cause
        except RayActorError as error:
            worker.call, worker.deaths = None, worker.deaths + 1
            if 0 <= self._max_restarts < worker.deaths:
                raise Broken(f"worker {rank} died after {worker.deaths - 1} restarts: {error}") from error
            _logger.warning("worker %d died; it joins again as soon as Ray has started it", rank)
        else:
            del self._running[rank]
            self._finished += 1

    def _check_alive(self, limit_s: float) -> None:
        """Raise, or be done, when no worker that is needed has replied for `limit_s` seconds."""
        if not self._running or time.monotonic() - max(worker.seen_s for worker in self._running.values()) < limit_s:
            return
        ranks = ", ".join(map(str, self._running))
        if not self._finished:
            raise Busy(f"workers {ranks} died, and Ray could not start any of them again within {limit_s:g} s")
        _logger.warning("workers %s were lost and could not be started again; the others have finished", ranks)
        self._running.clear()
