"""The order of events in one wrapped model: gather before use, reshard after, push when complete, step at the end.

The hooks (`hooks.py`) call the runtime at autograd's events. `FlatUnit` moves the bytes.

Note: [When a gradient is complete]
    Autograd runs a parameter's AccumulateGrad once per backward, after every use of the parameter in that backward
    has contributed. So a unit's gradient is complete when the AccumulateGrad of each of its parameters has run.
    Reentrant activation checkpointing is the exception: each checkpointed call is a backward of its own. A unit that
    was used more than once since the last backward is therefore pushed when all of backward ends, not before.

Note: [When memory may be freed in backward]
    Once the gradients of all trainable parameters of a module are complete, backward is most likely done with the
    module. If it has frozen parameters, backward is done once the gradient of its inputs is there. (An adapter's
    gradient is complete before backward has read the weights it adapts.) The module counts as finished then, and is
    resharded when backward comes to another one, or ends. The time is only a guess: values that are read again are
    gathered again (`saved_tensors`).

Note: [Backward that is broken off]
    After an error in backward some gradients are sent and others not made. None of them is used: `zero_grad()` drops
    them, and withdraws those sent. The step is then aborted for all workers. Until `zero_grad()` is called, a step or
    another backward is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from axon_ps.errors import Misuse
from axon_ps.observe.moments import Moment, reached
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp import stats
from axon_ps.parallel.fsdp.abstract_runtime import AbstractRuntime
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit, check_unchanged, release_held
from axon_ps.parallel.fsdp.forwards import OneThread, OneVersion
from axon_ps.parallel.fsdp.gathering import UnitGathering
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.tensors.accumulation import Accumulation
from axon_ps.parallel.fsdp.tensors.loss_scale import LossScale
from axon_ps.parallel.fsdp.tensors.saved_tensors import SavedParameter
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.markers import Markers
from axon_ps.types import Hyper
from axon_ps.worker.steps.step_trace import StepTrace


class Runtime(AbstractRuntime):
    """The order of events in one wrapped model, wherever its steps are made: `ServerRuntime`, `ReplicatedRuntime`.

    Args:
        wrapping: the options with which the model is wrapped.
        units: module units; the first is the root.
        gather_buffers: buffers for gathers that cannot come into their unit.
        trace: the spans of the worker's steps; None where steps are not made on the servers.

    Attributes:
        flats: the flat units of all module units, in layout order.
        gathering: the units that are in memory.
        one_version: the version of the values that a forward reads.
        accumulation: gradients that stay here before they are pushed.
        sent: gradients that have left this worker for the step under way, and the norm that they are clipped to.
        has_gradients: True if a backward has been made for the step under way.
        loss_scale: the factor of the loss. Gradients are divided by it before they are pushed.
        markers: the parts of its steps, for profilers and traces.
        optimizers: our optimizers that were made for the model.
        current: the optimizer of ours that was made last, which alone makes steps; None before there is one.
        moments_of: the version at which the optimizer's moments began.
        expected_hyper: returns the hyperparameters that the optimizer has now; None = the next step's cannot be known.
        decisions: number of steps on the servers that have ended, in whatever way.
        resends: number of times that the gradients of an aborted step are sent again. Above 0, a copy is retained.
        on_abort: called when a step is aborted whose gradients are to be sent again. It may raise.
        buffers: the module's buffers, which are in checkpoints.
        on_commit: called when a step has committed.
        left: parameters in no group whose gradients were dropped here, and would not be dropped by torch.
        last_reason: the reason for which the last step did not commit, in words.
    """

    def __init__(
        self,
        wrapping: Wrapping,
        units: Sequence[ModuleUnit],
        gather_buffers: BufferPool,
        trace: StepTrace | None = None,
    ) -> None:
        self._wrapping = wrapping
        self.units = tuple(units)
        self.flats = tuple(flat for unit in self.units for flat in unit.flats)
        self.markers = Markers(trace)
        self.gathering = UnitGathering(wrapping, self.units, gather_buffers, self.markers, self._free)
        self.meter = wrapping.meter
        self.grad_meter = Meter()
        self.counters = wrapping.counters
        self.sent = SentGradients()
        is_wider = wrapping.spec.precision.grad.itemsize > wrapping.precision.compute(wrapping.built).itemsize
        stages = (wrapping.offload.stages_grads or is_wider) and not wrapping.replicated
        self.accumulation = Accumulation(self.flats, self.sent, self.grad_meter, stages=stages)
        self._callback_queued = False
        self._thread = OneThread(self)
        self.one_version = OneVersion(self.units, lambda: self.now, self.gathering, self.counters)
        self.has_gradients = False
        self._zeroed: set[nn.Parameter] = set()  # their gradients are zeros, where torch's would be
        self.left: set[nn.Parameter] = set()
        self._broken = False  # True if the last backward was broken off, and `zero_grad` was not called since
        self._makes_graph = False  # of the backward under way
        self._unit_of = {flat.index: unit for unit in self.units for flat in unit.flats}
        for flat in self.flats:
            flat.runtime = weakref.ref(self)
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.current: weakref.ref[torch.optim.Optimizer] | None = None
        self.moments_of = 0
        self.expected_hyper: Callable[[], Sequence[Hyper] | None] | None = None
        self.decisions = 0
        self.resends = 0
        self.on_abort: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None
        self.buffers: ModuleBuffers | None = None
        self.last_reason = ""
        self.loss_scale = LossScale()

    def _begin_step(self) -> None:
        """Prepare for a forward that may be the first of a step."""

    def _gather_speculative(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """Gather a unit, as the step is expected to leave it, if its gradient has left."""

    # ------------------------------------------------------------------ forward

    @uncompiled
    def before_forward(self, unit: ModuleUnit, *_: object) -> None:
        """Unshard a module that is about to run.

        Raises:
            Misuse: its parameters are not those that were wrapped, or a transform of torch.func or a tracer runs it.
        """
        recomputing = in_backward()
        if not recomputing:
            self._thread.begin(f"a forward of {unit.name or 'the model'!r} begins", busy=self._is_busy)
        refuse_transforms()
        if unit.is_root and not recomputing:
            check_unchanged(self.flats)
            self.agree()
            self._settle_backward()
            self.gathering.begin_forward(training=torch.is_grad_enabled())
            for other in self.units:  # after a forward that raised, it may be above 0
                other.depth = 0
            self.markers.begin("forward", in_profile=True)
            repeated = self.one_version.begin()
            if self.gathering.training and not (self.has_gradients or repeated):
                self._begin_step()
        if not recomputing:
            unit.depth += 1
            unit.uses += torch.is_grad_enabled()
            unit.check_parameters()
        self.gathering.need(unit)
        if not (unit.is_root or recomputing):
            reached(Moment.FORWARD)

    def after_forward(self, unit: ModuleUnit) -> None:
        """Reshard a module that has run, unless it is needed again at once."""
        if in_backward():
            return
        unit.depth -= 1
        if unit.depth > 0:
            return
        check_unchanged(unit.flats)
        if unit.is_root:
            self.markers.end("forward")
        self.gathering.used(unit)

    # ------------------------------------------------------------------ backward

    @uncompiled
    def before_backward(self, unit: ModuleUnit, grad: torch.Tensor) -> None:
        """Unshard a module again: the gradient of its output is there."""
        self._begin_backward()
        self.gathering.need(unit)
        if not unit.is_root:
            reached(Moment.BACKWARD)

    def gather_for_backward(self, flat: int) -> None:
        """Unshard the flat unit of this number: backward reads its parameters."""
        self._begin_backward()
        self.gathering.need(self._unit_of[flat])

    def gather_saved(self, saved: SavedParameter) -> None:
        """Gather a unit again: backward reads what was saved of it; see `saved_tensors`.

        Raises:
            Misuse: a step was made since forward, so that the values are gone.
        """
        self._begin_backward()
        unit, flat = self._unit_of[saved.flat.index], saved.flat
        if not flat.is_readable:
            self.gathering.need(unit)
        if saved.at != flat.values_at and saved.decisions != self.decisions:
            raise Misuse(
                f"backward needs unit {flat.unit.name!r} as forward read it, and a step was made since: those "
                "values are gone (torch's optimizers change them in place, which is an error there, too). Run forward "
                "again"
            )
        unit.held = unit.held or self._makes_graph

    def _begin_backward(self) -> None:
        """Begin a backward, unless it has begun. It is called at every event that may be the first of a backward.

        Raises:
            Misuse: the backward before was broken off, and its gradients were not dropped; or the loss and the
            gradients present have different scales.
        """
        if self._callback_queued:
            return
        self._thread.check("a backward begins", ("forward",), busy=self._is_busy)
        if self._broken:
            raise Misuse(
                "the backward before was broken off by an error, with a part of its gradients made: call "
                "optimizer.zero_grad(), which withdraws them, before the next backward"
            )
        check_unchanged(self.flats)
        self.loss_scale.begin(adds=self.has_gradients)
        self._callback_queued = self.gathering.training = True
        self._makes_graph = torch.is_grad_enabled()
        self.markers.begin("backward", in_profile=False)  # autograd's own thread may end it
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @property
    def _is_busy(self) -> bool:
        """True if a forward or a backward seems to be under way."""
        return self.units[0].depth > 0 or self._callback_queued

    def _settle_backward(self) -> None:
        """Forget which gradients the last backward had made, if it was broken off; called outside of backward."""
        if not self._callback_queued or in_backward():
            return
        self._callback_queued = False
        self._broken = self._broken or self._is_partial
        for unit in self.units:
            unit.fired.clear()
            unit.uses, unit.held = 0, False
            self.gathering.reshard(unit)
        self.gathering.drop_backward()
        self.markers.end("backward")

    @property
    def _is_partial(self) -> bool:
        """True if a backward, broken off now, has left gradients that would count."""
        return self.has_gradients

    def check_backward(self) -> None:
        """Refuse gradients of a broken-off backward and parameters changed in place; called before a step.

        Raises:
            Misuse: there are some.
        """
        check_unchanged(self.flats)
        self._settle_backward()
        if self._broken:
            raise Misuse(
                "the last backward was broken off by an error, so that its gradients are a part of what they should "
                "be: call optimizer.zero_grad(), which withdraws them, and go on with the next batch"
            )

    @uncompiled
    def grad_ready(self, unit: ModuleUnit, param: nn.Parameter) -> None:
        """Record that a parameter's gradient is complete; see Note: [When a gradient is complete].

        Raises:
            Misuse: the gradient of the step before was not dropped.
        """
        self._begin_backward()
        self.sent.check_not_retained(param._axon_home)  # type: ignore[attr-defined]
        unit.fired.add(param)
        self.has_gradients = True
        if len(unit.fired) < unit.expected:
            return
        if not unit.has_frozen:
            self.gathering.finish(unit)
        sent = [flat for flat in unit.trained if self.accumulation.pushes(flat.index)]
        if sent and unit.uses <= 1:
            for flat in sent:
                self._push(flat)
            unit.fired.clear()
        elif self.accumulation.stages and unit.uses <= 1:
            for flat in unit.trained:
                self.accumulation.stage(flat)
        self.gathering.prefetch()

    def inputs_done(self, unit: ModuleUnit) -> None:
        """Finish a module, unless it is used again: the gradients of its inputs are there."""
        if not unit.trained or len(unit.fired) in (0, unit.expected):
            self.gathering.finish(unit)

    def _free(self, unit: ModuleUnit) -> None:
        """Reshard a unit in backward, and gather it behind its push, as the step is expected to leave it."""
        self.gathering.reshard(unit)
        for flat in unit.trained if not unit.held else ():
            self._gather_speculative(unit, flat)

    def _after_backward(self) -> None:
        """End a backward: push the remaining gradients, reshard all modules but those whose forward is under way."""
        self._callback_queued = False
        self.gathering.forget_backward()
        for unit in reversed(self.units):
            for flat in unit.trained if unit.fired else ():
                if self.accumulation.pushes(flat.index):
                    self._push(flat)
                elif self.accumulation.stages:
                    self.accumulation.stage(flat)
            unit.fired.clear()
            unit.uses = 0
            if not unit.depth:
                self._free(unit)
        self.gathering.end_backward()
        self.markers.end("backward")

    # ------------------------------------------------------------------ by hand

    def gather(self, units: Sequence[ModuleUnit] | None = None) -> None:
        """Unshard these units (None = all), and block until they are."""
        self.agree()
        self.one_version.renew()
        self.gathering.gather(self.units if units is None else units)

    def prefetch(self) -> None:
        """Begin to gather the units that the next forward needs first."""
        self.agree()
        self.gathering.prefetch_by_hand()

    def push_accumulated(self) -> None:
        """Push every gradient that was accumulated and not pushed yet, unless others of the step are still to come."""
        if self.accumulation.goes_on:
            return
        for unit in reversed(self.units):
            for flat in (flat for flat in unit.trained if flat.grads.present):
                self._push(flat)
                self._gather_speculative(unit, flat)

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, *, set_to_none: bool, leaving: Iterable[nn.Parameter] = ()) -> bool:
        """Forget the present gradients, unless they are of a batch that an `ElasticLoader` has cut.

        Those that were sent for the step under way are withdrawn: the step is aborted, for all workers.

        Args:
            set_to_none: as of `torch.optim.Optimizer.zero_grad`: if not, they count as zeros in the steps to come.
            leaving: parameters whose gradients torch would leave as they are, to be added to.

        Returns:
            True if they are forgotten.

        Raises:
            Misuse: some are on their way to other workers, and cannot be withdrawn.
        """
        self._settle_backward()
        release_held(self.units)
        if self._sums_batches:
            return False
        present = {p for flat in self.flats for p in flat.params if p.grad is not None}  # as torch would see them
        zeroed = self._zeroed if set_to_none else present | self._zeroed
        self.left = {p for p in leaving if p.grad is not None or p in self.left}
        self._withdraw()
        for flat in self.flats:
            self.grad_meter.add(-flat.grads.staged_bytes)
            flat.grads.pop()
            self.sent.drop(flat.index)
        self.sent.forget()
        self._zeroed = set() if set_to_none else zeroed
        self._broken = self.has_gradients = False
        return True

    @property
    def _sums_batches(self) -> bool:
        """True if there are gradients of earlier micro-batches of the step."""
        return self.accumulation.sums_batches and self.has_gradients and not self._broken

    def _withdraw(self) -> None:
        """Withdraw the gradients that were sent for the step under way, if there are any."""
        raise NotImplementedError

    def reset(self) -> None:
        """See `UnitGathering.reset`."""
        self.gathering.reset()

    def begin_anew(self) -> None:
        """Drop all values, and the order in which units are needed, as in a worker that has just come."""
        self.reset()
        self.gathering.forget_orders()

    def statistics(self) -> dict[str, float]:
        """Return counters and memory of this worker; bytes and seconds."""
        return stats.measured(self.counters, sum(f.repeated for f in self.flats), self.meter, self.grad_meter)


def refuse_transforms() -> None:
    """Refuse to run inside a transform of torch.func, or in a trace.

    Raises:
        Misuse: this is one.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Misuse(
            "a wrapped model cannot run inside torch.func's transforms (grad, vmap, jvp, jacrev): its parameters "
            "are gathered and its gradients sent by autograd's own backward. Transform a plain copy of the module, "
            "with the values of model.state_dict()"
        )
    if torch._C._get_tracing_state() is not None:
        raise Misuse(
            "a wrapped model cannot be traced by torch.jit.trace: the trace keeps the parameters' memory, which a unit "
            "gives back when it has run. Trace a plain copy of the module, with the values of model.state_dict()"
        )
