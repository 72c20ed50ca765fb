"""Collectives of several nodes, made of collectives inside nodes and in rails.

An all-reduce is a reduce-scatter inside each node, an all-reduce across nodes in each rail (one rank of every node,
each with its stripe of the data), and an all-gather inside each node; the other operations are made likewise. Nodes may
have different numbers of ranks, see `topology`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.hierarchical.stage import Stage
from axon_ps.collectives.backends.hierarchical.topology import Topology, rearranged
from axon_ps.collectives.backends.request import required
from axon_ps.errors import InternalError, InvalidRequest
from axon_ps.reduction import ops
from axon_ps.types import Array, ReduceOp


class StagedCalls:
    """The calls of one rank of several nodes, some of which have several ranks.

    Args:
        topology: topology of the group.
        rank: our position in the group.
        node: performs the stages inside our node.
        rail: performs those in our rail; None = we are in none.
    """

    def __init__(self, topology: Topology, rank: int, node: Stage, rail: Stage | None) -> None:
        self._topology = topology
        self._rank = rank
        self._world_size = sum(map(len, topology.nodes))
        self._node_index = topology.node_of(rank)
        self._local_rank = topology.local_rank(rank)
        self._node_ranks = topology.nodes[self._node_index]
        self._node = node
        self._in_rail = rail is not None
        if rail is not None:
            self._rail = rail

    def run(self, request: Request, matrix: list[list[int]], deadline: float) -> None:
        """Make a call that all ranks make.

        Args:
            request: the call.
            matrix: ALL_TO_ALL: numbers of elements from rank to rank.
            deadline: deadline of the call.
        """
        try:
            _PERFORM[request.call.operation](self, request, matrix, deadline)
        except InvalidRequest as error:
            raise InternalError(f"a stage of {request.call} was refused: {error}") from error

    # ------------------------------------------------------------------ reductions

    def _stripe_counts(self, numel: int) -> list[int]:
        """Return the number of elements, of `numel`, that each rank of the node takes through its rail."""
        rails = self._topology.num_rails
        return [numel // rails + (i < numel % rails) if i < rails else 0 for i in range(len(self._node_ranks))]

    def _rail_reduction(self, call: Call) -> tuple[ReduceOp, Callable[[Array], object] | None]:
        """Return the reduction of the nodes' partial results in a rail, and the step before it for each stripe.

        An average of averages is right if nodes are equal; else each node is weighted by its number of ranks.
        """
        assert call.op is not None
        if call.op is not ReduceOp.AVERAGE or self._topology.even:
            return call.op, None
        weight = len(self._node_ranks) / self._world_size

        def weigh(stripe: Array) -> None:
            weighed = np.empty(stripe.size, ops.accumulator_dtype(call.dtype))
            ops.start(weighed, stripe, call.dtype)
            weighed *= weight
            ops.finish(stripe, weighed, ReduceOp.SUM, call.dtype, 1)

        return ReduceOp.SUM, weigh

    def _reduce_in_node(self, request: Request, data: Array, stripe_counts: Sequence[int], deadline: float) -> Array:
        """Return our stripe of the reduction of our node's data: T[stripe_counts[local_rank]]."""
        stripe = _empty(data, stripe_counts[self._local_rank])
        self._node.run(
            Operation.REDUCE_SCATTER,
            request.call.dtype,
            deadline,
            counts=stripe_counts,
            data=data,
            output=stripe,
            op=request.call.op,
        )
        return stripe

    def _all_reduce(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, required(request.data)
        stripe_counts = self._stripe_counts(data.size)
        stripe = self._reduce_in_node(request, data, stripe_counts, deadline)
        if self._in_rail:
            op, weigh = self._rail_reduction(call)
            self._rail.run(
                Operation.ALL_REDUCE, call.dtype, deadline, counts=(stripe.size,), data=stripe, op=op, prepare=weigh
            )
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=data)

    def _reduce(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, required(request.data)
        stripe_counts = self._stripe_counts(data.size)
        stripe = self._reduce_in_node(request, data, stripe_counts, deadline)
        root_node = self._topology.node_of(call.root)
        if self._in_rail:
            op, weigh = self._rail_reduction(call)
            self._rail.run(
                Operation.REDUCE,
                call.dtype,
                deadline,
                counts=(stripe.size,),
                data=stripe,
                op=op,
                root=root_node,
                prepare=weigh,
            )
        if self._node_index == root_node:
            self._gather_in_node(call, stripe, data if self._rank == call.root else None, stripe_counts, deadline)

    def _reduce_scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, topology = request.call, self._topology
        counts = dict(enumerate(call.counts))
        arranged = rearranged(required(request.data), counts, range(self._world_size), topology.rail_order)
        stripe = self._reduce_in_node(request, arranged, self._rail_totals(counts), deadline)
        mine = _empty(arranged, self._served_total(counts))
        if self._in_rail:
            op, weigh = self._rail_reduction(call)
            self._rail.run(
                Operation.REDUCE_SCATTER,
                call.dtype,
                deadline,
                counts=self._node_totals(counts),
                data=stripe,
                output=mine,
                op=op,
                prepare=weigh,
            )
        self._deliver_in_node(call, mine, required(request.output), counts, deadline)

    # ------------------------------------------------------------------ moves

    def _broadcast(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, required(request.data)
        stripe_counts = self._stripe_counts(data.size)
        stripe = _empty(data, stripe_counts[self._local_rank])
        root_node = self._topology.node_of(call.root)
        if self._node_index == root_node:
            full = data if self._rank == call.root else None
            self._scatter_in_node(call, stripe, full, stripe_counts, deadline)
        if self._in_rail:
            self._rail.run(
                Operation.BROADCAST, call.dtype, deadline, counts=(stripe.size,), data=stripe, root=root_node
            )
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=data)

    def _all_gather(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, required(request.output)
        counts = dict(enumerate(call.counts))
        stripe_counts = self._rail_totals(counts)
        mine = self._collect_in_node(call, required(request.data), counts, deadline)
        stripe = _empty(output, stripe_counts[self._local_rank])
        if self._in_rail:
            totals = self._node_totals(counts)
            self._rail.run(Operation.ALL_GATHER, call.dtype, deadline, counts=totals, data=mine, output=stripe)
        in_place = self._topology.rail_order == tuple(range(self._world_size))
        full = output if in_place else _empty(output, output.size)
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=full)
        if not in_place:
            output[:] = rearranged(full, counts, self._topology.rail_order, range(self._world_size))

    def _gather(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, required(request.data)
        counts = dict(enumerate(call.counts))
        stripe_counts = self._rail_totals(counts)
        root_node = self._topology.node_of(call.root)
        mine = self._collect_in_node(call, data, counts, deadline)
        stripe = _empty(data, stripe_counts[self._local_rank]) if self._node_index == root_node else None
        if self._in_rail:
            totals = self._node_totals(counts)
            self._rail.run(
                Operation.GATHER, call.dtype, deadline, counts=totals, data=mine, output=stripe, root=root_node
            )
        if stripe is not None:
            full = _empty(data, sum(stripe_counts)) if self._rank == call.root else None
            self._gather_in_node(call, stripe, full, stripe_counts, deadline)
            if full is not None:
                output = required(request.output)
                output[:] = rearranged(full, counts, self._topology.rail_order, range(self._world_size))

    def _scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, required(request.output)
        counts = dict(enumerate(call.counts))
        stripe_counts = self._rail_totals(counts)
        root_node = self._topology.node_of(call.root)
        stripe: Array | None = None
        if self._node_index == root_node:
            full: Array | None = None
            if self._rank == call.root:
                full = rearranged(required(request.data), counts, range(self._world_size), self._topology.rail_order)
            stripe = _empty(output, stripe_counts[self._local_rank])
            self._scatter_in_node(call, stripe, full, stripe_counts, deadline)
        mine = _empty(output, self._served_total(counts))
        if self._in_rail:
            totals = self._node_totals(counts)
            self._rail.run(
                Operation.SCATTER, call.dtype, deadline, counts=totals, data=stripe, output=mine, root=root_node
            )
        self._deliver_in_node(call, mine, output, counts, deadline)

    def _all_to_all(self, request: Request, matrix: list[list[int]], deadline: float) -> None:
        """Move data inside the node to the receiver's rail, across nodes, and inside its node to the receiver."""
        call, topology, all_ranks = request.call, self._topology, range(self._world_size)
        counts = {(i, j): matrix[i][j] for i in all_ranks for j in all_ranks}
        by_rail = [[(self._rank, j) for j in topology.served_everywhere(q)] for q in range(topology.num_rails)]
        data = rearranged(required(request.data), counts, [(self._rank, j) for j in all_ranks], list(chain(*by_rail)))
        sent = [_total(counts, keys) for keys in by_rail] + [0] * (len(self._node_ranks) - topology.num_rails)
        here: list[tuple[int, int]] = []
        received = [0] * len(self._node_ranks)
        if self._in_rail:
            mine = topology.served_everywhere(self._local_rank)
            here = [(i, j) for i in self._node_ranks for j in mine]
            received = [_total(counts, [(i, j) for j in mine]) for i in self._node_ranks]
        collected = _empty(data, sum(received))
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=data, output=collected, received=received, sent=sent
        )
        arrived = _empty(data, 0)
        if self._in_rail:
            nodes = range(len(topology.nodes))
            out = [[(i, j) for i in self._node_ranks for j in topology.served(b, self._local_rank)] for b in nodes]
            served = topology.served(self._node_index, self._local_rank)
            back = [[(i, j) for i in topology.nodes[b] for j in served] for b in nodes]
            received = [_total(counts, keys) for keys in back]
            arrived = _empty(data, sum(received))
            self._rail.run(
                Operation.ALL_TO_ALL,
                call.dtype,
                deadline,
                data=rearranged(collected, counts, here, list(chain(*out))),
                output=arrived,
                received=received,
                sent=[_total(counts, keys) for keys in out],
            )
            arrived = rearranged(arrived, counts, list(chain(*back)), [(i, j) for j in served for i in all_ranks])
        totals = {j: _total(counts, [(i, j) for i in all_ranks]) for j in all_ranks}
        self._deliver_in_node(call, arrived, required(request.output), totals, deadline)

    def _barrier(self, request: Request, _: Any, deadline: float) -> None:
        """Do nothing: the ranks have exchanged headers."""

    # ------------------------------------------------------------------ inside the node

    def _rail_totals(self, counts: dict[int, int]) -> list[int]:
        """Return the elements of each rail, by rank of our node, given those of each rank of the group."""
        rails = self._topology.num_rails
        totals = [_total(counts, self._topology.served_everywhere(q)) for q in range(rails)]
        return totals + [0] * (len(self._node_ranks) - rails)

    def _node_totals(self, counts: dict[int, int]) -> list[int]:
        """Return the elements of our rail, by node."""
        return [_total(counts, self._topology.served(b, self._local_rank)) for b in range(len(self._topology.nodes))]

    def _served_total(self, counts: dict[int, int]) -> int:
        """Return the elements of the ranks of our node whose data goes through us."""
        return _total(counts, self._topology.served(self._node_index, self._local_rank)) if self._in_rail else 0

    def _gather_in_node(
        self, call: Call, stripe: Array, full: Array | None, stripe_counts: Sequence[int], deadline: float
    ) -> None:
        root = self._topology.local_rank(call.root)
        self._node.run(
            Operation.GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=full, root=root
        )

    def _scatter_in_node(
        self, call: Call, stripe: Array, full: Array | None, stripe_counts: Sequence[int], deadline: float
    ) -> None:
        root = self._topology.local_rank(call.root)
        self._node.run(
            Operation.SCATTER, call.dtype, deadline, counts=stripe_counts, data=full, output=stripe, root=root
        )

    def _collect_in_node(self, call: Call, data: Array, counts: dict[int, int], deadline: float) -> Array:
        """Collect the data of the ranks of our node whose data goes through our rail; only used in a rail."""
        if len(self._node_ranks) == self._topology.num_rails:
            return data
        sent, received = self._transfer_counts(counts)
        collected = _empty(data, sum(received))
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=data, output=collected, received=received, sent=sent
        )
        return collected

    def _deliver_in_node(self, call: Call, mine: Array, output: Array, counts: dict[int, int], deadline: float) -> None:
        """Do the inverse of `_collect_in_node`: move data from the rails to the ranks."""
        if len(self._node_ranks) == self._topology.num_rails:
            output[:] = mine
            return
        received, sent = self._transfer_counts(counts)
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=mine, output=output, received=received, sent=sent
        )

    def _transfer_counts(self, counts: dict[int, int]) -> tuple[list[int], list[int]]:
        """Return the elements that we send to, and receive from, each rank of our node when data is collected."""
        own, rail = counts[self._rank], self._topology.rail_of(self._rank)
        sent = [own if i == rail else 0 for i in range(len(self._node_ranks))]
        served = self._topology.served(self._node_index, self._local_rank) if self._in_rail else ()
        return sent, [counts[p] if p in served else 0 for p in self._node_ranks]


_PERFORM: dict[Operation, Callable[[StagedCalls, Request, list[list[int]], float], None]] = {
    Operation.ALL_REDUCE: StagedCalls._all_reduce,
    Operation.REDUCE: StagedCalls._reduce,
    Operation.BROADCAST: StagedCalls._broadcast,
    Operation.ALL_GATHER: StagedCalls._all_gather,
    Operation.REDUCE_SCATTER: StagedCalls._reduce_scatter,
    Operation.GATHER: StagedCalls._gather,
    Operation.SCATTER: StagedCalls._scatter,
    Operation.ALL_TO_ALL: StagedCalls._all_to_all,
    Operation.BARRIER: StagedCalls._barrier,
}


def _empty(like: Array, numel: int) -> Array:
    """Make a new array T[numel] in the memory of `like`'s kind: numpy hands the call on to cupy for its arrays."""
    return np.empty_like(like, shape=(numel,))


def _total(counts: Any, keys: Sequence[Any]) -> int:
    return sum(counts[key] for key in keys)
