"""The moments of torch's optimizers on the servers, in the form of torch's `optimizer.state`.

Each worker reads them by itself, as it gathers parameters.

Note: [Through files]
    Servers take moments in checkpoints alone. So they write one into a temporary directory of the worker of lowest
    rank. That worker changes the moments in it, in a mesh each worker of its replica those of the units that it pushes.
    Then the servers restore it. If workers and servers are on several hosts, TMPDIR must be a directory that all of
    them reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from axon_ps.errors import CheckpointError, ConfigurationError, InvalidRequest
from axon_ps.optim.registry import create, initial_states
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.mesh.boxes import box_in, box_of, like
from axon_ps.parallel.fsdp.on_servers.served_masters import ServedMasters
from axon_ps.parallel.optim import ServerOptimizer, in_our_names
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import read_manifest, write_manifest
from axon_ps.types import OptimizerSpec
from axon_ps.worker.world import world_of

if TYPE_CHECKING:
    from axon_ps.shard.full_model import FullModel

Names: TypeAlias = Mapping[torch.Tensor, Sequence[str]]
"""Per trained parameter, the names of its entries in torch's state."""

States: TypeAlias = dict[torch.Tensor, dict[str, torch.Tensor]]

_STEP: Final = "step"
_WRITTEN: Final = "the moments were not loaded, since that failed"
_HINT: Final = (
    "moments of a state dict come to the shard servers through files in a temporary directory: set TMPDIR to a "
    "directory that workers and servers reach; or leave them out of the state dict, and save and load them with "
    "sharded_model(model).save_checkpoint(uri, optimizer) and load_checkpoint(uri, optimizer)"
)


def names_of(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> Names:
    """Return the names for the parameters of these groups. The optimizer is named as in `axon_ps.optim`."""
    rules = create(optimizer)
    found: dict[torch.Tensor, list[str]] = {}
    for group in groups:
        names = list(rules.state_names((rules.validate(in_our_names(rules, group)),)))
        names += [] if optimizer == "sgd" else [_STEP]
        found |= {param: names for param in group["params"] if param.requires_grad and names}
    return found


class StateOnServers(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """`optimizer.state`: the moments of each trained parameter, with shapes and without values (device "meta").

    Args:
        names: those of each parameter.
        begin_anew: begins all moments anew.
    """

    def __init__(self, names: Names, begin_anew: Callable[[], None]) -> None:
        self._names = names
        self._begin_anew = begin_anew

    def clear(self) -> None:
        """Begin the moments of all parameters anew."""
        self._begin_anew()

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        shapes = {name: () if name == _STEP else param.shape for name in self._names[param]}
        return {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def initial(spec: OptimizerSpec, names: Names) -> States:
    """Return the state of parameters without an update."""
    values = initial_states(spec)

    def filled(param: torch.Tensor, name: str) -> torch.Tensor:
        if name == _STEP:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        return like(param, torch.full(box_of(param).shape, values[name], dtype=torch.float32, device="cpu"))

    return {param: {name: filled(param, name) for name in of} for param, of in names.items()}


def read(model: FullyShardedDataParallel, spec: OptimizerSpec, states: States) -> None:
    """Fill a state that `initial` returned with the moments on the servers. No other worker takes part.

    Raises:
        StepAborted: the job went on without this worker meanwhile.
        AxonError: the servers cannot send them.
    """
    masters, initially = model.runtime.masters, initial_states(spec)
    assert isinstance(masters, ServedMasters)
    wanted = {
        flat: {name: initially[name] for param in flat.params for name in states.get(param, ()) if name != _STEP}
        for flat in model.runtime.flats
    }
    flats = [flat for flat, names in wanted.items() if names]
    found = masters.moments((flat.index, wanted[flat]) for flat in flats)
    for flat, (arrays, updates) in zip(flats, found, strict=True):
        for of, param, count in zip(flat.unit.parameters, flat.params, updates, strict=True):
            for name, tensor in states.get(param, {}).items():
                if name == _STEP:
                    tensor.fill_(count)
                else:
                    box_of(tensor).copy_(arrays[name][of.offset : of.end].view(of.shape))


def check(
    model: FullyShardedDataParallel, optimizer: str, names: Names, states: Mapping[torch.Tensor, Mapping[str, Any]]
) -> None:
    """Check that a state is that of an optimizer with these names. Every worker calls it.

    Raises:
        InvalidRequest: it is not.
        Disagreement: it is not on another worker.
    """

    def check_all() -> None:
        for param, state in states.items():
            _check(optimizer, param, state, names.get(param, ()))

    model.runtime.masters.together(_WRITTEN, check_all)


def write(
    model: FullyShardedDataParallel,
    optimizer: ServerOptimizer,
    spec: OptimizerSpec,
    names: Names,
    states: Mapping[torch.Tensor, Mapping[str, Any]],
) -> None:
    """Give the servers the moments of a state that `check` accepted. Every worker calls it.

    Those of the main process count, in a mesh those of its replica. Parameters that the state does not have
    begin anew. Values and version stay.

    Raises:
        AxonError: such a worker cannot write them, or the servers cannot read them.
    """
    values = initial_states(spec)

    def own() -> dict[str, Any] | None:
        """Write the file of this worker's units."""
        if not _writes(model):
            return None
        flats = [flat for flat in model.runtime.flats if flat.pushes]
        units = [flat.index for flat in flats]
        manifest = read_manifest(directory).section(model.name)
        before = _full_model(model, units)
        before.read(manifest)
        full = _full_model(model, units)  # a new one, since the other has digests of the moments before
        for flat in flats:
            full.set(flat.index, before.values(flat.index), manifest.version)
            if not flat.trainable:
                continue
            arrays = {name: np.full(flat.unit.numel, value, np.float32) for name, value in values.items()}
            for of, param in zip(flat.unit.parameters, flat.params, strict=True):
                for name in names.get(param, ()):
                    if name in arrays and param in states:
                        moment = torch.from_numpy(arrays[name][of.offset : of.end]).view(of.shape)
                        moment.copy_(box_in(states[param][name], param))
            full.set_moments(flat.index, arrays, [_updates(states.get(param, {})) for param in flat.params])
        return {"file": dataclasses.asdict(full.write(directory, manifest.version)), "units": units}

    def complete() -> None:
        """Name these files in the manifest."""
        if not world_of(model.process_group).is_main_process:
            return
        entries = [found for found in written if found is not None]
        file_of = {unit: index for index, found in enumerate(entries) for unit in found["units"]}
        changed = dataclasses.replace(
            read_manifest(directory).section(model.name),
            optimizer=spec,
            num_servers=1,
            files=tuple(FileEntry(**found["file"]) for found in entries),
            slices_in=tuple(file_of[s.unit] for s in model.spec.plan(1).numbered),
            others=(),
        )
        write_manifest(directory, changed)

    world = world_of(model.process_group)
    with TemporaryDirectory(prefix="axon_ps-moments-", ignore_cleanup_errors=True) as mine:

        def save() -> str:
            if not world.is_main_process:
                return ""
            world.save_checkpoint(mine)
            return mine

        try:
            directory = next(filter(None, model.runtime.masters.together(_WRITTEN, save)))
            written = model.runtime.masters.together(_WRITTEN, own)
            model.runtime.masters.together(_WRITTEN, complete)
            model.runtime.load(directory, optimizer)
        except (CheckpointError, ConfigurationError) as error:
            error.add_note(_HINT)
            raise


def _writes(model: FullyShardedDataParallel) -> bool:
    """Return True for the main process, and in a mesh for all workers of its replica."""
    world = world_of(model.process_group)
    first = world.membership.numbered(model.spec.grouping).first_worker
    assert first is not None  # this worker is one
    return world.rank == first.rank or world.rank in model.spec.grouping.row_of(first.rank)


def _full_model(model: FullyShardedDataParallel, units: Collection[int]) -> FullModel:
    from axon_ps.shard.full_model import FullModel  # loads numba, which other programs do not need

    return FullModel(model.spec, units)


def _check(optimizer: str, param: torch.Tensor, state: Mapping[str, Any], names: Sequence[str]) -> None:
    if sorted(state) != sorted(names):
        raise InvalidRequest(
            f"the state dict has {', '.join(sorted(state)) or 'nothing'} of a parameter of shape {list(param.shape)}, "
            f"and {optimizer} with these hyperparameters has {', '.join(sorted(names)) or 'nothing'}; load the state "
            "dict of an optimizer of the same type"
        )
    for name, value in state.items():
        wanted = () if name == _STEP else tuple(param.shape)
        if (given := tuple(getattr(value, "shape", ()))) != wanted:
            raise InvalidRequest(f"{name!r} has shape {list(given)} in the state dict, and {list(wanted)} here")


def _updates(state: Mapping[str, Any]) -> int:
    """Return torch's `step`. SGD has none: it is 1 once its momentum is not zero."""
    return int(state[_STEP]) if _STEP in state else int(any(torch.any(box_of(value)) for value in state.values()))
