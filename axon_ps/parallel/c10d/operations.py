"""The collectives of c10d on single tensors and on lists, each as one call of our group on flat tensors.

Ranks are positions in the group. Every method returns a handle; see `parallel.c10d.calls` for when it blocks.
Invariant: all members make the same calls of our group for the same c10d calls. So a call depends on shapes and dtypes
that all of them know, never on one rank's own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceScatterOptions, Work

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.calls import CallPlan, Performer
from axon_ps.parallel.c10d.reductions import TensorReduction
from axon_ps.parallel.c10d.sparse import all_reduce_sparse
from axon_ps.parallel.c10d.tensors import native, native_numel, readable, writable
from axon_ps.parallel.compile import uncompiled_methods


@uncompiled_methods
class Collectives:
    """The collectives of `AxonProcessGroup`.

    Args:
        group: our group.
        timeout_s: default deadline.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._performer = Performer(group, timeout_s)

    # ------------------------------------------------------------------ collectives of one tensor

    def allreduce(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replace every rank's tensor by the reduction of all."""
        tensor, options = one(tensors), options_of(opts, AllreduceOptions, timeout)
        if tensor.is_sparse:
            return all_reduce_sparse(self._performer, tensor, options)
        reduction = TensorReduction.of(options.reduceOp, tensor.dtype)
        return self._performer.perform(
            lambda: self._all_reduce_plan([tensor], reduction), [tensor], tensor.device, options
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace the root's tensor by the reduction of all; the others' are only read."""
        tensor, root = one(tensors), opts.rootRank
        reduction = TensorReduction.of(opts.reduceOp, tensor.dtype)

        def plan() -> CallPlan:
            if root != self._rank:
                call = partial(self._group.reduce, reduction.buffer(readable(tensor)), root, reduction.op)
                return CallPlan("reduce", call)
            target = writable(tensor, filled=True)
            buffer = reduction.buffer(target.flat)

            def finish() -> None:
                if not reduction.direct:
                    reduction.store(buffer, target.flat)
                target.finish()

            return CallPlan("reduce", partial(self._group.reduce, buffer, root, reduction.op), finish)

        return self._performer.perform(plan, [tensor], tensor.device, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replace every rank's tensor by the root's."""
        if isinstance(opts, int):  # C++'s short form: tensor, root, timeout
            root, opts = opts, BroadcastOptions()
            opts.rootRank = root
        tensor, options = one(tensors), options_of(opts, BroadcastOptions, timeout)

        def plan() -> CallPlan:
            target = writable(tensor, filled=options.rootRank == self._rank)
            return CallPlan(
                "broadcast", partial(self._group.broadcast, native(target.flat), options.rootRank), target.finish
            )

        return self._performer.perform(plan, [tensor], tensor.device, options)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill the output with all ranks' inputs, one after the other."""
        self._check_numel("the output of all_gather", output, input.numel() * self._world_size)

        def plan() -> CallPlan:
            target = writable(output)
            call = partial(self._group.all_gather, native(readable(input)), out=native(target.flat))
            return CallPlan("all_gather", call, target.finish)

        return self._performer.perform(plan, output, output.device, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill the output with this rank's shard of the reduction of all inputs."""
        self._check_numel("the input of reduce_scatter", input, output.numel() * self._world_size)
        options = options_of(opts, ReduceScatterOptions)
        counts = [output.numel()] * self._world_size
        reduction = TensorReduction.of(options.reduceOp, input.dtype)
        return self._performer.perform(
            lambda: self._reduce_scatter_plan(reduction, [output], readable(input), counts),
            output,
            output.device,
            options,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
    ) -> Work:
        """Fill split i of the output with the split of rank i's input that is for this rank; splits are rows."""
        received, sent = self._splits(output, output_split_sizes), self._splits(input, input_split_sizes)

        def plan() -> CallPlan:
            target = writable(output)
            call = partial(
                self._group.all_to_all,
                native(readable(input)),
                out=native(target.flat),
                output_counts=received,
                input_counts=sent,
            )
            return CallPlan("all_to_all", call, target.finish)

        return self._performer.perform(plan, output, output.device, opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        """Fill the root's output with all ranks' inputs, one after the other; elsewhere the output is not used."""
        if opts.rootRank == self._rank:
            self._check_numel("the output of gather", output, input.numel() * self._world_size)
        return self._gathered(input, [output], output, opts)

    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ collectives of lists

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Fill tensor i of the list with rank i's input; the tensors may differ in size."""
        outputs, tensor = output_tensors[0], one(input_tensors)
        self._check_list("all_gather", outputs)
        self._check_numel(f"output {self._rank} of all_gather", outputs[self._rank], tensor.numel())

        def plan() -> CallPlan:
            target = writable(*outputs)
            counts = [native_numel(t.numel(), t.dtype) for t in outputs]
            call = partial(self._group.all_gather, native(readable(tensor)), out=native(target.flat), counts=counts)
            return CallPlan("all_gather", call, target.finish)

        return self._performer.perform(plan, output_tensors, tensor.device, opts)

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> Work:
        """Fill the output with the reduction of all ranks' tensor number `rank`; the tensors may differ in size."""
        output, inputs = one(output_tensors), input_tensors[0]
        self._check_list("reduce_scatter", inputs)
        self._check_numel("the output of reduce_scatter", output, inputs[self._rank].numel())
        options = options_of(opts, ReduceScatterOptions)
        counts = [t.numel() for t in inputs]
        reduction = TensorReduction.of(options.reduceOp, output.dtype)
        return self._performer.perform(
            lambda: self._reduce_scatter_plan(reduction, [output], readable(*inputs), counts),
            [output],
            output.device,
            options,
        )

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Work:
        """Fill tensor i of the root's list with rank i's input; all have one size."""
        tensor = one(input_tensors)
        outputs: list[Tensor] = []
        if opts.rootRank == self._rank:
            outputs = output_tensors[0]
            self._check_list("gather", outputs, tensor.numel())
        return self._gathered(tensor, outputs, output_tensors, opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Work:
        """Fill the output with tensor number `rank` of the root's list; all have one size."""
        output, root = one(output_tensors), opts.rootRank
        inputs = input_tensors[0] if root == self._rank else []
        if root == self._rank:
            self._check_list("scatter", inputs, output.numel())

        def plan() -> CallPlan:
            target = writable(output)
            data = native(readable(*inputs)) if root == self._rank else None
            return CallPlan("scatter", partial(self._group.scatter, data, root, out=native(target.flat)), target.finish)

        return self._performer.perform(plan, [output], output.device, opts)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Fill output i with rank i's input number `rank`."""
        self._check_list("all_to_all", output_tensors)
        self._check_list("all_to_all", input_tensors)

        def plan() -> CallPlan:
            target = writable(*output_tensors)
            call = partial(
                self._group.all_to_all,
                native(readable(*input_tensors)),
                out=native(target.flat),
                output_counts=[native_numel(t.numel(), t.dtype) for t in output_tensors],
                input_counts=[native_numel(t.numel(), t.dtype) for t in input_tensors],
            )
            return CallPlan("all_to_all", call, target.finish)

        return self._performer.perform(plan, output_tensors, output_tensors[0].device, opts)

    # ------------------------------------------------------------------ plans

    def _gathered(self, tensor: Tensor, outputs: Sequence[Tensor], result: Any, opts: Any) -> Work:
        """Gather to the root, whose outputs take all tensors, one after the other."""
        root = opts.rootRank

        def plan() -> CallPlan:
            data = native(readable(tensor))
            if root != self._rank:
                return CallPlan("gather", partial(self._group.gather, data, root))
            target = writable(*outputs)
            return CallPlan("gather", partial(self._group.gather, data, root, out=native(target.flat)), target.finish)

        return self._performer.perform(plan, result, tensor.device, opts)

    def _all_reduce_plan(self, tensors: Sequence[Tensor], reduction: TensorReduction) -> CallPlan:
        target = writable(*tensors, filled=True)
        buffer = reduction.buffer(target.flat)

        def finish() -> None:
            if not reduction.direct:
                reduction.store(buffer, target.flat)
            target.finish()

        return CallPlan("all_reduce", partial(self._group.all_reduce, buffer, reduction.op), finish)

    def _reduce_scatter_plan(
        self, reduction: TensorReduction, outputs: Sequence[Tensor], data: Tensor, counts: list[int]
    ) -> CallPlan:
        """Reduce data: T[sum(counts)]; the outputs get their shards, one after the other."""
        target = writable(*outputs)
        out = reduction.view(target.flat) if reduction.results_fit else reduction.buffer(target.flat)

        def finish() -> None:
            if not reduction.results_fit:
                reduction.store(out, target.flat)
            target.finish()

        each = [reduction.numel(c) for c in counts]
        call = partial(self._group.reduce_scatter, reduction.buffer(data), reduction.op, out=out, counts=each)
        return CallPlan("reduce_scatter", call, finish)

    # ------------------------------------------------------------------ checks

    def _check_list(self, what: str, tensors: Sequence[Any], numel: int | None = None) -> None:
        if len(tensors) != self._world_size:
            raise InvalidRequest(f"{what} was given a list of {len(tensors)} tensors; it needs {self._world_size}")
        if numel is not None and any(t.numel() != numel for t in tensors):
            sizes = [t.numel() for t in tensors]
            raise InvalidRequest(f"{what} was given tensors of {sizes} elements; each must have {numel}")

    def _check_numel(self, what: str, tensor: Tensor, numel: int) -> None:
        if tensor.numel() != numel:
            raise InvalidRequest(f"{what} has {tensor.numel()} elements; it needs {numel}")

    def _splits(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[int]:
        """Return the elements of each rank's split, as our group counts them."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self._world_size:
                raise InvalidRequest(
                    f"{rows} rows do not divide equally among {self._world_size} ranks; give the split sizes"
                )
            sizes = [rows // self._world_size] * self._world_size
        if len(sizes) != self._world_size or sum(sizes) != rows:
            raise InvalidRequest(
                f"the split sizes are {list(sizes)}; they must be {self._world_size} numbers with the sum {rows}"
            )
        width = tensor.numel() // rows if rows else 0
        return [native_numel(size * width, tensor.dtype) for size in sizes]


def one(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the only tensor of a list: c10d's lists have one tensor per device, and a process has one device.

    Raises:
        InvalidRequest: there is none, or several.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidRequest(f"{len(tensors)} tensors were given; a process has one device, and gives one tensor")
    return tensors[0]


def options_of(given: Any, kind: Any, timeout: timedelta | None = None) -> Any:
    """Return c10d's options of a call: the given ones, or new ones for C++ and for the short forms without options."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:  # the short form
        options.reduceOp = given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)
    if timeout is not None:
        options.timeout = timeout
    return options
