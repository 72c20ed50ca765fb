"""Pushing this worker's gradients of one model to the shard servers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext

from axon_ps.collectives.work import LoopWork
from axon_ps.errors import GenerationChanged
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.shard.client.client import ShardGroup
from axon_ps.types import Array
from axon_ps.worker.steps.calls import ModelCalls
from axon_ps.worker.steps.step_trace import StepTrace, UnitCall
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.steps.view import ModelView


class Gradients:
    """The gradients of a model, unit by unit; thread-safe.

    Args:
        loop: the background loop for all calls.
        shards: the connections to the shard servers, for this model.
        view: this worker's view of the model.
        calls: those of this model.
        trace: the spans of its steps.
    """

    def __init__(
        self, loop: BackgroundLoop, shards: ShardGroup, view: ModelView, calls: ModelCalls, trace: StepTrace
    ) -> None:
        self._loop = loop
        self._shards = shards
        self._view = view
        self._calls = calls
        self._trace = trace
        self._orders: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by unit

    def buffer(self, size_bytes: int) -> Array:
        """Return u8[size_bytes] for a gradient to push: in memory that servers of this host can map, if possible."""
        return self._shards.buffer(size_bytes)

    def push(
        self,
        unit: int,
        grad: Array | None,
        ticket: Ticket,
        done: Callable[[], None] | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> LoopWork[None]:
        """Push the gradient of a unit, of one replica; None when it has none.

        Args:
            unit: its number.
            grad: wire[end - begin]; must stay alive and untouched until the work is done.
            ticket: the step it belongs to.
            done: called once when the buffer is free again, also if this method raises; as a rule on the loop's thread.
            begin: first element; must begin a chunk. Other workers of the replica push the rest.
            end: one past the last, at the end of a chunk; None = the unit's end.

        After an error: the step cannot commit; `StepClient.vote` returns an abort.
        """
        call, free = self._trace.call("push", unit, absent=grad is None), _once(done)
        try:
            push = self._push(unit, grad, ticket, free, begin, end, call)
            work = LoopWork(self._loop, push, f"pushing unit {unit}")
        except BaseException:
            free()
            raise
        work.on_end(lambda _: free())  # a coroutine that is cancelled before it begins frees nothing itself
        return work

    async def _push(
        self,
        unit: int,
        grad: Array | None,
        ticket: Ticket,
        free: Callable[[], None],
        begin: int,
        end: int | None,
        call: UnitCall,
    ) -> None:
        view = self._view
        try:
            if not view.valid(ticket):
                raise GenerationChanged("the membership changed before the push", view.membership.generation)
            compresses = view.spec is not None and view.spec.precision.grad_compression is not None
            # the residual of an addend is added to the next one
            async with self._orders[unit] if compresses else nullcontext():
                await self._calls.run(
                    lambda span: self._shards.reduce_scatter(
                        unit,
                        grad,
                        step=ticket.step,
                        replica=ticket.replica,
                        addend=ticket.addend,
                        context=lambda: self._calls.context(ticket.generation),
                        timeout_s=view.job.timeout_s,
                        begin=begin,
                        end=end,
                        span=span,
                    ),
                    call,
                    generation=ticket.generation,
                )
        except asyncio.CancelledError:
            if view.valid(ticket):
                raise
            raise GenerationChanged("the membership changed during the push", view.membership.generation) from None
        finally:
            free()


def _once(done: Callable[[], None] | None) -> Callable[[], None]:
    """Return a function that calls `done` the first time that it is called."""
    pending = [] if done is None else [done]

    def call() -> None:
        if pending:
            pending.pop()()

    return call
