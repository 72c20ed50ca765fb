"""`Markers`: the parts of a step, under the same names in `torch.profiler` and in traces.

Without a profiler and without a sampled step a marker costs two tests. In a profile the names begin with "axon_ps::".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from axon_ps.observe.tracing.span import Span
from axon_ps.worker.steps.step_trace import StepTrace

_NOTHING: Final = nullcontext()


class Markers:
    """The markers of one wrapped model.

    Args:
        trace: the spans of the worker's steps; None where steps are not made on the servers.
    """

    def __init__(self, trace: StepTrace | None = None) -> None:
        self._trace = trace
        self._open: dict[str, tuple[Span | None, AbstractContextManager[object]]] = {}

    def within(self, name: str, unit: str = "") -> AbstractContextManager[object]:
        """Mark a part of the step, as long as the context lasts."""
        profiled = torch._C._autograd._profiler_enabled()
        step = None if self._trace is None else self._trace.current
        return self._both(name, unit) if profiled or step is not None else _NOTHING

    @contextmanager
    def _both(self, name: str, unit: str) -> Iterator[None]:
        traced = nullcontext() if self._trace is None else self._trace.within(name, unit=unit or "root")
        with traced, profiled(name, unit):
            yield

    def begin(self, name: str, *, in_profile: bool) -> None:
        """Begin a part of the step, which `end` ends. A part of this name that is still open is ended first.

        Args:
            name: name of the part.
            in_profile: True if it ends on the same thread, as a profile's must.
        """
        if name in self._open:
            self.end(name, "it did not end")
        step = None if self._trace is None else self._trace.current
        if step is None and not torch._C._autograd._profiler_enabled():
            return
        marker = profiled(name) if in_profile else _NOTHING
        marker.__enter__()
        self._open[name] = None if self._trace is None else self._trace.begin(name), marker

    def end(self, name: str, error: str = "") -> None:
        """End a part of the step."""
        found = self._open.pop(name, None)
        if found is not None:
            span, marker = found
            marker.__exit__(None, None, None)
            if self._trace is not None:
                self._trace.end(span, error)


def profiled(name: str, unit: str = "") -> AbstractContextManager[object]:
    """Return a marker for the profiler alone."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"axon_ps::{name} {unit}".rstrip())
