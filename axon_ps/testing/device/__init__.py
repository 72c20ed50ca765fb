"""A GPU's stand-in: device memory, streams and NCCL of threads and processes of one host, for tests without a GPU.

    with stand_in() as device:
        ...                                   # groups, DDP and FSDP take the device's way: NCCL inside a node
        crossed = device.trace.take()         # what NCCL did, and what crossed between the device and the host

Inside, this process's `cupy` is the stand-in's, and every CPU tensor of torch counts as device memory, but those in
page-locked memory that our own code took. So code that chooses by device takes the way it takes on a GPU, in real
processes, and the trace shows each copy that a GPU would have made over PCIe. All workers of a job must enter it.

Faithful in what our code relies on: calls of a communicator are matched by their order and not compared between ranks;
grouped calls go together; a wait ends by `abort` alone, or when a peer is gone; reductions are NCCL's (a NaN is ignored
in minima and maxima, averages of floats are multiplied before they are added). Not in time: a call is done when it
returns, so an order of streams that is missing does not show.
"""

from axon_ps.testing.device.cupy_module import DeviceArray, asarray
from axon_ps.testing.device.install import StandIn, stand_in
from axon_ps.testing.device.trace import Event, Trace

__all__ = ["DeviceArray", "Event", "StandIn", "Trace", "asarray", "stand_in"]
