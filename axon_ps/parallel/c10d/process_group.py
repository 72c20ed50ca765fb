"""`AxonProcessGroup`: torch.distributed's process group over one of ours.

Owns: the methods that torch calls. `plans` makes operations into calls of our group, and `calls` performs them.

Note: [C++ asks, too]
    Our group is a `dist.ProcessGroup` without a C++ backend. The methods of that class call its backends, and raise an
    error without one ("ProcessGroup name not set"). In Python our methods have the names of torch's bindings
    (`group_name`). In C++ they have the names of its virtual functions (`getGroupName`, see torch's
    PyProcessGroup.hpp). So each method is here under both names. tests/unit/parallel/test_c10d_surface.py reads both
    lists from the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Store,
    Work,
)

from axon_ps.collectives.process_group import ANY_SOURCE, ProcessGroup
from axon_ps.errors import Closed, InvalidRequest
from axon_ps.parallel.c10d.calls import CallPlan, Performer, seconds
from axon_ps.parallel.c10d.coalesced import packed
from axon_ps.parallel.c10d.plans import CallPlans, check_pairs
from axon_ps.parallel.c10d.sparse import all_reduce_sparse
from axon_ps.parallel.c10d.work import AxonWork
from axon_ps.parallel.compile import uncompiled_methods
from axon_ps_torch import BACKEND

CPU = torch.device("cpu")

_Base: Any = dist.ProcessGroup  # not its type: torch declares overloads that a subclass need not have

Split = Callable[[list[int], str, float], "AxonProcessGroup"]
"""Makes a group of some members from their positions, its name and its default time-out in seconds."""


@uncompiled_methods
class AxonProcessGroup(_Base):  # type: ignore[misc]
    """The process group that `torch.distributed` makes for the backend "axon".

    Ranks are positions in the group. Operations return a handle. See `parallel.c10d.calls` for when they block.

    Args:
        group: our group of the same members in the same order.
        store: c10d's store of this group.
        timeout_s: default time-out of operations.
        on_shutdown: frees the group's resources.
        split: makes a group of some of its members.
    """

    def __init__(
        self, group: ProcessGroup, store: Store, *, timeout_s: float, on_shutdown: Callable[[], None], split: Split
    ) -> None:
        super().__init__(group.rank, group.world_size)
        self._rank, self._world_size = group.rank, group.world_size
        self._name, self._desc = "", "undefined"
        self._group = group
        self._plans = CallPlans(group)
        self._performer = Performer(group, timeout_s)
        self._store = store
        self._on_shutdown = on_shutdown
        self._split = split
        self._split_count = 0

    def __repr__(self) -> str:
        return f"AxonProcessGroup({self._group.name!r}, rank {self._rank} of {self._world_size})"

    # ------------------------------------------------------------------ identity

    @property
    def group(self) -> ProcessGroup:
        """Our group under it."""
        return self._group

    def getGroupName(self) -> str:
        """Return its name in torch.distributed."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return its description in torch.distributed."""
        return self._desc

    group_name, pg_name, group_desc = property(getGroupName), property(getGroupName), property(getGroupDesc)

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def rank(self) -> int:
        """Return our position."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._world_size

    def name(self) -> str:
        """Return "axon"."""
        return BACKEND

    def get_group_store(self) -> Store:
        """Return c10d's store of this group."""
        return self._store

    # C++ calls them by these names.
    getRank, getSize, getBackendName = rank, size, name
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    # ------------------------------------------------------------------ devices, and what it can do

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]

    # torch calls this for a group's backend on a device. This group is the backend on every device.

    def _get_backend(self, device: torch.device) -> Any:
        return self

    get_backend = _get_backend

    def _has_hooks(self) -> bool:
        return False

    supports_splitting = True
    supports_coalescing = True
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_window = False

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: a split concerns its members only."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: backends are made when they are first needed."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: our group numbers its calls from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.sequence

    @property
    def options(self) -> Any:
        """The arguments that `split_group` passes on."""
        return Backend.Options(BACKEND, timedelta(seconds=self._performer.timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the default time-out."""
        self._performer.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # ------------------------------------------------------------------ collectives of one tensor

    def allreduce(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replace every rank's tensor by the reduction of all."""
        tensor, options = _one(tensors), _options_of(opts, AllreduceOptions, timeout)
        if tensor.is_sparse:
            return all_reduce_sparse(self._performer, tensor, options)
        return self._performer.perform(self._plans.all_reduce([tensor], options.reduceOp), [tensor], options)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace the root's tensor by the reduction of all. The other ranks' tensors are only read."""
        tensor = _one(tensors)
        return self._performer.perform(self._plans.reduce(tensor, opts.rootRank, opts.reduceOp), [tensor], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replace every rank's tensor by the root's."""
        if isinstance(opts, int):  # C++'s short form: tensor, root, timeout
            root, opts = opts, BroadcastOptions()
            opts.rootRank = root
        tensor, options = _one(tensors), _options_of(opts, BroadcastOptions, timeout)
        return self._performer.perform(self._plans.broadcast(tensor, options.rootRank), [tensor], options)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill the output with all ranks' inputs, one after the other."""
        self._plans.check_shards("the output of all_gather", output, input)
        return self._performer.perform(self._plans.all_gather_rows([output], [input], self._world_size), output, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill the output with this rank's shard of the reduction of all inputs."""
        self._plans.check_shards("the input of reduce_scatter", input, output)
        options = _options_of(opts, ReduceScatterOptions)
        plan = self._plans.reduce_scatter_rows([output], [input], options.reduceOp)
        return self._performer.perform(plan, output, options)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
    ) -> Work:
        """Fill split i of the output with the split of rank i's input that is for this rank. Splits are in rows."""
        plan = self._plans.all_to_all_splits(output, input, output_split_sizes, input_split_sizes)
        return self._performer.perform(plan, output, opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        """Fill the root's output with all ranks' inputs, one after the other. Elsewhere the output is not used."""
        if opts.rootRank == self._rank:
            self._plans.check_shards("the output of gather", output, input)
        return self._performer.perform(self._plans.gather([output], input, opts.rootRank), output, opts)

    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ collectives of lists

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Fill tensor i of the list with rank i's input. The tensors may differ in size."""
        plan = self._plans.all_gather(output_tensors[0], _one(input_tensors))
        return self._performer.perform(plan, output_tensors, opts)

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> Work:
        """Fill the output with the reduction of all ranks' tensor number `rank`. The tensors may differ in size."""
        output, options = _one(output_tensors), _options_of(opts, ReduceScatterOptions)
        plan = self._plans.reduce_scatter(output, input_tensors[0], options.reduceOp)
        return self._performer.perform(plan, [output], options)

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Work:
        """Fill tensor i of the root's list with rank i's input. All tensors have one size."""
        tensor, outputs = _one(input_tensors), output_tensors[0] if opts.rootRank == self._rank else []
        if opts.rootRank == self._rank:
            self._plans.check_gathered(outputs, tensor)
        return self._performer.perform(self._plans.gather(outputs, tensor, opts.rootRank), output_tensors, opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Work:
        """Fill the output with tensor number `rank` of the root's list. All tensors have one size."""
        output, inputs = _one(output_tensors), input_tensors[0] if opts.rootRank == self._rank else []
        return self._performer.perform(self._plans.scatter(output, inputs, opts.rootRank), [output], opts)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Fill output i with rank i's input number `rank`."""
        return self._performer.perform(self._plans.all_to_all(output_tensors, input_tensors), output_tensors, opts)

    # ------------------------------------------------------------------ several collectives as one

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace every rank's tensors by the reductions of all."""
        options = _options_of(opts, AllreduceCoalescedOptions)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            ours = [tensors[i] for i in chosen]
            return self._performer.perform(self._plans.all_reduce(ours, options.reduceOp), ours, options)

        return self._performer.combined([one_call(chosen) for chosen in packed(tensors)], tensors)

    def all_gather_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Fill output i: [n * k_i] with all ranks' inputs i: [k_i], one after the other."""
        check_pairs("all_gather", output_tensors, input_tensors)
        for output, data in zip(output_tensors, input_tensors, strict=True):
            self._plans.check_shards("an output of all_gather", output, data)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            outputs, inputs = [output_tensors[i] for i in chosen], [input_tensors[i] for i in chosen]
            plan = self._plans.all_gather_rows(outputs, inputs, self._world_size)
            return self._performer.perform(plan, outputs, opts)

        return self._performer.combined([one_call(chosen) for chosen in packed(input_tensors)], output_tensors)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Fill output i: [k_i] with this rank's shard of the reduction of all inputs i: [n * k_i]."""
        check_pairs("reduce_scatter", output_tensors, input_tensors)
        for output, data in zip(output_tensors, input_tensors, strict=True):
            self._plans.check_shards("an input of reduce_scatter", data, output)
        options = _options_of(opts, ReduceScatterOptions)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            outputs, inputs = [output_tensors[i] for i in chosen], [input_tensors[i] for i in chosen]
            plan = self._plans.reduce_scatter_rows(outputs, inputs, options.reduceOp)
            return self._performer.perform(plan, outputs, options)

        return self._performer.combined([one_call(chosen) for chosen in packed(output_tensors)], output_tensors)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Work:
        """Fill tensor i of list r with rank r's input i."""
        self._plans.check_lists("all_gather_coalesced", output_lists, input_list)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            outputs = [outputs[i] for outputs in output_lists for i in chosen]
            plan = self._plans.all_gather_rows(outputs, [input_list[i] for i in chosen], 1)
            return self._performer.perform(plan, outputs, opts)

        result = [t for outputs in output_lists for t in outputs]
        return self._performer.combined([one_call(chosen) for chosen in packed(input_list)], result)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        self._performer.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._performer.end_coalescing()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # C++'s names

    # ------------------------------------------------------------------ point to point, barriers

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send to a rank, which must receive it with the same tag."""
        tensor = _one(tensors)
        return self._performer.perform(self._plans.send(tensor, dstRank, tag), [tensor])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Receive from a rank."""
        tensor = _one(tensors)
        return self._performer.perform(self._plans.receive(tensor, srcRank, tag), [tensor])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive from the rank that sends first. The handle's `source_rank()` returns that rank."""
        return self.recv(tensors, ANY_SOURCE, tag)

    recvAnysource = recv_anysource  # C++'s name

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Begin a barrier, which ends when every rank has come. On CUDA, first wait for the work enqueued before."""
        options = _options_of(opts, BarrierOptions, timeout)
        device = options.device
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._performer.perform(CallPlan("barrier", CPU, self._group.barrier), [], options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. A `Timeout` names, on every rank, all ranks that did not come."""
        limit_s = seconds(timeout)
        self._group.barrier(self._performer.timeout_s if limit_s is None else limit_s)

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
            timeout: default time-out; None = ours.
            opts: ignored.
            group_name: the same on every member and never used before; None = our name, the ranks and a counter.
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
        """End pending and later operations with `Closed`, and free the group. Other ranks get `Broken`."""
        self._group.abort(Closed(f"process group {self.pg_name!r} was aborted"))
        self.shutdown()

    def shutdown(self) -> None:
        """Free the group's resources, and end the operations under way. Repeated calls do nothing."""
        on_shutdown, self._on_shutdown = self._on_shutdown, lambda: None
        on_shutdown()


def _one(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the only tensor of a list. c10d's lists have one tensor per device, and a process has one device.

    Raises:
        InvalidRequest: there is none, or several.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidRequest(f"{len(tensors)} tensors were given; a process has one device, and gives one tensor")
    return tensors[0]


def _options_of(given: Any, kind: Any, timeout: timedelta | None = None) -> Any:
    """Return c10d's options of a call: the given ones, or new ones for C++ and for the short forms without options."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:  # the short form
        options.reduceOp = given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)
    if timeout is not None:
        options.timeout = timeout
    return options
