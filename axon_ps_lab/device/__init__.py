"""A stand-in for a GPU: device memory, streams and NCCL among threads and processes of one host, for tests without one.

    with stand_in() as device:
        ...                                   # groups, DDP and FSDP use the device: NCCL inside a node
        events = device.trace.take()          # calls of NCCL, and copies between the device and the host

In the block, this process's `cupy` is the stand-in's. Every CPU tensor of torch counts as device memory, except
tensors in page-locked memory that axon_ps has allocated. So code that depends on the device runs as it does on a GPU,
in real processes. The trace has each copy that a GPU would have made over PCIe. All workers of a job must enter it.

The stand-in behaves like NCCL in what axon_ps relies on. Calls of a communicator are matched by their order and not
compared between ranks. Grouped calls start together. A wait ends by `abort` alone, or when a peer is gone. Reductions
are NCCL's: a NaN is ignored in minima and maxima, the terms of an average are divided before they are added. Its timing
differs: a call is done when it returns, so a missing synchronization of streams is not found.
"""

from axon_ps_lab.device.cupy_module import DeviceArray, asarray
from axon_ps_lab.device.install import StandIn, stand_in
from axon_ps_lab.device.trace import Event, Trace

__all__ = ["DeviceArray", "Event", "StandIn", "Trace", "asarray", "stand_in"]
