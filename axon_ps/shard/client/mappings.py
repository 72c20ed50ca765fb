"""The units of one model that lie in memory of this host, and that this worker has mapped."""

from __future__ import annotations

from axon_ps.aggregation.client.peers import MakeContext
from axon_ps.observe.tracing.span import Span
from axon_ps.shard.client.retries import GATHERS, Retries
from axon_ps.shard.client.routes import Routes
from axon_ps.shard.client.transfers import Transfers
from axon_ps.shard.same_host.shared_copy import MappedCopy
from axon_ps.types import Array, DType


class Mappings:
    """The mappings of one model. It runs on one event loop.

    Args:
        routes: to the servers that hold the model.
        retries: the attempts of its calls.
        transfers: between this worker and the servers.
    """

    def __init__(self, routes: Routes, retries: Retries, transfers: Transfers) -> None:
        self._routes = routes
        self._retries = retries
        self._transfers = transfers
        self._mapped: dict[int, tuple[Array, MappedCopy]] = {}  # by unit, with the memory of its server

    def clear(self) -> None:
        """Drop all mappings, after the model was released."""
        self._mapped.clear()

    async def map(
        self,
        unit: int,
        *,
        dtype: DType,
        min_version: int,
        context: MakeContext,
        timeout_s: float | None,
        epoch: int = 0,
        span: Span | None = None,
    ) -> MappedCopy | None:
        """Map the memory of this host that holds a unit, once it is at `min_version` or later.

        Args:
            unit: number of the unit.
            dtype: the wanted element type.
            min_version: the oldest version accepted.
            context: returns the present job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            epoch: as for `ShardGroup.gather`.
            span: the span of the call.

        Returns:
            The mapping; None if the unit must be gathered: it is on another host or on several servers, there is no
            memory for it, it is sent compressed or as another dtype, or replicas step asynchronously. See
            `same_host.shared_copy`, Note: [When a mapped unit may change].

        Raises:
            InvalidRequest: there is no such unit.
            Timeout: its server was absent, did not answer, or did not reach the version in time.
            StepAborted: the job was restored meanwhile: the server holds values of a later epoch.
        """
        spec, slices, transfer = await self._routes.transfer(unit, 0, None, None, context, timeout_s, span)
        precision = spec.precision_of(spec.layout.units[unit])
        if len(slices) > 1 or spec.policy.asynchronous or precision.param_compression or dtype is not precision.param:
            return None
        t = transfer(dtype=dtype, min_version=min_version, epoch=epoch)
        memory = await self._retries.call(self._transfers.locate, GATHERS, slices[0], t)
        if memory is None:
            return None
        known = self._mapped.get(unit)
        if known is None or known[0] is not memory:
            known = self._mapped[unit] = memory, MappedCopy(memory, t.end, dtype)
        return known[1]
