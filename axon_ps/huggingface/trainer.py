"""`Trainer`, and any subclass of it, with the model and the optimizer on the shard servers.

Note: [Where the servers are]
    With each step the trainer's position commits: `global_step` and the epoch. A trainer may start and find its model
    on the servers at a later version: its processes were started again, since one of them had died. It goes on there:
    no checkpoint is read and no committed step is lost. The argument `resume_from_checkpoint` is ignored then, so that
    the same line of a script serves both.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Final

import transformers
from torch import nn
from transformers import trainer as _trainer

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.huggingface.accelerator import SERVERS_DIRECTORY, Accelerator, ServerPlugin, join_group
from axon_ps.parallel.from_torch import MovedOptimizer, load_servers, save_servers
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel

POSITION: Final = "trainer"
"""The name of the position among the values that are committed with each step."""

_logger = logging.getLogger(__name__)


class ServersMixin:
    """The methods that `on_servers` adds to a trainer; see Note: [Where the servers are]."""

    server_plugin: ClassVar[ServerPlugin] = ServerPlugin()

    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Accelerator
    _continues: tempfile.TemporaryDirectory[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        join_group()
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Do as transformers does, with our `Accelerator`."""
        made, _trainer.Accelerator = _trainer.Accelerator, self._make_accelerator  # it is made only in there
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            _trainer.Accelerator = made

    def _make_accelerator(self, **kwargs: Any) -> Accelerator:
        accelerator = Accelerator(**kwargs, server_plugin=self.server_plugin, cpu=self.args.use_cpu)
        accelerator.evaluates_without_ddp = True
        return accelerator

    # ------------------------------------------------------------------ train

    @property
    def _wrapper(self) -> FullyShardedDataParallel:
        return self.accelerator.wrapped(self.model)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does; see Note: [Where the servers are].

        Raises:
            Misuse: the trainer has a `model_init`.
        """
        if getattr(self, "model_init", None) is not None:
            raise Misuse("model_init makes another model for each train(); give the trainer a model instead")
        position = self._wrapper.committed.get(POSITION)
        if position is not None and position["global_step"] > self.state.global_step:
            _logger.warning("the job is at step %d: training goes on there", position["global_step"])
            self._continues = tempfile.TemporaryDirectory(prefix="axon-ps-trainer-")
            resume_from_checkpoint = self._continues.name
            self._state_at(position).save_to_json(str(Path(resume_from_checkpoint, _trainer.TRAINER_STATE_NAME)))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            if self._continues is not None:
                self._continues.cleanup()
                self._continues = None

    def _state_at(self, position: dict[str, Any]) -> Any:
        """Return the trainer's state at a position as a checkpoint has it, without its history."""
        intervals = {name: getattr(self.args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
        return transformers.TrainerState(train_batch_size=self.args.train_batch_size, **intervals, **position)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        return wrapped if training else self.accelerator.wrapped(wrapped)

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)  # type: ignore[misc]
        moved = self.optimizer.optimizer
        if isinstance(moved, MovedOptimizer):
            moved.commits = self._position
        return prepared

    def _position(self) -> dict[str, Any]:
        """Return the values to commit with the step that is about to be made."""
        return {POSITION: {"global_step": self.state.global_step + 1, "epoch": self.state.epoch or 0.0}}

    # ------------------------------------------------------------------ checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        save_servers(self._wrapper, Path(output_dir) / SERVERS_DIRECTORY)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint) / SERVERS_DIRECTORY
        if self._continues is not None:
            return  # the servers have the values
        if directory.is_dir():
            load_servers(self._wrapper, directory)
            return
        _logger.warning("%s has no checkpoint of shard servers: the optimizer's state begins anew", directory.parent)
        super()._load_from_checkpoint(resume_from_checkpoint, self._wrapper)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._continues is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        for _ in range(self.state.global_step):
            self.lr_scheduler.step()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        load_servers(self._wrapper, Path(best) / SERVERS_DIRECTORY)


def on_servers(trainer: type[Any], plugin: ServerPlugin | None = None) -> type[Any]:
    """Return a subclass of a class of trainers, with model and optimizer on the shard servers.

        SFTTrainer = on_servers(trl.SFTTrainer)

    It makes the process group over axon if there is none: call it before `TrainingArguments`, which would make another.

    Args:
        trainer: `transformers.Trainer` or a subclass.
        plugin: the options of wrapped models.

    Raises:
        InvalidRequest: `trainer` is something else.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise InvalidRequest(f"trainer is {trainer!r}; give transformers.Trainer, or a subclass of it")
    join_group()
    return _with_servers(trainer, plugin)


def _with_servers(trainer: type[Any], plugin: ServerPlugin | None = None) -> type[Any]:
    values = {"server_plugin": plugin or ServerPlugin(), "__doc__": trainer.__doc__, "__module__": trainer.__module__}
    return type(trainer.__name__, (ServersMixin, trainer), values)


Trainer: Any = _with_servers(transformers.Trainer)

__all__ = ["POSITION", "ServersMixin", "Trainer", "on_servers"]
