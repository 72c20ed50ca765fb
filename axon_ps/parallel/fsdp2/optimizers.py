"""torch's optimizers of parameters that `fully_shard` put on the servers: they stay torch's, and step there.

An optimizer is recognised when it gets its parameters: `torch.optim.Optimizer.add_param_group` looks for them among the
models that `fully_shard` made. Its class becomes a subclass of its own. Groups, schedulers and hooks are torch's.
Moments are on the servers; `state_dict()` reads them from there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.counterpart import counterpart
from axon_ps.parallel.from_torch import MovedOptimizer
from axon_ps.parallel.fsdp2 import moments
from axon_ps.parallel.fsdp2.marks import Mark, root_with
from axon_ps.parallel.optim import ServerOptimizer
from axon_ps.types import StepResult

_OTHERWISE = "train under torch's DistributedDataParallel over the backend 'axon'"


class _Served(MovedOptimizer):
    """The server optimizer of one of torch's; a step that a departed worker aborted raises, the next one goes on."""

    _check_moments = ServerOptimizer._check_moments

    def _check_workers(self) -> None:
        """Check nothing: the job goes on with the workers that it has."""

    def state_dict(self) -> dict[str, Any]:
        """Return groups and moments in the form of torch's."""
        spec = self._spec()
        states = moments.initial(spec, moments.names_of(self.rule, self.param_groups))
        assert self._runtime is not None
        change = self._runtime.optimizer_change
        if change is None or change.retains_moments:
            moments.read(self.model, spec, states)
        with self._state.holding(states):
            return torch.optim.Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and moments, of torch's optimizer, too; every worker calls it. Without moments they stay."""
        pairs = list(zip(state_dict["param_groups"], self.param_groups, strict=False))
        names = moments.names_of(self.rule, [{**saved, "params": now["params"]} for saved, now in pairs])
        params = {
            key: param for saved, now in pairs for key, param in zip(saved["params"], now["params"], strict=False)
        }
        states = {params[key]: state for key, state in state_dict["state"].items() if key in params}
        if states:
            moments.check(self.model, self.rule, names, states)
        super().load_state_dict({**state_dict, "state": {}})
        if states:
            moments.write(self.model, self, self._spec(), names, states)


class OnServers:
    """The part of an optimizer of torch that steps on the servers.

    Attributes:
        last: the result of the newest step; None before the first.
    """

    param_groups: list[dict[str, Any]]
    _root: Mark
    _served: _Served | None
    last: StepResult | None

    @property
    def state(self) -> moments.StateOnServers:
        """The moments of each parameter, without values: `state_dict()` reads those from the servers."""
        name, _ = counterpart(self, _OTHERWISE)  # type: ignore[arg-type]
        return moments.StateOnServers(moments.names_of(name, self.param_groups), self._begin_anew)

    @state.setter
    def state(self, values: dict[Any, Any]) -> None:
        if not values:
            self._begin_anew()
        elif not isinstance(values, moments.StateOnServers):
            raise Misuse("optimizer.state is on the shard servers; give another one with load_state_dict()")

    def _begin_anew(self) -> None:
        if self._served is not None:
            self._served.state.clear()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step on the servers. A step whose gradients are not finite changes nothing; see `last`.

        Args:
            closure: computes the loss and runs backward; called once.

        Returns:
            The closure's loss.

        Raises:
            StepAborted: a worker left or joined, so that the batch is lost; go on with the next one.
            Misuse: some gradients are those of another optimizer, or are not to be sent yet.
            AxonError: as of `ServerOptimizer.step`.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        served = self._on_servers()
        self._check_gradients()
        self.last = served.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `ServerOptimizer.zero_grad` does."""
        if self._root.outermost.model is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]
        else:
            self._on_servers().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and moments in the form of torch's optimizer. No other worker takes part after the first use.

        Raises:
            StepAborted: the job went on without this worker meanwhile.
            AxonError: the servers cannot send them.
        """
        return self._on_servers().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and moments, also those of torch's optimizer. Every worker calls it.

        The moments of the worker of lowest rank count. A state dict that has none leaves them as they are.

        Raises:
            ValueError: the groups are not those of the state dict.
            InvalidRequest: the moments are not those of such an optimizer.
            AxonError: they could not be written, or the servers cannot read them.
        """
        self._on_servers().load_state_dict(state_dict)

    def _check_gradients(self) -> None:
        """Refuse a step in which torch's optimizer would leave gradients as they are, for a step or backward to come.

        Raises:
            Misuse: see there.
        """
        model = self._root.outermost.built()
        if model.runtime.accumulation.has_local or model.awaits_all_reduce:
            call = "set_requires_gradient_sync" if model.runtime.accumulation.has_local else "set_requires_all_reduce"
            raise Misuse(
                f"optimizer.step() after {call}(False) and a backward: torch would not apply its gradients before one "
                f"with True; call {call}(True) before the last backward of a step, or at least before the step"
            )
        own = {param for group in self.param_groups for param in group["params"]}
        for other in _made:
            if other is self or other._root.outermost is not self._root.outermost:
                continue
            params = {param for group in other.param_groups for param in group["params"]}
            if own.isdisjoint(params) and any(param.grad is not None for param in params):
                raise Misuse(
                    f"{len(params)} parameters with gradients are in another optimizer of the model, and a step on the "
                    "servers is one of the whole model: make one optimizer of all, with a group for each; or delete "
                    "the other one"
                )

    def _on_servers(self) -> _Served:
        if self._served is None:
            self._root.outermost.built()
            own: Any = self
            self._served = _Served(own)
        return self._served


_made: weakref.WeakSet[OnServers] = weakref.WeakSet()


def install() -> None:
    """Have optimizers of torch that are made from now on recognise the parameters of `fully_shard`."""
    original = torch.optim.Optimizer.add_param_group
    if hasattr(original, "_axon_original"):
        return

    @functools.wraps(original)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        _recognise(self)

    add_param_group._axon_original = original  # type: ignore[attr-defined]
    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _recognise(optimizer: Any) -> None:
    """Give an optimizer of a model's parameters the class that steps on the servers.

    Raises:
        InvalidRequest: it has no counterpart there.
    """
    if isinstance(optimizer, (ServerOptimizer, OnServers)):
        return
    root = root_with(param for group in optimizer.param_groups for param in group["params"])
    if root is None:
        return
    try:
        counterpart(optimizer, _OTHERWISE)
    except InvalidRequest:
        optimizer.param_groups.pop()
        raise
    optimizer._root, optimizer._served, optimizer.last = root, None, None
    kind: Any = type(optimizer)
    optimizer.__class__ = _joined(kind)
    _made.add(optimizer)
    line = root.outermost.options.line
    if line and len(line) < torch.distributed.get_world_size():  # the first use of a stage needs other stages' output
        root.outermost.built()


@functools.cache
def _joined(kind: Any) -> Any:
    made: Any = type(
        kind.__name__, (OnServers, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
    made.step = torch.optim.Optimizer.profile_hook_step(OnServers.step)
    made.step.hooked = True
    return made


__all__ = ["OnServers", "install"]
