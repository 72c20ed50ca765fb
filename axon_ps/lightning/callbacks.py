"""Lightning's callbacks that read and write parameters between steps, for a model whose values are on the servers.

While one of their hooks runs, parameters have values, and the values that it writes are given to the servers. The
callbacks are not changed: in the trainer's list there is one of ours before and one after each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import Callback

from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel

_EACH_STEP: Final = "on_train_batch_end"

_HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "BaseFinetuning": ("on_train_epoch_start",),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_end"),
    "WeightAveraging": (  # and EMAWeightAveraging, which is one
        _EACH_STEP,
        "on_train_epoch_end",
        "on_train_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
    ),
}
"""The hooks in which each callback reads or writes parameters. Lightning's older versions lack some callbacks."""


def needs_all_trained(callbacks: Iterable[Callback]) -> bool:
    """Return True if one of them freezes parameters before the model is wrapped, to train them later."""
    return any(isinstance(callback, lightnings.BaseFinetuning) for callback in callbacks)


def surrounded(callbacks: Iterable[Callback], model: FullyShardedDataParallel) -> list[Callback]:
    """Return the trainer's callbacks, those that read and write parameters with one of ours on each side.

    Args:
        callbacks: the trainer's. Some of ours may be among them.
        model: the wrapper of its module.
    """
    result: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, _Edge):
            continue
        if hooks := _hooks_of(callback):
            reading = _Reading(model)
            result += [_Edge(hooks, reading.begin, reading.drop), callback, _Edge(hooks, reading.end)]
        else:
            result.append(callback)
    return result


def _hooks_of(callback: Callback) -> tuple[str, ...]:
    kinds = ((getattr(lightnings, name, ()), hooks) for name, hooks in _HOOKS.items())
    return next((hooks for kind, hooks in kinds if isinstance(callback, kind)), ())


class _Reading:
    """Lets parameters have values for as long as a hook runs."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self._model = model
        self._open = ExitStack()
        self._steps = -1

    def begin(self, hook: str, trainer: Any) -> None:
        """Give parameters their values, before the hook. A batch that ends without a step has changed nothing."""
        if hook == _EACH_STEP and trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._open.enter_context(self._model.summon_full_params(writeback=True))

    def end(self, hook: str, trainer: Any) -> None:
        """Give the values back to the servers, after the hook."""
        self._open.close()

    def drop(self, error: BaseException) -> None:
        """End after an error of the hook, or of something else."""
        self._open.__exit__(type(error), error, error.__traceback__)


class _Edge(Callback):
    """Calls a function where another callback has these hooks."""

    def __init__(self, hooks: Iterable[str], call: Any, on_error: Any = lambda error: None) -> None:
        for hook in hooks:
            setattr(self, hook, self._calling(call, hook))
        self._on_error = on_error

    @staticmethod
    def _calling(call: Any, hook: str) -> Any:
        return lambda trainer, *_: call(hook, trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the reading that is under way."""
        self._on_error(exception)


__all__ = ["needs_all_trained", "surrounded"]
