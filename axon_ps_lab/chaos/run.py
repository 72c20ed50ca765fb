"""A whole campaign: the job that it strikes, its faults, and the comparison with a job without faults."""

from __future__ import annotations

import contextlib

from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.rpc.security import Security
from axon_ps_lab.chaos.campaign import Campaign, Job
from axon_ps_lab.chaos.embedded import EmbeddedJob, Values, bits_different
from axon_ps_lab.chaos.outside import RunningJob
from axon_ps_lab.chaos.runner import Emit, Result, Runner


def run_embedded(campaign: Campaign, emit: Emit) -> Result:
    """Start a job on this machine, strike it, and compare it bit by bit with a job without faults.

    Ctrl-C interrupts the campaign: all processes are ended, and the events observed so far are returned. Call it on a
    thread that outlives the job's processes.

    Args:
        campaign: a campaign with [embedded].
        emit: called with a line for every fault, and for slow work.

    Raises:
        AxonError: the job does not start.
    """
    job = EmbeddedJob(campaign)
    result: Result | None = None
    values = None
    try:
        with job:
            emit(f"a job of {campaign.embedded.shards} shard servers and {campaign.embedded.workers} workers trains")
            result = Runner(campaign, job, emit).run()
            if not result.interrupted:
                values = _finished(job, result)
    except AxonError as error:  # a service has ended by itself, or does not end
        if result is None:
            raise
        result.problems.append(str(error)[:2000])
    result.samples = job.samples()
    if values is not None and result.steps:
        emit(f"comparing with {result.steps} steps of a job that nothing happens to")
        try:
            result.bits_different = bits_different(values, job.unfailed(result.steps))
        except KeyboardInterrupt:
            result.stopped, result.interrupted = "it was interrupted", True
        except AxonError as error:
            result.problems.append(f"the job that nothing happens to: {error}")
    return result


def _finished(job: EmbeddedJob, result: Result) -> Values | None:
    """Return the job's values at its end; None = the job did not end well."""
    try:
        with contextlib.suppress(KeyboardInterrupt):
            result.steps, values = job.finish()
            return values
    except AxonError as error:
        result.problems.append(str(error)[:2000])
    finally:
        dealt = result.events.dealt
        result.events = job.collected()
        result.events.dealt = dealt
    return None


def run_outside(campaign: Campaign, coordinator: str, security: Security, name: str, emit: Emit) -> Result:
    """Strike a job that runs already.

    Args:
        campaign: a campaign with [job].
        coordinator: the coordinator's "host:port", if the campaign does not name it.
        security: the security of connections to the coordinator.
        name: name of the job; empty = the job that the coordinator runs.
        emit: called with a line for every fault.

    Raises:
        ConfigurationError: no coordinator is given.
        Unreachable: the coordinator does not answer.
    """
    assert isinstance(campaign.target, Job)
    address = campaign.target.coordinator or coordinator
    if not address:
        raise ConfigurationError(
            'which job? Give coordinator = "host:port" in [job], --coordinator, or AXON_PS_COORDINATOR'
        )
    with RunningJob(campaign.target, address, security, name) as job:
        return Runner(campaign, job, emit).run()
