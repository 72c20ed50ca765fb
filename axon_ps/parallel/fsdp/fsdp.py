"""`FullyShardedDataParallel`: a module whose parameters are on the shard servers.

These terms are used here and in the modules below: *unit* (parameters gathered together), *slice* (a range of a unit,
on one or several servers), *replica* (the source of one gradient per step), *version* (the number of committed steps).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.checkpoints import groups, own_state
from axon_ps.parallel.ddp import torch_arguments
from axon_ps.parallel.fsdp import arguments, build, hooks, stats
from axon_ps.parallel.fsdp.flat_unit import ModuleUnit
from axon_ps.parallel.fsdp.forwards import check_idle
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.stats import FSDPMemoryStats, MemoryStats, UnitBytes
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.fsdp.tensors.sent_gradients import Home, PendingNorm
from axon_ps.parallel.fsdp.values import WrappedValues
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.parallel.wrapper import ModuleWrapper
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Policy
from axon_ps.texts import value_of_json
from axon_ps.types import StepResult
from axon_ps.worker.checkpoints import CheckpointInfo
from axon_ps.worker.world import World


class FullyShardedDataParallel(ModuleWrapper):
    """Wrap a module so that its parameters and optimizer state are on the shard servers of the job.

    Use it like the module. Parameters are gathered before a unit's forward and backward, and freed afterwards.
    Gradients are averaged over the replicas on the servers while backward runs. `optimizer.step()` of one of our
    optimizers applies them there. Between uses a parameter has a shape and no values. Reading it is an error (`Misuse`)
    then, outside `summon_full_params()`. Reading `param.grad` is an error once the gradient was sent. Every worker must
    build the same module and wrap it the same way. A job may have several models, by name. Each has its own layout,
    optimizer, version and steps.

    Under NO_SHARD the servers are not used. Gradients are averaged between the workers and stay there, and the step is
    local.

    Args:
        module: the user's module, on the CPU, a GPU or the meta device. First values and buffers are those of the
            worker of lowest rank (in a job that resumes, those of the checkpoint). Other workers' values are dropped,
            with a warning if they differ.
        group: the workers that train it: a world, or its default group; None = the current world. Under NO_SHARD it may
            be any group of the world.
        sharding_strategy: the part of the model that stays in a worker's memory between uses; its name and torch's
            `ShardingStrategy` are accepted, too. None = HYBRID_SHARD if every node has the same number of workers, more
            than one, on GPUs with NCCL, else FULL_SHARD; a log line has the reason and the bytes of each.
        cpu_offload: the part of that in host memory; torch's `CPUOffload` is accepted, too, and True for FULL.
        mixed_precision: dtypes of compute and wire; a dtype or its name for `MixedPrecision(param_dtype=...)`, True for
            bfloat16, or torch's `MixedPrecision`.
        unit_types: module classes that become units, or one class.
        auto_wrap_policy: returns True for a module that becomes a unit; instead of `unit_types`. Torch's
            `ModuleWrapPolicy` and `transformer_auto_wrap_policy` are accepted, too.
        ignored_parameters: parameters that stay unchanged: each worker's own, not averaged.
        intra_node_size: HYBRID_SHARD: the workers of a node, G; None = as many as this node has. On a host with a
            multiple of G workers, each G of them by rank are a node.
        prefetch: gather the next units before they are needed; else only `prefetch_forward_params()` does.
        retain_frozen: FULL_SHARD: frozen units stay in this worker's memory, and are gathered once. A step then moves
            none of them. False = they are gathered for each use, as others are. See docs/frozen.md for the memory.
        param_init_fn: gives a submodule on the meta device its values; None = its own `reset_parameters()`.
        plan_options: the sizes in which units are cut; None = chunks of about 2^18 elements (2^19 if all values are
            sent compressed), of a length that cuts the largest units evenly.
        device: the device on which parameters compute; None = the module's (the CPU for the meta device).
        policy: the way in which replicas wait for each other between steps: `Synchronous()` (None, "sync"),
            `BoundedStaleness(...)`, `Asynchronous()` ("async").
        name: the job's name for the model; None = "model 0", "model 1" and so on, in the order in which this process
            wraps models. Workers find each other's models by it.
        of_torch: other arguments of torch's FSDP: `process_group`, `device_id`, `ignored_states`, `device_mesh` and so
            on. Those that choose when bytes move have no effect.

    Raises:
        LayoutMismatch: another worker wrapped another module by that name; the message names the difference.
        Misuse: there is no world, or this process has wrapped a model by that name already (the message names both).
        InvalidRequest: the module cannot be sharded (the message names the parameter and the reason), the group is not
            all workers of the world, or the policy does not go with the strategy. A step commits for all workers of
            the world. Under an asynchronous policy others change the parameters between forward and backward, so this
            worker must retain those that forward read.
        Timeout: the servers got no first values; usually because the worker of lowest rank does not wrap the model.
        Busy: a shard server has no memory for the model.

    After an error: the module may have lost its values; build it again.
    """

    _missing = 0  # names that `load_state_dict()` of a module around this one found missing

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | World | None = None,
        *,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | bool | str = CPUOffload.NONE,
        mixed_precision: MixedPrecision | torch.dtype | str | bool | None = None,
        unit_types: Collection[type[nn.Module]] | type[nn.Module] = (),
        auto_wrap_policy: Callable[..., bool] | None = None,
        ignored_parameters: Iterable[nn.Parameter] = (),
        intra_node_size: int | None = None,
        prefetch: bool = True,
        retain_frozen: bool = True,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        plan_options: PlanOptions | None = None,
        device: torch.device | str | None = None,
        policy: Policy | str | None = None,
        name: str | None = None,
        **of_torch: Any,
    ) -> None:
        super().__init__()
        own: dict[str, Any] = {
            "group": group,
            "module": module,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "unit_types": unit_types,
            "auto_wrap_policy": auto_wrap_policy,
            "ignored_parameters": ignored_parameters,
            "intra_node_size": intra_node_size,
            "prefetch": prefetch,
            "retain_frozen": retain_frozen,
            "param_init_fn": param_init_fn,
            "plan_options": plan_options,
            "device": device,
            "policy": policy,
            "name": name,
        }
        own |= torch_arguments.as_ours("FSDP", torch_arguments.FSDP, of_torch, own)
        group = own.pop("group")
        given = arguments.checked(**own)
        with build.prepared(given, group) as (self._wrapping, wrapped_units):
            made = build.made(self._wrapping, module, wrapped_units, given.param_init_fn, self)
            self._runtime, self._served_buffers = made.runtime, made.served_buffers
            self._wrap(module)
            for flat in self._runtime.flats:
                for names, param in zip(flat.names, flat.params, strict=True):
                    param._axon_home = Home(weakref.ref(self), names[0], flat.index, self._runtime.sent)  # type: ignore[attr-defined]
            self._values = WrappedValues(module, self._wrapping, self._runtime, made.buffer_dtypes, made.served_buffers)
            self.register_load_state_dict_post_hook(_end_of_loading)  # type: ignore[no-untyped-call]
            register("fsdp", self, model=self.name or "")
            hooks.attach(self._runtime, self)

    # ------------------------------------------------------------------ as a module

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with its arguments, and with the parameters gathered unit by unit."""
        return self._run_gathered(self.module, args, kwargs)

    def _run_gathered(self, inside: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module, or a method of it, with its parameters gathered unit by unit.

        A forward whose parameters changed meanwhile (this worker was frozen or cut off, and the job went on) is run
        again: its result is of one version.

        Raises:
            StepAborted: the parameters change faster than it can read them, since this worker is not a member; or they
                changed, and a replica is several workers of a mesh.
            Misuse: this process is a fork of a worker.
        """
        runtime, precision = self._runtime, self._wrapping.precision
        if self._served_buffers is not None:
            self._served_buffers.follow()
        pushed = hooks.before_root(runtime)
        try:
            given, options = precision.cast_inputs((args, kwargs))
            output = inside(*given, **options)
        finally:
            hooks.end_root(pushed)
        output = precision.cast_output(output)
        hooks.after_root(runtime, output)
        if hooks.again(runtime):
            if self._wrapping.lines is not None:
                raise StepAborted(
                    "the parameters changed during a forward, since the job went on without this worker's replica: it "
                    "is not run again, because the other workers of the replica would have to run it, too"
                )
            del given, options, output  # the next attempt needs the memory
            return self._run_gathered(inside, args, kwargs)
        return output

    def extra_repr(self) -> str:
        """Return its line in `repr()`."""
        workers = len(self.process_group.ranks)
        return f"{self.name or 'a model'!r}: {self.strategy.name}, {workers} workers, version {self.version}"

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy."""
        return self._wrapping.strategy

    @property
    def process_group(self) -> ProcessGroup:
        """The workers that train it."""
        return self._wrapping.group

    @property
    def spec(self) -> JobSpec:
        """The spec with which the model was registered: layout, wire dtypes, chunk sizes."""
        return self._wrapping.spec

    @property
    def name(self) -> str:
        """The job's name for the model. Under NO_SHARD it is the name that was given, which the job does not have."""
        return self._wrapping.name

    @property
    def version(self) -> int:
        """Committed steps of the model, copies from others included, as this worker knows it."""
        return self._runtime.version

    @property
    def committed(self) -> dict[str, Any]:
        """The newest values that were committed with its steps, by name. See `ServerOptimizer.step`.

        They are those of the version that the model is at: after a restore, those of the checkpoint. Under NO_SHARD
        there are none.
        """
        return {
            name: value_of_json(value, f"the committed value {name!r}")
            for name, value in self._runtime.committed.items()
        }

    def copy_from(self, other: FullyShardedDataParallel, weight: float = 1.0) -> StepResult:
        """Move the values towards another model's, on the servers: (1 - weight) * these + weight * the other's.

        It serves target networks and averages of weights. It is a step of this model, with the other's version at that
        moment. Every worker calls it. All of them see the result from their next forward on, and it commits for all or
        for none. The optimizer's state stays as it is. Only votes and decisions are sent.

        Args:
            other: a model whose module is built and wrapped alike.
            weight: above 0, at most 1.

        Returns:
            The result, as of `optimizer.step()`. If it did not commit (a worker left or joined), the values are as they
            were. Go on as after any step that did not commit.

        Raises:
            InvalidRequest: the weight is out of range, the other is this model or has another layout, one of the two is
                asynchronous, or only one is under NO_SHARD.
            Misuse: gradients were sent for the step under way, a forward is under way, or a model was released.
            Timeout: no decision came in time.

        After an error: it may or may not have committed. See `version`.
        """
        if not 0.0 < weight <= 1.0:
            raise InvalidRequest(f"weight is {weight}; it must be above 0 and at most 1")
        if other is self:
            raise InvalidRequest("copy_from was given the model itself; give another one")
        check_idle(self._runtime.units, "copy_from")
        if self._wrapping.replicated != other._wrapping.replicated:
            raise InvalidRequest("copy_from needs both models on the servers, or both under NO_SHARD")
        if difference := self.spec.cut_difference(other.spec):
            raise InvalidRequest(f"model {self.name!r} cannot take the values of {other.name!r}: {difference}")
        return self._runtime.copy_from(other.runtime, weight)

    def release(self) -> None:
        """Have the servers forget the model and free its memory. Every worker calls it, and none uses the model again.

        Its name may be used for another model then. Checkpoints that have it stay as they are.

        Raises:
            Busy: a checkpoint is being written.
            GenerationChanged, Timeout, Disagreement: as of `World.barrier`; nothing has changed then.

        After an error: the model may be gone. Releasing it again is harmless.
        """
        self._runtime.reset()
        self._runtime.release()
        if self._wrapping.lines is not None:
            self._wrapping.lines.forget()
        for flat in self._runtime.flats if self.strategy is not ShardingStrategy.NO_SHARD else ():
            flat.free_storage()  # also if it is resident
        if self._served_buffers is not None:
            self._served_buffers.release()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards inside in `param.grad`. The next backward outside adds its own to them.

        A step without such a backward sends them too. Under NO_SHARD of several workers it is refused (`Misuse`).
        """
        before, self._runtime.accumulation.syncing = self._runtime.accumulation.syncing, False
        try:
            yield
        finally:
            self._runtime.accumulation.syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `optimizer.zero_grad()` of one of our optimizers does."""
        if self._runtime.zero_grad(set_to_none=set_to_none):
            super().zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float) -> float | None:
        """Clip the gradients of the coming step to a global L2 norm, as `torch.nn.utils.clip_grad_norm_` does.

        The norm is that of the averaged gradients of the full model over all replicas. With servers it is known when
        the step is decided, and is in `StepResult.grad_norm`. Under NO_SHARD the gradients are clipped at once.

        Args:
            max_norm: the norm, above 0; inf measures only. Of several calls before a step the smallest counts.

        Returns:
            Under NO_SHARD the norm before clipping, else None.

        Raises:
            InvalidRequest: it is not above 0.
        """
        norm = self.clip_grad_norm_(max_norm)
        return None if isinstance(norm, PendingNorm) else float(norm)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as `clip_grad_norm` does, by the name and with the result of torch's FSDP.

        accelerate and Lightning call it.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` does the same.

        Args:
            max_norm: as of `clip_grad_norm`.
            norm_type: 2.

        Returns:
            The norm before clipping. With servers it can be read after `optimizer.step()`. Before, reading it is an
            error (`Misuse`).

        Raises:
            InvalidRequest: `max_norm` is not above 0, or `norm_type` is not 2.
        """
        if float(norm_type) != 2.0:
            raise InvalidRequest(f"norm_type is {norm_type}; the L2 norm is computed, pass 2")
        return self._runtime.clip(float(max_norm))

    # ------------------------------------------------------------------ by hand

    def gather_parameters(self) -> None:
        """Unshard parameters, as `summon_full_params()` does, until `reshard_parameters()`, a forward or a backward.

        Raises:
            Misuse: a forward is under way.
        """
        check_idle(self._runtime.units, "gather_parameters")
        self._runtime.gather()

    def reshard_parameters(self) -> None:
        """Free the memory of every parameter that the strategy reshards, and of prefetched units.

        Raises:
            Misuse: a forward is under way.
        """
        check_idle(self._runtime.units, "reshard_parameters")
        self._runtime.reset()

    def sync_gradients(self) -> None:
        """Send (NO_SHARD: average) the gradients accumulated inside `no_sync()`, without another backward."""
        self._runtime.push_accumulated()

    def prefetch_forward_params(self) -> None:
        """Begin to gather the parameters that the next forward needs first. With `prefetch=True` a step ends with this.

        Raises:
            Misuse: it was called before and no forward has come since, a forward is under way, or the strategy does not
                reshard parameters.
        """
        if self.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            raise Misuse(
                f"prefetch_forward_params() has nothing to gather: {self.strategy.name} does not reshard parameters"
            )
        if self._runtime.gathering.prefetched:
            raise Misuse("prefetch_forward_params() was called twice; run a forward before you call it again")
        check_idle(self._runtime.units, "prefetch_forward_params")
        self._runtime.prefetch()

    def has_pending_prefetch(self) -> bool:
        """Return True if `prefetch_forward_params()` was called and no forward has come since."""
        return self._runtime.gathering.prefetched

    def broadcast_updated_params(self) -> None:
        """Bring the parameters that stay on this worker up to the current version now, not at the next forward.

        Under SHARD_GRAD_OP these are the full parameters, under HYBRID_SHARD this worker's shard. Under NO_SHARD every
        worker's parameters become those of the first. Under FULL_SHARD none stay, and nothing happens.
        """
        if self.strategy is ShardingStrategy.SHARD_GRAD_OP:
            self._runtime.gather()
            self._runtime.reset()
        else:
            self._runtime.refresh()

    # ------------------------------------------------------------------ values

    def summon_full_params(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """Give every parameter its current value, in compute dtype, inside the block.

        Args:
            writeback: True = values changed in place become those on the servers, as by `load_state_dict()`. Every
                worker calls it then, and the changes of the worker of lowest rank count. False = parameters are to be
                read, not changed. Under NO_SHARD changes are this worker's own in either case.

        Raises:
            Misuse: a forward is under way; or, at the end, parameters were changed in place, and that has no effect.
            StepAborted: at the end: the job went on without this worker, so the values may be of several versions.
        """
        return self._values.summoned(writeback=writeback)

    def sharded_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the strategy shards: all but `ignored_parameters`, tied ones once."""
        managed = self._values.sharded
        return (p for p in self.parameters() if p in managed)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply `to()`, `cuda()`, `half()` and their like to buffers and ignored parameters, as in any module.

        Raises:
            Misuse: it would move or cast sharded parameters.
        """
        self._values.apply(fn)
        return self

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter as f32, exactly as on the servers (NO_SHARD: in the optimizer), one after the other.

        This takes the memory of one unit at a time.

        Raises:
            StepAborted: the job went on without this worker (it was frozen or cut off), so the values read are of
                several versions; begin again. Under an asynchronous policy that is not an error.
        """
        return self._values.full()

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return every parameter in the dtype it was built with, and every buffer, by the names of the user's module.

        Each worker gets all of it, without the help of others. For models too big for that use
        `world.save_checkpoint` and `axon-ps checkpoint export`. `state_dict()` of the user's module, and functions
        built on it (`save_pretrained()` of transformers), give the same. Tied parameters are one tensor under several
        names, as in torch.

        Args:
            args: as `nn.Module.state_dict` takes them.
            destination: the dict to fill; None = a new dict.
            prefix: beginning of all names.
            keep_vars: give the parameters themselves, which have no values.
        """
        given: dict[str, Any] = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        if args:
            given |= dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        state: dict[str, Any] = self.module.state_dict(**given)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Give every parameter and buffer other values. Optimizer state and version stay. Every worker calls it.

        Parameters are those that the worker of lowest rank gives. Buffers are each worker's own.

        Args:
            state_dict: by the names of the user's module, as `state_dict()` gives.
            strict: names must match exactly; else the values of missing ones stay.
            assign: must be False.

        Returns:
            The missing and unexpected names.

        Raises:
            InvalidRequest: names, shapes or values do not fit, or `assign` is set.
            Disagreement: they do not fit on another rank, which the message names.
            Misuse: a forward is under way, here or on another rank.

        After an error: if it is of these, no parameter and no buffer has changed, on any rank. For other errors see
        `World.replace_parameters`.
        """
        return self._values.load(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as a part of `load_state_dict()` of a module around this one. Every worker must call that."""
        ours = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        try:
            keys = self.load_state_dict({n.removeprefix(prefix): value for n, value in ours.items()}, strict=False)
            missing_keys += [prefix + name for name in keys.missing_keys]
            unexpected_keys += [prefix + name for name in keys.unexpected_keys]
        except InvalidRequest as error:
            error_msgs.append(str(error))
        self._missing = len(missing_keys)

    def update_shards(self, flat: torch.Tensor) -> None:
        """Give every parameter other values, from one flat tensor. Every worker calls it.

        Args:
            flat: [total_params], the parameters one after the other in layout order (that of `full_parameters()`); that
                of the worker of lowest rank counts. A tensor, or a value that `torch.as_tensor` accepts.

        Raises:
            InvalidRequest: it is not of that length, or not of numbers.
            Disagreement: it is not so on another rank.
            Misuse: a forward is under way, here or on another rank.

        After an error: as for `load_state_dict`.
        """
        self._values.update(flat)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> CheckpointInfo | None:
        """Write parameters and optimizer state. Every worker calls it. It returns when the checkpoint is complete.

        The format is the same for every strategy, so a job may go on with another one. With servers, they write the
        checkpoint, and all models of the job are in it. Under NO_SHARD the first worker writes it, which takes a second
        copy of parameters and state in its memory.

        Args:
            uri: directory or fsspec URI, which shard servers (NO_SHARD: the workers) reach.
            optimizer: the optimizer whose groups are saved, with all their keys; None = the hyperparameters of the
                newest step. Under NO_SHARD its moments are saved, too: it is ours, or one of torch.optim with a
                counterpart of ours; None = only parameters. With servers moments are always saved.
            extra: JSON values to get back on load.
            state: your own state by name, that of the first worker: objects with `state_dict()` and
                `load_state_dict()` (schedulers), `torch.Generator`s, and plain values. Nothing is pickled; a function
                is not saved. That worker writes the state, so it must reach `uri`, too.
            rank_state: the same, of each worker: random generators (`RandomState`), the position of a loader. The
                names are the same on every worker.
            version: under NO_SHARD with torch's optimizer, the number of steps made; None = as in its state.

        Returns:
            The checkpoint that was written; None on workers that did not write.

        Raises:
            CheckpointError: it could not be written. Nothing half-written counts as a checkpoint.
            InvalidRequest: a value of `state` has no safe form, one of `extra` is not JSON, a worker's own state has
                more than 64 MiB, or another worker could not write its own.
        """
        given = groups.with_groups(extra, optimizer)
        states = own_state.save(uri, self._wrapping.group, state, rank_state)
        written: list[CheckpointInfo | None] = []

        def write() -> None:
            written.append(self._runtime.save(uri, optimizer, given, states, version))

        self._runtime.masters.together("the checkpoint was not written, since that failed", write)
        return None if written[0] is None else groups.of_caller(written[0])

    def load_checkpoint(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Load parameters and optimizer state from a checkpoint of any strategy and world size. Every worker calls it.

        Of a checkpoint of several models only this one is restored. `World.restore_checkpoint` restores all of them.

        Args:
            uri: the checkpoint, or a directory of checkpoints (of which the newest complete one is loaded).
            optimizer: as for `save_checkpoint`; its groups get the values that they had then, so that a scheduler goes
                on from there. None = no groups are touched.
            state: as for `save_checkpoint`, or less of it. Objects load their state, tensors are filled, other values
                are set in the mapping.
            rank_state: likewise, of the worker of this rank. If there are more workers than then, the objects of the
                new ones stay as they are, with a warning; the state of ranks that are gone is not loaded.

        Raises:
            CheckpointError: it cannot be read. Every worker raises this.
            InvalidRequest: it was saved from another model (every worker raises this), or it lacks some of `state`.
            Misuse: `optimizer` is of another type than the model's, which it replaces with the next step.
        """
        info = self._runtime.load(uri, optimizer)
        if self._served_buffers is not None:
            self._served_buffers.follow()
        if optimizer is not None:
            groups.set_groups(optimizer, info)
        own_state.load(info.uri, info.states, self._wrapping.group.rank, state, rank_state)
        return groups.of_caller(info)

    # ------------------------------------------------------------------ measures

    def statistics(self) -> dict[str, float]:
        """Return counters and memory of this worker: bytes, seconds, steps. The data plane's are `wire_*`."""
        return self._runtime.statistics()

    def memory_estimate(self) -> FSDPMemoryStats:
        """Estimate the memory of this worker at the peak of a step, by strategy. `stats` has the formulas."""
        runtime, wrapping, layout = self._runtime, self._wrapping, self.spec.layout
        built, compute = wrapping.built, wrapping.precision.compute(wrapping.built)
        trainable, state_bytes = max(1, layout.trainable_numel), runtime.optimizer_bytes
        return stats.estimate(
            layout,
            [_unit_bytes(unit, compute.itemsize) for unit in runtime.units],
            strategy=self.strategy,
            offload=wrapping.offload,
            compute_bytes=compute.itemsize,
            wire_bytes=wrapping.wire.itemsize,
            grad_bytes=self.spec.precision.grad.itemsize,
            built_bytes=built.itemsize,
            shard_numel=runtime.shard_numel,
            state_bytes=2 * built.itemsize if state_bytes is None else state_bytes // trainable,
            copied=any(flat.swapped for flat in runtime.flats),
            buffered=any(f.source.buffered for f in runtime.flats),
            world_size=self.process_group.world_size,
            retained_bytes=sum(f.nbytes if f.resident else f.wire_bytes for f in runtime.flats if f.retained),
        )

    def memory_stats(self) -> MemoryStats:
        """Return the memory of the parameters, and of gradients on their way, in this worker: current and peak."""
        s = self._runtime.statistics()
        return MemoryStats(
            peak_memory_mb=s["peak_memory_bytes"] / stats.MIB,
            current_allocation_mb=(s["param_memory_bytes"] + s["grad_buffer_bytes"]) / stats.MIB,
        )

    @property
    def runtime(self) -> Runtime:
        """The model's runtime, for optimizers."""
        return self._runtime


def _unit_bytes(unit: ModuleUnit, compute_bytes: int) -> UnitBytes:
    """Return the elements of a module unit; raw parameters count as so many as take their bytes."""
    found = {flat: flat.nbytes // compute_bytes if flat.unit.raw else flat.unit.numel for flat in unit.flats}
    retained = sum(numel for flat, numel in found.items() if flat.retained and flat.resident)
    return UnitBytes(
        numel=sum(found.values()) - retained,
        trainable_numel=sum(numel for flat, numel in found.items() if flat.trainable),
        retained_numel=retained,
    )


def _end_of_loading(model: nn.Module, keys: _IncompatibleKeys) -> None:
    """Drop the names that torch found missing inside the user's module, whose values the wrapper has loaded."""
    assert isinstance(model, FullyShardedDataParallel)
    del keys.missing_keys[model._missing :]
