"""Running the cases on a group, and making groups to run them on.

Owns: the order of the cases, and their results. After a case that raises, the ranks are not synchronized any more, so
no further case is run on its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.errors import AxonError
from axon_ps.worker.world import World
from axon_ps_lab.conformance import agreement, endings, messages, results
from axon_ps_lab.conformance.arguments import check_arguments
from axon_ps_lab.conformance.trial import Skip, Trial

SIZES = (1, 2, 3, 4, 7)
"""The group sizes that the suite is usually run on."""

CALL_S = 120.0
"""Seconds for a call that must succeed: a limit for hangs, on a machine with other work."""

SPARES = len(endings.CASES)
"""Number of further groups of the same ranks that `run_conformance` can use, for the cases that end a group."""

MAX_RANKS_FOR_ARGUMENTS = 3
"""The largest group whose arguments are checked: two nodes, one of them with two ranks."""

_Case = Callable[[Trial], None]


@dataclass
class ConformanceReport:
    """The results of the cases on one rank.

    Attributes:
        passed: number of cases that passed.
        failures: descriptions of the errors, with the case's name.
        skipped: cases that do not apply, with the reason.
        seconds: duration by case.
    """

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if no case failed."""
        return not self.failures


def run_conformance(
    backend: Backend, *, exact_order: bool = True, spares: Sequence[Backend] = (), timeout_s: float = CALL_S
) -> ConformanceReport:
    """Run all cases on a group; every one of its ranks must call it.

    Args:
        backend: the group's backend, fresh. It can be used afterwards if nothing failed.
        exact_order: whether the backend promises to reduce in rank order (see `backends.base`, Note: [Rank order]);
            else results may differ from that by rounding.
        spares: `SPARES` further backends of the same ranks, for the cases that end a group; without them these cases
            are skipped. The spares cannot be used afterwards; the caller closes them.
        timeout_s: seconds for a call that must succeed.
    """
    report = ConformanceReport()
    trial = Trial(backend, exact_order=exact_order, timeout_s=timeout_s)
    for case in (*results.CASES, *agreement.CASES, *messages.CASES):
        if not _run(case, trial, report):
            report.failures.append(f"{case.__name__}: nothing more was run on this group")
            break
    report.skipped += [f"{case.__name__}: no spare group was given" for case in endings.CASES[len(spares) :]]
    # These cases mostly wait, and each has its own group, so they run in parallel.
    ends = [
        threading.Thread(
            target=_run, args=(case, Trial(spare, exact_order=exact_order, timeout_s=timeout_s), report), daemon=True
        )
        for case, spare in zip(endings.CASES, spares, strict=False)
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    return report


def _run(case: _Case, trial: Trial, report: ConformanceReport) -> bool:
    """Run a case; returns True if the ranks are still synchronized."""
    trial.wrong = []
    begin = time.monotonic()
    try:
        case(trial)
    except Skip as skip:
        report.skipped.append(f"{case.__name__}: {skip}")
        return True
    except (AxonError, AssertionError, ArithmeticError, TypeError, ValueError, LookupError, OSError, RuntimeError) as e:
        report.failures.append(f"{case.__name__} on {trial.n} ranks: {type(e).__name__}: {e}")
        return False
    finally:
        report.seconds[case.__name__] = round(time.monotonic() - begin, 3)
        report.failures += [f"{case.__name__} on {trial.n} ranks: {wrong}" for wrong in trial.wrong]
    report.passed += not trial.wrong
    return True


def run_in_threads(
    n: int,
    make: Callable[[GroupContext], Backend],
    *,
    nodes: Sequence[str] = (),
    exact_order: bool = True,
    timeout_s: float = CALL_S,
) -> list[ConformanceReport]:
    """Run the suite on a group of `n` threads of this process; returns the reports by rank.

    Args:
        n: number of ranks.
        make: makes the backend of one rank; called in the rank's thread. All contexts share a `MemoryStore`.
        nodes: the node that each rank appears to be on; empty = all on one.
        exact_order: as for `run_conformance`.
        timeout_s: as for `run_conformance`.
    """
    groups = [
        mock_contexts(n, nodes=nodes, name=f"conformance/{g}", ranks=range(10, 10 + n)) for g in range(1 + SPARES)
    ]
    reports: list[ConformanceReport] = [ConformanceReport(failures=["it did not end"]) for _ in range(n)]
    all_done = threading.Barrier(n)  # a backend that is closed earlier may disturb the others

    def run(rank: int) -> None:
        backends: list[Backend] = []
        try:
            backends += [make(group[rank]) for group in groups]
            reports[rank] = run_conformance(
                backends[0], exact_order=exact_order, spares=backends[1:], timeout_s=timeout_s
            )
        except Exception as error:  # any error: the other ranks wait for this one below
            reports[rank] = ConformanceReport(failures=[f"the backend cannot be made: {error}"])
        all_done.wait()
        for backend in backends:
            backend.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def run_in_world(
    world: World,
    backend: str,
    sizes: Sequence[int] = SIZES,
    *,
    exact_order: bool = True,
    timeout_s: float = CALL_S,
) -> dict[int, ConformanceReport]:
    """Run the suite on groups of the last workers of a job, and `check_arguments`; every worker must call it.

    Args:
        world: the job.
        backend: name of the backend.
        sizes: number of ranks of each group.
        exact_order: as for `run_conformance`.
        timeout_s: as for `run_conformance`.

    Returns:
        The reports by size, without the sizes whose group does not have this worker.
    """
    reports = {}
    everybody = world.default_group.ranks
    groups = {size: [world.new_group(everybody[-size:], backend=backend) for _ in range(2 + SPARES)] for size in sizes}
    for size, (group, *spares, last) in groups.items():
        if group.contains(world.rank):
            reports[size] = run_conformance(
                group.backend_of(),
                exact_order=exact_order,
                spares=[spare.backend_of() for spare in spares],
                timeout_s=timeout_s,
            )
            if size <= MAX_RANKS_FOR_ARGUMENTS:
                reports[size].failures += check_arguments(last)
    world.barrier(f"conformance/{backend}")
    for group in (g for some in groups.values() for g in some):
        group.close()
    return reports


def conformance_worker(
    backends: Mapping[str, bool], sizes: Sequence[int] = SIZES, *, timeout_s: float = CALL_S
) -> dict[str, dict[int, ConformanceReport]]:
    """Run `run_in_world` in a worker process; all workers of the job must call it.

    Example: `LocalCluster.run_workers(conformance_worker, args=({"shm": True, "hierarchical": False},))`.

    Args:
        backends: names of backends, and whether each promises an exact order.
        sizes: number of ranks of each group.
        timeout_s: as for `run_conformance`.

    Returns:
        The reports by backend and size.
    """
    with World.init(join_timeout_s=CALL_S) as world:
        return {
            backend: run_in_world(world, backend, sizes, exact_order=exact_order, timeout_s=timeout_s)
            for backend, exact_order in backends.items()
        }
