"""torch's optimizers and their schedulers, moved to the shard servers for the framework adapters.

A framework's program makes `torch.optim.AdamW(model.parameters())` before it hands model and optimizer over. Here that
becomes a server optimizer with the same groups and hyperparameters. It also becomes the scheduler's optimizer.
Buffers are in the servers' checkpoint. An older checkpoint has them in a file beside it.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import nn

from axon_ps.errors import StepAborted
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.counterpart import counterpart
from axon_ps.parallel.ddp import replicas
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.optim import ServerOptimizer, owner_of
from axon_ps.types import NO_GRADIENTS, StepResult
from axon_ps.worker.world import World

RESENDS: Final = 8
"""Repeats of an aborted step from the gradients that were sent, before its abort is an error."""

BUFFERS_FILE: Final = "buffers.safetensors"


class MovedOptimizer(ServerOptimizer):
    """A server optimizer in the place of one of torch's, for a framework's training loop.

    The two have the same `param_groups`. So a step applies the values that a scheduler, a callback or the program sets
    in either of them.

    A step that was aborted by the death of a shard server is made again from the same gradients. So no batch is
    lost in a loop that ignores the result.

    Args:
        original: torch's optimizer; its groups are of parameters of a wrapped model.

    Attributes:
        commits: returns the values to commit with each step; see `ServerOptimizer.step`.
        last: the result of the last step.

    Raises:
        InvalidRequest: it has no counterpart on the servers, or its parameters are not of a wrapped model.
        LayoutMismatch: another worker has made another optimizer.
    """

    def __init__(self, original: torch.optim.Optimizer) -> None:
        name, _ = counterpart(original, "train under torch's DistributedDataParallel over the backend 'axon'")
        self._original: torch.optim.Optimizer | None = None
        super().__init__([dict(group) for group in original.param_groups], name)
        self.defaults.update(original.defaults)  # for groups that are added later, and for schedules to begin from
        self._original = original
        assert self._runtime is not None
        self._runtime.resends, self._runtime.on_abort = RESENDS, self._check_workers
        self._workers = _ids_of_workers()
        self.commits: Callable[[], Mapping[str, Any]] = dict
        self.last: StepResult | None = None
        self._opt_called = False  # read by torch's schedulers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of torch's optimizer."""
        return self._groups if self._original is None else self._original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._original is None:
            self._groups = groups
        else:
            self._original.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take new groups and other state. `load_state_dict` calls this."""
        self.param_groups = state["param_groups"]
        super().__setstate__({key: value for key, value in state.items() if key != "param_groups"})

    def _check_moments(self, model: str | None, version: int) -> None:
        """Check nothing: the frameworks' adapters bring moments back, before or after the state dict."""

    @property
    def model(self) -> FullyShardedDataParallel:
        """The wrapped model whose parameters it has."""
        return owner_of(self.param_groups)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, commit: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Make a step as in `ServerOptimizer.step`, but raise an error if it is aborted.

        If no worker has a gradient, nothing happens, as in torch. If the gradients of the step before were not dropped,
        there is a warning then, because torch would apply them again.

        Raises:
            StepAborted: a worker has left or joined; or the parameters were replaced meanwhile (all servers of a slice
                died, and the servers went on from a checkpoint); or attempt after attempt was aborted.
        """
        assert self._original is not None
        self._opt_called = self._original._opt_called = True  # type: ignore[attr-defined]
        self._check_workers()
        if closure is not None:
            with torch.enable_grad():
                closure()
        assert self._runtime is not None
        stale = self._runtime.sent.retains and not self._runtime.has_gradients
        if stale:
            self._runtime.sent.forget()
        result = super().step(commit={**self.commits(), **(commit or {})})
        if not result.committed and result.reason != NO_GRADIENTS and math.isfinite(result.grad_norm):
            raise StepAborted(
                f"the step was aborted, also when its gradients were sent again: {result.reason}. The batch is lost to "
                "this loop; start the script again, it goes on where the servers are"
            )
        if result.reason == NO_GRADIENTS and stale:
            warnings.warn(
                "this step had no backward, and the gradients of the step before were not dropped (zero_grad()): "
                "torch's optimizer would apply them a second time; on the shard servers nothing is changed",
                stacklevel=2,
            )
        self.last = result
        return result

    def _check_workers(self) -> None:
        """Raise if a worker has left or joined, since the framework's process group has ended then.

        The worker's replacement makes a new group, and waits in it for the workers that start again. So no worker may
        wait for its vote.
        """
        if _ids_of_workers() != self._workers:
            raise StepAborted(
                "a worker has left the job, and with it the process group of the training framework ended; start this "
                "process again, too (axon-ps run --max-restarts 3 does): it goes on where the servers are"
            )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or torch warns of a scheduler that was made before


def _ids_of_workers() -> set[str]:
    world = World.current()
    return set() if world is None else {member.id for member in world.membership.workers}


def moved(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the server optimizer that replaces one of torch's.

    Our optimizers, and those of other parameters, are returned as they are.
    """
    if isinstance(optimizer, ServerOptimizer):
        return optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(hasattr(param, "_axon_home") for param in params):
        return optimizer
    return _by_name(type(optimizer).__name__)(optimizer)


@functools.cache
def _by_name(name: str) -> type[MovedOptimizer]:
    """Return the class with another name, which frameworks log: a learning rate is "lr-AdamW"."""
    return type(name, (MovedOptimizer,), {"__module__": __name__})


def broadcast_buffers(model: FullyShardedDataParallel, *, in_training_only: bool = False) -> None:
    """Broadcast the first worker's buffers to all workers when a forward begins, as DDP does.

    Without this each worker has buffers of its own. If the last forward was one of training, the next one begins with a
    broadcast, in which every worker of the model takes part.

    Args:
        model: the wrapper.
        in_training_only: True if forwards without gradients take no part, since a framework evaluates outside of DDP.
    """
    pending = True
    wrapper = weakref.ref(model)

    @uncompiled
    def before_forward(module: nn.Module, args: Any) -> None:
        nonlocal pending
        if in_training_only and not torch.is_grad_enabled():
            return
        found = wrapper()
        buffers = [] if found is None else list(found.buffers())
        if pending and found is not None and buffers and found.process_group.world_size > 1:
            replicas.broadcast(found.process_group, buffers)
        pending = torch.is_grad_enabled() and found is not None and found.runtime.accumulation.syncing

    model.register_forward_pre_hook(before_forward)


def save_servers(model: FullyShardedDataParallel, directory: str | os.PathLike[str]) -> None:
    """Have the servers write a checkpoint into a directory. Every worker calls it.

    Args:
        model: a wrapped model; all models of the job are in the checkpoint.
        directory: the checkpoint's, which all workers and servers reach by the same path.

    Raises:
        CheckpointError: it could not be written.
    """
    directory = Path(directory).absolute()  # the servers have another working directory
    model.save_checkpoint(str(directory))


def load_servers(model: FullyShardedDataParallel, directory: str | os.PathLike[str]) -> None:
    """Load parameters, optimizer state and buffers that `save_servers` wrote. Every worker calls it.

    Raises:
        CheckpointError: it cannot be read.
        InvalidRequest: it was saved from another model.
    """
    directory = Path(directory).absolute()
    model.load_checkpoint(str(directory))
    if (directory / BUFFERS_FILE).exists():
        load_buffers(model, load_file(directory / BUFFERS_FILE))


def load_buffers(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy the buffers in a state dict into a module."""
    with torch.no_grad():
        for name, buffer in _buffers(model):
            if name in state:
                buffer.copy_(state[name])


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that state dicts have, by name."""
    skipped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in skipped]


__all__ = ["MovedOptimizer", "broadcast_buffers", "load_buffers", "load_servers", "moved", "save_servers"]
