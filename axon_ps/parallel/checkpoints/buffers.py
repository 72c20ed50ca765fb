"""The persistent buffers of a wrapped module in checkpoints: running statistics, counters, constants.

Shard servers have parameters, so buffers are each worker's own. A checkpoint has those of the worker of lowest rank, as
torch's DDP broadcasts rank 0's, as a safetensors file by the names that state dicts have. After a restore every worker
takes them, whoever ordered it.

Note: [Between a worker and a checkpoint]
    With servers the coordinator writes the file, from what workers have attached in the job's key-value store
    (`coordinator.client.attachments`). The worker of lowest rank attaches its buffers when it orders a checkpoint. For
    those that nobody orders it does so after a committed step, at most every `CADENCE_S`: an automatic checkpoint may
    have buffers that are so much older than its parameters. A restore puts the buffers there too, with the epoch that
    it begins; a worker compares that with the epoch which it computes with. A worker that joins takes what is there.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from axon_ps.errors import AxonError, CheckpointCorrupt, InvalidRequest
from axon_ps.parallel.fsdp.wrap import name_in_states
from axon_ps.types import BUFFERS
from axon_ps.worker.steps.view import ModelView
from axon_ps.worker.world import World

CADENCE_S: Final = 10.0
"""Seconds between two times that buffers are attached without a checkpoint being ordered."""

_NAMED: Final = 5
"""How many names a message has."""

_logger = logging.getLogger(__name__)


class ModuleBuffers:
    """The persistent buffers of a module.

    Args:
        module: the user's module.
        dtypes: by name, the dtype that those were built with that `MixedPrecision.buffer_dtype` cast.
    """

    def __init__(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._module = module
        self._dtypes = dtypes

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the names that state dicts have."""
        for prefix, child in self._module.named_modules(remove_duplicate=False):
            for name, buffer in child._buffers.items():
                if buffer is not None and name not in child._non_persistent_buffers_set:
                    yield name_in_states(f"{prefix}.{name}" if prefix else name), buffer

    def state(self) -> tuple[tuple[int, int], ...]:
        """Changes when a buffer does, as far as torch counts."""
        return tuple((id(buffer), buffer._version) for _, buffer in self.named() if not buffer.is_inference())

    def encoded(self) -> bytes | None:
        """A safetensors file of them; None where there are none.

        Raises:
            InvalidRequest: one is of a dtype that the format does not have.
        """
        tensors = {
            name: buffer.detach().to("cpu", self._dtypes.get(name, buffer.dtype), copy=True).contiguous()
            for name, buffer in self.named()
        }
        try:
            return save(tensors) if tensors else None
        except (SafetensorError, KeyError, ValueError) as error:
            kinds = ", ".join(sorted({str(t.dtype) for t in tensors.values()}))
            raise InvalidRequest(
                f"buffers of {kinds} cannot be saved ({error}); register what need not be with persistent=False"
            ) from error

    def load(self, content: bytes | None, source: str) -> None:
        """Take the values of a safetensors file; the names that one side lacks are logged.

        Args:
            content: the file; None = there is none, since it was written before buffers were, or the module had none.
            source: where it comes from, for messages.

        Raises:
            CheckpointCorrupt: it is no safetensors file.
            InvalidRequest: a buffer has another shape; none is changed then.
        """
        own = dict(self.named())
        if content is None:
            if own:
                _logger.warning("%s has no buffers: %s stay as they are", source, _listed(own))
            return
        try:
            given = load(content)
        except (SafetensorError, ValueError) as error:
            raise CheckpointCorrupt(f"the buffers of {source} are damaged: {error}") from error
        for name, buffer in own.items():
            if name in given and given[name].shape != buffer.shape:
                raise InvalidRequest(
                    f"buffer {name!r} has shape {list(given[name].shape)} in {source} and {list(buffer.shape)} in the "
                    "model"
                )
        with torch.no_grad():
            for name, buffer in own.items():
                if name in given:
                    buffer.copy_(given[name])
        if missing := [name for name in own if name not in given]:
            _logger.warning("%s lacks buffers: %s stay as they are", source, _listed(missing))
        if unknown := [name for name in given if name not in own]:
            _logger.warning("%s has buffers that the model lacks: %s", source, _listed(unknown))


class ServedBuffers:
    """Those of a model on the servers; see Note: [Between a worker and a checkpoint].

    Args:
        world: the worker.
        view: the model.
        buffers: its buffers.
    """

    def __init__(self, world: World, view: ModelView, buffers: ModuleBuffers) -> None:
        self._world = world
        self._view = view
        self._buffers = buffers
        self._key = f"{BUFFERS}{view.name}"
        self._epoch = 0  # that the buffers are of
        self._state: Any = None  # what was attached last
        self._attached_s = -CADENCE_S
        self._attaching: Future[None] | None = None
        own = weakref.ref(self)
        world.attachments.register(self._key, lambda: None if (found := own()) is None else found._buffers.encoded())
        if view.latest > (0, 0):
            self._take(joined=True)

    def follow(self) -> None:
        """After a restore, take the buffers that came with it."""
        if self._view.epoch != self._epoch:
            self._take()

    def offer(self) -> None:
        """After a committed step: attach what has changed, in the background."""
        if not self._world.is_main_process or time.monotonic() < self._attached_s + CADENCE_S:
            return
        if (attaching := self._attaching) is not None:
            if not attaching.done():
                return
            if isinstance(error := attaching.exception(), AxonError):
                _logger.warning(
                    "the buffers of %r were not stored for automatic checkpoints: %s", self._view.name, error
                )
        self._attached_s = time.monotonic()
        if (state := self._buffers.state()) != self._state and (content := self._buffers.encoded()) is not None:
            self._state, self._attaching = state, self._world.attachments.offer(self._key, content)

    def release(self) -> None:
        """The model is given up: later checkpoints do not have them."""
        self._world.attachments.forget(self._key)
        self._world.attachments.remove(self._key)

    def _take(self, *, joined: bool = False) -> None:
        epoch = self._view.epoch
        header = self._world.attachments.header(self._key)
        if header.epoch == epoch and epoch:  # else the parameters were replaced, by load_state_dict, say
            self._buffers.load(self._world.attachments.read(self._key), f"the checkpoint at {header.source}")
        elif joined and header.blocks:
            self._buffers.load(self._world.attachments.read(self._key), "the job")
        self._epoch = epoch


def _listed(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


__all__ = ["CADENCE_S", "ModuleBuffers", "ServedBuffers"]
