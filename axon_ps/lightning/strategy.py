"""`AxonStrategy`: Lightning's training with the model and the optimizers on the shard servers.

It is Lightning's own DDP strategy with other internals: models that Lightning would wrap in DDP are wrapped in
`FullyShardedDataParallel`, and optimizers become server optimizers. Beside each checkpoint of Lightning is a checkpoint
of the servers, which has the optimizer's state. With each step the position of the loops commits. So processes that
were started again, since one of them had died, go on where the servers are.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as AutocastPrecision
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.lightning import position as positions
from axon_ps.lightning.callbacks import needs_all_trained, surrounded
from axon_ps.lightning.over_backend import DDPOverAxon
from axon_ps.parallel.from_torch import (
    MovedOptimizer,
    broadcast_buffers,
    load_buffers,
    load_servers,
    moved,
    save_servers,
)
from axon_ps.parallel.fsdp.arguments import strategy_of, understood
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.precision import MixedPrecision

SUFFIX: Final = ".axon_ps"
"""The end of the name of a checkpoint's part that the servers wrote."""

_logger = logging.getLogger(__name__)


class AxonStrategy(DDPOverAxon):
    """The strategy "axon".

    Args:
        sharding_strategy: the parameters that stay in a worker's memory between uses; not NO_SHARD ("axon_ddp").
        unit_types: module classes that become units.
        auto_wrap_policy: returns True for a module that becomes a unit; instead of `unit_types`. Without either, each
            child of the LightningModule's children is one.
        cpu_offload: the arrays that are in host memory between uses.
        mixed_precision: dtypes of the parameters and the wire. The trainer's `precision="bf16-mixed"` is autocast over
            f32 parameters, and goes with it.
        save_parameters: whether Lightning's checkpoints have the parameters, too (so that `load_from_checkpoint` reads
            them anywhere); else only the servers' part has them.
        options: those of `DDPStrategy`.

    Raises:
        InvalidRequest: NO_SHARD was given, or a value is not one of its argument.
    """

    def __init__(
        self,
        sharding_strategy: ShardingStrategy | str | None = None,
        unit_types: Collection[type[nn.Module]] | type[nn.Module] = (),
        auto_wrap_policy: Callable[..., bool] | None = None,
        cpu_offload: CPUOffload | bool | str = CPUOffload.NONE,
        mixed_precision: MixedPrecision | torch.dtype | str | bool | None = None,
        save_parameters: bool = True,
        **options: Any,
    ) -> None:
        if strategy_of(sharding_strategy) is ShardingStrategy.NO_SHARD:
            raise InvalidRequest(
                "AxonStrategy(sharding_strategy=NO_SHARD) would put nothing on the servers; use strategy='axon_ddp'"
            )
        self._how: dict[str, Any] = {
            "sharding_strategy": sharding_strategy,
            "unit_types": unit_types,
            "auto_wrap_policy": auto_wrap_policy,
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
        }
        for name, value in self._how.items():
            understood(name, value)
        super().__init__(**options)
        self._save_parameters = save_parameters
        self._forward_redirection = Redirection()
        self._wrappers: WeakKeyDictionary[nn.Module, FullyShardedDataParallel] = WeakKeyDictionary()
        self._position: Mapping[str, Any] | None = None  # of a fit that goes on where the servers are
        self._skip = 0  # batches of its epoch that were used
        self._loaded: dict[str, Any] | None = None  # Lightning's part of a checkpoint, until the servers' is loaded
        self._servers_checkpoint = Path()  # beside it

    # ------------------------------------------------------------------ setup

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model to fit it. To evaluate it, use its wrapper if there is one.

        Raises:
            InvalidRequest: the precision has a gradient scaler ("16-mixed"), or see `setup_optimizers`.
        """
        fits = trainer.state.fn == TrainerFn.FITTING
        if isinstance(self.precision_plugin, AutocastPrecision) and self.precision_plugin.scaler is not None:
            raise InvalidRequest(
                "precision='16-mixed' scales losses and looks at gradients, which are on the shard servers by then; "
                "use 'bf16-mixed'"
            )
        if not fits and self.lightning_module not in self._wrappers:
            self._loaded = None
            super().setup(trainer)
            return
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self.lightning_module not in self._wrappers:
            self.precision_plugin.convert_module(self.lightning_module)
            with _all_trained(self.lightning_module if needs_all_trained(trainer.callbacks) else nn.Module()):
                self._wrappers[self.lightning_module] = self._wrapped(self.lightning_module)
            if self._ddp_kwargs.get("broadcast_buffers", True):
                broadcast_buffers(self._fsdp)
        self.model = self._wrappers[self.lightning_module]
        if fits:
            trainer.callbacks = surrounded(trainer.callbacks, self._fsdp)
            self.setup_optimizers(trainer)
            self._go_on(trainer)
        self._load_servers()
        self.setup_precision_plugin()

    def _wrapped(self, module: LightningModule) -> FullyShardedDataParallel:
        how = dict(self._how)
        if not how["unit_types"] and how["auto_wrap_policy"] is None:
            units = {grandchild for child in module.children() for grandchild in child.children()}
            how["auto_wrap_policy"] = units.__contains__
        return FullyShardedDataParallel(module, device=self.root_device, **how)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Move the optimizer that `configure_optimizers` has made to the servers.

        Raises:
            InvalidRequest: it has made several, or one without a counterpart on the servers.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise InvalidRequest(
                f"configure_optimizers() returned {len(self.optimizers)} optimizers, and a model on the shard servers "
                "has one, which moves all of it: return one with several groups, or use strategy='axon_ddp', which "
                "trains on the workers"
            )
        now = {optimizer: moved(optimizer) for optimizer in self.optimizers}
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = now.get(config.scheduler.optimizer, config.scheduler.optimizer)
        self.optimizers: list[Any] = list(now.values())
        for optimizer in self.optimizers:
            if isinstance(optimizer, MovedOptimizer):
                optimizer.commits = lambda: {positions.NAME: positions.after_step(trainer.fit_loop.state_dict())}

    # ------------------------------------------------------------------ going on where the servers are

    def _go_on(self, trainer: Trainer) -> None:
        """Bring this trainer to the job's position, if the job has made more steps."""
        position = self._fsdp.committed.get(positions.NAME)
        if position is None or positions.steps_made(position) <= trainer.global_step:
            return
        self._position, self._skip = position, positions.batches_used(position)
        _logger.warning("the job is at step %d: training goes on there", positions.steps_made(position))
        trainer.fit_loop.load_state_dict(dict(position))
        for config in self.lr_scheduler_configs:
            made = positions.steps_made if config.interval == "step" else positions.epochs_made
            for _ in range(made(position) // config.frequency):
                config.scheduler.step()
        if self._loaded is not None:
            _logger.warning("%s is not loaded: the job is further", self._servers_checkpoint)
            self._loaded["loops"] = {**self._loaded.get("loops", {}), "fit_loop": dict(position)}
            self._loaded["lr_schedulers"] = [config.scheduler.state_dict() for config in self.lr_scheduler_configs]
            self._loaded["optimizer_states"] = [optimizer.state_dict() for optimizer in self.optimizers]
            self._loaded = None

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader; if training goes on in the middle of an epoch, without the batches that were used."""
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if self._skip and trainer is not None and trainer.training:
            loader, self._skip = Rest(loader, self._skip), 0
        return loader

    # ------------------------------------------------------------------ steps

    @property
    def _fsdp(self) -> FullyShardedDataParallel:
        assert self.lightning_module is not None
        return self._wrappers[self.lightning_module]

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate: gradients stay here."""
        with self._fsdp.no_sync():
            yield

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers, on the first process; only buffers if `save_parameters` is False."""
        if not self.is_global_zero:
            return {}
        if self._save_parameters or self.lightning_module not in self._wrappers:
            return dict(super().lightning_module_state_dict())
        return {name: buffer.detach().clone() for name, buffer in self._fsdp.named_buffers()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save Lightning's checkpoint, and the servers' beside it. Every process calls it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.lightning_module in self._wrappers:
            save_servers(self._fsdp, f"{filepath}{SUFFIX}")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's part. The servers' part is loaded when the model is wrapped, unless the job is further."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._servers_checkpoint = Path(f"{checkpoint_path}{SUFFIX}")
        self._loaded = checkpoint
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load Lightning's parameters into the module, unless it is wrapped."""
        if self.lightning_module not in self._wrappers:
            super().load_model_state_dict(checkpoint, strict and not self._servers_checkpoint.is_dir())

    def _load_servers(self) -> None:
        """Load the servers' part of a checkpoint. If it has none, load Lightning's parameters."""
        checkpoint, self._loaded = self._loaded, None
        if checkpoint is None:
            return
        if self._servers_checkpoint.is_dir():
            load_servers(self._fsdp, self._servers_checkpoint)
            load_buffers(self._fsdp, checkpoint["state_dict"])
            return
        _logger.warning("%s is not there: the optimizer's state begins anew", self._servers_checkpoint)
        assert self.lightning_module is not None
        self._fsdp.load_state_dict(checkpoint["state_dict"], strict=self.lightning_module.strict_loading)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the hyperparameters. The moments came with the servers' part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict({**state, "state": {}})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove both parts."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{SUFFIX}", ignore_errors=True)

    def teardown(self) -> None:
        """Tear down as Lightning does, without moving the model: its parameters are not here."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self.lightning_module not in self._wrappers:
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


@contextmanager
def _all_trained(module: nn.Module) -> Iterator[None]:
    """Unfreeze every parameter of a module inside of the block."""
    frozen = [param for param in module.parameters() if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(param.is_floating_point())
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


class Redirection(_ForwardRedirection):
    """Runs a step of the LightningModule as the wrapper's forward, also if the wrapper runs that several times."""

    def __call__(
        self, wrapper_module: nn.Module, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the method inside of the wrapper's forward, where the module has its own forward; returns its result."""
        own = original_module.forward

        def redirected(*given: Any, **options: Any) -> Any:
            original_module.forward = own
            try:
                return getattr(original_module, method_name)(*given, **options)
            finally:
                original_module.forward = redirected

        original_module.forward = redirected
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            original_module.forward = own


class Rest:
    """A data loader whose first epoch begins after some batches.

    Args:
        loader: the loader.
        used: number of those batches.
    """

    def __init__(self, loader: Any, used: int) -> None:
        self._loader = loader
        self._used = used

    def __iter__(self) -> Iterator[Any]:
        used, self._used = self._used, 0
        return itertools.islice(iter(self._loader), used, None)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


__all__ = ["SUFFIX", "AxonStrategy"]
