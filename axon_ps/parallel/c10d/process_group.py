"""`AxonProcessGroup`: torch.distributed's process group over one of ours.

Owns: point to point, barriers, sub-groups, the end. Its answers to torch.distributed are in `identity`, its collectives
in `operations` and `coalesced`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, BarrierOptions, Store, Work

from axon_ps.collectives.process_group import ANY_SOURCE, ProcessGroup
from axon_ps.errors import Closed
from axon_ps.parallel.c10d.calls import CallPlan, seconds
from axon_ps.parallel.c10d.coalesced import CoalescedCollectives
from axon_ps.parallel.c10d.identity import CPU, Identity
from axon_ps.parallel.c10d.operations import one, options_of
from axon_ps.parallel.c10d.tensors import native, readable, writable
from axon_ps.parallel.compile import uncompiled_methods
from axon_ps_torch import BACKEND

Split = Callable[[list[int], str, float], "AxonProcessGroup"]
"""Makes a group of some members from their positions, its name and its default deadline in seconds."""


@uncompiled_methods
class AxonProcessGroup(Identity, CoalescedCollectives, dist.ProcessGroup):  # type: ignore[misc]  # its overloads
    """The process group that `torch.distributed` makes for the backend "axon".

    Args:
        group: our group of the same members in the same order.
        store: c10d's store of this group.
        timeout_s: default deadline of operations.
        on_shutdown: frees the group's resources.
        split: makes a group of some of its members.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        *,
        timeout_s: float,
        on_shutdown: Callable[[], None],
        split: Split,
    ) -> None:
        dist.ProcessGroup.__init__(self, group.rank, group.world_size)  # type: ignore[call-arg]
        Identity.__init__(self, group.rank, group.world_size)
        CoalescedCollectives.__init__(self, group, timeout_s)
        self._store = store
        self._on_shutdown = on_shutdown
        self._split = split
        self._split_count = 0

    # ------------------------------------------------------------------ what is under it

    @property
    def group(self) -> ProcessGroup:
        """Our group under it."""
        return self._group

    def __repr__(self) -> str:
        return f"AxonProcessGroup({self._group.name!r}, rank {self._rank} of {self._world_size})"

    def get_group_store(self) -> Store:
        """Return c10d's store of this group."""
        return self._store

    @property
    def options(self) -> Any:
        """The arguments that `split_group` passes on."""
        return Backend.Options(BACKEND, timedelta(seconds=self._performer.timeout_s))

    def _get_sequence_number_for_group(self) -> int:
        return self._group.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the default deadline."""
        self._performer.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # ------------------------------------------------------------------ point to point, barriers

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send to a rank, which must receive it with the same tag."""
        tensor = one(tensors)

        def plan() -> CallPlan:
            return CallPlan("send", partial(self._group.send, native(readable(tensor)), dstRank, tag=tag))

        return self._performer.perform(plan, [tensor], tensor.device)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Receive from a rank."""
        tensor = one(tensors)

        def plan() -> CallPlan:
            target = writable(tensor)
            return CallPlan("recv", partial(self._group.recv, native(target.flat), srcRank, tag=tag), target.finish)

        return self._performer.perform(plan, [tensor], tensor.device)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive from the rank that sends first; the handle's `source_rank` is its rank."""
        return self.recv(tensors, ANY_SOURCE, tag)

    recvAnysource = recv_anysource  # C++'s name

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Return when every rank has come; on CUDA, when the work that was enqueued before is done, too."""
        options = options_of(opts, BarrierOptions, timeout)
        device = options.device
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._performer.perform(lambda: CallPlan("barrier", self._group.barrier), [], CPU, options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; a `Timeout` names, on every rank, all ranks that did not come."""
        limit_s = seconds(timeout)
        self._group.barrier(self._performer.timeout_s if limit_s is None else limit_s)

    # ------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        self._performer.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._performer.end_coalescing()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # C++'s names

    # ------------------------------------------------------------------ sub-groups, the end

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> AxonProcessGroup | None:
        """Make a group of some members, in ascending order, or return None on a rank that is not one of them.

        Every member of the new group calls this.

        Args:
            new_ranks: positions in this group.
            timeout: default deadline; None = ours.
            opts: ignored.
            group_name: the same on every member and never used before; None = made of the ranks and a counter.
            group_desc: its description.
            device_types: ignored: a group serves all.
        """
        ranks = sorted(new_ranks)
        if self._rank not in ranks:
            return None
        self._split_count += 1
        name = group_name or f"{self.pg_name}:split:{'_'.join(map(str, ranks))}:{self._split_count}"
        group = self._split(ranks, name, seconds(timeout) or self._performer.timeout_s)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    splitGroup = split_group  # C++'s name

    def abort(self) -> None:
        """End all pending and later operations with `Closed`, here and on the other ranks, and free the group."""
        self._group.abort(Closed(f"process group {self.pg_name!r} was aborted"))
        self.shutdown()

    def shutdown(self) -> None:
        """Free the group's resources; operations under way are ended. Repeated calls do nothing."""
        on_shutdown, self._on_shutdown = self._on_shutdown, lambda: None
        on_shutdown()
