"""The performance of c10d operations, alone or coalesced: their threads and handles.

Owns: that a blocking operation runs in its caller's thread, and an asynchronous one on the group's own. Refuses: to
distinguish operations.

On CUDA our group reads its input after everything that the current stream has enqueued so far (by DLPack). A call
ends when its work on the device has ended: after a wait for its handle, no stream needs to be synchronized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as C10dWork

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.parallel.c10d.tensors import Finish, nothing
from axon_ps.parallel.c10d.work import AxonWork, CoalescedWork


class _Call(Protocol):
    """A call of a method of our group, still to be made."""

    def __call__(self, *, timeout_s: float | None, async_op: bool) -> Any: ...


@dataclass(slots=True, eq=False)
class CallPlan:
    """One call of our group, made from one c10d operation. It is never changed once it is made.

    Attributes:
        what: the operation's name.
        device: the device of its tensors.
        call: makes the call; takes `timeout_s` and `async_op`.
        finish: called afterwards; stores the results in the user's tensors.
    """

    what: str
    device: torch.device
    call: _Call
    finish: Finish = nothing


class Performer:
    """Performs the operations of one group.

    Args:
        group: our group.
        timeout_s: default time-out.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self._coalesced: list[AxonWork] | None = None

    # ------------------------------------------------------------------ coalescing

    def start_coalescing(self) -> None:
        """Only begin operations from now on. `end_coalescing` returns one handle for all."""
        self._coalesced = []

    def end_coalescing(self) -> C10dWork:
        """Return the handle of everything since `start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works, [t for work in works for t in _tensors(work.result())])

    # ------------------------------------------------------------------ performing

    def perform(self, plan: CallPlan, result: Any, options: Any = None) -> AxonWork:
        """Do one operation.

        Args:
            plan: the call to make.
            result: the user's tensors that hold the result, for the handle.
            options: c10d's options: the deadline, and whether to block; None = do not block.

        Raises:
            AxonError: a blocking operation failed.
        """
        timeout_s = seconds(getattr(options, "timeout", None)) or self.timeout_s
        asynchronous = getattr(options, "asyncOp", True) or self._coalesced is not None
        device = plan.device
        finish = plan.finish if device.type == "cpu" else partial(_finish_on_device, plan.finish, device)
        if asynchronous:
            ours: Work[Any] = plan.call(timeout_s=timeout_s, async_op=True)
            work = AxonWork.following(result, ours, finish, _accelerators(device))
        else:
            value = plan.call(timeout_s=timeout_s, async_op=False)
            finish()
            work = AxonWork.done(result, plan.what, value, _accelerators(device))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def combined(self, works: Sequence[AxonWork], result: list[Tensor]) -> C10dWork:
        """Return one handle for several operations."""
        return works[0] if len(works) == 1 else CoalescedWork(works, result)


def seconds(timeout: timedelta | float | None) -> float | None:
    """Return c10d's timeout in seconds, or None when it is not set."""
    if timeout is None:
        return None
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return limit_s if limit_s > 0 else None


def _finish_on_device(finish: Finish, device: torch.device) -> None:
    """Copy results to the user's tensors and wait for the copies. Afterwards the tensors may be used on any stream."""
    if finish is not nothing:
        finish()
        torch.cuda.current_stream(device).synchronize()


def _accelerators(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in _tensors(item)]
    return []
