"""Checkpoints of a model of which every worker has all parameters (NO_SHARD), in the format of the shard servers.

So a job may go on from its checkpoint with another strategy, from NO_SHARD or to it. `shard.full_model` writes and
reads the values. Saving and loading take memory for a second copy of parameters and moments.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from axon_ps.optim import registry
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers
from axon_ps.parallel.counterpart import counterpart
from axon_ps.parallel.fsdp.no_shard.local_optimizer import LocalOptimizer
from axon_ps.parallel.fsdp.no_shard.replicated_unit import ReplicatedUnit
from axon_ps.shard.full_model import FullModel
from axon_ps.sharding.job import JobSpec
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.contents import read_attached
from axon_ps.storage.manifest import Manifest, read_manifest, write_attached, write_manifest
from axon_ps.types import BUFFERS, Hyper, OptimizerSpec
from axon_ps.worker.checkpoints import CheckpointInfo

_JOB = "no_shard"
"""The job's name in a manifest that no servers wrote."""


class OptimizerMoments:
    """The state, by unit, of one of our optimizers or of torch's. Both have the same names for it.

    Args:
        optimizer: a `LocalOptimizer`, a torch optimizer of the model's parameters, or None.
        flats: every unit, in layout order.

    Attributes:
        spec: the optimizer as servers know it; None without one.

    Raises:
        InvalidRequest: servers do not have this optimizer.
    """

    def __init__(
        self, optimizer: LocalOptimizer | torch.optim.Optimizer | None, flats: Sequence[ReplicatedUnit]
    ) -> None:
        self._flats = flats
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._ours = None if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self.spec: OptimizerSpec | None = None
        if self._ours is not None:
            self.spec = self._ours.spec
        elif self._torch is not None:
            self.spec = _spec_of(self._torch, flats)

    def version(self) -> int:
        """Return the number of steps made: the largest number of updates of a parameter."""
        if self.spec is None:
            return 0
        return max((n for f in self._flats if f.trainable for n in self.updates(f)), default=0)

    def updates(self, flat: ReplicatedUnit) -> list[int]:
        """Return the number of updates of each parameter."""
        if self._ours is not None:
            return list(self._ours.updates[flat.index])
        return [_updates(self._state(p)) for p in flat.params]

    def arrays(self, flat: ReplicatedUnit) -> dict[str, torch.Tensor]:
        """Return the state arrays, f32[unit_numel], by name."""
        if self._ours is not None:
            return self._ours.state[flat.index]
        if self.spec is None:
            return {}
        arrays = {
            name: torch.full((flat.unit.numel,), value, dtype=torch.float32, device="cpu")
            for name, value in registry.initial_states(self.spec).items()
        }
        for spec, param in zip(flat.unit.parameters, flat.params, strict=True):
            for name, array in arrays.items():
                value = self._state(param).get(name)
                if isinstance(value, torch.Tensor):
                    array[spec.offset : spec.end].view(spec.shape).copy_(value)
        return arrays

    def load(
        self,
        flat: ReplicatedUnit,
        arrays: Mapping[str, torch.Tensor],
        updates: Sequence[int],
        saved: OptimizerSpec | None,
    ) -> None:
        """Set the state of a unit from a checkpoint: f32[unit_numel] by name, and updates per parameter.

        `saved` is the checkpoint's optimizer.
        """
        if self._ours is not None:
            if saved is not None:
                self._ours.need((*saved.groups, *saved.moments))
            for name, array in self._ours.state[flat.index].items():
                if name in arrays:
                    array.copy_(arrays[name])
            self._ours.updates[flat.index] = list(updates)
        elif self._torch is not None:
            for spec, param, count in zip(flat.unit.parameters, flat.params, updates, strict=True):
                self._torch.state.pop(param, None)
                if count:
                    state: dict[str, Any] = {
                        name: array[spec.offset : spec.end]
                        .view(spec.shape)
                        .to(flat.master.device, flat.master.dtype, copy=True)
                        for name, array in arrays.items()
                    }
                    if not isinstance(self._torch, torch.optim.SGD):
                        state["step"] = torch.tensor(float(count), dtype=torch.float32, device="cpu")
                    self._torch.state[param] = state

    def _state(self, param: torch.Tensor) -> Mapping[str, Any]:
        return self._torch.state.get(param, {}) if self._torch is not None else {}


def save(
    uri: str,
    spec: JobSpec,
    flats: Sequence[ReplicatedUnit],
    moments: OptimizerMoments,
    extra: Mapping[str, Any],
    version: int,
    states: Mapping[int, FileEntry],
    buffers: ModuleBuffers | None = None,
) -> CheckpointInfo:
    """Write a checkpoint; on one worker.

    Args:
        uri: the checkpoint's URI.
        spec: layout and plan.
        flats: every unit, in layout order, with its masters.
        moments: the optimizer's.
        extra: values that are given back on load.
        version: steps made.
        states: by the rank of a worker, the file of its own state.
        buffers: those of the module.

    Raises:
        StorageFull: no space left; existing files are untouched.
        CheckpointError: it could not be written; existing files are untouched.
    """
    model = FullModel(spec)
    for flat in flats:
        model.set(flat.index, flat.master.detach().to("cpu", torch.float32).numpy(), version)
        if flat.trainable and moments.spec is not None:
            arrays = {name: array.numpy() for name, array in moments.arrays(flat).items()}
            model.set_moments(flat.index, arrays, moments.updates(flat))
    entry = model.write(uri, version)
    content = None if buffers is None else buffers.encoded()
    manifest = Manifest(
        job=_JOB,
        version=version,
        layout=spec.layout,
        optimizer=moments.spec,
        num_servers=1,
        options=spec.options,
        files=(entry,),
        extra=dict(extra),
        attached={} if content is None else write_attached(uri, {BUFFERS: content}),
        states=states,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        uri=uri,
    )
    write_manifest(uri, manifest)
    return _info(manifest)


def load(
    uri: str,
    spec: JobSpec,
    flats: Sequence[ReplicatedUnit],
    moments: OptimizerMoments,
    name: str = "",
    buffers: ModuleBuffers | None = None,
) -> CheckpointInfo:
    """Read a checkpoint of any strategy into masters, moments and buffers; on every worker.

    Moments are loaded if they are of the same kind of optimizer. `name` is the model's, if the checkpoint has several.

    Raises:
        InvalidRequest: it lacks the model or a parameter, or has a parameter in another shape.
        CheckpointError: it cannot be read, or is damaged; masters and moments are untouched then.
    """
    model = FullModel(spec)
    section = read_manifest(uri).section(name)
    manifest = model.read(section)
    if buffers is not None:
        key = f"{BUFFERS}{section.name}"
        content = read_attached(section, key) if key in section.attached else None
        buffers.load(content, f"the checkpoint at {section.uri}")
    saved = manifest.optimizer
    ours = moments.spec is not None and saved is not None and moments.spec.name == saved.name
    for flat in flats:
        with torch.no_grad():
            flat.master.copy_(torch.from_numpy(model.values(flat.index)))
        if flat.trainable and ours:
            state, updates = model.moments(flat.index)
            arrays = {name: torch.from_numpy(array) for name, array in state.items()}
            moments.load(flat, arrays, updates, saved)
    return _info(manifest)


def _info(manifest: Manifest) -> CheckpointInfo:
    return CheckpointInfo(
        uri=manifest.uri,
        version=manifest.version,
        bytes=manifest.bytes,
        extra=manifest.extra,
        optimizer="" if manifest.optimizer is None else manifest.optimizer.name,
        hyper=() if manifest.optimizer is None else manifest.optimizer.groups,
        states=manifest.states,
    )


def _updates(state: Mapping[str, Any]) -> int:
    """Return torch's `step`. SGD has none: return 1 if it has a momentum buffer, else 0."""
    return int(state["step"]) if "step" in state else int(any(v is not None for v in state.values()))


def _spec_of(optimizer: torch.optim.Optimizer, flats: Sequence[ReplicatedUnit]) -> OptimizerSpec:
    name, hypers = counterpart(optimizer, "save with optimizer=None, and its state_dict() beside it")
    groups: list[Hyper] = []
    for hyper in hypers:
        beta1, beta2 = hyper.pop("betas", (None, None))
        values = {**hyper, **({} if beta1 is None else {"beta1": beta1, "beta2": beta2})}
        groups.append({key: float(value) for key, value in values.items()})
    group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return OptimizerSpec(
        name=name,
        groups=tuple(groups),
        group_of=tuple(group_of.get(p, -1) if f.trainable else -1 for f in flats for p in f.params),
    )
