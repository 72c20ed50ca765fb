"""`Accelerator` whose models live on the shard servers.

Accelerate runs as it does for several processes (data loaders, metrics, autocast, accumulation), over the present
process group. Models that it would wrap in DDP are wrapped in our `FullyShardedDataParallel`, and optimizers become
server optimizers. Nothing of accelerate is patched: only methods of the subclass differ.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import accelerate
import torch
import torch.distributed as dist
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.from_torch import MovedOptimizer, broadcast_buffers, load_servers, moved, save_servers
from axon_ps.parallel.fsdp.arguments import strategy_of, understood
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.worker.world import World

SERVERS_DIRECTORY: Final = "axon_ps"
"""The directory of the servers' checkpoint in a checkpoint of accelerate or of a trainer."""

_OTHER_PLUGINS: Final = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerPlugin:
    """The options of wrapped models: the arguments of `FullyShardedDataParallel` that a user of accelerate may want.

    Attributes:
        sharding_strategy: the parameters that stay in a worker's memory between uses; not NO_SHARD, which is plain DDP.
        unit_types: module classes that become units; empty = those in a transformers model's `_no_split_modules`.
        auto_wrap_policy: returns True for a module that becomes a unit; instead of `unit_types`.
        cpu_offload: the arrays that are in host memory between uses.
        mixed_precision: dtypes of the parameters and the wire. Accelerate's own `mixed_precision="bf16"` is autocast
            over f32 parameters, and goes with it.
        intra_node_size: HYBRID_SHARD: number of workers of a node; None = as many as this node has.

    Raises:
        InvalidRequest: the strategy is NO_SHARD, or a value is not one of its argument.
    """

    sharding_strategy: ShardingStrategy | str | None = None
    unit_types: Collection[type[nn.Module]] | type[nn.Module] = ()
    auto_wrap_policy: Callable[..., bool] | None = None
    cpu_offload: CPUOffload | bool | str = CPUOffload.NONE
    mixed_precision: MixedPrecision | torch.dtype | str | bool | None = None
    intra_node_size: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            understood(each.name, getattr(self, each.name))
        if strategy_of(self.sharding_strategy) is ShardingStrategy.NO_SHARD:
            raise InvalidRequest(
                "ServerPlugin(sharding_strategy=NO_SHARD) would put nothing on the servers; use accelerate's own "
                "Accelerator after torch.distributed.init_process_group('axon'), which is DDP over axon"
            )

    def wrap(self, model: nn.Module) -> FullyShardedDataParallel:
        """Wrap a model, so that it is on the servers."""
        policy = self.auto_wrap_policy
        if policy is None and not self.unit_types:
            names = set(getattr(model, "_no_split_modules", None) or ())
            policy = lambda child: type(child).__name__ in names  # noqa: E731
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            unit_types=self.unit_types,
            auto_wrap_policy=policy,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision,
            intra_node_size=self.intra_node_size,
        )


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for models and optimizers on the shard servers.

    `prepare()` takes models and torch's optimizers and schedulers as they are. Use the objects that it returns.
    `save_state()` lets the servers write a checkpoint, with the optimizer's state, into the directory `axon_ps` of
    accelerate's checkpoint. `load_state()` restores it. `get_state_dict()` gives the state on the first process.
    `unwrap_model()` gives the user's module, and `save_pretrained()` of that works. `state` has the backend "axon", and
    as `distributed_type` accelerate's MULTI_CPU or MULTI_GPU, by which its code goes.

    A process may start and find its model on the servers at a later version: all processes were started again, since
    one had died. Training goes on there: `model.version` is the number of steps made, `prepare()` brings schedulers
    there, and `load_state()` does not go back.

    Args:
        args, kwargs: accelerate's. `cpu` is True by default if there is no GPU, since accelerate requires that for
            several processes.
        server_plugin: the options of wrapped models.

    Raises:
        InvalidRequest: `mixed_precision="fp16"`, whose scaler needs gradients after they have left for the servers; or
            the plugin of another way to shard.
    """

    evaluates_without_ddp = False
    """True if the program would evaluate the module itself under DDP, as Trainer does."""

    def __init__(self, *args: Any, server_plugin: ServerPlugin | None = None, **kwargs: Any) -> None:
        if others := [name for name in _OTHER_PLUGINS if kwargs.get(name) is not None]:
            raise InvalidRequest(
                f"{others[0]} was given, and the model is to be on the shard servers: drop it, or use accelerate's own "
                "Accelerator after torch.distributed.init_process_group('axon')"
            )
        join_group()
        kwargs.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(*args, **kwargs)
        for state in (accelerate.PartialState(), self.state):  # accelerate names the backend it would have chosen
            state.backend = dist.get_backend()
        if self.mixed_precision == "fp16":
            raise InvalidRequest(
                "mixed_precision='fp16' scales losses and looks at gradients, which are on the shard servers by then; "
                "use 'bf16', or axon_ps.parallel.GradScaler in a loop of your own"
            )
        self.server_plugin = server_plugin or ServerPlugin()
        self._wrappers: WeakKeyDictionary[nn.Module, FullyShardedDataParallel] = WeakKeyDictionary()
        self._moved: WeakKeyDictionary[torch.optim.Optimizer, torch.optim.Optimizer] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[FullyShardedDataParallel, int] = WeakKeyDictionary()  # at which version

    # ------------------------------------------------------------------ prepare

    def wrapped(self, model: nn.Module) -> FullyShardedDataParallel:
        """Return the wrapper of a model, which is made if there is none. Every process calls it."""
        if type(model) is FullyShardedDataParallel:
            return model
        if model not in self._wrappers:
            wrapper = self._wrappers[model] = self.server_plugin.wrap(model)
            broadcast_buffers(wrapper, in_training_only=self.evaluates_without_ddp)
            self._found[wrapper] = wrapper.version
            if wrapper.version:
                _logger.warning("%s was found on the servers, after %d steps", wrapper.name, wrapper.version)
        return self._wrappers[model]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does; models first, since optimizers are moved to where their parameters are.

        Raises:
            InvalidRequest: an optimizer has no counterpart on the servers.
        """
        for given in args:
            if isinstance(given, nn.Module):
                self.wrapped(given)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the wrapper, with accelerate's autocast and compilation."""
        prepared: nn.Module = super().prepare_model(self.wrapped(model), device_placement=False, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Return accelerate's wrapper of the server optimizer."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            if optimizer not in self._moved:
                self._moved[optimizer] = moved(optimizer)
            optimizer = self._moved[optimizer]
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return accelerate's wrapper of the scheduler, which now sets the server optimizer's learning rate.

        It is brought to the job's step, if it goes with the optimizer's steps (`step_scheduler_with_optimizer`).
        """
        of: Any = getattr(scheduler, "optimizer", None)
        scheduler.optimizer = self._moved.get(of, of)
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(scheduler.optimizer, MovedOptimizer) and self.step_scheduler_with_optimizer:
            for _ in range(self._steps_found(scheduler.optimizer.model)):
                prepared.step()
        return prepared

    def _steps_found(self, model: FullyShardedDataParallel) -> int:
        """Return the version at which this process found a model on the servers; 0 once its version has changed."""
        found = self._found.get(model, 0)
        return found if model.version == found else 0

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate: gradients stay here, also with one process, for which accelerate's own does nothing."""
        with getattr(model, "no_sync", nullcontext)():
            yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the user's module."""
        inside: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return inside.module if type(inside) is FullyShardedDataParallel else inside

    # ------------------------------------------------------------------ state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return every parameter and persistent buffer, on the first process; {} on the others."""
        state: dict[str, Any] = super().get_state_dict(model, unwrap) if self.is_main_process else {}
        return state

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save as accelerate does, with the servers' checkpoint in place of models' weights. Every process calls it."""
        with self._without_models() as models:
            path = super().save_state(output_dir, safe_serialization, **kwargs)
        if models:
            save_servers(models[0], Path(path) / SERVERS_DIRECTORY)  # all models of the job are in it
        return path

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a state that `save_state` wrote, as accelerate does. Every process calls it.

        Nothing is loaded, and a warning is logged, if this process has found the job under way and has made no step
        yet: the servers have newer values. So the same line serves a restart, too.
        """
        if found := max(map(self._steps_found, self._found), default=0):
            _logger.warning("%s is not loaded: the job is at step %d, training goes on there", input_dir, found)
            return
        with self._without_models() as models:
            super().load_state(input_dir, load_kwargs, **kwargs)
        for model in models:
            load_servers(model, Path(self._loaded_from(input_dir)) / SERVERS_DIRECTORY)

    def _loaded_from(self, input_dir: str | None) -> str:
        if input_dir is not None:
            return os.path.expanduser(input_dir)
        saved = Path(self.project_dir, "checkpoints").iterdir()  # accelerate's automatic names
        return str(max(saved, key=lambda path: int(path.name.rpartition("_")[2])))

    @contextmanager
    def _without_models(self) -> Iterator[list[FullyShardedDataParallel]]:
        """Hide the models on the servers from accelerate inside of the block, which is given them."""
        before: list[nn.Module] = self._models
        ours = [model for model in before if type(model) is FullyShardedDataParallel]
        self._models: list[nn.Module] = [model for model in before if type(model) is not FullyShardedDataParallel]
        try:
            yield ours
        finally:
            self._models = before


def join_group() -> None:
    """Ensure a default process group and a world: over axon, unless the program has made another group before."""
    if not dist.is_initialized():
        dist.init_process_group("axon")
    elif World.current() is None:
        _logger.warning(
            "the default process group is over %s: models are on the shard servers, and what accelerate gathers by "
            "itself goes over that. Call torch.distributed.init_process_group('axon') before TrainingArguments and "
            "Accelerator to have one of both",
            dist.get_backend(),
        )
        World.init()


__all__ = ["SERVERS_DIRECTORY", "Accelerator", "ServerPlugin", "join_group"]
