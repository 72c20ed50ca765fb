"""The running calls to shard servers about one model. They are cancelled once they cannot succeed any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import StepAborted, Timeout, again
from axon_ps.observe.tracing.span import Span
from axon_ps.wire.v1.common_pb2 import CallContext
from axon_ps.worker.steps.step_trace import StepTrace, UnitCall
from axon_ps.worker.steps.view import ModelView

T = TypeVar("T")


class ModelCalls:
    """Runs calls on the background loop. All methods but `context` are called on the loop's thread.

    Args:
        coordinator: gives the context of a call.
        view: this worker's view of the model.
        trace: the spans of its steps.
    """

    def __init__(self, coordinator: CoordinatorClient, view: ModelView, trace: StepTrace) -> None:
        self._coordinator = coordinator
        self._view = view
        self._trace = trace
        self._running: dict[asyncio.Task[Any], tuple[int | None, int | None]] = {}  # with their epoch and generation

    def context(self, generation: int | None = None) -> CallContext:
        """Return the context of a call about this model, in the present generation if none is given."""
        context = self._coordinator.context()
        context.model = self._view.model
        if generation is not None:
            context.generation = generation
        return context

    async def run(
        self,
        call: Callable[[Span | None], Coroutine[Any, Any, T]],
        what: UnitCall | None = None,
        *,
        epoch: int | None = None,
        generation: int | None = None,
        retried: bool = False,
    ) -> T:
        """Run a call, and cancel it if the session fails or the model is released.

        The message of a time-out names members that the job waits for.

        Args:
            call: starts it; is given its span, if it is traced.
            what: its description in traces; None = it is not part of a step.
            epoch: the call is also cancelled when the parameters are no longer those of this epoch; None = it is not.
                (A request for a version from before a restore might never be answered.)
            generation: the call is also cancelled when another generation begins; None = it is not.
            retried: True if the caller retries it after a restore. A server may learn of a restore before this worker.
                Then the call ends only when this worker knows of it, so that the retry requests the new epoch.

        Raises:
            StepAborted: the parameters were replaced.
            CancelledError: another generation has begun.
            AxonError: the session failed, the model was released, or the call failed.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = epoch, generation
        try:
            self._check_current(epoch)
            with self._trace.timed(what) if what is not None else nullcontext() as span:
                try:
                    return await call(span)
                except StepAborted:
                    if retried and epoch == self._view.epoch:
                        await asyncio.sleep(self._view.job.timeout_s)  # `end_stale` ends this call
                    raise
        except asyncio.CancelledError:
            self._check_current(epoch)
            raise
        except Timeout as error:
            if not (reason := self._view.job.waiting_for()):
                raise
            raise Timeout(f"{error}{reason}") from error
        finally:
            self._running.pop(task, None)

    def end_stale(self) -> None:
        """Cancel the calls that cannot succeed any more. Call it after an event was applied to the view."""
        view = self._view
        over = view.released or view.job.failure is not None
        now = view.job.known and view.job.known.generation
        for task, (epoch, generation) in list(self._running.items()):
            if over or epoch not in (None, view.epoch) or generation not in (None, now):
                del self._running[task]
                task.cancel()

    def _check_current(self, epoch: int | None) -> None:
        """Raise the error that ends a call of `epoch`, if there is one."""
        view = self._view
        if view.job.failure is not None:
            raise again(view.job.failure)
        view.check_released()
        if epoch is not None and epoch != view.epoch:
            raise StepAborted(f"the parameters were replaced meanwhile: this is epoch {view.epoch}, no longer {epoch}")
