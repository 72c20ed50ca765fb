"""`CallPlans`: c10d's operations on tensors and on lists of them, as calls of our group on flat tensors.

Owns: the checks of the tensors of an operation, and their packing. Refuses: to make a call; `Performer` does that.

    shape legend: n = world_size, k_i = elements of one rank's shard of tensor i

Ranks are positions in the group. Invariant: all members make the same calls of our group for the same c10d operations.
So a call depends on shapes and dtypes that all of them know, never on one rank's own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.calls import CallPlan
from axon_ps.parallel.c10d.reductions import TensorReduction
from axon_ps.parallel.c10d.tensors import (
    Buffer,
    Finish,
    native,
    native_numel,
    readable,
    readable_rows,
    writable,
    writable_rows,
)


class CallPlans:
    """Plans the calls of one group. A method raises `InvalidRequest` if its tensors do not fit the operation.

    Args:
        group: our group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, tensors: Sequence[Tensor], op: Any) -> CallPlan:
        """Replace every rank's tensors by the reductions of all."""
        reduction = TensorReduction.of(op, tensors[0].dtype)
        target = writable(*tensors, filled=True)
        buffer = reduction.buffer(target.flat)
        call = partial(self._group.all_reduce, buffer, reduction.op)
        return CallPlan("all_reduce", tensors[0].device, call, _storing(reduction, buffer, target, reduction.direct))

    def reduce(self, tensor: Tensor, root: int, op: Any) -> CallPlan:
        """Replace the root's tensor by the reduction of all. The other ranks' tensors are only read."""
        reduction = TensorReduction.of(op, tensor.dtype)
        if root != self._rank:
            call = partial(self._group.reduce, reduction.buffer(readable(tensor)), root, reduction.op)
            return CallPlan("reduce", tensor.device, call)
        target = writable(tensor, filled=True)
        buffer = reduction.buffer(target.flat)
        call = partial(self._group.reduce, buffer, root, reduction.op)
        return CallPlan("reduce", tensor.device, call, _storing(reduction, buffer, target, reduction.direct))

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Any) -> CallPlan:
        """Fill the output with the reduction of all ranks' tensor number `rank`. The tensors may differ in size."""
        self._check_list("reduce_scatter", inputs)
        _check_numel("the output of reduce_scatter", output, inputs[self._rank].numel())
        reduction = TensorReduction.of(op, output.dtype)
        return self._reduce_scatter(reduction, [output], readable(*inputs), [t.numel() for t in inputs])

    def reduce_scatter_rows(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any) -> CallPlan:
        """Fill output i: [k_i] with this rank's shard of the reduction of all inputs i: [n * k_i]."""
        n = self._world_size
        reduction = TensorReduction.of(op, inputs[0].dtype)
        counts = [sum(t.numel() for t in outputs)] * n
        return self._reduce_scatter(reduction, outputs, readable_rows(inputs, n), counts)

    def _reduce_scatter(
        self, reduction: TensorReduction, outputs: Sequence[Tensor], data: Tensor, counts: list[int]
    ) -> CallPlan:
        """Reduce data: T[sum(counts)]. The shards are stored in the outputs, one after the other."""
        target = writable(*outputs)
        out = reduction.view(target.flat) if reduction.results_fit else reduction.buffer(target.flat)
        each = [reduction.numel(c) for c in counts]
        call = partial(self._group.reduce_scatter, reduction.buffer(data), reduction.op, out=out, counts=each)
        finish = _storing(reduction, out, target, reduction.results_fit)
        return CallPlan("reduce_scatter", outputs[0].device, call, finish)

    # ------------------------------------------------------------------ exchanges

    def broadcast(self, tensor: Tensor, root: int) -> CallPlan:
        """Replace every rank's tensor by the root's."""
        target = writable(tensor, filled=root == self._rank)
        call = partial(self._group.broadcast, native(target.flat), root)
        return CallPlan("broadcast", tensor.device, call, target.finish)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CallPlan:
        """Fill tensor i of the list with rank i's tensor. The tensors may differ in size."""
        self._check_list("all_gather", outputs)
        _check_numel(f"output {self._rank} of all_gather", outputs[self._rank], tensor.numel())
        target = writable(*outputs)
        counts = [native_numel(t.numel(), t.dtype) for t in outputs]
        call = partial(self._group.all_gather, native(readable(tensor)), out=native(target.flat), counts=counts)
        return CallPlan("all_gather", tensor.device, call, target.finish)

    def all_gather_rows(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int) -> CallPlan:
        """Fill the outputs with all ranks' inputs, in rank order.

        Each output is seen as `rows` rows. If that is n, row r of an output is from rank r.
        """
        target = writable_rows(outputs, rows)
        call = partial(self._group.all_gather, native(readable_rows(inputs, 1)), out=native(target.flat))
        return CallPlan("all_gather", inputs[0].device, call, target.finish)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> CallPlan:
        """Gather all ranks' tensors into the root's outputs, one after the other."""
        data = native(readable(tensor))
        if root != self._rank:
            return CallPlan("gather", tensor.device, partial(self._group.gather, data, root))
        target = writable(*outputs)
        call = partial(self._group.gather, data, root, out=native(target.flat))
        return CallPlan("gather", tensor.device, call, target.finish)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> CallPlan:
        """Fill the output with tensor number `rank` of the root's list. All tensors have one size."""
        if root == self._rank:
            self._check_list("scatter", inputs, output.numel())
        target = writable(output)
        data = native(readable(*inputs)) if root == self._rank else None
        call = partial(self._group.scatter, data, root, out=native(target.flat))
        return CallPlan("scatter", output.device, call, target.finish)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> CallPlan:
        """Fill output i with rank i's input number `rank`."""
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        received, sent = ([native_numel(t.numel(), t.dtype) for t in tensors] for tensors in (outputs, inputs))
        return self._all_to_all(writable(*outputs), readable(*inputs), received, sent)

    def all_to_all_splits(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
    ) -> CallPlan:
        """Fill split i of the output with the split of rank i's input that is for this rank. Splits are in rows."""
        received, sent = self._splits(output, output_splits), self._splits(input, input_splits)
        return self._all_to_all(writable(output), readable(input), received, sent)

    def _all_to_all(self, target: Buffer, data: Tensor, received: list[int], sent: list[int]) -> CallPlan:
        call = partial(
            self._group.all_to_all,
            native(data),
            out=native(target.flat),
            output_counts=received,
            input_counts=sent,
        )
        return CallPlan("all_to_all", target.flat.device, call, target.finish)

    def send(self, tensor: Tensor, to: int, tag: int) -> CallPlan:
        """Send to a rank."""
        return CallPlan("send", tensor.device, partial(self._group.send, native(readable(tensor)), to, tag=tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> CallPlan:
        """Receive from a rank, or from any."""
        target = writable(tensor)
        call = partial(self._group.recv, native(target.flat), source, tag=tag)
        return CallPlan("recv", tensor.device, call, target.finish)

    # ------------------------------------------------------------------ checks

    def check_shards(self, what: str, tensor: Tensor, shard: Tensor) -> None:
        """Check that a tensor, called `what` in the error, has the elements of n shards."""
        _check_numel(what, tensor, shard.numel() * self._world_size)

    def check_gathered(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Check that there is an output for each rank's tensor, all of the size of ours."""
        self._check_list("gather", outputs, tensor.numel())

    def check_lists(self, what: str, lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        """Check that there is a list for each rank, with an output for each input."""
        self._check_list(what, lists)
        for outputs in lists:
            check_pairs(what, outputs, inputs)

    def _check_list(self, what: str, tensors: Sequence[Any], numel: int | None = None) -> None:
        if len(tensors) != self._world_size:
            raise InvalidRequest(f"{what} was given a list of {len(tensors)} tensors; it needs {self._world_size}")
        if numel is not None and any(t.numel() != numel for t in tensors):
            sizes = [t.numel() for t in tensors]
            raise InvalidRequest(f"{what} was given tensors of {sizes} elements; each must have {numel}")

    def _splits(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[int]:
        """Return the number of elements in each rank's split, after `native`."""
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


def check_pairs(what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Check that there are as many outputs as inputs.

    Raises:
        InvalidRequest: there are not.
    """
    if len(outputs) != len(inputs):
        raise InvalidRequest(f"{what} was given {len(outputs)} outputs and {len(inputs)} inputs; give as many")


def _check_numel(what: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise InvalidRequest(f"{what} has {tensor.numel()} elements; it needs {numel}")


def _storing(reduction: TensorReduction, buffer: Tensor, target: Buffer, in_place: bool) -> Finish:
    """Return the function that stores a reduced buffer in the user's tensors. `in_place` = it is in `target`."""
    if in_place:
        return target.finish

    def finish() -> None:
        reduction.store(buffer, target.flat)
        target.finish()

    return finish
