"""The registration of a model: its layout and optimizer. Pure.

The layout is that of the worker of lowest rank (see `first_values`), the optimizer the first that is registered. Every
other worker must agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from axon_ps.errors import InvalidRequest, LayoutMismatch, Misuse
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, Hyper, OptimizerSpec
from axon_ps.wire.events import KnownNames


class Registration:
    """Spec and optimizer of a model.

    Args:
        spec: as it was before the coordinator's restart.
        optimizer: likewise.
        number: of the model.
        name: its name in the job.
    """

    def __init__(self, spec: JobSpec | None, optimizer: OptimizerSpec | None, *, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.spec = spec
        self.optimizer = optimizer
        self._given_by: int | None = None  # the rank that gave the layout, if since the coordinator's start

    def check_spec(self, spec: JobSpec, rank: int) -> bool:
        """Return True if `spec` is the first. A later one must be equal."""
        if self.spec is None:
            if not spec.layout.units:
                raise InvalidRequest(f"worker {rank} registers a layout without units; a model needs parameters")
            return True
        if spec.model and self.spec.model and spec.model != self.spec.model:
            raise LayoutMismatch(
                f"worker {rank} registers {spec.described} as {self.name!r}, and that is {self.spec.described} in the "
                f"job{self._giver}; every worker must build the same models, by the same names or in the same order"
            )
        if difference := spec.difference(self.spec):
            raise LayoutMismatch(
                f"worker {rank} registers another model as {self.name!r} than the job has{self._giver}: {difference}; "
                "every worker must build the same"
            )
        return False

    @property
    def _giver(self) -> str:
        """The worker that gave the layout, as part of a message; empty if it is not known."""
        return "" if self._given_by is None else f" from worker {self._given_by}"

    def set_spec(self, spec: JobSpec, rank: int) -> None:
        """Set the first spec, given by the worker of `rank`."""
        self.spec, self._given_by = spec, rank

    def check_optimizer(
        self, optimizer: OptimizerSpec, spec: JobSpec | None, rank: int, *, later: bool = False
    ) -> OptimizerSpec | None:
        """Return the optimizer with every hyperparameter filled in if it is the first or `later`, else None.

        Without `later` another one must be equal. With `later` it may differ: a step is to replace the job's by it.
        """
        if spec is None:
            raise Misuse(f"worker {rank} registers an optimizer before a layout; register the layout first")
        _check_groups(optimizer, spec)
        algorithm = create(optimizer.name)
        groups = tuple(algorithm.validate(g) for g in optimizer.groups)
        optimizer = dataclasses.replace(optimizer, groups=groups)
        if self.optimizer is None or later:
            return optimizer
        if difference := _optimizer_difference(optimizer, self.optimizer, spec):
            raise LayoutMismatch(
                f"worker {rank} registers another optimizer of {self.name!r} than the job has: {difference}; "
                "every worker must make the same"
            )
        return None

    def change_optimizer(self, decision: Decision) -> None:
        """Apply a committed step: the named optimizer replaces this one, with the moments that it needs.

        If only hyperparameters differ, the optimizer stays as registered, so that joining workers find it unchanged.
        """
        if self.optimizer is not None:
            self.optimizer = optimizer_after(self.optimizer, decision)


def check_known(
    server: str, known: KnownNames | None, model: str, spec: JobSpec | None, optimizer: OptimizerSpec | None
) -> None:
    """Check that a shard server knows the optimizer and compressors of a model.

    Args:
        server: its name in errors.
        known: the optimizers and compressors that it can make; None = not known.
        model: the model's name.
        spec, optimizer: of the model; None = not registered, or checked before.
    """
    if known is None:
        return
    missing = [] if optimizer is None or optimizer.name in known.optimizers else [f"optimizer {optimizer.name!r}"]
    if spec is not None:
        compressors = (spec.precision.param_compression, spec.precision.grad_compression)
        names = {c.name for c in compressors if c is not None} - known.compressors
        missing += [f"compressor {name!r}" for name in sorted(names)]
    if missing:
        raise InvalidRequest(
            f"{server} does not know {' and '.join(missing)} of model {model!r}; start it with --plugins MODULE (or "
            "AXON_PS_PLUGINS), the module that registers it"
        )


def _check_groups(optimizer: OptimizerSpec, spec: JobSpec) -> None:
    parameters = list(spec.layout.parameters())
    if len(optimizer.group_of) != len(parameters):
        raise InvalidRequest(
            f"the optimizer names the group of {len(optimizer.group_of)} parameters; the layout has {len(parameters)}"
        )
    for (unit, p), group in zip(parameters, optimizer.group_of, strict=True):
        trainable = spec.layout.units[unit].trainable
        if not trainable and group != -1:
            raise InvalidRequest(
                f"parameter {p.name!r} is frozen and in group {group}; frozen parameters have group -1"
            )
        if not -1 <= group < len(optimizer.groups):
            raise InvalidRequest(
                f"parameter {p.name!r} is in group {group}; the optimizer has groups 0 to {len(optimizer.groups) - 1}"
            )


def optimizer_after(optimizer: OptimizerSpec, decision: Decision) -> OptimizerSpec:
    """Return the optimizer after a committed step; see `Registration.change_optimizer`."""
    if (change := decision.optimizer) is not None:
        same = dataclasses.replace(optimizer, groups=change.spec.groups, moments=())
        if same != change.spec:
            moments = optimizer.moments if change.retains_moments else ()
            optimizer = dataclasses.replace(change.spec, moments=moments)
    return covering(optimizer, decision.hyper) if decision.hyper else optimizer


def covering(optimizer: OptimizerSpec, hypers: Sequence[Hyper]) -> OptimizerSpec:
    """Return the optimizer, extended by the moments that steps with these hyperparameters need."""
    names, there = create(optimizer.name).state_names, (*optimizer.groups, *optimizer.moments)
    if names((*there, *hypers)) == names(there):
        return optimizer
    return dataclasses.replace(optimizer, moments=(*optimizer.moments, *hypers))


def _optimizer_difference(ours: OptimizerSpec, job: OptimizerSpec, spec: JobSpec) -> str:
    """Return the first difference of two optimizers, as text; empty when they are equal."""
    if ours.name != job.name:
        return f"it is {ours.name} here and {job.name} in the job"
    if len(ours.groups) != len(job.groups):
        return f"it has {len(ours.groups)} parameter groups here and {len(job.groups)} in the job"
    for index, (a, b) in enumerate(zip(ours.groups, job.groups, strict=True)):
        if difference := _hyper_difference(a, b):
            return f"{difference} of group {index}"
    for (_, p), a_group, b_group in zip(spec.layout.parameters(), ours.group_of, job.group_of, strict=True):
        if a_group != b_group:
            return f"parameter {p.name!r} is in group {a_group} here and {b_group} in the job"
    return ""


def _hyper_difference(ours: Hyper, job: Mapping[str, float]) -> str:
    for name in sorted({*ours, *job}):
        a, b = ours.get(name, math.nan), job.get(name, math.nan)
        if a != b:
            return f"{name} is {a} here and {b} in the job, in the hyperparameters"
    return ""
