"""Test programs that use axon_ps, on real processes of this machine, or with workers in threads."""

from axon_ps.testing.cluster import LocalCluster
from axon_ps.testing.threads import run_threads
from axon_ps.testing.workers import WorkerFailed, WorkerResult, preloaded

__all__ = ["LocalCluster", "WorkerFailed", "WorkerResult", "preloaded", "run_threads"]
