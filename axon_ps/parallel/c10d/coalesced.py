"""Collectives on several tensors at once: small ones are packed into one call, large ones have one each.

    shape legend: n = world_size, k_i = elements of one rank's shard of tensor i

A call costs about as much as copying `PACKED_BYTES` twice, so tensors below that are packed into one staging buffer
per dtype and device. For larger tensors packing would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, ReduceScatterOptions, Work

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.calls import CallPlan
from axon_ps.parallel.c10d.operations import Collectives, options_of
from axon_ps.parallel.c10d.reductions import TensorReduction
from axon_ps.parallel.c10d.tensors import native, readable_rows, writable_rows
from axon_ps.parallel.c10d.work import AxonWork
from axon_ps.parallel.compile import uncompiled_methods

PACKED_BYTES = 256 << 10
"""Up to this size tensors are packed."""


@uncompiled_methods
class CoalescedCollectives(Collectives):
    """The coalesced collectives of `AxonProcessGroup`."""

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace every rank's tensors by the reductions of all."""
        options = options_of(opts, AllreduceCoalescedOptions)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            packed = [tensors[i] for i in chosen]
            reduction = TensorReduction.of(options.reduceOp, packed[0].dtype)
            return self._performer.perform(
                lambda: self._all_reduce_plan(packed, reduction), packed, packed[0].device, options
            )

        return self._in_few_calls(tensors, tensors, one_call)

    def all_gather_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Fill output i: [n * k_i] with all ranks' inputs i: [k_i], one after the other."""
        n = self._world_size
        self._check_pairs("all_gather", output_tensors, input_tensors)
        for output, data in zip(output_tensors, input_tensors, strict=True):
            self._check_numel("an output of all_gather", output, data.numel() * n)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            outputs, inputs = [output_tensors[i] for i in chosen], [input_tensors[i] for i in chosen]

            def plan() -> CallPlan:
                target = writable_rows(outputs, n)
                data = native(readable_rows(inputs, 1))
                return CallPlan(
                    "all_gather", partial(self._group.all_gather, data, out=native(target.flat)), target.finish
                )

            return self._performer.perform(plan, outputs, outputs[0].device, opts)

        return self._in_few_calls(input_tensors, output_tensors, one_call)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Fill output i: [k_i] with this rank's shard of the reduction of all inputs i: [n * k_i]."""
        n = self._world_size
        self._check_pairs("reduce_scatter", output_tensors, input_tensors)
        for output, data in zip(output_tensors, input_tensors, strict=True):
            self._check_numel("an input of reduce_scatter", data, output.numel() * n)
        options = options_of(opts, ReduceScatterOptions)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            outputs, inputs = [output_tensors[i] for i in chosen], [input_tensors[i] for i in chosen]
            reduction = TensorReduction.of(options.reduceOp, outputs[0].dtype)

            def plan() -> CallPlan:
                counts = [sum(t.numel() for t in outputs)] * n
                return self._reduce_scatter_plan(reduction, outputs, readable_rows(inputs, n), counts)

            return self._performer.perform(plan, outputs, outputs[0].device, options)

        return self._in_few_calls(output_tensors, output_tensors, one_call)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Work:
        """Fill tensor i of list r with rank r's input i."""
        self._check_list("all_gather_coalesced", output_lists)
        for outputs in output_lists:
            self._check_pairs("all_gather_coalesced", outputs, input_list)

        def one_call(chosen: Sequence[int]) -> AxonWork:
            inputs = [input_list[i] for i in chosen]
            outputs = [outputs[i] for outputs in output_lists for i in chosen]

            def plan() -> CallPlan:
                target = writable_rows(outputs, 1)
                data = native(readable_rows(inputs, 1))
                return CallPlan(
                    "all_gather", partial(self._group.all_gather, data, out=native(target.flat)), target.finish
                )

            return self._performer.perform(plan, outputs, inputs[0].device, opts)

        return self._in_few_calls(input_list, [t for outputs in output_lists for t in outputs], one_call)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _in_few_calls(
        self, shards: Sequence[Tensor], result: list[Tensor], one_call: Callable[[Sequence[int]], AxonWork]
    ) -> Work:
        """Make one call for all small tensors of a dtype and device, and one for each other tensor.

        The calls are made in the order of their first tensors.

        Args:
            shards: one rank's shard of each tensor; its size decides.
            result: the handle's result.
            one_call: makes the call for the tensors with these indices.
        """
        if not shards:
            raise InvalidRequest("no tensors were given to a coalesced collective; give at least one")
        calls: dict[Any, list[int]] = {}
        for i, shard in enumerate(shards):
            small = shard.numel() * shard.element_size() <= PACKED_BYTES
            calls.setdefault((shard.dtype, shard.device) if small else i, []).append(i)
        return self._performer.combined([one_call(chosen) for chosen in calls.values()], result)

    def _check_pairs(self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if len(outputs) != len(inputs):
            raise InvalidRequest(f"{what} was given {len(outputs)} outputs and {len(inputs)} inputs; give as many")
