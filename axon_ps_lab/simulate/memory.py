"""Memory of workers and servers, by the rules of the code that allocates it. It is pure.

A worker's memory is that of parameters, gradients and buffers of messages, without activations and the program's own
needs. A server's memory is that of its slices, as `sharding.memory` computes it before placement.
"""

from __future__ import annotations

from axon_ps.optim.registry import create
from axon_ps.sharding.memory import slice_bytes
from axon_ps.sharding.traffic import BUFFERS
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.tables import DTYPES, WorkersTable

_F32 = 4


def server_bytes(scenario: Scenario) -> int:
    """Return the bytes of a shard server, with all copies of slices."""
    sizes = slice_bytes(scenario.spec, scenario.moments, scenario.num_servers)
    return -(-sum(sizes) * scenario.copies // scenario.num_servers)


def parameter_bytes(scenario: Scenario, group: WorkersTable) -> int:
    """Return the peak bytes of a worker's parameters, by the formulas of `parallel.fsdp.stats`, tested on real jobs."""
    job = scenario.job
    numels = [unit.numel for unit in scenario.spec.layout.units]
    one, numel = max(numels[1:], default=0), sum(numels)
    compute, wire = DTYPES[job.compute].itemsize, scenario.gathered_as.itemsize
    prefetched = compute * (numels[0] + min(BUFFERS * one, sum(numels[1:])))
    if job.strategy == "local_steps":
        return (compute + _F32) * numel  # the module, and the copy at the last sync
    if job.strategy == "hybrid_shard":
        return -(-numel // group.devices) * wire + prefetched
    if job.offload_params:
        return wire * numel + compute * (numels[0] + one)
    if job.strategy == "shard_grad_op":
        return (compute + (wire if scenario.buffered(group) else 0)) * numel
    return prefetched


def gradient_bytes(scenario: Scenario, group: WorkersTable) -> int:
    """Return the bytes of gradients on their way, in f32 where they are compressed, and of compression's residuals."""
    job, precision = scenario.job, scenario.spec.precision
    numels = [unit.numel for unit in scenario.spec.layout.units]
    residuals = _F32 * sum(numels) * (precision.grad_compression is not None) // group.devices
    if job.strategy == "local_steps":  # the pushed values, the coming values, and the buffer
        return max(numels) * (2 * _F32 + precision.grad.itemsize) + residuals
    return precision.grad.itemsize * min(BUFFERS * max(numels), sum(numels)) + residuals


def worker_bytes(scenario: Scenario) -> int:
    """Return the bytes of the worker that needs most; under "hybrid_shard" those of each device's process."""
    job, numels = scenario.job, [unit.numel for unit in scenario.spec.layout.units]
    compute = DTYPES[job.compute].itemsize
    if job.strategy == "local_steps":
        computing = sum(numels) * (compute + _F32 * len(create(job.optimizer).state_names([{}])))  # the inner optimizer
    else:
        computing = (numels[0] + max(numels[1:], default=0)) * compute  # gradients of the unit in use, and of the root
    differences = _F32 * sum(numels) * scenario.spec.precision.differs
    moving = max(parameter_bytes(scenario, group) + gradient_bytes(scenario, group) for group in scenario.workers)
    return moving + computing + differences
