"""The conformance suite of `Backend`, for all implementations.

All ranks of a group call `run_conformance` together, each with its own backend object. The cases run in lock-step and
compare with plain numpy. `run_in_threads` makes groups of threads, `run_in_world` groups of a job's workers.
`conformance_worker` runs `run_in_world` in a worker process of a `LocalCluster`.

    reports = run_in_threads(4, MockBackend)
    assert all(report.ok for report in reports), reports
"""

import warnings
from typing import Any

from axon_ps_lab.conformance.arguments import check_arguments
from axon_ps_lab.conformance.device import DeviceBackend
from axon_ps_lab.conformance.runner import (
    SIZES,
    SPARES,
    ConformanceReport,
    conformance_worker,
    run_conformance,
    run_in_threads,
    run_in_world,
)

__all__ = [
    "SIZES",
    "SPARES",
    "ConformanceReport",
    "DeviceBackend",
    "check_arguments",
    "conformance_worker",
    "run_conformance",
    "run_in_threads",
    "run_in_world",
]


def __getattr__(name: str) -> Any:
    """Give `ConformanceReport` by its old name, for one release."""
    if name != "Report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("axon_ps_lab.conformance.Report is called ConformanceReport now", DeprecationWarning, stacklevel=2)
    return ConformanceReport
