"""Gathering the parameters of one model from the shard servers, and uploading their first values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from axon_ps.collectives.work import LoopWork
from axon_ps.observe.tracing.span import Span
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.same_host.shared_copy import MappedCopy
from axon_ps.types import Array, DType, Hyper
from axon_ps.worker.steps.calls import ModelCalls
from axon_ps.worker.steps.step_trace import StepTrace
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.steps.view import ModelView


class Parameters:
    """The parameters of a model, unit by unit; thread-safe.

    Args:
        loop: the background loop for all calls.
        shards: the connections to the shard servers, for this model.
        view: this worker's view of the model.
        calls: those of this model.
        trace: the spans of its steps.

    Attributes:
        mapped_bytes: bytes of the units that were mapped and not copied.
    """

    def __init__(
        self, loop: BackgroundLoop, shards: ShardGroup, view: ModelView, calls: ModelCalls, trace: StepTrace
    ) -> None:
        self._loop = loop
        self._shards = shards
        self._view = view
        self._calls = calls
        self._trace = trace
        self._mapped: dict[int, tuple[int, int, MappedCopy]] = {}  # by unit: generation and epoch of the request
        self.mapped_bytes = 0

    def upload(self, unit: int, values: Array, *, epoch: int = 0) -> None:
        """Store first values of a unit.

        Args:
            unit: its number.
            values: f32[unit_numel].
            epoch: the epoch that begins with the values; 0 for the model's first ones.

        Raises:
            MemberLost: this worker is not a member any more.

        After an error: some slices may be stored. Upload the values again.
        """
        self._loop.run(self._upload(unit, values, epoch), self._view.job.timeout_s)

    async def _upload(self, unit: int, values: Array, epoch: int) -> None:
        timeout_s = self._view.job.timeout_s
        await self._calls.run(
            lambda _: self._shards.upload(unit, values, context=self._calls.context, timeout_s=timeout_s, epoch=epoch)
        )

    def gather(
        self,
        unit: int,
        out: Array,
        *,
        begin: int = 0,
        end: int | None = None,
        exact: bool = False,
        moment: str = "",
        updates: list[int] | None = None,
    ) -> LoopWork[int]:
        """Fill `out` with the unit at this worker's version or later, in the wire dtype.

        Args:
            unit: its number.
            out: wire[end - begin]; must stay alive and untouched until the work is done.
            begin: first element wanted.
            end: one past the last element wanted; None = the unit's end.
            exact: transfer them uncompressed even if the job compresses parameters, and at the newest version that this
                worker knows of: the values that the servers hold, not those that training computes with.
            moment, updates: as of `ShardGroup.gather`, with `exact`.

        Returns:
            A handle whose result is the version gathered.

        After an error: the content of `out` is undefined.
        """
        with self._view.job.changed:
            epoch, version = self._view.epoch, self._view.version_of(unit, exact=exact)
        gather = partial(
            self._shards.gather,
            unit,
            out,
            min_version=version,
            epoch=epoch,
            context=self._calls.context,
            timeout_s=self._view.job.timeout_s,
            begin=begin,
            end=end,
            compressed=not exact,
            moment=moment,
            updates=updates,
        )
        call = self._trace.call("gather", unit)
        running = self._calls.run(lambda span: gather(span=span), call, epoch=epoch, retried=True)
        return LoopWork(self._loop, running, f"gathering unit {unit}")

    def mapped(self, unit: int) -> MappedCopy | None:
        """Return the memory that a unit lies in, if this worker has mapped it and it is at this worker's version.

        This needs no message. The memory must not be read after this worker's next vote.

        Raises:
            Misuse: the model was released, although the servers may still have its memory.
        """
        with self._view.job.changed:
            self._view.check_released()
            known = self._mapped.get(unit)
            if known is None or known[:2] != (self._view.membership.generation, self._view.epoch):
                return None
            if not known[2].is_at(self._view.version_of(unit, exact=True)):
                return None
            self.mapped_bytes += known[2].values.nbytes
        self._trace.mapped(unit, known[2].values.nbytes)
        return known[2]

    def map(self, unit: int, dtype: DType) -> LoopWork[MappedCopy | None]:
        """Map the memory that a unit lies in, at this worker's version or later.

        Args:
            unit: its number.
            dtype: the wanted dtype.

        Returns:
            A handle; its result is None if the unit must be gathered (see `Mappings.map`). The memory must not be read
            after this worker's next vote.
        """
        with self._view.job.changed:
            epoch, version = self._view.epoch, self._view.version_of(unit)
        call = self._trace.call("gather", unit, mapped=True)
        found = self._calls.run(
            lambda span: self._map(unit, dtype, epoch, version, span), call, epoch=epoch, retried=True
        )
        return LoopWork(self._loop, found, f"mapping unit {unit}")

    async def _map(self, unit: int, dtype: DType, epoch: int, version: int, span: Span | None) -> MappedCopy | None:
        asked = self._view.membership.generation, epoch
        copy = await self._shards.mappings.map(
            unit,
            dtype=dtype,
            min_version=version,
            epoch=epoch,
            context=self._calls.context,
            timeout_s=self._view.job.timeout_s,
            span=span,
        )
        with self._view.job.changed:
            if copy is not None:
                self._mapped[unit] = *asked, copy
                self.mapped_bytes += copy.values.nbytes
                if span is not None:
                    span.add("bytes", copy.values.nbytes)
        return copy

    @property
    def in_flight_bytes(self) -> int:
        """Bytes to gather, and to push, beyond those needed now, so that connections of high latency are used fully."""
        return self._shards.lines.in_flight_bytes

    def is_near(self, unit: int, begin: int = 0, end: int | None = None) -> bool:
        """Return True if elements [begin, end) of a unit are known to be on servers that share memory with us."""
        return self._shards.routes.is_near(unit, begin, end)

    def gather_speculative(
        self,
        unit: int,
        out: Array,
        ticket: Ticket,
        hyper: Sequence[Hyper],
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> LoopWork[int]:
        """Fill `out` with the unit as an undecided step will leave it, if it commits unclipped with `hyper`.

        Args:
            unit: its number.
            out: wire[end - begin]; must stay alive and untouched until the work is done.
            ticket: the step.
            hyper: per parameter group, the hyperparameters this worker will vote for.
            begin: first element wanted, counted from the unit's start.
            end: one past the last element wanted; None = the unit's end.

        Returns:
            A handle. The values gathered are the next version's only if the decision is a commit with clip factor 1 and
            these hyperparameters.

        After an error: the content of `out` is undefined. Gather the unit in the ordinary way.
        """
        epoch = self._view.epoch
        gather = partial(
            self._shards.gather_speculative,
            unit,
            out,
            step=ticket.step,
            addend=ticket.addend,
            hyper=tuple(hyper),
            context=lambda: self._calls.context(ticket.generation),
            timeout_s=self._view.job.timeout_s,
            begin=begin,
            end=end,
        )
        call = self._trace.call("gather", unit, speculative=True)
        running = self._calls.run(lambda span: gather(span=span), call, epoch=epoch)
        return LoopWork(self._loop, running, f"gathering unit {unit} as step {ticket.step} is expected to leave it")
