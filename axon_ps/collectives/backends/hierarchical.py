"""`HierarchicalBackend`: one backend inside nodes, and another across them, which moves a byte once per node.

Owns: how a collective is made of collectives inside nodes and across them. An all-reduce is a reduce-scatter inside
each node, an all-reduce across nodes in each rail (one rank of every node, each with its stripe of the data), and an
all-gather inside each node; the other operations likewise. Nodes may have different numbers of ranks, see `topology`.
Refuses: to move a byte itself.

Invariants:
- All ranks compare their calls first, through `flat`, which spans the group. So a rank that is missing or makes another
  call is named whichever node it is on, and no rank begins a stage that another does not begin.
- Small calls go through `flat` only: the stages would cost more than they save. So do messages: they would be faster
  inside a node, but a receive from any rank would have to wait in two places.
- A group on one node uses `intra` alone, and one with a single rank on each node `inter` alone.
- Reductions are in rank order inside nodes, then in the order of nodes; bf16, f16 and blocks of int8 are rounded after
  each. Results have the same bits on every rank and in every run.
- Device memory stays on the device inside a node. Only the stripe of each rail, which crosses nodes, is staged through
  page-locked host memory (see `collectives.staging`), and messages, in full.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from axon_ps.collectives.backends import header
from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation
from axon_ps.collectives.backends.request import Request, RequestBackend
from axon_ps.collectives.backends.stage import Stage, on_device
from axon_ps.collectives.backends.topology import Topology, rearranged
from axon_ps.collectives.staging import Staging
from axon_ps.errors import AxonError, Disagreement, InternalError, InvalidRequest
from axon_ps.reduction import ops
from axon_ps.types import Array, DType, ReduceOp

SMALL_BYTES = 16 << 10
"""Up to how many bytes a call goes through `flat` only."""

Make = Callable[[GroupContext], Backend]
_MAX_NAME = 200


class HierarchicalBackend(RequestBackend):
    """See this module's notes. All ranks of the group must make it together. `create` also makes its backends.

    Args:
        intra: spans the ranks of our node, in the group's order.
        inter: spans the group, and knows who is on which node (its members); rails get siblings of it.
        small_bytes: up to how many bytes a call goes through `inter` only.

    Raises:
        InvalidRequest: `intra` does not span our node.
        AxonError: the backend of our rail cannot be made.
    """

    name: ClassVar[str] = "hierarchical"
    buffers_messages = True

    def __init__(self, intra: Backend, inter: Backend, *, small_bytes: int = SMALL_BYTES) -> None:
        context, topology = inter.context, Topology.of(inter.context.members)
        node_ranks = topology.nodes[topology.node_of(context.rank)]
        local = topology.local_rank(context.rank)
        if (intra.rank, intra.world_size) != (local, len(node_ranks)):
            raise InvalidRequest(
                f"intra is rank {intra.rank} of {intra.world_size}; needed is rank {local} of {len(node_ranks)}, a "
                f"backend of the ranks of node {context.members[context.rank].node!r}"
            )
        one, apart = len(topology.nodes) == 1, max(map(len, topology.nodes)) == 1
        rail: Backend | None = None
        if not one and not apart and local < topology.num_rails:
            rail = inter.sibling(_sub_context(context, f"rail{local}", topology.rail(local)))
        self._compose(
            context,
            node=None if apart and not one else intra,
            rail=rail,
            flat=None if one else inter,
            small_bytes=small_bytes,
        )
        self._backends = [b for b in (inter, rail, intra) if b is not None]  # also those that are only to be closed

    def _compose(
        self,
        context: GroupContext,
        *,
        node: Backend | None,
        rail: Backend | None,
        flat: Backend | None,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """`node` spans our node, None if `flat` does everything; `rail` our rail, None if we are in none; `flat` the
        group, None if `node` does everything.
        """
        super().__init__(context)
        self._backends = [b for b in (flat, rail, node) if b is not None]
        self.dtypes = tuple(dtype for dtype in DType if all(dtype in b.dtypes for b in self._backends))
        self._staging = Staging()
        single = flat if node is None else node if flat is None else None
        self._single = None if single is None else Stage(single, None if single is node else self._staging)
        self._small_bytes = small_bytes
        self._error: AxonError | None = None
        self._topology = Topology.of(context.members)
        self._node_index = self._topology.node_of(self.rank)
        self._local_rank = self._topology.local_rank(self.rank)
        self._node_ranks = self._topology.nodes[self._node_index]
        if node is not None:
            self._node = Stage(node)
        if rail is not None:
            self._rail = Stage(rail, self._staging)
        if flat is not None:
            self._flat = Stage(flat, self._staging)
        self._in_rail = rail is not None

    @classmethod
    def create(
        cls, context: GroupContext, *, intra: Make, inter: Make, small_bytes: int = SMALL_BYTES
    ) -> HierarchicalBackend:
        """Make the backend and those it uses. All ranks of the group must make it together.

        Args:
            context: who the group is.
            intra: makes a backend for the ranks of one node.
            inter: makes a backend for ranks on different nodes.
            small_bytes: as for the class.

        Raises:
            AxonError: one of the backends cannot be made; those that were are closed.
        """
        topology, all_ranks = Topology.of(context.members), range(len(context.ranks))
        if len(topology.nodes) == 1:
            return cls._of(context, node=intra(_sub_context(context, "node", all_ranks)), rail=None, flat=None)
        if max(map(len, topology.nodes)) == 1:
            return cls._of(context, node=None, rail=None, flat=inter(_sub_context(context, "flat", all_ranks)))
        made: list[Backend] = []
        try:
            home = topology.node_of(context.rank)
            node = intra(_sub_context(context, f"node{home}", topology.nodes[home]))
            made.append(node)
            flat = inter(_sub_context(context, "flat", all_ranks))
            made.append(flat)
            rail: Backend | None = None
            if (local := topology.local_rank(context.rank)) < topology.num_rails:
                rail = inter(_sub_context(context, f"rail{local}", topology.rail(local)))
        except BaseException:
            for backend in made:
                backend.close()
            raise
        return cls._of(context, node=node, rail=rail, flat=flat, small_bytes=small_bytes)

    @classmethod
    def _of(cls, context: GroupContext, **backends: Any) -> HierarchicalBackend:
        backend = cls.__new__(cls)
        backend._compose(context, **backends)
        return backend

    def sibling(self, context: GroupContext) -> Backend:
        """See `Backend.sibling`."""
        if self._single is not None:
            return self._single.backend.sibling(context)
        return type(self).create(
            context,
            intra=self._node.backend.sibling,
            inter=self._flat.backend.sibling,
            small_bytes=self._small_bytes,
        )

    # ------------------------------------------------------------------ agreement

    def _perform(self, request: Request, timeout_s: float) -> None:
        if self._single is not None:
            self._single.perform(request, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            if not self._through_flat(request, deadline):
                matrix = self._agree(request, deadline)
                try:
                    _PERFORM[request.call.operation](self, request, matrix, deadline)
                except InvalidRequest as error:
                    raise InternalError(f"a stage of {request.call} was refused: {error}") from error
        except InvalidRequest:
            raise
        except AxonError as error:
            self.abort(error)
            raise

    def _through_flat(self, request: Request, deadline: float) -> bool:
        """Make a small call through `flat`; returns whether it was small, which equal calls find on every rank."""
        call = request.call
        arrays = [a for a in (request.data, request.output) if a is not None]
        small = sum(call.counts) * call.dtype.itemsize <= self._small_bytes
        if call.operation is Operation.ALL_TO_ALL or not small or any(map(on_device, arrays)):
            return False
        try:
            self._flat.run(
                call.operation,
                call.dtype,
                deadline,
                counts=call.counts,
                data=request.data,
                output=request.output,
                op=call.op,
                root=call.root,
                reason=call.reason,
            )
        except Disagreement:
            self._raise_disagreement(request, deadline)
        return True

    def _agree(self, request: Request, deadline: float) -> list[list[int]]:
        """Check that all ranks make the same call; how many elements go from rank to rank in an all-to-all."""
        try:
            headers = self._exchange_headers(request, deadline)
        except Disagreement:  # other ranks make a small call
            return self._raise_disagreement(request, deadline)
        return header.check(headers, request.call, self.context)

    def _raise_disagreement(self, request: Request, deadline: float) -> list[list[int]]:
        """All ranks come here when one finds that calls differ: `flat` cannot describe the ranks' own calls."""
        header.check(self._exchange_headers(request, deadline), request.call, self.context)
        raise InternalError(f"the ranks make equal calls {request.call}, and yet a stage found that they differ")

    def _exchange_headers(self, request: Request, deadline: float) -> list[Array]:
        mine = header.encode(request, self.world_size)
        headers = np.empty(self.world_size * mine.size, np.uint8)
        counts = (mine.size,) * self.world_size
        self._flat.run(Operation.ALL_GATHER, DType.U8, deadline, counts=counts, data=mine, output=headers)
        return list(headers.reshape(self.world_size, -1))

    # ------------------------------------------------------------------ reductions

    def _stripe_counts(self, numel: int) -> list[int]:
        """How many of `numel` elements each rank of the node takes through its rail."""
        rails = self._topology.num_rails
        return [numel // rails + (i < numel % rails) if i < rails else 0 for i in range(len(self._node_ranks))]

    def _rail_reduction(self, call: Call) -> tuple[ReduceOp, Callable[[Array], object] | None]:
        """How a rail reduces the nodes' partial results, and what is done to each stripe before.

        An average of averages is right if nodes are equal; else each node is weighted by its number of ranks.
        """
        assert call.op is not None
        if call.op is not ReduceOp.AVERAGE or self._topology.even:
            return call.op, None
        weight = len(self._node_ranks) / self.world_size

        def weigh(stripe: Array) -> None:
            weighed = np.empty(stripe.size, ops.accumulator_dtype(call.dtype))
            ops.start(weighed, stripe, call.dtype)
            weighed *= weight
            ops.finish(stripe, weighed, ReduceOp.SUM, call.dtype, 1)

        return ReduceOp.SUM, weigh

    def _reduce_in_node(self, request: Request, data: Array, stripe_counts: Sequence[int], deadline: float) -> Array:
        """Our stripe of the reduction of our node's data: T[stripe_counts[local_rank]]."""
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
        call, data = request.call, _required(request.data)
        stripe_counts = self._stripe_counts(data.size)
        stripe = self._reduce_in_node(request, data, stripe_counts, deadline)
        if self._in_rail:
            op, weigh = self._rail_reduction(call)
            self._rail.run(
                Operation.ALL_REDUCE, call.dtype, deadline, counts=(stripe.size,), data=stripe, op=op, prepare=weigh
            )
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=data)

    def _reduce(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _required(request.data)
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
            self._gather_in_node(call, stripe, data if self.rank == call.root else None, stripe_counts, deadline)

    def _reduce_scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, topology = request.call, self._topology
        counts = dict(enumerate(call.counts))
        arranged = rearranged(_required(request.data), counts, range(self.world_size), topology.rail_order)
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
        self._deliver_in_node(call, mine, _required(request.output), counts, deadline)

    # ------------------------------------------------------------------ moves

    def _broadcast(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _required(request.data)
        stripe_counts = self._stripe_counts(data.size)
        stripe = _empty(data, stripe_counts[self._local_rank])
        root_node = self._topology.node_of(call.root)
        if self._node_index == root_node:
            full = data if self.rank == call.root else None
            self._scatter_in_node(call, stripe, full, stripe_counts, deadline)
        if self._in_rail:
            self._rail.run(
                Operation.BROADCAST, call.dtype, deadline, counts=(stripe.size,), data=stripe, root=root_node
            )
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=data)

    def _all_gather(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, _required(request.output)
        counts = dict(enumerate(call.counts))
        stripe_counts = self._rail_totals(counts)
        mine = self._collect_in_node(call, _required(request.data), counts, deadline)
        stripe = _empty(output, stripe_counts[self._local_rank])
        if self._in_rail:
            totals = self._node_totals(counts)
            self._rail.run(Operation.ALL_GATHER, call.dtype, deadline, counts=totals, data=mine, output=stripe)
        in_place = self._topology.rail_order == tuple(range(self.world_size))
        full = output if in_place else _empty(output, output.size)
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=stripe_counts, data=stripe, output=full)
        if not in_place:
            output[:] = rearranged(full, counts, self._topology.rail_order, range(self.world_size))

    def _gather(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _required(request.data)
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
            full = _empty(data, sum(stripe_counts)) if self.rank == call.root else None
            self._gather_in_node(call, stripe, full, stripe_counts, deadline)
            if full is not None:
                output = _required(request.output)
                output[:] = rearranged(full, counts, self._topology.rail_order, range(self.world_size))

    def _scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, _required(request.output)
        counts = dict(enumerate(call.counts))
        stripe_counts = self._rail_totals(counts)
        root_node = self._topology.node_of(call.root)
        stripe: Array | None = None
        if self._node_index == root_node:
            full: Array | None = None
            if self.rank == call.root:
                full = rearranged(_required(request.data), counts, range(self.world_size), self._topology.rail_order)
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
        """Inside the node to the receiver's rail, across nodes, and inside the receiver's node to the receiver."""
        call, topology, all_ranks = request.call, self._topology, range(self.world_size)
        counts = {(i, j): matrix[i][j] for i in all_ranks for j in all_ranks}
        by_rail = [[(self.rank, j) for j in topology.served_everywhere(q)] for q in range(topology.num_rails)]
        data = rearranged(_required(request.data), counts, [(self.rank, j) for j in all_ranks], list(chain(*by_rail)))
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
        self._deliver_in_node(call, arrived, _required(request.output), totals, deadline)

    def _barrier(self, request: Request, _: Any, deadline: float) -> None:
        """Nothing is left to do: the ranks have exchanged headers."""

    # ------------------------------------------------------------------ inside the node

    def _rail_totals(self, counts: dict[int, int]) -> list[int]:
        """Elements of each rail, by rank of our node, given those of each rank of the group."""
        rails = self._topology.num_rails
        totals = [_total(counts, self._topology.served_everywhere(q)) for q in range(rails)]
        return totals + [0] * (len(self._node_ranks) - rails)

    def _node_totals(self, counts: dict[int, int]) -> list[int]:
        """Elements of our rail, by node."""
        return [_total(counts, self._topology.served(b, self._local_rank)) for b in range(len(self._topology.nodes))]

    def _served_total(self, counts: dict[int, int]) -> int:
        """Elements of the ranks of our node whose data goes through us."""
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
        """The data of the ranks of our node whose data goes through our rail; only used in a rail."""
        if len(self._node_ranks) == self._topology.num_rails:
            return data
        sent, received = self._transfer_counts(counts)
        collected = _empty(data, sum(received))
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=data, output=collected, received=received, sent=sent
        )
        return collected

    def _deliver_in_node(self, call: Call, mine: Array, output: Array, counts: dict[int, int], deadline: float) -> None:
        """The inverse of `_collect_in_node`: from the rails to the ranks."""
        if len(self._node_ranks) == self._topology.num_rails:
            output[:] = mine
            return
        received, sent = self._transfer_counts(counts)
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=mine, output=output, received=received, sent=sent
        )

    def _transfer_counts(self, counts: dict[int, int]) -> tuple[list[int], list[int]]:
        """Elements that we send to, and receive from, each rank of our node when data is collected."""
        own, rail = counts[self.rank], self._topology.rail_of(self.rank)
        sent = [own if i == rail else 0 for i in range(len(self._node_ranks))]
        served = self._topology.served(self._node_index, self._local_rank) if self._in_rail else ()
        return sent, [counts[p] if p in served else 0 for p in self._node_ranks]

    # ------------------------------------------------------------------ the rest

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        (self._single or self._flat).send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        return (self._single or self._flat).recv(data, dtype, source, tag, timeout_s)

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`."""
        if self._error is None:
            self._error = error
        for backend in self._backends:
            backend.abort(self._error)

    def close(self) -> None:
        """See `Backend.close`."""
        for backend in self._backends:
            backend.close()

    def statistics(self) -> dict[str, float]:
        """Counters of the backends it uses, added up, and bytes of device memory that crossed to the host."""
        total = self._staging.statistics()
        for backend in self._backends:
            for name, value in backend.statistics().items():
                total[name] = total.get(name, 0.0) + value
        return total


_PERFORM: dict[Operation, Callable[[HierarchicalBackend, Request, list[list[int]], float], None]] = {
    Operation.ALL_REDUCE: HierarchicalBackend._all_reduce,
    Operation.REDUCE: HierarchicalBackend._reduce,
    Operation.BROADCAST: HierarchicalBackend._broadcast,
    Operation.ALL_GATHER: HierarchicalBackend._all_gather,
    Operation.REDUCE_SCATTER: HierarchicalBackend._reduce_scatter,
    Operation.GATHER: HierarchicalBackend._gather,
    Operation.SCATTER: HierarchicalBackend._scatter,
    Operation.ALL_TO_ALL: HierarchicalBackend._all_to_all,
    Operation.BARRIER: HierarchicalBackend._barrier,
}


def _sub_context(context: GroupContext, what: str, positions: Sequence[int]) -> GroupContext:
    """The context of a sub-group of which we are a member."""
    return GroupContext(
        name=name_of_subgroup(context.name, what),
        rank=list(positions).index(context.rank),
        ranks=tuple(context.ranks[p] for p in positions),
        members=tuple(context.members[p] for p in positions),
        store=context.store,
        timeout_s=context.timeout_s,
    )


def name_of_subgroup(group: str, what: str) -> str:
    """The name of a sub-group of a group; hashed if it would be longer than a name may be."""
    name = f"{group}/{what}"
    return name if len(name) <= _MAX_NAME else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _required(array: Array | None) -> Array:
    assert array is not None, "Request.check has checked this"
    return array


def _empty(like: Array, numel: int) -> Array:
    """A new array T[numel] where `like` is: numpy hands the call on to cupy for its arrays."""
    return np.empty_like(like, shape=(numel,))


def _total(counts: Any, keys: Sequence[Any]) -> int:
    return sum(counts[key] for key in keys)
