"""The optimizer of a model: its kernels, its hyperparameters, and the moments they need. Pure.

Refuses a second optimizer, unless a step replaces the first: a model has one. The arithmetic is `shard.core.master`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from axon_ps.errors import InternalError, InvalidRequest, Misuse, StepAborted
from axon_ps.optim import registry
from axon_ps.optim.base import UpdateRule
from axon_ps.shard.core.master import Master, Update
from axon_ps.shard.core.slices import OwnedSlice, OwnedSlices
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, DType, Hyper, OptimizerChange, OptimizerSpec


class Updater:
    """Kernels and hyperparameters of one model.

    Args:
        spec: the optimizer as registered.
        num_parameters: number of parameters in the layout, with frozen ones.
        restored: the optimizer of the checkpoint that the moments came from; None = they came from none.

    Attributes:
        spec: the optimizer as registered.

    Raises:
        InvalidRequest: the optimizer or a hyperparameter is unknown, or the groups do not cover the layout.
    """

    def __init__(self, spec: OptimizerSpec, num_parameters: int, restored: OptimizerSpec | None = None) -> None:
        if len(spec.group_of) != num_parameters:
            raise InvalidRequest(
                f"the optimizer names the groups of {len(spec.group_of)} parameters; the layout has {num_parameters}"
            )
        self.spec = spec
        self._kernels: UpdateRule = registry.create(spec.name)
        self._hypers: tuple[Hyper, ...] = tuple(self._kernels.validate(group) for group in spec.groups)
        self._state_groups = (*self._hypers, *(self._kernels.validate(group) for group in spec.moments))
        self._restored(restored)

    def restored(self, saved: OptimizerSpec | None, masters: Iterable[Master]) -> None:
        """Take the optimizer of the checkpoint that values and moments of `masters` came from."""
        self._restored(saved)
        self.install(masters, "" if saved is None else saved.name)

    def _restored(self, saved: OptimizerSpec | None) -> None:
        if saved is not None and saved.name == self.spec.name:
            groups = tuple(self._kernels.validate(group) for group in (*saved.groups, *saved.moments))
            if self._needs_moments(groups):
                self._state_groups = (*self._state_groups, *groups)

    def begin_anew(self, masters: Iterable[Master]) -> None:
        """Replace another optimizer from the next update on, with new moments."""
        for master in masters:
            master.begin_anew()
        self.install(masters, self.spec.name)

    def install(self, masters: Iterable[Master], moments_of: str) -> None:
        """Give trainable slices their groups and moments. Existing moments stay if they are of this optimizer.

        Args:
            masters: of the slices.
            moments_of: name of the optimizer whose moments they have; empty for none.
        """
        for master in masters:
            if moments_of != self.spec.name:
                master.forget_moments()
            master.set_groups(self.spec.group_of)
            master.add_moments(self._kernels, self._state_groups)

    def update(
        self, hypers: Sequence[Hyper], scale: float, masters: Iterable[Master], untouched: Collection[int] = ()
    ) -> Update:
        """Make the update of a step that commits.

        Args:
            hypers: hyperparameters per parameter group; empty = unchanged.
            scale: the clip factor.
            masters: of trainable slices. They get moments that a group needs for the first time (it turned momentum on,
                for example).
            untouched: numbers of the parameters that stay as they are.

        Raises:
            InvalidRequest: a hyperparameter is unknown or out of range.
            InternalError: their number is not that of the groups.
        """
        if hypers:
            if len(hypers) != len(self.spec.groups):
                raise InternalError(
                    f"a step has hyperparameters of {len(hypers)} groups; there are {len(self.spec.groups)}"
                )
            self._hypers = tuple(self._kernels.validate(hyper) for hyper in hypers)
            if self._needs_moments(self._hypers):
                self._state_groups = (*self._state_groups, *self._hypers)
                for master in masters:
                    master.add_moments(self._kernels, self._state_groups)
        return Update(self._kernels, self._hypers, scale, frozenset(untouched))

    def expected(self, hypers: Sequence[Hyper]) -> Update:
        """Make the update of a step that commits with these hyperparameters, unclipped.

        Raises:
            InvalidRequest: one is unknown or out of range, or their number is not that of the groups.
            StepAborted: they need moments that do not exist yet.
        """
        if len(hypers) != len(self.spec.groups):
            raise InvalidRequest(
                f"hyperparameters of {len(hypers)} groups were given; there are {len(self.spec.groups)}"
            )
        valid = tuple(self._kernels.validate(hyper) for hyper in hypers)
        if self._needs_moments(valid):
            raise StepAborted("these hyperparameters need new moments; their update cannot be prepared")
        return Update(self._kernels, valid)

    def warm_up(self, param_dtype: DType) -> None:
        """Compile the kernels, with and without wire copy. Takes about a second the first time; any thread."""
        for wire_dtype in {None, None if param_dtype is DType.F32 else param_dtype}:
            self._kernels.warm_up(self._hypers, wire_dtype)

    def _needs_moments(self, hypers: tuple[Hyper, ...]) -> bool:
        """Return True if a group with these hyperparameters needs moments that do not exist yet."""
        names = self._kernels.state_names
        return names((*self._state_groups, *hypers)) != names(self._state_groups)


class ModelOptimizer:
    """The optimizer of one model's slices: set once, and replaced only by a step.

    Args:
        slices: of the model.

    Attributes:
        updater: None until `set`.
    """

    def __init__(self, slices: OwnedSlices) -> None:
        self.updater: Updater | None = None
        self._slices = slices
        self._num_parameters: int | None = None
        self._saved: OptimizerSpec | None = None  # in the checkpoint that was restored

    def configure(self, spec: JobSpec) -> None:
        """Set the layout."""
        self._num_parameters = sum(len(u.parameters) for u in spec.layout.units)

    def set(self, optimizer: OptimizerSpec) -> Updater:
        """Set the optimizer: make moments and assign parameters to groups. A repeated call changes nothing.

        Restored moments stay if they are of this optimizer. It may take long, and runs in any thread while nothing else
        changes the engine.

        Raises:
            Misuse: the layout is not known yet, or there is another optimizer.
            InvalidRequest: the optimizer or a hyperparameter is unknown, or groups do not cover the layout.
        """
        if self.updater is not None:
            if self.updater.spec != optimizer:
                raise Misuse(f"this server runs {self.updater.spec.name} already; a job has one optimizer")
            return self.updater
        if self._num_parameters is None:
            raise Misuse("the optimizer came before the layout")
        updater = Updater(optimizer, self._num_parameters, self._saved)
        updater.install(self._slices.masters(), "" if self._saved is None else self._saved.name)
        self.updater = updater
        return updater

    def install(self, slices: Iterable[OwnedSlice], *, has_moments: bool = False) -> None:
        """Give further slices their groups, and moments unless they have the optimizer's already."""
        if self.updater is not None:
            name = self.updater.spec.name if has_moments else ""
            self.updater.install([owned.master for owned in slices if owned.trainable], name)

    def update(self, decision: Decision) -> Update | None:
        """Make the update of a step that commits, with its new optimizer if it has one; None without an optimizer."""
        masters = self._slices.masters()
        if decision.optimizer is not None:
            self._change(decision.optimizer, masters)
        if self.updater is None:
            return None
        return self.updater.update(decision.hyper, decision.clip_factor, masters, decision.untouched)

    def _change(self, change: OptimizerChange, masters: Sequence[Master]) -> None:
        assert self._num_parameters is not None
        before, self.updater = self.updater, Updater(change.spec, self._num_parameters)
        if change.retains_moments and before is not None:
            self.updater.install(masters, before.spec.name)
        else:
            self.updater.begin_anew(masters)

    def restored(self, saved: OptimizerSpec | None) -> None:
        """Take the optimizer of the checkpoint that was restored; None if it has none."""
        self._saved = saved
        if self.updater is not None:
            self.updater.restored(saved, self._slices.masters())
