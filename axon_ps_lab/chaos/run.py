"""A whole campaign: the job that it strikes, its faults, and the comparison with a job that nothing happened to."""

from __future__ import annotations

import contextlib

from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.rpc.security import Security
from axon_ps_lab.chaos.campaign import Campaign, Job
from axon_ps_lab.chaos.embedded import EmbeddedJob, Values, bits_different
from axon_ps_lab.chaos.outside import RunningJob
from axon_ps_lab.chaos.runner import Emit, Result, Runner


def run_embedded(campaign: Campaign, emit: Emit) -> Result:
    """Start a job on this machine, strike it, and compare it bit by bit with one that nothing happens to.

    It is interrupted by Ctrl-C: all processes are ended then, and what was observed so far is returned. Call it on a
    thread that outlives the job's processes.

    Args:
        campaign: with [embedded].
        emit: is given a line for every fault, and for what takes long.

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
    """The values at the end; None = the job did not come to one."""
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
        campaign: with [job].
        coordinator: its "host:port", if the campaign names none.
        security: for a client of the coordinator.
        name: of the job; empty = the one that the coordinator runs.
        emit: is given a line for every fault.

    Raises:
        ConfigurationError: nobody says which job, or processes of it are not found.
        Unreachable: its coordinator does not answer.
    """
    assert isinstance(campaign.target, Job)
    address = campaign.target.coordinator or coordinator
    if not address:
        raise ConfigurationError(
            'which job? Give coordinator = "host:port" in [job], --coordinator, or AXON_PS_COORDINATOR'
        )
    with RunningJob(campaign.target, address, security, name) as job:
        return Runner(campaign, job, emit).run()
