"""The buffers of a wrapped module (running statistics, counters, constants), at the beginning and in checkpoints.

Shard servers have no buffers, so these are each worker's own once training has begun. Training begins with those of the
worker of lowest rank, non-persistent ones too, as under torch's DDP and with FSDP's `sync_module_states`. A checkpoint
has the persistent ones of that worker, as a safetensors file by the names that state dicts have. After a restore, by
any process, every worker takes them.

Note: [Between a worker and a checkpoint]
    With servers the coordinator writes the file, from what workers have attached in the job's key-value store
    (`coordinator.client.attachments`). The worker of lowest rank attaches its buffers when it orders a checkpoint. For
    automatic checkpoints it does so after a committed step, at most every `CADENCE_S`. So an automatic checkpoint may
    have buffers that are older than its parameters by that time. A restore puts the buffers there too, with the epoch
    that it begins. A worker compares that with its own epoch.

    The worker that gives a model its first values attaches its buffers before them. So the others find the buffers when
    the model has values. Non-persistent buffers are attached under a key that no checkpoint includes. In a job that
    resumes no worker gives first values, so the worker of lowest rank attaches them before it registers the model: the
    others register later. A worker that joins takes the job's buffers.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.coordinator.attachments import UNSAVED, Attachment
from axon_ps.errors import AxonError, Busy, CheckpointCorrupt, InvalidRequest
from axon_ps.parallel.ddp import replicas
from axon_ps.parallel.fsdp.wrap import name_in_states
from axon_ps.types import BUFFERS
from axon_ps.worker.steps.view import ModelView
from axon_ps.worker.world import World

CADENCE_S: Final = 10.0
"""Least seconds between two times that buffers are attached without an order for a checkpoint."""

_NAMED: Final = 5
"""The most names in a message."""

_logger = logging.getLogger(__name__)


class ModuleBuffers:
    """The buffers of a module, by default the persistent ones.

    Args:
        module: the user's module.
        dtypes: by name, the original dtype of each buffer that `MixedPrecision.buffer_dtype` cast.
    """

    def __init__(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._module = module
        self._dtypes = dtypes

    def named(self, *, persistent: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers by the names that state dicts have. Non-persistent ones that cannot be sent are left out."""
        for prefix, child in self._module.named_modules(remove_duplicate=False):
            for name, buffer in child._buffers.items():
                if buffer is None or (name not in child._non_persistent_buffers_set) != persistent:
                    continue
                if persistent or _can_be_sent(buffer):
                    yield name_in_states(f"{prefix}.{name}" if prefix else name), buffer

    def described(self) -> list[str]:
        """Return a line for each buffer that can be sent."""
        return [f"{name}: {b.dtype}{list(b.shape)}, a buffer" for name, b in self._all()]

    def broadcast(self, group: ProcessGroup) -> list[str]:
        """Take the buffers of a group's first rank, persistent or not. Every rank calls it.

        Returns:
            The names of those that differed.
        """
        own = self._all()
        values = [buffer.detach().clone(memory_format=torch.contiguous_format) for _, buffer in own]
        replicas.broadcast(group, values)
        return _set((name, buffer, value) for (name, buffer), value in zip(own, values, strict=True))

    def _all(self) -> list[tuple[str, torch.Tensor]]:
        found = ((name, b) for kind in (True, False) for name, b in self.named(persistent=kind) if _can_be_sent(b))
        return list({id(b): (name, b) for name, b in found}.values())

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return a value that changes with torch's version counters of the persistent buffers."""
        return tuple((id(buffer), buffer._version) for _, buffer in self.named() if not buffer.is_inference())

    def encoded(self, *, persistent: bool = True) -> bytes | None:
        """Return a safetensors file of the buffers, or None if there are none.

        Raises:
            InvalidRequest: one is of a dtype that the format does not have.
        """
        tensors = {
            name: buffer.detach().to("cpu", self._dtypes.get(name, buffer.dtype), copy=True).contiguous()
            for name, buffer in self.named(persistent=persistent)
        }
        try:
            return save(tensors) if tensors else None
        except (SafetensorError, KeyError, ValueError) as error:
            kinds = ", ".join(sorted({str(t.dtype) for t in tensors.values()}))
            raise InvalidRequest(
                f"buffers of {kinds} cannot be saved ({error}); register what need not be with persistent=False"
            ) from error

    def load(self, content: bytes | None, source: str, *, persistent: bool = True) -> list[str]:
        """Take the values of a safetensors file, and log the names that one side lacks.

        Args:
            content: the file; None = there is none, as in older checkpoints, or for a module that had no buffers.
            source: its origin, for messages.
            persistent: True if it has the persistent buffers, False if it has the others.

        Returns:
            The names of those that had other values.

        Raises:
            CheckpointCorrupt: it is not a safetensors file.
            InvalidRequest: a buffer has another shape; none is changed then.
        """
        own = dict(self.named(persistent=persistent))
        if content is None:
            if own:
                _logger.warning("%s has no buffers: %s stay as they are", source, listed(map(repr, own)))
            return []
        try:
            given = load(content)
        except (SafetensorError, ValueError, KeyError) as error:  # or of a dtype that torch does not have
            raise CheckpointCorrupt(f"the buffers of {source} are damaged: {error!r:.300}") from error
        for name, buffer in own.items():
            if name in given and given[name].shape != buffer.shape:
                raise InvalidRequest(
                    f"buffer {name!r} has shape {list(given[name].shape)} in {source} and {list(buffer.shape)} in the "
                    "model"
                )
        differ = _set((name, buffer, given[name]) for name, buffer in own.items() if name in given)
        if missing := [name for name in own if name not in given]:
            _logger.warning("%s lacks buffers: %s stay as they are", source, listed(map(repr, missing)))
        if unknown := [name for name in given if name not in own]:
            _logger.warning("%s has buffers that the model lacks: %s", source, listed(map(repr, unknown)))
        return differ


class ServedBuffers:
    """The buffers of a model on the servers. See Note: [Between a worker and a checkpoint].

    Args:
        world: the worker.
        name: the model's name in the job.
        buffers: its buffers.
    """

    def __init__(self, world: World, name: str, buffers: ModuleBuffers) -> None:
        self._world = world
        self._name = name
        self._view: ModelView | None = None
        self._buffers = buffers
        self._key = f"{BUFFERS}{name}"
        self._unsaved_key = f"{UNSAVED}{self._key}"
        self._epoch = 0  # of the buffers
        self._state: Any = None  # of the buffers that were attached last
        self._attached_s = -CADENCE_S
        self._attaching: Future[None] | None = None
        self._first: dict[str, Attachment] = {}  # this worker's own, by key

    def prepare(self) -> None:
        """Attach the non-persistent buffers before the model is registered, if the job is to have this worker's.

        Raises:
            InvalidRequest: the persistent ones cannot be saved; every worker raises it, since each encodes its own.
        """
        if (content := self._buffers.encoded()) is not None:
            self._first[self._key] = Attachment.made(self._key, content)
        if (content := self._buffers.encoded(persistent=False)) is not None:
            self._first[self._unsaved_key] = Attachment.digest(content)
            if self._world.is_main_process and not self._world.attachments.header(self._unsaved_key).sha256:
                self._attach_unsaved(content)

    def give(self) -> None:
        """Attach this worker's buffers, before it gives the model first values."""
        if (content := self._buffers.encoded(persistent=False)) is not None:
            self._attach_unsaved(content)
        if self._key in self._first:
            self._world.attachments.attach(self._key, self._first[self._key])

    def begin(self, view: ModelView, *, given: bool) -> list[str]:
        """Take the job's buffers of a registered model that has values.

        Args:
            view: the model.
            given: True if this worker has given the values.

        Returns:
            The names of the buffers that were changed; of persistent ones, only before the model's first step.

        Raises:
            InvalidRequest: some differ in shape, or differ and are too large to be sent.
        """
        self._view, weak = view, weakref.ref(self)
        self._world.attachments.register(
            self._key, lambda: None if (found := weak()) is None else found._buffers.encoded()
        )
        own, self._first = self._first, {}
        if given:
            self._epoch = view.epoch
            return []
        begins = view.latest == (0, 0)
        differ = self._take(view, own.get(self._key))
        return [*(differ if begins else ()), *self._take_unsaved(own.get(self._unsaved_key), begins=begins)]

    def follow(self) -> None:
        """Take the buffers that came with a restore, if there was one."""
        if self._view is not None and self._view.epoch != self._epoch:
            self._take(self._view)

    def offer(self) -> None:
        """Attach changed buffers in the background. It is called after a committed step."""
        if not self._world.is_main_process or time.monotonic() < self._attached_s + CADENCE_S:
            return
        if (attaching := self._attaching) is not None:
            if not attaching.done():
                return
            if isinstance(error := attaching.exception(), AxonError):
                _logger.warning("the buffers of %r were not stored for automatic checkpoints: %s", self._name, error)
        self._attached_s = time.monotonic()
        if (state := self._buffers.state()) != self._state and (content := self._buffers.encoded()) is not None:
            self._state, self._attaching = state, self._world.attachments.offer(self._key, content)

    def release(self) -> None:
        """Give up the model's buffers: later checkpoints do not have them."""
        self._world.attachments.forget(self._key)
        for key in (self._key, self._unsaved_key):
            self._world.attachments.remove(key)

    def _take(self, view: ModelView, joins_with: Attachment | None = None) -> list[str]:
        epoch, attachments = view.epoch, self._world.attachments
        header = attachments.header(self._key)
        self._epoch = epoch
        if header.epoch == epoch and epoch:  # else the parameters were replaced, by load_state_dict, say
            return self._buffers.load(attachments.read(self._key), f"the checkpoint at {header.source}")
        if joins_with is not None and header.blocks and header.sha256 != joins_with.header.sha256:
            return self._buffers.load(attachments.read(self._key), "the job")
        return []

    def _attach_unsaved(self, content: bytes) -> None:
        """Attach the non-persistent buffers. If they are too large for the store, attach their hash."""
        try:
            self._world.attachments.attach(self._unsaved_key, content)
        except (InvalidRequest, Busy):
            self._world.attachments.attach(self._unsaved_key, Attachment.digest(content))

    def _take_unsaved(self, own: Attachment | None, *, begins: bool) -> list[str]:
        header = self._world.attachments.header(self._unsaved_key)
        if own is None or header.sha256 in ("", own.header.sha256):
            return []
        try:
            if not header.blocks:
                names = listed(repr(name) for name, _ in self._buffers.named(persistent=False))
                raise InvalidRequest(
                    f"the buffers {names} of model {self._name!r} differ between this rank and the lowest, and are "
                    "too large to be sent to the others; give them the same values on every rank"
                )
            content = self._world.attachments.read(self._unsaved_key)
            return self._buffers.load(content, "the job", persistent=False)
        except InvalidRequest as error:
            if begins:
                raise
            _logger.warning("%s: this worker's own stay as they are", error)  # the program was changed meanwhile
            return []


def _can_be_sent(buffer: torch.Tensor) -> bool:
    """Return True for a plain dense tensor of a dtype that safetensors has."""
    if type(buffer) is not torch.Tensor or buffer.layout != torch.strided or buffer.is_quantized:
        return False
    return not (buffer.is_conj() or buffer.is_neg()) and buffer.dtype not in (torch.complex32, torch.complex128)


@torch.no_grad()
def _set(values: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """Give buffers values, and return the names of those whose bits differed. Equal ones are not written."""
    differ = []
    for name, buffer, value in values:
        given = value.to(buffer.device, buffer.dtype)
        if not torch.equal(_bits(buffer), _bits(given)):
            differ.append(name)
            buffer.copy_(given)
    return differ


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def listed(names: Iterable[str]) -> str:
    """Return the first few of names, and the number of the others, for a message."""
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


__all__ = ["CADENCE_S", "ModuleBuffers", "ServedBuffers", "listed"]
