"""`Masters`: the values of a model that its optimizer updates, on the shard servers or on every worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from axon_ps import errors
from axon_ps.errors import AxonError, Disagreement, InvalidRequest

TORN: Final = "the parameters changed while they were read: the job went on without this worker; read them again"

_LONGEST: Final = 2000
"""Most characters of an error that are sent to the other workers."""


class Masters(ABC):
    """The values that a model's optimizer updates, and the workers that have the model."""

    @abstractmethod
    def units(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        """Yield the values of these units, f32[unit_numel]; see `FullyShardedDataParallel.full_parameters`.

        Those of raw parameters are words; see `parallel.precision.view_of`.
        """

    @abstractmethod
    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """Replace all values by those of the worker of lowest rank: f32[unit_numel] of each of its units.

        In a mesh the other workers of its replica give theirs.
        """

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return a small value of every worker that has the model, in rank order; collective."""

    def together(self, failed: str, perform: Callable[[], Any]) -> list[Any]:
        """Return the small values that `perform` returns on all workers, in rank order; collective.

        Args:
            failed: beginning of the message that the others get if it fails on one.
            perform: the part of each worker.

        Raises:
            Exception: `perform` raised it here.
            Disagreement: the error of another worker is an `InvalidRequest`, or not one of ours.
            AxonError: it failed on another worker by an error of this class.
        """
        value, problem = None, None
        try:
            value = perform()
        except Exception as error:
            problem = error
        kind, text = ("", "") if problem is None else (type(problem).__name__, str(problem)[:_LONGEST])
        try:
            answers = self.gather({"value": value, "error": kind, "text": text})
        finally:
            if problem is not None:
                raise problem
        if failures := {rank: answer for rank, answer in enumerate(answers) if answer["error"]}:
            names = "; ".join(f"rank {rank}: {a['error']}: {a['text']}" for rank, a in failures.items())
            raise _error_of_another(next(iter(failures.values()))["error"])(f"{failed} on {names}")
        return [answer["value"] for answer in answers]


def _error_of_another(name: str) -> type[AxonError]:
    """Return the class of error to raise here when another worker raised an error of this name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AxonError) and not issubclass(kind, InvalidRequest):
        return kind
    return Disagreement
