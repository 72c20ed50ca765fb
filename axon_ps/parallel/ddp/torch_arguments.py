"""torch's keyword arguments of FSDP and DDP: each is translated to ours, has no effect, or is refused by name.

A table has every argument of torch's wrapper that ours has not under that name. A new one of torch, which is in no
table, is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.types import parse_member

Translation: TypeAlias = Callable[[str, Any], dict[str, Any]]
"""From an argument's name and value to ours."""

Table: TypeAlias = Mapping[str, Translation]


@dataclass(frozen=True)
class _No:
    """True or False, which changes no value here.

    Attributes:
        why: the reason, for readers.
    """

    why: str

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} is {value!r}; give True or False, or leave it out: it has no effect here")
        return {}


@dataclass(frozen=True)
class _Only:
    """An argument that may have some values only.

    Attributes:
        values: these.
        do: the alternative, for the error.
    """

    values: tuple[Any, ...]
    do: str

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if not any(value is other for other in self.values):
            raise InvalidRequest(f"{name} is {value!r}; {self.do}")
        return {}


def as_ours(wrapper: str, table: Table, given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for some of torch's.

    Args:
        wrapper: the wrapper, for errors.
        table: its table.
        given: torch's arguments.
        own: ours, as they were given beside.

    Raises:
        InvalidRequest: an argument is unknown, has no meaning here, or was given in both spellings.
    """
    ours: dict[str, Any] = {}
    for name, value in given.items():
        if name not in table:
            raise InvalidRequest(f"{wrapper} has no argument {name!r}; remove it, or correct its name")
        for key, meaning in table[name](name, value).items():
            if key in ours or own.get(key):
                raise InvalidRequest(f"{wrapper} was given {key!r} twice, once as {name!r}; pass one of them")
            ours[key] = meaning
    return ours


def mesh_sizes(name: str, mesh: Any) -> tuple[int, ...]:
    """Return the sizes of torch's `DeviceMesh`; () = none is given.

    Raises:
        InvalidRequest: it is no mesh, or has more than two dimensions.
    """
    if mesh is None:
        return ()
    sizes = getattr(mesh, "shape", None)
    if not (isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes)):
        raise InvalidRequest(f"{name} is {mesh!r}; give a torch.distributed.device_mesh.DeviceMesh, or None")
    if len(sizes) > 2:
        raise InvalidRequest(f"{name} has {len(sizes)} dimensions; give one (shard) or two (replicate, shard)")
    return sizes


def line_of(mesh: Any) -> tuple[int, ...]:
    """Return the ranks in torch's `DeviceMesh` of the workers that are replicas; () = the mesh has no other axes."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    ranks = getattr(mesh, "mesh", None)
    if root is None or ranks is None or root.ndim == mesh.ndim:
        return ()
    if ranks.ndim > 1 and ranks.numel() == root.mesh.numel():  # the other axes have one worker
        return ()
    return tuple(map(int, ranks.flatten().tolist()))


def _renamed(ours: str) -> Translation:
    return lambda _, value: {ours: value}


def _group(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.distributed.ProcessGroup):
        if value.size() != torch.distributed.get_world_size():
            raise InvalidRequest(
                f"{name} is a group of {value.size()} of {torch.distributed.get_world_size()} ranks; give None for all "
                "of them, or as `group` one of axon_ps (world.new_group)"
            )
        return {}
    if isinstance(value, tuple):
        raise InvalidRequest(f"{name} is a pair of groups; give sharding_strategy='hybrid_shard' and intra_node_size=")
    return {} if value is None else {"group": value}


def _ignored(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, (str, torch.Tensor, nn.Module)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is {value!r}; give a list of parameters or of modules")
    each = ([*one.parameters()] if isinstance(one, nn.Module) else [one] for one in value)
    return {"ignored_parameters": [param for params in each for param in params]}


def _device(name: str, value: Any) -> dict[str, Any]:
    return {"device": torch.device("cuda", value) if type(value) is int and value >= 0 else value}


def _node_size(name: str, mesh: Any) -> dict[str, Any]:
    sizes, line = mesh_sizes(name, mesh), line_of(mesh)
    return {"line": line} if line else {"intra_node_size": sizes[1]} if len(sizes) == 2 else {}


def _one_device(name: str, value: Any) -> dict[str, Any]:
    if value is not None and len(value) > 1:
        raise InvalidRequest(f"{name} has {len(value)} devices; start a worker for each device, with its module there")
    return {}


def _prefetch(name: str, value: Any) -> dict[str, Any]:
    """Check torch's `BackwardPrefetch`, which has no effect, as `forward_prefetch`."""
    if value is not None:
        from torch.distributed.fsdp import BackwardPrefetch

        parse_member(value, BackwardPrefetch, name, also=("None",))
    return {}


def _default(ours: str) -> Translation:
    """None is our default."""
    return lambda _, value: {} if value is None else {ours: value}


_MESH_OF_WORKERS: Final = "a mesh of one dimension is all workers"

FSDP: Final[Table] = {
    "process_group": _group,
    "device_id": _device,
    "ignored_states": _ignored,
    "ignored_modules": _ignored,
    "device_mesh": _node_size,
    "mesh": _node_size,
    "forward_prefetch": _No("the next units are gathered in any case; prefetch=False turns it off"),
    "backward_prefetch": _prefetch,
    "limit_all_gathers": _No("gathers take at most the memory of two units"),
    "use_orig_params": _No("parameters are the user's in any case"),
    "sync_module_states": _No("every model begins with the values of the first worker"),
}

DDP: Final[Table] = {
    "process_group": _group,
    "bucket_cap_mb": _default("bucket_size_mb"),
    "forward_sync_buffers": _default("broadcast_buffers"),
    "device_ids": _one_device,
    "output_device": lambda name, value: {},  # the output is on the module's device
    "dim": _Only((0,), "batches are divided along the first dimension"),
    "init_sync": _Only((True,), "rank 0's values are sent in any case; leave it out"),
    "check_reduction": _No("torch ignores it, too"),
    "static_graph": _No("the order of buckets is that of the last backward in any case"),
    "delay_all_reduce_named_params": _Only((None,), "use no_sync() and sync_gradients()"),
    "param_to_hook_all_reduce": _Only((None,), "use no_sync() and sync_gradients()"),
    "mixed_precision": _Only((None,), "use torch.autocast"),
    "device_mesh": lambda name, mesh: _Only(((), None), _MESH_OF_WORKERS)(name, mesh_sizes(name, mesh)[1:] or None),
    "skip_all_reduce_unused_params": _Only((False,), "use find_unused_parameters=True"),
    "bucket_cap_mb_list": _Only((None,), "use bucket_size_mb"),
    "batched_grad_copy": _No("gradients are copied by bucket in any case"),
}

__all__ = ["DDP", "FSDP", "as_ours", "line_of", "mesh_sizes"]
