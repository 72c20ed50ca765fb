"""`HierarchicalBackend`: one backend inside nodes, and another across them, which moves a byte once per node.

Owns: the backends that it is made of, the agreement of all ranks, and the way that a call goes. Refuses: to move a byte
itself, and to know of which stages a call consists (`staged`).

Invariants:
- All ranks compare their calls first, through `flat`, which spans the group. So a rank that is missing or makes another
  call is named, on any node, and a stage begins on all ranks or on none.
- Small calls of host memory, except all-to-alls, go through `flat` only: stages would cost more. So do messages: they
  would be faster inside a node, but a receive from any rank would have to wait in two places.
- A group on one node uses `intra` alone; a group with a single rank on each node uses `inter` alone.
- Reductions are in the order of `intra` inside nodes, then of nodes; bf16, f16 and blocks of int8 are rounded after
  each. Results have the same bits on every rank and in every run.
- Device memory stays on the device inside a node. Only bytes that cross nodes are staged through page-locked host
  memory (see `collectives.staging`): the stripe of each rail, and full messages.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from axon_ps.collectives.backends import header
from axon_ps.collectives.backends.base import Backend, GroupContext, Operation, Request
from axon_ps.collectives.backends.hierarchical.stage import Stage, on_device
from axon_ps.collectives.backends.hierarchical.staged import StagedCalls
from axon_ps.collectives.backends.hierarchical.topology import Topology
from axon_ps.collectives.staging import Staging
from axon_ps.errors import AxonError, Disagreement, InternalError, InvalidRequest, again
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType

SMALL_BYTES = 16 << 10
"""The most bytes of a call that goes through `flat` only."""

Make = Callable[[GroupContext], Backend]
_MAX_NAME = 200


class HierarchicalBackend(Backend):
    """See this module's notes. All ranks of the group must make it together. `create` also makes its backends.

    Args:
        intra: spans the ranks of our node, in the group's order.
        inter: spans the group; its members have the node of each rank. Rails get siblings of it.
        small_bytes: the most bytes of a call that goes through `inter` only.

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
        """Set the backends that are used.

        Args:
            context: the group.
            node: spans our node; None = `flat` does everything.
            rail: spans our rail; None = we are in none.
            flat: spans the group; None = `node` does everything.
            small_bytes: as for the class.
        """
        super().__init__(context)
        self._backends = [b for b in (flat, rail, node) if b is not None]
        self.dtypes = tuple(dtype for dtype in COLLECTIVE_DTYPES if all(dtype in b.dtypes for b in self._backends))
        self._staging = Staging()
        single = flat if node is None else node if flat is None else None
        self._single = None if single is None else Stage(single, None if single is node else self._staging)
        self._small_bytes = small_bytes
        self._error: AxonError | None = None
        if node is not None and flat is not None:
            self._node_backend, self._flat = node, Stage(flat, self._staging)
            in_rail = None if rail is None else Stage(rail, self._staging)
            self._staged = StagedCalls(Topology.of(context.members), self.rank, Stage(node), in_rail)

    @classmethod
    def create(
        cls, context: GroupContext, *, intra: Make, inter: Make, small_bytes: int = SMALL_BYTES
    ) -> HierarchicalBackend:
        """Make the backend and the backends that it uses. All ranks of the group must make it together.

        Args:
            context: the group.
            intra: makes a backend for the ranks of one node.
            inter: makes a backend for ranks on different nodes.
            small_bytes: as for the class.

        Raises:
            AxonError: one of the backends cannot be made; those made before it are closed.
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
            intra=self._node_backend.sibling,
            inter=self._flat.backend.sibling,
            small_bytes=self._small_bytes,
        )

    # ------------------------------------------------------------------ agreement

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        request.check(self.rank, self.world_size, self.dtypes)
        if self._single is not None:
            self._single.perform(request, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            if not self._through_flat(request, deadline):
                self._staged.run(request, self._agree(request, deadline), deadline)
        except InvalidRequest:
            raise
        except AxonError as error:
            self.abort(error)
            raise

    def _through_flat(self, request: Request, deadline: float) -> bool:
        """Make a small call of host memory, except an all-to-all, through `flat`; return True if it was made."""
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
        """Check that all ranks make the same call; return how many elements go from rank to rank in an all-to-all."""
        try:
            headers = self._exchange_headers(request, deadline)
        except Disagreement:  # other ranks make a small call
            return self._raise_disagreement(request, deadline)
        return header.check(headers, request.call, self.context)

    def _raise_disagreement(self, request: Request, deadline: float) -> list[list[int]]:
        """Raise `Disagreement` on all ranks, after one has found it: `flat` cannot describe the ranks' own calls."""
        header.check(self._exchange_headers(request, deadline), request.call, self.context)
        raise InternalError(f"the ranks make equal calls {request.call}, and yet a stage found that they differ")

    def _exchange_headers(self, request: Request, deadline: float) -> list[Array]:
        mine = header.encode(request, self.world_size)
        headers = np.empty(self.world_size * mine.size, np.uint8)
        counts = (mine.size,) * self.world_size
        self._flat.run(Operation.ALL_GATHER, DType.U8, deadline, counts=counts, data=mine, output=headers)
        return list(headers.reshape(self.world_size, -1))

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
            self._error = again(error)
        for backend in self._backends:
            backend.abort(self._error)

    def close(self) -> None:
        """See `Backend.close`."""
        for backend in self._backends:
            backend.close()

    def statistics(self) -> dict[str, float]:
        """Return the counters of the backends that it uses, added up, and bytes copied between device and host."""
        total = self._staging.statistics()
        for backend in self._backends:
            for name, value in backend.statistics().items():
                total[name] = total.get(name, 0.0) + value
        return total


def _sub_context(context: GroupContext, what: str, positions: Sequence[int]) -> GroupContext:
    """Return the context of a sub-group of which we are a member."""
    return GroupContext(
        name=name_of_subgroup(context.name, what),
        rank=list(positions).index(context.rank),
        ranks=tuple(context.ranks[p] for p in positions),
        members=tuple(context.members[p] for p in positions),
        store=context.store,
        timeout_s=context.timeout_s,
    )


def name_of_subgroup(group: str, what: str) -> str:
    """Return the name of a sub-group of a group; it is hashed if it would be longer than a name may be."""
    name = f"{group}/{what}"
    return name if len(name) <= _MAX_NAME else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
