"""The rendezvous of all workers of a job, by the coordinator. Workers that have just joined take part, too."""

from __future__ import annotations

from collections.abc import Sequence

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import GenerationChanged
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.worker.job_view import JobView


class Rendezvous:
    """The barriers of one worker.

    Args:
        loop: the background loop.
        coordinator: the session.
        view: the members.
    """

    def __init__(self, loop: BackgroundLoop, coordinator: CoordinatorClient, view: JobView) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._view = view

    def barrier(self, name: str, timeout_s: float, ranks: Sequence[int] = ()) -> None:
        """Enter a barrier, and again if the generation changed without a change of workers (by a restore).

        Args:
            name: distinguishes concurrent barriers.
            timeout_s: most seconds to wait.
            ranks: of the workers that must enter it; empty = of all.

        Raises:
            Timeout, GenerationChanged, Disagreement: as of `World.barrier`.
        """
        deadline, view = Deadline(timeout_s), self._view
        if new := view.newcomers():
            who = " and ".join(f"worker {m.rank} (node {m.node})" for m in new)
            raise GenerationChanged(
                f"{who} came since this worker's last step and is at the beginning of its program, so barrier {name!r} "
                "was not entered: make a step, or begin this part of the program again",
                view.membership.generation,
            )
        workers = {m.id for m in view.membership.workers}
        while True:
            try:
                self._loop.run(self._coordinator.barrier(name, ranks, deadline.remaining()))
                return
            except GenerationChanged as error:
                view.wait_generation(error.generation, deadline.remaining())
                if {m.id for m in view.membership.workers} != workers:
                    raise

    def all_gather(self, name: str, value: bytes, timeout_s: float) -> list[bytes]:
        """Gather a value of every worker, in rank order, at most 1 MiB each.

        Args:
            name: distinguishes concurrent gathers.
            value: this worker's.
            timeout_s: most seconds to wait in each of three steps.

        Raises:
            Timeout, GenerationChanged, Disagreement: as of `barrier`.
        """
        run, coordinator = self._loop.run, self._coordinator
        ranks = [m.rank for m in self._view.membership.workers]
        run(coordinator.kv_put(f"{name}/{coordinator.rank}", value, timeout_s=self._view.timeout_s))
        self.barrier(f"{name}/put", timeout_s, ranks)
        values = [run(coordinator.kv_wait(f"{name}/{rank}", timeout_s=timeout_s)) for rank in ranks]
        self.barrier(f"{name}/got", timeout_s, ranks)
        return values
