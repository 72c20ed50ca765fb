"""Communication hooks: ways to average a bucket of gradients over the ranks.

Owns: the interface of a hook, and the plain hooks: `AllReduceHook` (the default), `CastHook` (bf16, fp16),
`FunctionHook` (the user's). `int8` has the hook of int8 blocks, and `compressed` that of compressors. Refuses: the time
at which a bucket is reduced.

    shape legend: N = elements of a bucket

Invariant: every rank ends with the same bits, in every run.

Note: [Two buckets on their way]
    Through servers the last segments of an all-reduce come back when a NIC has nothing more to send. So neighbouring
    buckets are sent in two groups alternately, and one begins while the one before it ends. Calls through shared memory
    or NCCL have no such end, and stay in one group. This was measured with f32 on 4 + 4 hosts at 500 Mbit/s, with
    buckets that grow from 1 MiB:

        a step, two groups     1.37 s
        a step, one group      1.43 s
        its bytes alone        1.13 s
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from axon_ps.collectives import cuda
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work, WorkQueue
from axon_ps.errors import InvalidRequest
from axon_ps.host import fork
from axon_ps.parallel.comm_hooks.residuals import Residuals, drop_non_finite
from axon_ps.parallel.ddp.buckets import GradientBucket, flat_memory
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.types import DType, ReduceOp, parse_dtype

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
"""Most seconds to wait for a hook's threads at its end, when they are idle. They must have ended before the process
does: a thread that drops a tensor while the interpreter is torn down ends the process with SIGABRT."""


class CommunicationHook(ABC):
    """A way to average buckets over the ranks of a group. An object serves one wrapper.

    Attributes:
        feedback: its residuals, which are added to later gradients; None without error feedback.
    """

    feedback: Residuals | None = None

    def attach(self, group: ProcessGroup) -> None:
        """Set the group whose ranks it averages over. Only this hook uses it. This is called once, before all else."""
        self.group = group
        self._alternating = (group, group.named_group("in_turns", range(group.size)))

    def group_of(self, bucket: GradientBucket) -> ProcessGroup:
        """Return the group in which a bucket is sent. See Note: [Two buckets on their way]."""
        through_servers = not cuda.memory().is_on_device(bucket.flat) and self.group.backend == "grpc"
        return self._alternating[bucket.index % 2 if through_servers else 0]

    @abstractmethod
    def start(self, bucket: GradientBucket) -> Work[Any]:
        """Begin to make `bucket.flat` the average of all ranks' and return at once.

        It is called for every bucket, in the same order on every rank. It is not called for a bucket again before the
        bucket's `Work` has ended.
        """

    def rebuild(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """Adapt to gradients that are in other buckets now, by `GradientBucket.members`. No reduction is under way."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's residuals for a checkpoint, by "residual.BUCKET" and "average.BUCKET". See `Residuals`."""
        return {} if self.feedback is None else self.feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the residuals that `state_dict` returned on the same rank, for the same buckets.

        Raises:
            InvalidRequest: a name is unknown, or this hook has no residuals. Sizes are checked when buckets are sent.
        """
        if self.feedback is not None:
            self.feedback.load_state_dict(state)
        elif state:
            raise InvalidRequest(f"{type(self).__name__} has no residuals, and was given {sorted(state)}")


class AllReduceHook(CommunicationHook):
    """One all-reduce in the gradients' own dtype. bf16 and f16 are summed in f32 and rounded once."""

    def start(self, bucket: GradientBucket) -> Work[Any]:
        """See `CommunicationHook`."""
        work: Work[Any] = self.group_of(bucket).all_reduce(bucket.flat, ReduceOp.AVERAGE, async_op=True)
        return work


class FunctionHook(CommunicationHook):
    """A function as a hook.

    Args:
        function: given the bucket and the group, makes `bucket.flat` the average over the group. It runs on a thread of
            its own.
    """

    def __init__(self, function: Callable[[GradientBucket, ProcessGroup], object]) -> None:
        self._function = function
        self._work_queue = work_queue_of(self, "hook")

    def start(self, bucket: GradientBucket) -> Work[Any]:
        """See `CommunicationHook`."""
        average = on_this_stream(bucket, lambda: self._function(bucket, self.group))
        return Work(self._work_queue.submit(average), f"bucket {bucket.index}")


class PackingHook(CommunicationHook):
    """An all-reduce of buckets in another form. A bucket is packed while the bucket before it is on its way.

    Args:
        what: the form, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._packing, self._unpacking = work_queue_of(self, "pack"), work_queue_of(self, "unpack")

    @abstractmethod
    def pack(self, bucket: GradientBucket) -> Any:
        """Return the bucket's gradients in the other form, or None if there is nothing to do.

        The next call for this bucket may return the same array.
        """

    @abstractmethod
    def unpack(self, bucket: GradientBucket, packed: Any) -> None:
        """Set `bucket.flat` from `packed`, which is the average over the ranks now."""

    def start(self, bucket: GradientBucket) -> Work[Any]:
        """See `CommunicationHook`."""

        def pack() -> tuple[Any, Work[Any] | None]:
            if (packed := self.pack(bucket)) is None:
                return None, None
            return packed, self.group_of(bucket).all_reduce(packed, ReduceOp.AVERAGE, async_op=True)

        packing = self._packing.submit(on_this_stream(bucket, pack))

        def unpack() -> None:
            packed, sending = packing.result()
            if sending is not None:
                sending.wait()
                self.unpack(bucket, packed)

        return Work(self._unpacking.submit(on_this_stream(bucket, unpack)), f"bucket {bucket.index} as {self._what}")


class CastHook(PackingHook):
    """An all-reduce in another dtype: half the bytes of f32. The sum is in f32 and rounded once.

    Args:
        dtype: a wire dtype of two bytes. In f16, values beyond its range become infinite.
        error_feedback: True to add the rounding error of a gradient to the next one.
    """

    def __init__(self, dtype: torch.dtype | str, *, error_feedback: bool = False) -> None:
        self.dtype = TORCH_DTYPES[parse_dtype(dtype, among=[DType.BF16, DType.F16])]
        super().__init__(str(self.dtype))
        self.feedback = Residuals() if error_feedback else None
        self._sent: dict[int, Tensor] = {}

    def pack(self, bucket: GradientBucket) -> Tensor:
        """See `PackingHook`."""
        flat = bucket.flat
        sent = self._sent.get(bucket.index)
        if sent is None or sent.numel() != flat.numel():
            sent = self._sent[bucket.index] = flat_memory(flat.numel(), self.dtype, flat.device, self.group)
        if self.feedback is None:
            sent.copy_(flat)
        else:
            residual = self.feedback.of(bucket)
            residual += flat
            sent.copy_(residual)
            residual -= sent
            drop_non_finite(residual)
        return sent

    def unpack(self, bucket: GradientBucket, packed: Tensor) -> None:
        """See `PackingHook`."""
        bucket.flat.copy_(packed)

    def rebuild(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """See `CommunicationHook`."""
        self._sent.clear()
        if self.feedback is not None:
            self.feedback.move(before, after)


def on_this_stream(bucket: GradientBucket, call: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call for another thread: for a bucket on a GPU it is made on this thread's current stream."""
    if not bucket.flat.is_cuda:
        return call
    stream = torch.cuda.current_stream(bucket.flat.device)

    def on_stream() -> T:
        with torch.cuda.stream(stream):
            return call()

    return on_stream


def work_queue_of(owner: CommunicationHook, what: str) -> WorkQueue:
    """Make a work queue whose thread ends with the hook."""
    queue = WorkQueue(f"axon-ps-{type(owner).__name__}-{what}")
    fork.finalize(owner, queue.close, _CLOSE_TIMEOUT_S)
    return queue
