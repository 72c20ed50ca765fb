"""`HierarchicalBackend`: fast inside nodes, and across them every byte once per node instead of once per rank.

Owns: how a collective is made of collectives inside nodes and across them. An all-reduce is a reduce-scatter inside
each node, an all-reduce across in lanes (one rank of every node, each with its share), and an all-gather inside; the
other operations likewise. Nodes may have different numbers of ranks, see `topology`. Refuses: to move a byte itself.

Invariants:
- Ranks agree before anything else, all of them at once, through `flat`, which spans the group; so whoever is missing or
  asks for something else is named whichever node it is on, and no stage begins that another rank does not begin.
- What is small goes through `flat` only: the stages would cost more than they save. So do messages; inside a node they
  could go faster, but then a receive from any rank would have to wait in two places.
- A group on one node is just `intra`, and one with a rank on each node just `inter`.
- Reductions are in rank order inside nodes, then in the order of nodes; bf16, f16 and blocks of int8 are rounded after
  each. Results have the same bits on every rank and in every run.
- Device memory stays on the device inside a node. What crosses, the share of each rank's lane, is staged through
  page-locked host memory, and nothing else is (see `collectives.staging`); a message is, whole.
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
    """See this module's notes. All ranks of the group must make it together. `create` makes what it consists of, too.

    Args:
        intra: spans the ranks of our node, in the group's order.
        inter: spans the group, and knows who is on which node (its members); lanes get siblings of it.
        small_bytes: up to how many bytes a call goes through `inter` only.

    Raises:
        InvalidRequest: `intra` does not span our node.
        AxonError: the backend of our lane cannot be made.
    """

    name: ClassVar[str] = "hierarchical"
    keeps_messages = True

    def __init__(self, intra: Backend, inter: Backend, *, small_bytes: int = SMALL_BYTES) -> None:
        context, topology = inter.context, Topology.of(inter.context.members)
        neighbours = topology.nodes[topology.node_of(context.rank)]
        local = topology.local(context.rank)
        if (intra.rank, intra.world_size) != (local, len(neighbours)):
            raise InvalidRequest(
                f"intra is rank {intra.rank} of {intra.world_size}; needed is rank {local} of {len(neighbours)}, a "
                f"backend of the ranks of node {context.members[context.rank].node!r}"
            )
        one, apart = len(topology.nodes) == 1, max(map(len, topology.nodes)) == 1
        lane: Backend | None = None
        if not one and not apart and local < topology.lanes:
            lane = inter.sibling(_part(context, f"lane{local}", topology.lane(local)))
        self._consist_of(
            context,
            node=None if apart and not one else intra,
            lane=lane,
            flat=None if one else inter,
            small_bytes=small_bytes,
        )
        self._backends = [b for b in (inter, lane, intra) if b is not None]  # to be closed, also where one does all

    def _consist_of(
        self,
        context: GroupContext,
        *,
        node: Backend | None,
        lane: Backend | None,
        flat: Backend | None,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """`node` spans our node, None if `flat` does everything; `lane` our lane, None when we are in none; `flat` the
        group, None if `node` does everything.
        """
        super().__init__(context)
        self._backends = [b for b in (flat, lane, node) if b is not None]
        self.dtypes = tuple(dtype for dtype in DType if all(dtype in b.dtypes for b in self._backends))
        self._staging = Staging()
        whole = flat if node is None else node if flat is None else None
        self._whole = None if whole is None else Stage(whole, None if whole is node else self._staging)
        self._small_bytes = small_bytes
        self._error: AxonError | None = None
        self._topology = Topology.of(context.members)
        self._home = self._topology.node_of(self.rank)
        self._local = self._topology.local(self.rank)
        self._neighbours = self._topology.nodes[self._home]
        if node is not None:
            self._node = Stage(node)
        if lane is not None:
            self._lane = Stage(lane, self._staging)
        if flat is not None:
            self._flat = Stage(flat, self._staging)
        self._in_lane = lane is not None

    @classmethod
    def create(
        cls, context: GroupContext, *, intra: Make, inter: Make, small_bytes: int = SMALL_BYTES
    ) -> HierarchicalBackend:
        """Make the backend and those it consists of. All ranks of the group must make it together.

        Args:
            context: who the group is.
            intra: makes a backend for the ranks of one node.
            inter: makes a backend for ranks on different nodes.
            small_bytes: as for the class.

        Raises:
            AxonError: one of the backends cannot be made; those that were are closed.
        """
        topology, everybody = Topology.of(context.members), range(len(context.ranks))
        if len(topology.nodes) == 1:
            return cls._of(context, node=intra(_part(context, "node", everybody)), lane=None, flat=None)
        if max(map(len, topology.nodes)) == 1:
            return cls._of(context, node=None, lane=None, flat=inter(_part(context, "flat", everybody)))
        made: list[Backend] = []
        try:
            home = topology.node_of(context.rank)
            node = intra(_part(context, f"node{home}", topology.nodes[home]))
            made.append(node)
            flat = inter(_part(context, "flat", everybody))
            made.append(flat)
            lane: Backend | None = None
            if (local := topology.local(context.rank)) < topology.lanes:
                lane = inter(_part(context, f"lane{local}", topology.lane(local)))
        except BaseException:
            for backend in made:
                backend.close()
            raise
        return cls._of(context, node=node, lane=lane, flat=flat, small_bytes=small_bytes)

    @classmethod
    def _of(cls, context: GroupContext, **parts: Any) -> HierarchicalBackend:
        backend = cls.__new__(cls)
        backend._consist_of(context, **parts)
        return backend

    def sibling(self, context: GroupContext) -> Backend:
        """See `Backend.sibling`."""
        if self._whole is not None:
            return self._whole.backend.sibling(context)
        return type(self).create(
            context,
            intra=self._node.backend.sibling,
            inter=self._flat.backend.sibling,
            small_bytes=self._small_bytes,
        )

    # ------------------------------------------------------------------ agreement

    def _perform(self, request: Request, timeout_s: float) -> None:
        if self._whole is not None:
            self._whole.perform(request, timeout_s)
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
        """Do all of a small call; whether it was one. All ranks see the same if they agree, and else are told."""
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
            self._say_who_disagrees(request, deadline)
        return True

    def _agree(self, request: Request, deadline: float) -> list[list[int]]:
        """See that all ranks make the same call; how many elements go from rank to rank in an all-to-all."""
        try:
            headers = self._exchange_headers(request, deadline)
        except Disagreement:  # others find this call small
            return self._say_who_disagrees(request, deadline)
        return header.check(headers, request.call, self.context)

    def _say_who_disagrees(self, request: Request, deadline: float) -> list[list[int]]:
        """All ranks come here when one finds that calls differ: `flat` knows only what was asked of it."""
        header.check(self._exchange_headers(request, deadline), request.call, self.context)
        raise InternalError(f"the ranks agree on {request.call}, and yet a stage found that they do not")

    def _exchange_headers(self, request: Request, deadline: float) -> list[Array]:
        mine = header.encode(request, self.world_size)
        headers = np.empty(self.world_size * mine.size, np.uint8)
        counts = (mine.size,) * self.world_size
        self._flat.run(Operation.ALL_GATHER, DType.U8, deadline, counts=counts, data=mine, output=headers)
        return list(headers.reshape(self.world_size, -1))

    # ------------------------------------------------------------------ reductions

    def _lane_shares(self, numel: int) -> list[int]:
        """How many of `numel` elements each rank of the node takes through its lane."""
        lanes = self._topology.lanes
        return [numel // lanes + (i < numel % lanes) if i < lanes else 0 for i in range(len(self._neighbours))]

    def _across(self, call: Call) -> tuple[ReduceOp, Callable[[Array], object] | None]:
        """How a lane combines the nodes' parts of a reduction, and what is done to each part before.

        An average of averages is right if nodes are equal; else each node's counts as much as it has ranks.
        """
        assert call.op is not None
        if call.op is not ReduceOp.AVERAGE or self._topology.even:
            return call.op, None
        weight = len(self._neighbours) / self.world_size

        def weigh(part: Array) -> None:
            weighed = np.empty(part.size, ops.accumulator_dtype(call.dtype))
            ops.start(weighed, part, call.dtype)
            weighed *= weight
            ops.finish(part, weighed, ReduceOp.SUM, call.dtype, 1)

        return ReduceOp.SUM, weigh

    def _reduce_in_node(self, request: Request, data: Array, shares: Sequence[int], deadline: float) -> Array:
        """Our share of the reduction of our node's data: T[shares[local]]."""
        part = _empty(data, shares[self._local])
        self._node.run(
            Operation.REDUCE_SCATTER,
            request.call.dtype,
            deadline,
            counts=shares,
            data=data,
            output=part,
            op=request.call.op,
        )
        return part

    def _all_reduce(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _given(request.data)
        shares = self._lane_shares(data.size)
        part = self._reduce_in_node(request, data, shares, deadline)
        if self._in_lane:
            op, weigh = self._across(call)
            self._lane.run(
                Operation.ALL_REDUCE, call.dtype, deadline, counts=(part.size,), data=part, op=op, prepare=weigh
            )
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=shares, data=part, output=data)

    def _reduce(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _given(request.data)
        shares = self._lane_shares(data.size)
        part = self._reduce_in_node(request, data, shares, deadline)
        root_node = self._topology.node_of(call.root)
        if self._in_lane:
            op, weigh = self._across(call)
            self._lane.run(
                Operation.REDUCE,
                call.dtype,
                deadline,
                counts=(part.size,),
                data=part,
                op=op,
                root=root_node,
                prepare=weigh,
            )
        if self._home == root_node:
            self._gather_in_node(call, part, data if self.rank == call.root else None, shares, deadline)

    def _reduce_scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, topology = request.call, self._topology
        counts = dict(enumerate(call.counts))
        arranged = rearranged(_given(request.data), counts, range(self.world_size), topology.lane_order)
        part = self._reduce_in_node(request, arranged, self._lane_totals(counts), deadline)
        mine = _empty(arranged, self._served_total(counts))
        if self._in_lane:
            op, weigh = self._across(call)
            self._lane.run(
                Operation.REDUCE_SCATTER,
                call.dtype,
                deadline,
                counts=self._node_totals(counts),
                data=part,
                output=mine,
                op=op,
                prepare=weigh,
            )
        self._deliver(call, mine, _given(request.output), counts, deadline)

    # ------------------------------------------------------------------ moves

    def _broadcast(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _given(request.data)
        shares = self._lane_shares(data.size)
        part = _empty(data, shares[self._local])
        root_node = self._topology.node_of(call.root)
        if self._home == root_node:
            whole = data if self.rank == call.root else None
            self._scatter_in_node(call, part, whole, shares, deadline)
        if self._in_lane:
            self._lane.run(Operation.BROADCAST, call.dtype, deadline, counts=(part.size,), data=part, root=root_node)
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=shares, data=part, output=data)

    def _all_gather(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, _given(request.output)
        counts = dict(enumerate(call.counts))
        shares = self._lane_totals(counts)
        mine = self._collect(call, _given(request.data), counts, deadline)
        part = _empty(output, shares[self._local])
        if self._in_lane:
            totals = self._node_totals(counts)
            self._lane.run(Operation.ALL_GATHER, call.dtype, deadline, counts=totals, data=mine, output=part)
        in_place = self._topology.lane_order == tuple(range(self.world_size))
        whole = output if in_place else _empty(output, output.size)
        self._node.run(Operation.ALL_GATHER, call.dtype, deadline, counts=shares, data=part, output=whole)
        if not in_place:
            output[:] = rearranged(whole, counts, self._topology.lane_order, range(self.world_size))

    def _gather(self, request: Request, _: Any, deadline: float) -> None:
        call, data = request.call, _given(request.data)
        counts = dict(enumerate(call.counts))
        shares = self._lane_totals(counts)
        root_node = self._topology.node_of(call.root)
        mine = self._collect(call, data, counts, deadline)
        part = _empty(data, shares[self._local]) if self._home == root_node else None
        if self._in_lane:
            totals = self._node_totals(counts)
            self._lane.run(
                Operation.GATHER, call.dtype, deadline, counts=totals, data=mine, output=part, root=root_node
            )
        if part is not None:
            whole = _empty(data, sum(shares)) if self.rank == call.root else None
            self._gather_in_node(call, part, whole, shares, deadline)
            if whole is not None:
                output = _given(request.output)
                output[:] = rearranged(whole, counts, self._topology.lane_order, range(self.world_size))

    def _scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, output = request.call, _given(request.output)
        counts = dict(enumerate(call.counts))
        shares = self._lane_totals(counts)
        root_node = self._topology.node_of(call.root)
        part: Array | None = None
        if self._home == root_node:
            whole: Array | None = None
            if self.rank == call.root:
                whole = rearranged(_given(request.data), counts, range(self.world_size), self._topology.lane_order)
            part = _empty(output, shares[self._local])
            self._scatter_in_node(call, part, whole, shares, deadline)
        mine = _empty(output, self._served_total(counts))
        if self._in_lane:
            totals = self._node_totals(counts)
            self._lane.run(
                Operation.SCATTER, call.dtype, deadline, counts=totals, data=part, output=mine, root=root_node
            )
        self._deliver(call, mine, output, counts, deadline)

    def _all_to_all(self, request: Request, matrix: list[list[int]], deadline: float) -> None:
        """To the lane of the receiver inside the node, across, and inside the receiver's node to it."""
        call, topology, everybody = request.call, self._topology, range(self.world_size)
        counts = {(i, j): matrix[i][j] for i in everybody for j in everybody}
        by_lane = [[(self.rank, j) for j in topology.served_everywhere(q)] for q in range(topology.lanes)]
        data = rearranged(_given(request.data), counts, [(self.rank, j) for j in everybody], list(chain(*by_lane)))
        sent = [_total(counts, keys) for keys in by_lane] + [0] * (len(self._neighbours) - topology.lanes)
        here: list[tuple[int, int]] = []
        received = [0] * len(self._neighbours)
        if self._in_lane:
            mine = topology.served_everywhere(self._local)
            here = [(i, j) for i in self._neighbours for j in mine]
            received = [_total(counts, [(i, j) for j in mine]) for i in self._neighbours]
        collected = _empty(data, sum(received))
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=data, output=collected, received=received, sent=sent
        )
        arrived = _empty(data, 0)
        if self._in_lane:
            nodes = range(len(topology.nodes))
            out = [[(i, j) for i in self._neighbours for j in topology.served(b, self._local)] for b in nodes]
            served = topology.served(self._home, self._local)
            back = [[(i, j) for i in topology.nodes[b] for j in served] for b in nodes]
            received = [_total(counts, keys) for keys in back]
            arrived = _empty(data, sum(received))
            self._lane.run(
                Operation.ALL_TO_ALL,
                call.dtype,
                deadline,
                data=rearranged(collected, counts, here, list(chain(*out))),
                output=arrived,
                received=received,
                sent=[_total(counts, keys) for keys in out],
            )
            arrived = rearranged(arrived, counts, list(chain(*back)), [(i, j) for j in served for i in everybody])
        totals = {j: _total(counts, [(i, j) for i in everybody]) for j in everybody}
        self._deliver(call, arrived, _given(request.output), totals, deadline)

    def _barrier(self, request: Request, _: Any, deadline: float) -> None:
        """Everybody is here: they have agreed."""

    # ------------------------------------------------------------------ inside the node

    def _lane_totals(self, counts: dict[int, int]) -> list[int]:
        """Elements in each lane by rank of our node, given those of each rank of the group."""
        lanes = self._topology.lanes
        totals = [_total(counts, self._topology.served_everywhere(q)) for q in range(lanes)]
        return totals + [0] * (len(self._neighbours) - lanes)

    def _node_totals(self, counts: dict[int, int]) -> list[int]:
        """Elements in our lane by node."""
        return [_total(counts, self._topology.served(b, self._local)) for b in range(len(self._topology.nodes))]

    def _served_total(self, counts: dict[int, int]) -> int:
        """Elements of the ranks of our node whose data goes through us."""
        return _total(counts, self._topology.served(self._home, self._local)) if self._in_lane else 0

    def _gather_in_node(
        self, call: Call, part: Array, whole: Array | None, shares: Sequence[int], deadline: float
    ) -> None:
        root = self._topology.local(call.root)
        self._node.run(Operation.GATHER, call.dtype, deadline, counts=shares, data=part, output=whole, root=root)

    def _scatter_in_node(
        self, call: Call, part: Array, whole: Array | None, shares: Sequence[int], deadline: float
    ) -> None:
        root = self._topology.local(call.root)
        self._node.run(Operation.SCATTER, call.dtype, deadline, counts=shares, data=whole, output=part, root=root)

    def _collect(self, call: Call, data: Array, counts: dict[int, int], deadline: float) -> Array:
        """The data of the ranks whose data goes through us; of use in a lane only."""
        if len(self._neighbours) == self._topology.lanes:
            return data
        sent, received = self._handed_over(counts)
        collected = _empty(data, sum(received))
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=data, output=collected, received=received, sent=sent
        )
        return collected

    def _deliver(self, call: Call, mine: Array, output: Array, counts: dict[int, int], deadline: float) -> None:
        """The inverse of `_collect`: from the lanes to the ranks."""
        if len(self._neighbours) == self._topology.lanes:
            output[:] = mine
            return
        received, sent = self._handed_over(counts)
        self._node.run(
            Operation.ALL_TO_ALL, call.dtype, deadline, data=mine, output=output, received=received, sent=sent
        )

    def _handed_over(self, counts: dict[int, int]) -> tuple[list[int], list[int]]:
        """Elements that go from us to each rank of the node when data is collected, and that come to us."""
        mine, lane = counts[self.rank], self._topology.lane_of(self.rank)
        there = [mine if i == lane else 0 for i in range(len(self._neighbours))]
        served = self._topology.served(self._home, self._local) if self._in_lane else ()
        return there, [counts[p] if p in served else 0 for p in self._neighbours]

    # ------------------------------------------------------------------ the rest

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        (self._whole or self._flat).send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        return (self._whole or self._flat).recv(data, dtype, source, tag, timeout_s)

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
        """Counters of the backends it consists of, added up, and bytes of device memory that crossed to the host."""
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


def _part(context: GroupContext, what: str, positions: Sequence[int]) -> GroupContext:
    """The context of some ranks of a group, of which we are one."""
    return GroupContext(
        name=name_of_part(context.name, what),
        rank=list(positions).index(context.rank),
        ranks=tuple(context.ranks[p] for p in positions),
        members=tuple(context.members[p] for p in positions),
        store=context.store,
        timeout_s=context.timeout_s,
    )


def name_of_part(group: str, what: str) -> str:
    """The name of something that belongs to a group and meets by a name of its own; no longer than a name may be."""
    name = f"{group}/{what}"
    return name if len(name) <= _MAX_NAME else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _given(array: Array | None) -> Array:
    assert array is not None, "Request.check has seen to that"
    return array


def _empty(like: Array, numel: int) -> Array:
    """A new array T[numel] where `like` is: numpy hands the call on to cupy for its arrays."""
    return np.empty_like(like, shape=(numel,))


def _total(counts: Any, keys: Sequence[Any]) -> int:
    return sum(counts[key] for key in keys)
