"""Memory of workers and servers, by the rules of the code that takes it. Pure.

Of a worker: parameters, gradients and what travels, without activations and what the program itself needs. Of a server:
its slices, as `sharding.memory` counts them before any is placed.
"""

from __future__ import annotations

from axon_ps.sharding.memory import slice_bytes
from axon_ps.simulate.scenario import DTYPES, Scenario

_F32 = 4
_BUFFERS = 2  # of the largest unit, as `parallel.fsdp.runtime.BUFFERS`


def server_bytes(scenario: Scenario) -> int:
    """Of a shard server, all copies of slices that it has included."""
    sizes = slice_bytes(scenario.spec, scenario.moments, scenario.num_servers)
    return -(-sum(sizes) * scenario.job.replication // scenario.num_servers)


def worker_bytes(scenario: Scenario) -> int:
    """Of a worker: of each device's process, under "hybrid_shard"."""
    job, precision = scenario.job, scenario.spec.precision
    numels = [unit.numel for unit in scenario.spec.layout.units]
    largest, numel = max(numels[1:], default=numels[0]), sum(numels)
    compute, wire, grad = DTYPES[job.compute].itemsize, precision.param.itemsize, precision.grad.itemsize
    residuals = _F32 * numel * ((precision.grad_compression is not None) + precision.differs)
    pushes = _BUFFERS * largest * grad
    if job.strategy == "local_steps":  # the module, its inner optimizer, the copy at the last sync, one outer step
        return numel * (compute * 2 + _F32 * 3) + largest * (2 * _F32 + grad) + residuals
    buffered = job.wire != job.compute or not scenario.workers[0].on_cpu
    gathers = _BUFFERS * largest * wire if buffered else 0
    computing = (numels[0] + largest) * compute  # gradients of the unit in use, and of the root
    unsharded = (numels[0] + _BUFFERS * largest) * compute
    if job.strategy == "shard_grad_op" and not job.keep_gathered:
        unsharded = numel * compute
        gathers += 0 if job.clip else numel * wire
    elif job.keep_gathered:
        gathers += numel * wire
    if job.strategy == "hybrid_shard":
        devices = scenario.workers[0].devices
        gathers += -(-numel // devices) * wire
        residuals //= devices
    return unsharded + gathers + computing + pushes + residuals
