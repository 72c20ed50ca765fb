"""A worker's end of the shard servers: gather units, push gradients, upload first values.

`ShardGroup` calls all primaries of a unit's slices at once. It copies payloads between messages and the caller's arrays
once. Methods must be called on the thread of one event loop, except for `buffer`, `settle`, `statistics` and `warm_up`.

The rules for retries are in `shard.client.retries`.

    shape legend: unit_numel = elements of the unit, n = end - begin, wire[...] = an array in a wire dtype
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from axon_ps.aggregation.client.peers import MakeContext, Peers
from axon_ps.compress.feedback import Feedback
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import InvalidRequest
from axon_ps.host.malloc import retain_message_memory
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.observe.tracing.span import Span
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import together
from axon_ps.shard.client import transfers
from axon_ps.shard.client.line import Permits
from axon_ps.shard.client.mappings import Mappings
from axon_ps.shard.client.received import Received
from axon_ps.shard.client.retries import GATHERS, PUSHES, Retries
from axon_ps.shard.client.routes import Routes
from axon_ps.shard.client.server_lines import ServerLines
from axon_ps.shard.client.transfers import Transfer, Transfers
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, Decision, DType, Hyper, Membership, Outcome
from axon_ps.wire.v1 import shard_pb2

T = TypeVar("T")


class ShardGroup:
    """One worker's client of all shard servers of a job, for one model.

    Args:
        security: TLS and token.
        connections: number of connections per server: gathers on the first, pushes and uploads on the second.
        node: name of this host. Memory is shared with servers on it if the kernel allows it, so that less is sent. "" =
            everything is sent.

    Attributes:
        lines: to the servers.
        routes: to the holders of the model's slices.
        mappings: the units that this worker has mapped.
    """

    def __init__(self, security: Security, connections: int = 2, node: str = "") -> None:
        retain_message_memory()
        self._peers = Peers(security, connections)
        self._same_host = SameHostServers(node)
        transfers = Transfers()
        self.lines = ServerLines(self._peers, transfers.rate)
        self._begin(transfers)

    def _begin(self, transfers: Transfers) -> None:
        """Initialize the state of one model."""
        self._transfers = transfers
        self._pushes = Permits()
        self.routes = Routes(self._peers, self._same_host)
        self._feedback = Feedback()
        self._received = Received()
        self._retries = Retries(self._peers, self._same_host, self.routes.holder)
        self.mappings = Mappings(self.routes, self._retries, transfers)

    def probe(self, report: ConnectivityReport, context: MakeContext) -> None:
        """Probe the servers of pending calls, and report those that do not answer."""
        self._peers.probe(report, context)

    def for_another_model(self) -> ShardGroup:
        """Return a client for another model over the same connections. Only the first client is to be closed."""
        other = copy.copy(self)
        other._begin(self._transfers.sharing())
        return other

    def release(self) -> None:
        """Drop the mappings, residuals and received values of a released model."""
        self.mappings.clear()
        self.forget_residuals()

    def set_members(self, membership: Membership, me: str = "") -> None:
        """Set the current shard servers and this worker's id. Only later calls and retries use the new addresses."""
        self._peers.set_members(membership)
        self._same_host.set_members(membership, me)
        self.lines.set_members(membership)

    def set_spec(self, spec: JobSpec) -> None:
        """Set the model's layout."""
        self.routes.set_spec(spec)

    def set_placement(self, placement: Placement) -> None:
        """Set the holders of the model's slices. Retries go to the present holders."""
        before = self.routes.placement
        if before is not None and before.num_cuts != placement.num_cuts:
            self._received = self._received.renewed()
        self.routes.set_placement(placement)

    @staticmethod
    def warm_up(spec: JobSpec) -> None:
        """Compile the loops for the job's compressions, outside of the event loop's thread: it may take seconds."""
        p = spec.precision
        for how in filter(None, (p.param_compression, p.grad_compression)):
            how.warm_up()
        if p.param_compression is not None:
            transfers.warm_up()

    def settle(self, step: int, decision: Decision) -> None:
        """Take the decision on a step. If it committed, the residuals of its gradients replace the previous ones.

        Residuals are multiplied by the decision's clip factor and weight, as the gradients were. If the step committed
        as expected, its speculative gathers are valid.

        Args:
            step: its number in tickets.
            decision: the decision.
        """
        committed = decision.outcome is Outcome.COMMIT
        self._feedback.settle(step, committed=committed, clip_factor=decision.clip_factor * (decision.weight or 1.0))
        as_expected = decision.applies(decision.hyper) and not decision.untouched
        self._received.settle(step, decision.hyper if as_expected else None)

    def forget_residuals(self) -> None:
        """Drop the residuals and the base of differences, after the parameters were replaced."""
        self._feedback.clear()
        self._received = self._received.renewed()

    async def gather(
        self,
        unit: int,
        out: Array,
        *,
        min_version: int,
        context: MakeContext,
        timeout_s: float | None,
        begin: int = 0,
        end: int | None = None,
        compressed: bool = False,
        epoch: int = 0,
        span: Span | None = None,
        moment: str = "",
        updates: list[int] | None = None,
    ) -> int:
        """Fill `out` with elements [begin, end) of a unit, all at one version, `min_version` or later.

        If replicas step asynchronously, commits go on meanwhile: then each element is at `min_version` or later.

        Args:
            unit: number of the unit.
            out: wire[n], contiguous. Its type, float32, uint16 (bf16) or float16, is that on the wire.
            min_version: the oldest version accepted. Servers that are behind answer once they have reached it.
            context: returns the present job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            begin: first element.
            end: one past the last; None = the unit's end.
            compressed: if the job compresses parameters, they are sent compressed and decompressed to `out`.
            epoch: number of restores of the job at `min_version`. Servers answer once they know of it.
            span: the span of the call; counts its bytes.
            moment, updates: as of `Transfer`. `out` stays as it is if the optimizer does not have the moment.

        Returns:
            The (oldest) version gathered: at least `min_version`.

        Raises:
            InvalidRequest: there is no such unit, or `out` does not fit.
            Timeout: a server was absent, did not answer, or did not reach the version in time.
            StepAborted: the job was restored meanwhile: a server holds values of a later epoch.

        After an error: the content of `out` is arbitrary. Nothing changed on the servers.
        """
        spec, slices, transfer = await self.routes.transfer(unit, begin, end, out, context, timeout_s, span)
        if out.dtype not in transfers.DTYPE_OF:
            raise InvalidRequest(f"out has element type {out.dtype}; needed is float32, uint16 (for bf16) or float16")
        how = spec.precision_of(spec.layout.units[unit]).param_compression if compressed else None
        received = self._opened(spec, unit) if compressed else None
        while True:
            t = transfer(
                dtype=DType.F32 if how is not None else transfers.DTYPE_OF[out.dtype],
                min_version=min_version,
                epoch=epoch,
                one_version=not spec.policy.asynchronous,
                compressor=how,
                received=received,
                moment=moment,
                updates=updates,
            )
            async with self.lines.gather(_travels_bytes(t)) as permit:
                calls = self._calls(slices, dataclasses.replace(t, permit=permit))
                versions = await together(
                    [self._retries.call(self._transfers.pull, GATHERS, s, one) for s, one in calls]
                )
            if min(versions) == max(versions) or spec.policy.asynchronous:
                return max(min(versions), min_version)
            min_version = max(versions)  # some servers committed in between: ask all of them for the latest version
            self._retries.count += 1

    def _calls(self, slices: Sequence[Slice], t: Transfer) -> list[tuple[Slice, Transfer]]:
        """Return the calls of a transfer: one per slice, or as many as fill a long line."""
        return [(s, one) for s in slices for one in t.split(s, self.lines.connections(self.routes.holder(s).server))]

    def _opened(self, spec: JobSpec, unit: int) -> Received | None:
        """Return the received state of a unit whose parameters are sent as differences; else None."""
        if not spec.precision_of(spec.layout.units[unit]).differs:
            return None
        self._received.open(unit, spec.layout.units[unit].numel)
        return self._received

    def buffer(self, size_bytes: int) -> Array:
        """Return u8[size_bytes] for gradients, in memory that servers of this host can map, if there are any."""
        return shared_arrays.buffer(size_bytes) if self._same_host.has_servers else np.empty(size_bytes, np.uint8)

    async def gather_speculative(
        self,
        unit: int,
        out: Array,
        *,
        step: int,
        hyper: tuple[Hyper, ...],
        context: MakeContext,
        timeout_s: float | None,
        addend: int = 0,
        begin: int = 0,
        end: int | None = None,
        span: Span | None = None,
    ) -> int:
        """Fill `out` with a unit as it will be if `step` commits unclipped with `hyper`. Failures are not retried.

        See `shard.core.speculative`, Note: [Speculative update].

        Args:
            unit: number of the unit.
            out: wire[end - begin] in the job's parameter dtype, contiguous; any wire dtype if parameters are
                compressed.
            step: the undecided step attempt.
            hyper: per parameter group, the hyperparameters that the step is expected to have.
            context: returns job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            addend: the last addend that is expected of it.
            begin: first element wanted, counted from the unit's start.
            end: one past the last element wanted; None = the unit's end.
            span: the span of the call; counts its bytes.

        Returns:
            The version after the step.

        Raises:
            StepAborted: the step ended in another way, or its result cannot be known before the decision.
            GenerationChanged: the step is lost.
            InvalidRequest: `out` does not fit, or another worker expects other hyperparameters.
            Timeout: a replica did not push in time.
            Broken: a connection broke.

        After an error: the content of `out` is arbitrary. Nothing changed on the servers.
        """
        spec, slices, transfer = await self.routes.transfer(unit, begin, end, out, context, timeout_s, span)
        how = spec.precision_of(spec.layout.units[unit]).param_compression
        received, param = self._opened(spec, unit), spec.precision.param
        t = transfer(dtype=param, step=step, addend=addend, expected=hyper, compressor=how, received=received)
        if out.dtype not in ((param.numpy,) if how is None else transfers.DTYPE_OF):
            raise InvalidRequest(f"out has element type {out.dtype}; this job's parameters are {param.value}")

        async def pull(s: Slice, one: Transfer) -> int:
            s = self.routes.holder(s)
            with self._peers.waiting() as waiting:
                waiting.on(s.server)
                return await self._transfers.pull(await self._peers.stub(s.server, GATHERS, t.deadline), s, one)

        async with self.lines.speculative(_travels_bytes(t), unit) as permit:
            calls = self._calls(slices, dataclasses.replace(t, permit=permit))
            return max(await together([pull(s, one) for s, one in calls]))

    async def reduce_scatter(
        self,
        unit: int,
        grad: Array | None,
        *,
        step: int,
        replica: int,
        context: MakeContext,
        timeout_s: float | None,
        addend: int = 0,
        begin: int = 0,
        end: int | None = None,
        span: Span | None = None,
    ) -> None:
        """Add this replica's gradient of elements [begin, end) of a unit to the step's sum, on every primary.

        Args:
            unit: number of the unit.
            grad: wire[n] in the job's gradient dtype, contiguous; None if this replica has no gradient for the unit. If
                gradients are compressed it is f32, and is compressed here with the residual of earlier steps.
            step: the step attempt.
            replica: this worker's replica.
            context: returns job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            addend: the addend of the step's gradient that it is part of.
            begin: first element; must be the first of a chunk.
            end: one past the last; must be the end of a chunk; None = the unit's end.
            span: the span of the call; counts its bytes.

        Raises:
            InvalidRequest: unit, replica, range or `grad` do not fit the job.
            GenerationChanged: the step is lost, and with it all that was pushed.
            StepAborted: the step ended without a commit, or its slices have moved.
            Timeout: a server was not reached, or a replica before this one did not push in time.

        After an error: the servers may have some or all of it. Pushing the same gradient again in the same step and
        generation is harmless. A different gradient is not detected.
        """
        spec, slices, transfer = await self.routes.transfer(unit, begin, end, grad, context, timeout_s, span)
        if grad is not None and grad.dtype != spec.precision.grad.numpy:
            raise InvalidRequest(
                f"the gradient of unit {unit} is {grad.dtype}; gradients travel as {spec.precision.grad.value} here"
            )
        how = spec.precision.grad_compression
        t = transfer(dtype=spec.precision.grad, step=step, replica=replica, addend=addend, compressor=how)
        if how is not None and grad is not None:
            t = dataclasses.replace(t, residuals=self._feedback.open(unit, t.begin, t.end, step, addend))
        push = self._transfers.push
        async with self.lines.push(self._pushes, _travels_bytes(t)):
            calls = self._calls(slices, t)
            await together([self._retries.call(push, PUSHES, s, one, repeatable=False) for s, one in calls])

    async def upload(
        self, unit: int, values: Array, *, context: MakeContext, timeout_s: float | None, epoch: int = 0
    ) -> None:
        """Store the first values of a unit on all holders of its slices.

        Args:
            unit: number of the unit.
            values: f32[unit_numel], contiguous.
            context: returns the present job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            epoch: number of restores of the job. Servers wait until they know of it, and drop values of an older epoch.

        Raises:
            InvalidRequest: there is no such unit, or `values` does not fit.
            Misuse: steps were committed already.
            Timeout: a server was not reached in time.

        After an error: some servers may have some or all of it. Uploading again is harmless.
        """
        _, slices, transfer = await self.routes.transfer(unit, 0, None, values, context, timeout_s)
        if values.dtype != np.float32:
            raise InvalidRequest(f"first values of unit {unit} are {values.dtype}; they travel as float32")
        t = transfer(dtype=DType.F32, epoch=epoch)
        calls = [
            self._retries.call(self._transfers.store, PUSHES, s, t, holder=holder)
            for s in slices
            for holder in range(self.routes.copies)
        ]
        await together(calls)

    async def stats(self, server: int, *, context: MakeContext, timeout_s: float | None = 10.0) -> dict[str, float]:
        """Return the counters of one shard server, as its `statistics()` returns them.

        Raises:
            Unreachable: the server does not answer.
            Timeout: it did not answer in time.
        """
        deadline = Deadline(timeout_s)
        stub = await self._peers.stub(server, GATHERS, deadline)
        reply = await stub.call("Stats", shard_pb2.StatsRequest(context=context()), timeout_s=deadline.remaining())
        return dict(reply.values)

    def statistics(self) -> dict[str, float]:
        """Return counters: calls, payload bytes and chunks in each direction, retries, mismatched digests, and memory.

        The memory is that of residuals, and of the values that differences are added to.
        """
        counters = {
            **self._transfers.counters,
            "retries": self._retries.count,
            "residual_bytes": self._feedback.nbytes,
            "received_bytes": self._received.nbytes,
            "mismatches": self._received.mismatches,
        }
        return {name: float(value) for name, value in sorted(counters.items())}

    async def close(self) -> None:
        """Close every connection. Calls under way fail. A repeated call is harmless."""
        self._same_host.close()
        await self._peers.close()


def _travels_bytes(t: Transfer) -> int:
    """Return the bytes of a transfer's payloads; 0 without a gradient."""
    if t.array is None:
        return 0
    if t.compressor is None:
        return t.array.nbytes
    return t.compressor.within(t.begin, t.end).compressed_bytes(t.end - t.begin)
