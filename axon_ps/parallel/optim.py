"""Optimizers whose state is on the shard servers, as real `torch.optim.Optimizer`s.

`param_groups` hold the hyperparameters that the next step will use, so torch's LR schedulers work on them unchanged.
The program's own keys stay in them. A model has one optimizer at a time. A later one replaces the earlier one with its
first step, and its moments begin anew, as torch's do.
`step()` sends the remaining gradients, votes, and returns the decision. Except under NO_SHARD, state (moments,
momentum) is never on a worker, and checkpoints are written by the servers.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypedDict, Unpack

import torch

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.host import fork
from axon_ps.optim.base import UpdateRule
from axon_ps.optim.registry import create
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.counterpart import as_in_torch
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.tensors.sent_gradients import Home
from axon_ps.parallel.server_state import ServerState
from axon_ps.types import Hyper, OptimizerSpec, StepResult
from axon_ps.wire.committed import encoded

Params: TypeAlias = FullyShardedDataParallel | Iterable[Any]

_WAYS_TO_COMPUTE: Final = ("foreach", "fused", "capturable", "differentiable")
"""Keys of torch's groups that change the way an update is computed, and not its result."""

_DECOUPLED_KEY: Final = "decoupled_weight_decay"
_DECOUPLED: Final = {"adam": False, "adamw": True}
"""By optimizer, the only value that this key may have in a group."""

_SERVERS: Final = "axon_ps"
"""Key in state dicts for the model whose moments are on the servers, the version they began at, and the present one."""

_add_param_group = uncompiled(inspect.unwrap(torch.optim.Optimizer.add_param_group))
_zero_grad = uncompiled(inspect.unwrap(torch.optim.Optimizer.zero_grad))
"""torch's methods without the wrapper that imports the compiler at the first call. They are not compiled either."""


class ServerOptimizer(torch.optim.Optimizer):
    """An optimizer that runs on the servers, by name. Under NO_SHARD the same kernels run here, in host memory.

    `ServerOptimizer(model.parameters(), "adamw", lr=3e-4)`. The names are those of `axon_ps.optim`. See
    docs/extend_optimizer.md for adding one.

    Args:
        params: a wrapped model, or its parameters, or parameter groups of them (dicts with "params").
        name: the optimizer's name.
        hyper: its hyperparameters, for groups that do not name their own; `betas` is the pair of beta1 and beta2.
            Others have the optimizer's defaults.

    Raises:
        InvalidRequest: there is no optimizer of that name, a parameter is not of a wrapped model, or a hyperparameter
            is unknown, out of range or not possible on servers.
        LayoutMismatch: another worker made another optimizer.
        Misuse: the model has an optimizer already, and its replicas step asynchronously; or a parameter has gradients
            that another optimizer's `zero_grad()` left.
        Busy: it has one, and the shard servers have no memory for the moments of another.
    """

    def __init__(self, params: Params, name: str, **hyper: Any) -> None:
        self._runtime: Runtime | None = None
        self._rules = create(name)
        self._takes_state = True  # False while values that `state` is set to are ignored
        defaults = as_in_torch(self._rules.defaults) | dict.fromkeys(_WAYS_TO_COMPUTE)
        if unknown := sorted(hyper.keys() - defaults.keys() - self._rules.defaults.keys()):
            raise InvalidRequest(
                f"{name} has no hyperparameter {unknown[0]!r}; it has {', '.join(as_in_torch(self._rules.defaults))}; "
                "remove it or correct its name"
            )
        groups = params.sharded_parameters() if isinstance(params, FullyShardedDataParallel) else params
        super().__init__(groups, defaults | hyper)
        owner = params if isinstance(params, FullyShardedDataParallel) else owner_of(self.param_groups)
        self._owner = weakref.ref(owner)
        spec = self._spec()
        self._needed = spec.groups  # the hyperparameters that the existing moments were made for
        self._before: tuple[Hyper, ...] = ()  # the hyperparameters of the step before
        if owner.runtime.current is None:
            owner.runtime.register_optimizer(spec)
        else:
            owner.runtime.change_optimizer(spec)
        self._grouped = self._grouping()
        self._runtime = owner.runtime
        self._runtime.optimizers.add(self)
        self._runtime.current = weakref.ref(self)
        # asynchronous: others commit in between, so the result of a step cannot be computed before it is decided
        self._runtime.expected_hyper = None if owner.spec.policy.asynchronous else self._expected

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters are updated from the next step on.

        Every worker adds the same.

        Raises:
            ValueError: a parameter is in another group.
            InvalidRequest: a parameter is in the group twice, or not of the wrapped model; or a hyperparameter is out
                of range.
            Misuse: replicas step asynchronously, another optimizer of this model was made since, or a parameter has
                gradients that `zero_grad()` left.
            Busy: the shard servers have no memory for the group's moments.
        """
        _add_param_group(self, param_group)
        if self._runtime is not None:
            try:
                self._check_current()
                self._take_groups()
            except BaseException:
                self.param_groups.pop()
                raise

    def _take_groups(self) -> None:
        """Have the present groups update their parameters from the next step on."""
        assert self._runtime is not None
        if (grouped := self._grouping()) != self._grouped:
            self._runtime.change_optimizer(self._spec(), retains_moments=True)
            self._grouped = grouped

    def _grouping(self) -> list[list[int]]:
        """Return the parameters of each group, of whatever model, by `id`."""
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    @property
    def state(self) -> ServerState:
        """An empty dict: moments are elsewhere. Clearing it, or setting it to an empty one, begins them anew."""
        return self._state

    @state.setter
    def state(self, values: Mapping[torch.Tensor, Any]) -> None:
        if self.__dict__.get("_runtime") is None:
            self._state = ServerState(weakref.WeakMethod(self._begin_anew))
        elif values is self._state or not self._takes_state:
            return
        elif not values:
            self._begin_anew()
        else:
            self._check_has_no(values)
            assert self._runtime is not None
            self._runtime.load_optimizer_state(dict(values), self._hyper())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state:
            self.state = state["state"]

    def _begin_anew(self) -> None:
        """Begin the moments anew with the next step. An optimizer that has been replaced has no moments any more."""
        if self._runtime is not None and self._is_current:
            spec = self._spec()
            self._runtime.change_optimizer(spec)
            self._needed, self._before, self._grouped = spec.groups, (), self._grouping()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model. Call it in each step, as with torch's optimizers.

        Gradients that were sent already for the current step (an error in backward was caught, say) are withdrawn. That
        step is aborted, also for the other workers, whose result names this one. Go on with the next batch.
        Nothing happens between the micro-batches of an `ElasticLoader`: their gradients are those of one step.

        Args:
            set_to_none: forget them, instead of setting them to zero. A parameter whose gradient is zero decays, and
                its moments move, also where it is not used.

        Raises:
            Misuse: under NO_SHARD, backward was broken off while some were on their way to the other workers.
        """
        if self._runtime is None or self._runtime.zero_grad(set_to_none=set_to_none, leaving=self._ungrouped()):
            _zero_grad(self, set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, commit: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Vote for this step and wait for the coordinator's decision.

        Args:
            closure: computes the loss and runs backward; called once, before the step.
            commit: values to commit with the step, by name: JSON, and the same on every worker. They are durable with
                it, also in checkpoints; `model.committed` has the newest of each name. All values of a model take at
                most 4 KiB together. An `ElasticLoader` commits its position in this way.

        Returns:
            The result of the step: committed or not, the version, the gradient norm before clipping. When it did not
            commit (non-finite gradients, or a worker left or joined), the parameters are unchanged. The gradients are
            gone, except under NO_SHARD. Go on with the next batch.

        Raises:
            Timeout: no decision came in time.
            Broken: the coordinator or a shard server is gone for good.
            Misuse: this process is a fork of a worker; NO_SHARD has no decision that `commit` could be part of;
                another optimizer of this model was made since; a `GradScaler` scaled the loss, and does not step; the
                last backward was broken off; or the gradients of the step before were not dropped.
            InvalidRequest: the values to commit are not JSON, or too large; or a value of a group is out of range.
            StepAborted: step after step is aborted because of the workers' votes: one of them has other values in
                its groups, say. Every worker gets it, and the message names ranks, key and values.

        After an error: the step may or may not have committed; see `World.version` once the session is back.
        """
        fork.check()
        assert self._runtime is not None
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._check_current()
        if self._runtime.has_gradients:
            self._runtime.loss_scale.check()
        self._take_groups()  # another holder of the list may have added one
        hyper = self._hyper()
        for before, now in zip(self._before, hyper, strict=False):
            if problem := self._rules.cannot_follow(before, now):
                raise InvalidRequest(problem)
        result = self._runtime.step(hyper, encoded(commit or {}))
        if result.committed:
            self._before = hyper
            if self._needs_more(hyper):
                self._needed = (*self._needed, *hyper)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter groups' hyperparameters, and under NO_SHARD the moments.

        Elsewhere moments are on the servers, and in checkpoints; see `load_state_dict`.
        """
        assert self._runtime is not None
        with self._state.holding(self._runtime.optimizer_state(self)):
            packed = super().state_dict()
        model = self._model.name if self._on_servers else None
        since, now = self._runtime.moments_of, self._runtime.version
        return {**packed, _SERVERS: {"model": model, "moments_of": since, "version": now}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the groups' values from a state dict, and under NO_SHARD the moments.

        Elsewhere the moments are those that the servers have. An optimizer that replaces another one of this model
        begins with new moments, unless it loads the state dict of that other.

        Raises:
            ValueError: the groups are not those of the state dict.
            InvalidRequest: it has moments, and this optimizer's are on the servers (`load_checkpoint` loads moments);
                or its moments are on the servers, and not those of this optimizer.
        """
        assert self._runtime is not None
        saved = state_dict.get(_SERVERS)
        self._check_has_no(state_dict["state"])
        if saved is not None:
            self._check_moments(saved.get("model"), saved["version"])
        self._takes_state = not self._on_servers
        try:
            super().load_state_dict(state_dict)
        finally:
            self._takes_state = True
        if self._on_servers and saved is not None and saved["moments_of"] == self._runtime.moments_of:
            self._runtime.retain_moments()

    def _check_has_no(self, state: Mapping[Any, Any]) -> None:
        if self._on_servers and state:
            raise InvalidRequest(
                f"the state dict has the moments of {len(state)} parameters, and those of this optimizer "
                "are on the shard servers; model.save_checkpoint(uri, optimizer) and load_checkpoint(uri, optimizer) "
                'bring them there. To take only the groups\' values, empty its "state"'
            )

    def _check_moments(self, model: str | None, version: int) -> None:
        """Refuse a state dict whose moments are another model's, and warn if they are of another version.

        Args:
            model: the model whose moments the servers have; None if they are in the state dict.
            version: version of the state dict.

        Raises:
            InvalidRequest: they are another model's.
        """
        assert self._runtime is not None
        mine = self._model.name if self._on_servers else None
        if model is not None and model != mine:
            raise InvalidRequest(
                f"this state dict is of the optimizer of model {model!r}, whose moments are on the shard servers and "
                f"not in it, and this optimizer's are {'those of ' + repr(mine) if mine else 'on this worker'}. "
                f"load_checkpoint(uri, optimizer) brings moments back to the model that had them. To take only the "
                f"groups' values, take {_SERVERS!r} out of it"
            )
        if self._on_servers and version != self._runtime.version:
            warnings.warn(
                f"this state dict is of version {version}, and the moments on the shard servers are of version "
                f"{self._runtime.version}: they stay as they are. load_checkpoint(uri, optimizer) brings moments back",
                stacklevel=3,
            )

    @property
    def rule(self) -> str:
        """The optimizer's name, of those of `axon_ps.optim`."""
        return self._rules.name

    @property
    def _on_servers(self) -> bool:
        return not self._model._wrapping.replicated

    @property
    def _model(self) -> FullyShardedDataParallel:
        owner = self._owner()
        if owner is None:
            raise Misuse("the wrapped model of this optimizer is gone")
        return owner

    @property
    def _is_current(self) -> bool:
        assert self._runtime is not None
        return self._runtime.current is not None and self._runtime.current() is self

    def _check_current(self) -> None:
        if not self._is_current:
            raise Misuse(
                f"another optimizer of model {self._model.name!r} was made after this {type(self).__name__}, and a "
                "model has one at a time, which moves all of it. Use one optimizer with several groups; or wrap the "
                "parts as models of their own, by name, each with its optimizer"
            )

    def _expected(self) -> tuple[Hyper, ...] | None:
        """Return the hyperparameters of the next step, if its result can be computed before it is decided."""
        hyper = self._hyper()
        changes = self._runtime is None or self._runtime.optimizer_change or self._grouping() != self._grouped
        return None if changes or self._needs_more(hyper) else hyper

    def _needs_more(self, hyper: tuple[Hyper, ...]) -> bool:
        """Return True if a step with these hyperparameters needs moments that do not exist yet."""
        names = self._rules.state_names
        return names((*self._needed, *hyper)) != names(self._needed)

    def _hyper(self) -> tuple[Hyper, ...]:
        return tuple(self._rules.validate(in_our_names(self._rules, group)) for group in self.param_groups)

    def _spec(self) -> OptimizerSpec:
        return OptimizerSpec(name=self._rules.name, groups=self._hyper(), group_of=self._group_of(self._model))

    def _group_of(self, owner: FullyShardedDataParallel) -> tuple[int, ...]:
        """Return the group of each parameter of the layout; -1 for those in none, which are left alone, as in torch."""
        grouped = [param for group in self.param_groups for param in group["params"]]
        group_of = {param: i for i, group in enumerate(self.param_groups) for param in group["params"]}
        if len(group_of) < len(grouped):
            twice = next(param for param in grouped if sum(other is param for other in grouped) > 1)
            home: Home | None = getattr(twice, "_axon_home", None)
            raise InvalidRequest(
                f"parameter {'?' if home is None else home.name!r} is in the optimizer's groups twice, and torch would "
                "move it twice with each step: leave it in one of them"
            )
        found: dict[int, list[int]] = {}
        for flat in owner.runtime.flats:
            result = found[flat.index] = []
            for spec, param in zip(flat.unit.parameters, flat.params, strict=True):
                group = group_of.pop(param, -1)
                result.append(group if flat.trainable else -1)
                if group >= 0 and param in owner.runtime.left:
                    raise Misuse(
                        f"parameter {spec.name!r} was in no group of the optimizer before, and got gradients that its "
                        "zero_grad() left: torch would apply their sum with the next step, and the shard servers have "
                        "forgotten them. Call model.zero_grad() before its group is added, which drops them there, "
                        "too; or let it require no gradient until then"
                    )
        tree = owner.runtime.units[0].tree
        if tree is not None and (added := next(filter(None, map(tree.look().added, group_of)), "")):
            raise InvalidRequest(
                f"parameter {added!r} was {tree.change_of(added)} since the model was wrapped, which does not move it: "
                "add and replace modules before wrapping; or, if it is not to be trained, give the optimizer "
                "model.sharded_parameters()"
            )
        if ignored := [name for name, param in owner.named_parameters() if param in group_of]:
            raise InvalidRequest(
                f"parameter {ignored[0]!r} is one of the model's ignored_parameters, which it does not move: "
                "give it model.sharded_parameters(), and those to be trained on each worker to an optimizer of torch"
            )
        if group_of:
            raise InvalidRequest(
                f"{len(group_of)} parameters of the optimizer's groups are not of the wrapped model; make the groups "
                "from model.parameters() after wrapping, and for another model another optimizer"
            )
        if (groups := owner._wrapping.groups) is not None:
            return groups.of_all(found, len(self.param_groups))
        return tuple(group for result in found.values() for group in result)

    def _ungrouped(self) -> list[torch.nn.Parameter]:
        """Return the trainable parameters that are in no group."""
        grouped = {param for group in self.param_groups for param in group["params"]}
        return [p for flat in self._model.runtime.flats if flat.trainable for p in flat.params if p not in grouped]


def owner_of(groups: list[dict[str, Any]]) -> FullyShardedDataParallel:
    """Return the wrapped model that the parameters of these groups belong to.

    Raises:
        InvalidRequest: there is none.
    """
    for group in groups:
        for param in group["params"]:
            home: Home | None = getattr(param, "_axon_home", None)
            model = None if home is None else home.model()
            if isinstance(model, FullyShardedDataParallel):
                return model
    raise InvalidRequest(
        "none of the parameters belongs to a wrapped model; wrap it first and take model.parameters() from the wrapper"
    )


def in_our_names(rules: UpdateRule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group by our names: betas are beta1 and beta2. Other keys are left out.

    Raises:
        InvalidRequest: it asks for other arithmetic than the servers'.
    """
    if group.get("differentiable"):
        raise InvalidRequest(
            f"{rules.name}: differentiable=True needs the step in torch's graph, and the servers make it; leave it out"
        )
    decoupled = _DECOUPLED.get(rules.name)
    if decoupled is not None and bool(group.get(_DECOUPLED_KEY, decoupled)) != decoupled:
        raise InvalidRequest(
            f"{rules.name}: {_DECOUPLED_KEY} is {group[_DECOUPLED_KEY]!r} in a group; make an "
            f"{'Adam' if decoupled else 'AdamW'} instead"
        )
    named = dict(group)
    if "beta1" in rules.defaults and "betas" in named:
        named["beta1"], named["beta2"] = named["betas"]
    return {name: _number(named[name]) for name in rules.defaults if name in named}


def _number(value: Any) -> Any:
    """Return a learning rate or the like, which may be a tensor in torch, as a number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


class Way(TypedDict, total=False):
    """torch's choices of the way an update is computed. On the servers they change nothing, or are refused."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class SGD(ServerOptimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **way: Unpack[Way],
    ) -> None:
        super().__init__(
            params,
            "sgd",
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            **way,
        )


class Adam(ServerOptimizer):
    """Adam (Kingma and Ba, 2015) with L2 weight decay, as `torch.optim.Adam`."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **way: Unpack[Way],
    ) -> None:
        super().__init__(
            params,
            "adamw" if decoupled_weight_decay else "adam",
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            **way,
        )


class AdamW(ServerOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **way: Unpack[Way],
    ) -> None:
        super().__init__(
            params,
            "adamw",
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            **way,
        )


class Adagrad(ServerOptimizer):
    """Adagrad (Duchi et al., 2011), as `torch.optim.Adagrad`."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            "adagrad",
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )


class RMSprop(ServerOptimizer):
    """RMSprop (Tieleman and Hinton, 2012), as `torch.optim.RMSprop`."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            "rmsprop",
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            maximize=maximize,
            capturable=capturable,
            foreach=foreach,
            differentiable=differentiable,
        )


class Lion(ServerOptimizer):
    """Lion (Chen et al., 2023) with decoupled weight decay."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, "lion", lr=lr, betas=betas, weight_decay=weight_decay)


__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "ServerOptimizer", "owner_of"]
