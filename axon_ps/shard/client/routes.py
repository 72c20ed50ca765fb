"""The servers that hold the slices of one model, by its newest placement, and transfers to them."""

from __future__ import annotations

import dataclasses
from functools import partial

from axon_ps.aggregation.client.peers import MakeContext, Peers
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.observe.tracing.span import Span
from axon_ps.rpc.deadlines import Deadline
from axon_ps.shard.client.transfers import Transfer
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array
from axon_ps.wire.v1 import common_pb2


class Routes:
    """The layout and the placement of a model. It runs on one event loop, except for `holder` and `is_near`.

    Args:
        peers: the servers. Waiting callers are woken when layout or placement has changed.
        same_host: the servers that memory is shared with.

    Attributes:
        spec: the layout; None until it is known.
        placement: the newest one; None until it is known.
    """

    def __init__(self, peers: Peers, same_host: SameHostServers) -> None:
        self.spec: JobSpec | None = None
        self.placement: Placement | None = None
        self._peers = peers
        self._same_host = same_host
        self._held: dict[tuple[Slice, int], Slice] = {}  # by (slice of the plan, index of the holder)

    def set_spec(self, spec: JobSpec) -> None:
        """Set the layout."""
        self.spec = spec
        self._held.clear()
        self._peers.wake()

    def set_placement(self, placement: Placement) -> None:
        """Set the holders of slices. Retries go to the present holders."""
        self.placement = placement
        self._held.clear()
        self._peers.wake()

    def holder(self, s: Slice, index: int = 0) -> Slice:
        """Return a slice with the server that holds it now: the primary or another holder, the last if there are
        fewer."""
        if (held := self._held.get((s, index))) is not None:
            return held
        assert self.spec is not None
        assert self.placement is not None
        number = self.spec.plan(self.placement.num_cuts).number_of(s)
        holders = self.placement.holders[number].complete
        held = self._held[s, index] = dataclasses.replace(s, server=holders[min(index, len(holders) - 1)])
        return held

    def is_near(self, unit: int, begin: int = 0, end: int | None = None) -> bool:
        """Return True if elements [begin, end) are known to be uncompressed, in memory shared with their servers.

        Any thread may call it.
        """
        spec, placement = self.spec, self.placement
        if spec is None or placement is None:
            return False
        if spec.precision_of(spec.layout.units[unit]).param_compression is not None:
            return False
        return all(
            self._same_host.is_shared(self.holder(s).server)
            for s in spec.plan(placement.num_cuts).slices[unit]
            if s.end > begin and (end is None or s.begin < end)
        )

    @property
    def copies(self) -> int:
        """The most holders that a slice has."""
        assert self.placement is not None
        return max(len(h.complete) for h in self.placement.holders)

    async def transfer(
        self,
        unit: int,
        begin: int,
        end: int | None,
        array: Array | None,
        context: MakeContext,
        timeout_s: float | None,
        span: Span | None = None,
    ) -> tuple[JobSpec, list[Slice], partial[Transfer]]:
        """Return the model's spec, the slices of a range, and its transfer, once layout and placement are known.

        Raises:
            InvalidRequest: there is no such unit or range, or `array` does not fit.
            Timeout: the layout or the placement did not become known in time.
            Closed: the connections were closed.
        """
        deadline = Deadline(timeout_s)
        while self.spec is None or self.placement is None:
            if deadline.expired:
                raise Timeout(f"the model's layout did not become known within {deadline.timeout_s:g} s")
            await self._peers.wait(deadline.remaining())
        spec, plan = self.spec, self.spec.plan(self.placement.num_cuts)
        self.placement.check(plan)
        begin, end = _range(spec, unit, begin, end, array)
        transfer = partial(
            Transfer,
            begin=begin,
            end=end,
            array=array,
            chunk_numel=spec.options.chunk_numel,
            context=partial(self._context, context, span),
            deadline=deadline,
            same_host=self._same_host,
            span=span,
        )
        return spec, [s for s in plan.slices[unit] if s.begin < end and s.end > begin], transfer

    def _context(self, context: MakeContext, span: Span | None) -> common_pb2.CallContext:
        """Return the context of a call: caller, span, placement. A server with an older placement first waits for this
        one."""
        made = context()
        if span is not None:
            made.traceparent = span.context.traceparent
        if self.placement is not None:
            made.placement = self.placement.number
        return made


def _range(spec: JobSpec, unit: int, begin: int, end: int | None, array: Array | None) -> tuple[int, int]:
    """Return the range asked for, after checking that it is in the unit and that `array` has its length."""
    units = len(spec.layout.units)
    if not 0 <= unit < units:
        raise InvalidRequest(f"there is no unit {unit}; the layout has {units}")
    numel = spec.layout.units[unit].numel
    end = numel if end is None else end
    if not 0 <= begin < end <= numel:
        raise InvalidRequest(f"elements {begin} to {end} are not a range of unit {unit}, which has {numel}")
    if array is not None and (array.shape != (end - begin,) or not array.flags.c_contiguous):
        raise InvalidRequest(
            f"the array for elements {begin} to {end} of unit {unit} has shape {list(array.shape)} and strides "
            f"{array.strides}; needed is a contiguous 1-D array of {end - begin} elements"
        )
    return begin, end
