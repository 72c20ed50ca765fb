"""The conformance suite of `Backend`, for all implementations.

All ranks of a group call `run_conformance` together, each with its own backend object. The cases run in lock-step and
compare with plain numpy. `run_in_threads` makes groups of threads, `run_in_world` groups of a job's workers.
`conformance_worker` runs `run_in_world` in a worker process of a `LocalCluster`.

    reports = run_in_threads(4, MockBackend)
    assert all(report.ok for report in reports), reports
"""

from axon_ps_lab.conformance.arguments import check_arguments
from axon_ps_lab.conformance.device import DeviceBackend
from axon_ps_lab.conformance.runner import (
    SIZES,
    SPARES,
    Report,
    conformance_worker,
    run_conformance,
    run_in_threads,
    run_in_world,
)

__all__ = [
    "SIZES",
    "SPARES",
    "DeviceBackend",
    "Report",
    "check_arguments",
    "conformance_worker",
    "run_conformance",
    "run_in_threads",
    "run_in_world",
]
