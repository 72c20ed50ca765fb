"""A worker's end of the shard servers: gather units, push gradients, upload first values.

`ShardGroup` calls all owners of a unit at once. It copies payloads between messages and the caller's arrays once.
Everything here runs on one event loop; every method must be called on its thread.

The rules for retries are in `shard.client.retries`.

    shape legend: unit_numel = elements of the unit, n = end - begin, wire[...] = an array in a wire dtype
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

import numpy as np

from axon_ps.aggregation.client.peers import MakeContext, Peers
from axon_ps.compress.feedback import Feedback
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.host.malloc import retain_message_memory
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.observe.tracing.span import Span
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import together
from axon_ps.shard.client import transfers
from axon_ps.shard.client.line import SHORT_RTT_S, Permit, Permits
from axon_ps.shard.client.received import Received
from axon_ps.shard.client.retries import Retries
from axon_ps.shard.client.transfers import Transfer, Transfers
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.shard.same_host.shared_copy import MappedCopy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, Decision, DType, Hyper, Membership, Outcome
from axon_ps.wire.v1 import common_pb2, shard_pb2

T = TypeVar("T")
_GATHERS, _PUSHES = 0, 1  # connections
_NOW = -1  # before speculative gathers, which are ordered by unit

CONNECTION_BYTES = 4 << 20
"""The bytes that fill a line are divided among bulk connections of this size each, and one more.

TCP has as many bytes in flight as the kernels' buffers hold (Linux: 4 MiB to send, of which a good half is data), and
sends little at first, after every pause. *Measured* at 500 Mbit/s, 64 MiB over one connection, as a multiple of the
time that line and round trip allow (`benchmarks/distance.py`):

    round trip    10 ms    50 ms    100 ms
    time          1.00     1.17     2.1
"""
MAX_CONNECTIONS = 8

IN_ORDER_BYTES = 1 << 20
"""Bytes left of a speculative gather when the next one begins, if the workers and servers are on the same two hosts.

Such gathers go one at a time, the first units first. Data that a host's servers send goes through the network card that
the host's own pushes wait for, and a step ends with its pushes. The next forward needs the first units first, which
were pushed last. *Measured* at 500 Mbit/s, seconds a step:

    two hosts                 in order    at once
    HYBRID_SHARD, f32         1.20        1.32
    HYBRID_SHARD, bf16        0.63        0.66
    SHARD_GRAD_OP, f32        1.15        1.20
    SHARD_GRAD_OP, bf16       0.57        0.61

With four hosts a unit waits for three others' pushes, and so do the units behind it: 1.97 instead of 1.92. Servers with
their own network cards send meanwhile: 1.90 instead of 1.47.
"""


class ShardGroup:
    """One worker's client of all shard servers of a job, for one model.

    Args:
        security: TLS and token.
        connections: number of connections per server: gathers on the first, pushes and uploads on the second.
        node: name of this host. Memory is shared with servers on it if the kernel allows it, so that less is sent. "" =
            everything is sent.
    """

    def __init__(self, security: Security, connections: int = 2, node: str = "") -> None:
        retain_message_memory()
        self._peers = Peers(security, connections)
        self._same_host = SameHostServers(node)
        self._gather_permits = Permits()
        self._two_hosts = False  # True if all workers and all servers are on the same two hosts
        self._begin(Transfers())

    def _begin(self, transfers: Transfers) -> None:
        """Initialize the state of one model."""
        self._transfers = transfers
        self._push_permits = Permits()  # a push may wait for other workers' pushes, which may push another model first
        self._spec: JobSpec | None = None
        self._placement: Placement | None = None
        self._held: dict[tuple[Slice, int], Slice] = {}  # by (slice of the plan, index of the holder)
        self._feedback = Feedback()
        self._received = Received()
        self._mapped: dict[int, tuple[Array, MappedCopy]] = {}
        self._retries = Retries(self._peers, self._same_host, self._holder)

    def probe(self, report: ConnectivityReport, context: MakeContext) -> None:
        """Probe the servers that calls wait for, and report those that do not answer."""
        self._peers.probe(report, context)

    def for_another_model(self) -> ShardGroup:
        """Return a client for another model over the same connections; only the first client is to be closed."""
        other = copy.copy(self)
        other._begin(self._transfers.sharing())
        return other

    def release(self) -> None:
        """Drop the mappings, residuals and received values of a released model."""
        self._mapped.clear()
        self.forget_residuals()

    def set_members(self, membership: Membership, me: str = "") -> None:
        """Set the current shard servers and this worker's id; only later calls and retries use the new addresses."""
        self._peers.set_members(membership)
        self._same_host.set_members(membership, me)
        hosts = {m.node for m in membership.workers}
        self._two_hosts = len(hosts) == 2 and hosts == {m.node for m in membership.shards}

    def set_spec(self, spec: JobSpec) -> None:
        """Set the model's layout."""
        self._spec = spec
        self._held.clear()
        self._peers.wake()

    def set_placement(self, placement: Placement) -> None:
        """Set the holders of the model's slices; retries go to the present holders."""
        if self._placement is not None and self._placement.num_cuts != placement.num_cuts:
            self._received = self._received.renewed()
        self._placement = placement
        self._held.clear()
        self._peers.wake()

    def _holder(self, s: Slice, index: int = 0) -> Slice:
        """Return a slice with the server that holds it now: the primary or another holder, the last if there are
        fewer."""
        if (held := self._held.get((s, index))) is not None:
            return held
        assert self._spec is not None
        assert self._placement is not None
        number = self._spec.plan(self._placement.num_cuts).number_of(s)
        holders = self._placement.holders[number].complete
        held = self._held[s, index] = dataclasses.replace(s, server=holders[min(index, len(holders) - 1)])
        return held

    async def _transfer(
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
        while self._spec is None or self._placement is None:
            if deadline.expired:
                raise Timeout(f"the model's layout did not become known within {deadline.timeout_s:g} s")
            await self._peers.wait(deadline.remaining())
        spec, plan = self._spec, self._spec.plan(self._placement.num_cuts)
        self._placement.check(plan)
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
        """Return the context of a call: caller, span, placement. A server with an older placement first waits for
        it."""
        made = context()
        if span is not None:
            made.traceparent = span.context.traceparent
        if self._placement is not None:
            made.placement = self._placement.number
        return made

    @staticmethod
    def warm_up(spec: JobSpec) -> None:
        """Compile the loops for the job's compressions. Not in the event loop's thread: it may take seconds."""
        p = spec.precision
        for how in (p.param_compression, p.grad_compression):
            if how is not None:
                how.warm_up()
        if p.param_compression is not None:
            transfers.warm_up()

    def settle(self, step: int, decision: Decision) -> None:
        """Take the decision on a step; if it committed, the residuals of its gradients replace the previous ones.

        Residuals are of weighted gradients. If the step committed as expected, its speculative gathers are valid.

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
    ) -> int:
        """Fill `out` with elements [begin, end) of a unit, all at one version, `min_version` or later.

        If replicas step asynchronously, commits go on meanwhile: then each element is at `min_version` or later.

        Args:
            unit: number of the unit.
            out: wire[n], contiguous; its type, float32, uint16 (bf16) or float16, is that on the wire.
            min_version: the oldest version accepted; the call waits for owners that are behind.
            context: returns the present job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            begin: first element.
            end: one past the last; None = the unit's end.
            compressed: if the job compresses parameters, they are sent compressed and decompressed to `out`.
            epoch: number of restores of the job at `min_version`; owners wait until they know of it.
            span: the span of the call; counts its bytes.

        Returns:
            The (oldest) version gathered: at least `min_version`.

        Raises:
            InvalidRequest: there is no such unit, or `out` does not fit.
            Timeout: an owner was absent, did not answer, or did not reach the version in time.
            StepAborted: the job was restored meanwhile: an owner holds values of a later epoch.

        After an error: the content of `out` is arbitrary; nothing changed on the servers.
        """
        spec, slices, transfer = await self._transfer(unit, begin, end, out, context, timeout_s, span)
        if out.dtype not in transfers.DTYPE_OF:
            raise InvalidRequest(f"out has element type {out.dtype}; needed is float32, uint16 (for bf16) or float16")
        how = spec.precision.param_compression if compressed else None
        received = self._opened(spec, unit) if compressed else None

        while True:
            t = transfer(
                dtype=DType.F32 if how is not None else transfers.DTYPE_OF[out.dtype],
                min_version=min_version,
                epoch=epoch,
                one_version=not spec.policy.asynchronous,
                compressor=how,
                received=received,
            )
            pull = self._transfers.pull
            async with self._permit(_GATHERS, _travels_bytes(t)) as permit:
                calls = self._calls(slices, dataclasses.replace(t, permit=permit))
                versions = await together([self._retries.call(pull, _GATHERS, s, one) for s, one in calls])
            if min(versions) == max(versions) or spec.policy.asynchronous:
                return max(min(versions), min_version)
            min_version = max(versions)  # some owners committed in between: ask all of them for the latest version
            self._retries.count += 1

    @property
    def in_flight_bytes(self) -> int:
        """The bytes that should be in flight beyond those needed now, to keep a long line busy; see `line`."""
        return self._transfers.rate.in_flight_bytes(self._peers.longest_rtt_s)

    def _permit(self, direction: int, size_bytes: int) -> AbstractAsyncContextManager[Permit]:
        """Return the permit of a gather or push; granted at once if the servers are near.

        A push counts until its reply has arrived, a round trip after it was sent, so one more push is allowed in
        flight.
        """
        most_bytes = math.inf
        if self._peers.longest_rtt_s > SHORT_RTT_S:
            most_bytes = self.in_flight_bytes + (size_bytes if direction == _PUSHES else 0)
        permits = self._push_permits if direction == _PUSHES else self._gather_permits
        return permits.request(size_bytes, most_bytes, _NOW)

    def _calls(self, slices: Sequence[Slice], t: Transfer) -> list[tuple[Slice, Transfer]]:
        """Return the calls of a transfer: one per slice, or as many as fill a long line."""
        calls: list[tuple[Slice, Transfer]] = []
        for s in slices:
            in_flight = self._transfers.rate.in_flight_bytes(self._peers.rtt_s(self._holder(s).server))
            most = min(MAX_CONNECTIONS, 1 + math.ceil(in_flight / CONNECTION_BYTES))
            calls += [(s, one) for one in t.split(s, most)]
        return calls

    def _opened(self, spec: JobSpec, unit: int) -> Received | None:
        """Return the received state of a unit whose parameters are sent as differences; else None."""
        if not spec.precision.differs:
            return None
        self._received.open(unit, spec.layout.units[unit].numel)
        return self._received

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
            epoch: as for `gather`.
            span: the span of the call.

        Returns:
            The mapping; None if the unit must be gathered: it is on another host or on several servers, is sent
            compressed or as another dtype, or replicas step asynchronously. See `same_host.shared_copy`, Note: [When a
            mapped unit may change].

        Raises:
            InvalidRequest: there is no such unit.
            Timeout: its owner was absent, did not answer, or did not reach the version in time.
            StepAborted: the job was restored meanwhile: an owner holds values of a later epoch.
        """
        spec, slices, transfer = await self._transfer(unit, 0, None, None, context, timeout_s, span)
        precision = spec.precision
        if len(slices) > 1 or spec.policy.asynchronous or precision.param_compression or dtype is not precision.param:
            return None
        t = transfer(dtype=dtype, min_version=min_version, epoch=epoch)
        memory = await self._retries.call(self._transfers.locate, _GATHERS, slices[0], t)
        if memory is None:
            return None
        known = self._mapped.get(unit)
        if known is None or known[0] is not memory:
            known = self._mapped[unit] = memory, MappedCopy(memory, t.end, dtype)
        return known[1]

    def is_near(self, unit: int, begin: int = 0, end: int | None = None) -> bool:
        """Return True if elements [begin, end) are known to be on servers that share memory with this one. Any
        thread."""
        spec, placement = self._spec, self._placement
        if spec is None or placement is None or spec.precision.param_compression is not None:
            return False
        return all(
            self._same_host.is_shared(self._holder(s).server)
            for s in spec.plan(placement.num_cuts).slices[unit]
            if s.end > begin and (end is None or s.begin < end)
        )

    def buffer(self, size_bytes: int) -> Array:
        """Return u8[size_bytes] for gradients, in memory that servers of this host can map."""
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

        After an error: the content of `out` is arbitrary; nothing changed on the servers.
        """
        spec, slices, transfer = await self._transfer(unit, begin, end, out, context, timeout_s, span)
        how = spec.precision.param_compression
        received = self._opened(spec, unit)
        t = transfer(dtype=spec.precision.param, step=step, expected=hyper, compressor=how, received=received)
        wanted = (spec.precision.param.numpy,) if how is None else tuple(transfers.DTYPE_OF)
        if out.dtype not in wanted:
            raise InvalidRequest(
                f"out has element type {out.dtype}; this job's parameters are {spec.precision.param.value}"
            )

        async def pull(s: Slice, one: Transfer) -> int:
            s = self._holder(s)
            with self._peers.waiting() as waiting:
                waiting.on(s.server)
                return await self._transfers.pull(await self._peers.stub(s.server, _GATHERS, t.deadline), s, one)

        in_order = self._two_hosts and self._peers.longest_rtt_s <= SHORT_RTT_S
        # otherwise without a permit: it may wait for another worker, which must not wait for calls behind it
        permits = self._gather_permits.request(_travels_bytes(t), IN_ORDER_BYTES, unit) if in_order else nullcontext()
        async with permits as permit:
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
        begin: int = 0,
        end: int | None = None,
        span: Span | None = None,
    ) -> None:
        """Add this replica's gradient of elements [begin, end) of a unit to the step's sum, on every owner.

        Args:
            unit: number of the unit.
            grad: wire[n] in the job's gradient dtype, contiguous; None if this replica has no gradient for the unit. If
                gradients are compressed it is f32, and is compressed here with the residual of earlier steps.
            step: the step attempt.
            replica: this worker's replica.
            context: returns job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            begin: first element; must begin a chunk of its owner.
            end: one past the last; must end a chunk of its owner; None = the unit's end.
            span: the span of the call; counts its bytes.

        Raises:
            InvalidRequest: unit, replica, range or `grad` do not fit the job.
            GenerationChanged: the step is lost, and with it all that was pushed.
            StepAborted: the step ended without a commit.
            Timeout: an owner was not reached, or a replica before this one did not push in time.

        After an error: the servers may have some or all of it. Pushing the same gradient again in the same step and
        generation is harmless; pushing another one is not detected.
        """
        spec, slices, transfer = await self._transfer(unit, begin, end, grad, context, timeout_s, span)
        if grad is not None and grad.dtype != spec.precision.grad.numpy:
            raise InvalidRequest(
                f"the gradient of unit {unit} is {grad.dtype}; gradients travel as {spec.precision.grad.value} here"
            )
        how = spec.precision.grad_compression
        t = transfer(dtype=spec.precision.grad, step=step, replica=replica, compressor=how)
        if how is not None and grad is not None:
            t = dataclasses.replace(t, residuals=self._feedback.open(unit, t.begin, t.end, step))
        push = self._transfers.push
        async with self._permit(_PUSHES, _travels_bytes(t)):
            calls = self._calls(slices, t)
            await together([self._retries.call(push, _PUSHES, s, one, repeatable=False) for s, one in calls])

    async def upload(
        self, unit: int, values: Array, *, context: MakeContext, timeout_s: float | None, epoch: int = 0
    ) -> None:
        """Store the first values of a unit on its owners.

        Args:
            unit: number of the unit.
            values: f32[unit_numel], contiguous.
            context: returns the present job, generation and incarnation.
            timeout_s: seconds it may take in all; None = no deadline.
            epoch: number of restores of the job; owners wait until they know of it, and drop values of an older epoch.

        Raises:
            InvalidRequest: there is no such unit, or `values` does not fit.
            Misuse: steps were committed already.
            Timeout: an owner was not reached in time.

        After an error: some owners may have some or all of it; uploading again is harmless.
        """
        _, slices, transfer = await self._transfer(unit, 0, None, values, context, timeout_s)
        if values.dtype != np.float32:
            raise InvalidRequest(f"first values of unit {unit} are {values.dtype}; they travel as float32")
        t = transfer(dtype=DType.F32, epoch=epoch)
        assert self._placement is not None  # `_transfer` waited for it
        copies = max(len(h.complete) for h in self._placement.holders)
        calls = [
            self._retries.call(self._transfers.store, _PUSHES, s, t, holder=holder)
            for s in slices
            for holder in range(copies)
        ]
        await together(calls)

    async def stats(self, server: int, *, context: MakeContext, timeout_s: float | None = 10.0) -> dict[str, float]:
        """Return the counters of one shard server, as its `statistics()` returns them.

        Raises:
            Unreachable: the server does not answer.
            Timeout: it did not answer in time.
        """
        deadline = Deadline(timeout_s)
        stub = await self._peers.stub(server, _GATHERS, deadline)
        reply = await stub.call("Stats", shard_pb2.StatsRequest(context=context()), timeout_s=deadline.remaining())
        return dict(reply.values)

    def statistics(self) -> dict[str, float]:
        """Return counters: payload bytes and chunks in each direction, retries, digests that did not match, and memory.

        Memory is that of residuals, and of the values that differences are added to.
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
        """Close every connection; calls under way fail. May be repeated."""
        self._same_host.close()
        await self._peers.close()


def _travels_bytes(t: Transfer) -> int:
    """Return the bytes of a transfer's payloads; 0 without a gradient."""
    if t.array is None:
        return 0
    return t.compressor.compressed_bytes(t.end - t.begin) if t.compressor is not None else t.array.nbytes


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
