"""`fully_shard`, and its arguments in their canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.ddp.torch_arguments import line_of, mesh_sizes
from axon_ps.parallel.fsdp.arguments import understood
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.strategy import CPUOffload
from axon_ps.parallel.fsdp.tensors import float8_weights
from axon_ps.parallel.fsdp2 import modules, optimizers
from axon_ps.parallel.fsdp2.marks import Options, checked_mark, mark, mark_of
from axon_ps.parallel.precision import MixedPrecision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_ModuleT = TypeVar("_ModuleT", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: _ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy | MixedPrecision | torch.dtype | str | bool | None = None,
    offload_policy: OffloadPolicy | CPUOffload | str | bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
    retain_frozen: bool = True,
) -> _ModuleT:
    """Put the parameters of a module on the shard servers, in place: torch's `fully_shard`, by signature and manners.

    Call it on the modules whose parameters are gathered together, then on the model that has them. Each call changes
    the class of its module to a subclass that is an `FSDPModule`, too. Names stay. At the first use of the model the
    servers get the values of the worker of lowest rank. An optimizer of torch.optim that has a counterpart here (SGD,
    Adam, AdamW, Adagrad, RMSprop) steps on the servers if it is made of the parameters.

    Args:
        module: the module. Of a list of modules each becomes a unit of its own.
        mesh: torch's `DeviceMesh` of all workers. Of two dimensions, the second is the workers that share a replica
            (HYBRID_SHARD). None = all workers of the current world. A process without one joins the job of its launcher
            at the first use.
        reshard_after_forward: of the units: None = the default of `FullyShardedDataParallel`, True for one of them =
            FULL_SHARD, False for all of them = SHARD_GRAD_OP, a number = HYBRID_SHARD with nodes of so many workers.
            That of the model counts if it has no units; None is False then, as in torch.
        shard_placement_fn: has no effect: the servers divide the values of a unit by number, not by dimension.
        mp_policy: torch's `MixedPrecisionPolicy`, or what `FSDP(mixed_precision=)` takes; the same in all calls for a
            model.
        offload_policy: torch's `CPUOffloadPolicy` (CPUOffload.FULL) or `OffloadPolicy`, or what `FSDP(cpu_offload=)`
            takes.
        ignored_params: parameters that stay each worker's own.
        dp_mesh_dims: None.
        retain_frozen: as of `FullyShardedDataParallel`; False in one call holds for all of the model.

    Returns:
        The module.

    Raises:
        InvalidRequest: an argument cannot be accepted; the message says what can. The first use of the model raises as
            `FullyShardedDataParallel` does.

    After an error: the module is as it was.
    """
    if dp_mesh_dims is not None:
        raise InvalidRequest("dp_mesh_dims is given; give a mesh of the workers that train replicas, as mesh['dp']")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise InvalidRequest(f"shard_placement_fn is {shard_placement_fn!r}; give a function, or None")
    options = Options(
        reshard_after_forward=_reshard(reshard_after_forward),
        mesh=mesh_sizes("mesh", mesh),
        line=line_of(mesh),
        axis=mesh,
        precision=understood("mixed_precision", mp_policy, "mp_policy"),
        offload=understood("cpu_offload", offload_policy, "offload_policy"),
        ignored=understood("ignored_parameters", () if ignored_params is None else ignored_params, "ignored_params"),
        retain_frozen=understood("retain_frozen", retain_frozen),
    )
    given: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in given:
        _check(one)
    for one in given:
        float8_weights.make_plain(one)
        mark(one, options)
        modules.convert(one)
        _cast_at(one, options.precision)
    optimizers.install()
    return module


def sharded_model(module: nn.Module) -> FullyShardedDataParallel:
    """Return the model of a module that `fully_shard` was called on; the servers get its values now at the latest.

    It has what the module has not: `version`, `save_checkpoint()`, `load_checkpoint()`, `summon_full_params()`,
    `full_parameters()`, `no_sync()`, `statistics()`.

    Raises:
        InvalidRequest: `fully_shard` was not called on it; or as of `fully_shard`.
    """
    return checked_mark(module).outermost.built()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a module run like its forward, with its parameters gathered; torch's function of this name.

    Does nothing if `fully_shard` was not called on the module.

    Raises:
        InvalidRequest: there is no such method.
    """
    found = mark_of(module)
    if found is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise InvalidRequest(f"{type(module).__name__} has no method {method_name!r}; give the name of one")
    precision = found.options.precision

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = precision.cast_inputs((args, kwargs))
        output = found.outermost.built().run_method(module, method, *args, **kwargs)
        return precision.cast_output(output)

    module.__dict__[method_name] = run


def _check(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidRequest(f"module is {module!r}; give an nn.Module, or a list of some")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise InvalidRequest(
            f"fully_shard was called on a {type(module).__name__}, which has no forward; call it on the modules in it"
        )


def _reshard(given: Any) -> bool | int | None:
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int) and given > 0:
        return given
    raise InvalidRequest(
        f"reshard_after_forward is {given!r}; give True, False, None, or the number of workers of a node"
    )


def _cast_at(module: nn.Module, precision: MixedPrecision) -> None:
    """Cast floating-point inputs and outputs of a module as torch's `MixedPrecisionPolicy` says."""
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        module.register_forward_pre_hook(
            uncompiled(lambda _, args, kwargs: precision.cast_inputs((args, kwargs))), prepend=True, with_kwargs=True
        )
    if precision.output_dtype is not None:
        module.register_forward_hook(uncompiled(lambda _, args, output: precision.cast_output(output)))


__all__ = ["fully_shard", "register_fsdp_forward_method", "sharded_model"]
