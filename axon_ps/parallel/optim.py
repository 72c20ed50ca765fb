"""Optimizers whose state lives on the shard servers, as real `torch.optim.Optimizer`s.

`param_groups` hold the hyperparameters that the next step will use, so torch's LR schedulers work on them unchanged.
`step()` sends the remaining gradients, votes, and returns the decision. State (moments, momentum) never
exists on a worker: `state` is empty, and checkpoints are written by the servers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from axon_ps.coordinator.core.committed import encoded
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.host import fork
from axon_ps.optim.registry import create
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.sent_gradients import Home
from axon_ps.types import Hyper, OptimizerSpec, StepResult

Params: TypeAlias = FullyShardedDataParallel | Iterable[Any]

_add_param_group = uncompiled(inspect.unwrap(torch.optim.Optimizer.add_param_group))
_zero_grad = uncompiled(inspect.unwrap(torch.optim.Optimizer.zero_grad))
"""torch's own import the compiler when they are first called; ours are not compiled either, and load nothing."""


class ServerOptimizer(torch.optim.Optimizer):
    """An optimizer that runs on the servers, by name; under NO_SHARD the same kernels run here, in host memory.

    `ServerOptimizer(model.parameters(), "adamw", lr=3e-4)`. The names are those of `axon_ps.optim`; docs/extending.md
    says how to add one.

    Args:
        params: a wrapped model, or its parameters, or parameter groups of them (dicts with "params").
        name: the optimizer's name.
        hyper: its hyperparameters, for groups that do not name their own; `betas` is the pair of beta1 and beta2. What
            is not given has the optimizer's default.

    Raises:
        InvalidRequest: there is no optimizer of that name, a parameter is not of a wrapped model, a trainable one is in
            no group, or a hyperparameter is unknown or out of range.
        LayoutMismatch: another worker made another optimizer.
    """

    def __init__(self, params: Params, name: str, **hyper: Any) -> None:
        self._runtime: Runtime | None = None
        self._rules = create(name)
        groups = params.sharded_parameters() if isinstance(params, FullyShardedDataParallel) else params
        super().__init__(groups, _as_in_torch(self._rules.defaults) | hyper)
        owner = params if isinstance(params, FullyShardedDataParallel) else owner_of(self.param_groups)
        spec = OptimizerSpec(name=name, groups=self._hyper(), group_of=self._group_of(owner))
        owner.runtime.register_optimizer(spec)
        self._runtime = owner.runtime
        self._runtime.optimizers.add(self)
        # asynchronous: others commit in between, so what a step will make cannot be known before
        self._runtime.expected_hyper = None if owner.spec.policy.asynchronous else self._hyper

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only while the optimizer is being made, since the servers then know its groups.

        Raises:
            Misuse: the optimizer is made already.
        """
        if self._runtime is not None:
            raise Misuse("the servers know this optimizer's groups already; give all groups when you make it")
        _add_param_group(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model, as torch's optimizers do; to be called in each step, as for those.

        Those that were sent already for the step under way (an error in backward was caught, say) are withdrawn: that
        step is aborted, also for the other workers, whose result names this one. Go on with the next batch.
        Nothing happens between the micro-batches of an `ElasticLoader`: their gradients are those of one step.

        Args:
            set_to_none: forget them, instead of setting them to zero: a parameter whose gradient is zero decays, and
                its moments move, also where it is not used.

        Raises:
            Misuse: under NO_SHARD, some were on their way to the other workers when backward was broken off.
        """
        if self._runtime is None or self._runtime.zero_grad(set_to_none=set_to_none):
            _zero_grad(self, set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, commit: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Vote for this step and wait for the coordinator's decision.

        Args:
            closure: computes the loss and runs backward; called once, before the step.
            commit: values to commit with the step, by name: JSON, and the same on every worker. They are durable with
                it, also in checkpoints; `model.committed` has the newest of each name. All of a model have at most
                4 KiB together. An `ElasticLoader` commits its position so.

        Returns:
            Whether the step committed, the version, the gradient norm before clipping. When it did not commit
            (non-finite gradients, or a worker left or joined), the parameters are those of before and the gradients
            are gone; go on with the next batch.

        Raises:
            Timeout: no decision came in time.
            Broken: the coordinator or a shard server is gone for good.
            Misuse: this process is a fork of a worker, or NO_SHARD has no decision that `commit` could be part of.
            InvalidRequest: the values to commit are no JSON, or too large.

        After an error: the step may or may not have committed; see `World.version` once the session is back.
        """
        fork.check()
        assert self._runtime is not None
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self._runtime.step(self._hyper(), encoded(commit or {}))

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups' hyperparameters. Moments are in the servers' checkpoints."""
        return super().state_dict()

    def _hyper(self) -> tuple[Hyper, ...]:
        return tuple(self._rules.validate(_flatten(group)) for group in self.param_groups)

    def _group_of(self, owner: FullyShardedDataParallel) -> tuple[int, ...]:
        group_of = {param: i for i, group in enumerate(self.param_groups) for param in group["params"]}
        result = []
        for flat in owner.runtime.flats:
            for spec, param in zip(flat.unit.parameters, flat.params, strict=True):
                if flat.trainable and param not in group_of:
                    raise InvalidRequest(
                        f"parameter {spec.name!r} is trainable and in no parameter group; put it in one, or call "
                        "requires_grad_(False) on it before wrapping the model"
                    )
                result.append(group_of[param] if flat.trainable else -1)
                group_of.pop(param, None)
        if ignored := [name for name, param in owner.named_parameters() if param in group_of]:
            raise InvalidRequest(
                f"parameter {ignored[0]!r} is one of the model's ignored_parameters, which it does not move: "
                "give it model.sharded_parameters(), and those to be trained on each worker to an optimizer of torch"
            )
        if group_of:
            raise InvalidRequest(
                f"{len(group_of)} parameters of the optimizer's groups are not of the wrapped model; make the groups "
                "from model.parameters() after wrapping"
            )
        return tuple(result)


def owner_of(groups: list[dict[str, Any]]) -> FullyShardedDataParallel:
    """The wrapped model of which parameter groups have parameters."""
    for group in groups:
        for param in group["params"]:
            home: Home | None = getattr(param, "_axon_home", None)
            model = None if home is None else home.model()
            if isinstance(model, FullyShardedDataParallel):
                return model
    raise InvalidRequest(
        "none of the parameters belongs to a wrapped model; wrap it first and take model.parameters() from the wrapper"
    )


def _as_in_torch(values: Hyper) -> dict[str, Any]:
    """Our hyperparameters by torch's names: beta1 and beta2 are the pair `betas`, which schedulers look for."""
    if "beta1" not in values or "beta2" not in values:
        return dict(values)
    others = {name: value for name, value in values.items() if name not in ("beta1", "beta2")}
    return {**others, "betas": (values["beta1"], values["beta2"])}


def _flatten(group: dict[str, Any]) -> dict[str, float]:
    """torch's hyperparameters by our names: betas become beta1 and beta2, flags 0 and 1."""
    values: dict[str, float] = {}
    for name, value in group.items():
        if name == "betas":
            values["beta1"], values["beta2"] = map(float, value)
        elif name not in ("params", "initial_lr", "param_names"):
            values[name] = float(value)
    return values


class SGD(ServerOptimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params, "sgd", lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )


class Adam(ServerOptimizer):
    """Adam (Kingma and Ba, 2015) with L2 weight decay, as `torch.optim.Adam`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, "adam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class AdamW(ServerOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adagrad(ServerOptimizer):
    """Adagrad (Duchi et al., 2011), as `torch.optim.Adagrad`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(
            params,
            "adagrad",
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )


class RMSprop(ServerOptimizer):
    """RMSprop (Tieleman and Hinton, 2012), as `torch.optim.RMSprop`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
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
        )


class Lion(ServerOptimizer):
    """Lion (Chen et al., 2023) with decoupled weight decay."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, "lion", lr=lr, betas=betas, weight_decay=weight_decay)


__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "ServerOptimizer", "owner_of"]
