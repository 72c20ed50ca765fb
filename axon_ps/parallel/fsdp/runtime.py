"""The order of acts in one wrapped model: gather before use, reshard after, push when complete, step at the end.

The hooks (`hooks.py`) call the runtime at autograd's events; the runtime decides; `FlatUnit` moves the bytes.

Note: [When a gradient is complete]
    Autograd runs a parameter's AccumulateGrad once per backward, after every use of the parameter in that backward
    has contributed. So a unit's gradient is complete when each of its parameters has fired. Reentrant activation
    checkpointing is the exception: each checkpointed call is a backward of its own. A unit that was used more than
    once since the last backward is therefore pushed when all of backward ends, not before.

Note: [When memory may be freed in backward]
    Once all trainable parameters of a module have fired, backward is most likely done with the module. If it has frozen
    parameters, backward is done once the gradient of its inputs is there: an adapter's gradient is complete while the
    weights it adapts are still to be read. The module counts as finished then, and is resharded when backward comes to
    another one, or ends. The time is only a guess: values that are read again are gathered again (`saved_tensors`).

Note: [Backward that is broken off]
    An error in backward leaves some gradients sent and others not made. None of them is used: `zero_grad()` drops them,
    and withdraws those sent, so that the step is aborted for all. Until then a step or another backward is refused.

Note: [One version a step]
    While this worker is a member nothing commits without its vote, so all that a step reads is of one version. A worker
    that the coordinator gave up (it was frozen, or cut off) does not know it: others commit, units that it has mapped
    change while it reads them, and once it is back the rest of its step would be of a later version. So a forward that
    was not of one version from its first to its last read is made again, before its output is seen. A step during which
    the version moved gets a void ticket: its gradients are not sent, and it aborts. (A step begins where the one before
    it ended, since that is when its batch is drawn: others may have had the same samples since. It begins anew if this
    worker itself asked for other parameters, as `load_checkpoint` does.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from axon_ps.errors import Misuse, StepAborted
from axon_ps.observe.moments import Moment, reached
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp import stats
from axon_ps.parallel.fsdp.abstract_runtime import AbstractRuntime
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit, check_unchanged, release_held
from axon_ps.parallel.fsdp.gathering import Gathering
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.one_thread import OneThread
from axon_ps.parallel.fsdp.steps import Position, StepBatch
from axon_ps.parallel.fsdp.tensors.loss_scale import LossScale
from axon_ps.parallel.fsdp.tensors.saved_tensors import SavedParameter
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.markers import Markers
from axon_ps.types import Hyper
from axon_ps.worker.steps.step_trace import StepTrace

TORN = "the parameters changed while they were read: the job went on without this worker; read them again"

_MAX_FORWARDS = 8
"""Runs of a forward before it raises; see Note: [One version a step]."""


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
        sent: gradients that have left this worker for the step under way, and the norm that they are clipped to.
        has_gradients: True if a backward has been made for the step under way.
        loss_scale: the factor of the loss; gradients are divided by it before they are pushed.
        syncing: True if gradients are pushed; False inside `no_sync()`.
        markers: the parts of its steps, for profilers and traces.
        optimizers: those of ours that make its steps.
        current: the optimizer of ours that was made last, which alone makes steps; None before there is one.
        moments_of: the version at which the optimizer's moments began.
        expected_hyper: the hyperparameters that the optimizer has now; None = the next step's cannot be known.
        batch: the batch of the next backward's gradients, if a loader deals the samples; see `begin_batch`.
        decisions: number of steps that have ended, in whatever way.
        resends: number of times that the gradients of an aborted step are sent again; if any, a copy is retained.
        on_abort: called when a step was aborted, before any wait; it may raise.
        buffers: the module's buffers, which checkpoints have.
        on_commit: called when a step has committed.
        left: parameters in no group whose gradients were forgotten here, and not in torch.
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
        self.gathering = Gathering(wrapping, self.units, gather_buffers, self.markers, self._free)
        self.meter = wrapping.meter
        self.grad_meter = Meter()
        self.counters = wrapping.counters
        self._stage_grads = wrapping.offload.stages_grads and not wrapping.replicated
        self._callback_queued = False
        self._thread = OneThread(self)
        self._read: Position = (0, 0)  # when the forward began
        self._uses: list[int] = []  # of every unit, when the forward began
        self._forwards = 0  # attempts at this forward
        self.has_gradients = False
        self._pushed: set[int] = set()  # units whose gradients have left for this step
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
        self.syncing = True
        self.batch: StepBatch | None = None
        self.decisions = 0
        self.resends = 0
        self.on_abort: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None
        self.buffers: ModuleBuffers | None = None
        self.last_reason = ""
        self.sent = SentGradients()
        self.loss_scale = LossScale()

    def _begin_step(self) -> None:
        """Prepare for a forward that may be the first of a step."""

    def _gather_speculative(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """Gather a unit behind its push, as the step is expected to leave it."""

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
        _refuse_transforms()
        if unit.is_root and not recomputing:
            check_unchanged(self.flats)
            self.agree()
            self._settle_backward()
            self.gathering.begin_forward(training=torch.is_grad_enabled())
            for other in self.units:  # a forward that raised may have left some behind
                other.depth = 0
            self.markers.begin("forward", in_profile=True)
            self._read = self.now
            self._uses = [other.uses for other in self.units]
            if self.gathering.training and not (self.has_gradients or self._forwards):
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

    @property
    def torn(self) -> bool:
        """True if the values read since the forward began are not of one version."""
        return self._read != self.now or any(flat.source.torn(flat) for flat in self.flats)

    def forward_again(self) -> bool:
        """Return True if the root's forward must be made again; see Note: [One version a step].

        Raises:
            StepAborted: it was made `_MAX_FORWARDS` times; the parameters change faster than it reads them.
        """
        if in_backward() or not self.torn:
            self._forwards = 0
            return False
        self._forwards += 1
        for unit, uses in zip(self.units, self._uses, strict=True):
            unit.uses = uses
            self.gathering.reshard(unit)
        if self._forwards == _MAX_FORWARDS:
            self._forwards = 0
            raise StepAborted(
                f"the parameters changed during each of {_MAX_FORWARDS} forwards: the job goes on without this worker"
            )
        self.counters.forwards_repeated += 1
        return True

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
        """Begin a backward, unless it has begun; each of its first possible events calls this.

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
        flat = unit.trainable
        assert flat is not None
        if len(unit.fired) < unit.expected:
            return
        if not unit.has_frozen:
            self.gathering.finish(unit)
        if self._pushes_now and unit.uses <= 1:
            self._push(flat)
            unit.fired.clear()
        elif self._stages_now and unit.uses <= 1:
            self._stage(flat)
        self.gathering.prefetch()

    def inputs_done(self, unit: ModuleUnit) -> None:
        """Finish a module, unless it is used again: the gradients of its inputs are there."""
        flat = unit.trainable
        if flat is None or len(unit.fired) in (0, unit.expected):
            self.gathering.finish(unit)

    def _free(self, unit: ModuleUnit) -> None:
        """Reshard a unit in backward; behind its push, gather it as the step is expected to leave it."""
        self.gathering.reshard(unit)
        flat = unit.trainable
        if flat is not None and flat.index in self._pushed and not unit.held:
            self._gather_speculative(unit, flat)

    def _after_backward(self) -> None:
        """End a backward: push the remaining gradients, reshard all modules but those whose forward is under way."""
        self._callback_queued = False
        self.gathering.forget_backward()
        for unit in reversed(self.units):
            flat = unit.trainable
            if flat is not None and unit.fired:
                if self._pushes_now:
                    self._push(flat)
                elif self._stages_now:
                    self._stage(flat)
            unit.fired.clear()
            unit.uses = 0
            if not unit.depth:
                self._free(unit)
        self.gathering.end_backward()
        self.markers.end("backward")

    # ------------------------------------------------------------------ by hand

    def gather_all(self) -> None:
        """Unshard every unit, and block until it is."""
        self.agree()
        self._read = self.now
        self.gathering.gather_all()

    def prefetch(self) -> None:
        """Begin to gather the units that the next forward needs first."""
        self.agree()
        self.gathering.prefetch_by_hand()

    def push_accumulated(self) -> None:
        """Push every gradient that was accumulated and not pushed yet, unless others of the step are still to come."""
        if self.accumulating:
            return
        for unit in reversed(self.units):
            flat = unit.trainable
            if flat is not None and flat.index not in self._pushed and flat.grads.present:
                self._push(flat)
                self._gather_speculative(unit, flat)

    # ------------------------------------------------------------------ gradients

    def begin_batch(self, batch: StepBatch) -> None:
        """Set the batch of the next backward's gradients, which a loader gives to the program.

        Gradients of the step's earlier batches will be multiplied by its weight when they are pushed, so they are
        rescaled for it here.

        Raises:
            Misuse: the batch counts for nothing, and gradients of batches that count are waiting.
        """
        before, self.batch = self.batch, batch
        if before is None or before.weight == batch.weight or not self.has_gradients:
            return
        if not batch.weight:
            raise Misuse(
                "gradients of several batches are accumulated, and of the last one there is nothing for this worker: "
                "the data set ends with fewer samples than there are workers. Use drop_last=True, or step after each"
            )
        for flat in self.flats:
            staged_bytes = flat.grads.staged_bytes
            flat.grads.multiply(before.weight / batch.weight)
            self.grad_meter.add(flat.grads.staged_bytes - staged_bytes)

    @property
    def accumulating(self) -> bool:
        """True if gradients stay here, since more of the step are still to come on this worker."""
        return self.batch is not None and not self.batch.is_last

    @property
    def accumulates(self) -> bool:
        """True if this worker's gradient of the step is a sum over several batches, which must not be dropped."""
        return self.batch is not None and self.batch.count > 1

    @property
    def _pushes_now(self) -> bool:
        return self.syncing and not self.accumulating

    @property
    def _stages_now(self) -> bool:
        """True if gradients are staged; those of a micro-batch always are, so that nothing clips them by themselves."""
        return self._stage_grads or self.accumulating

    def _stage(self, flat: FlatUnit) -> None:
        """Stage the gradients of `no_sync()`, or of a micro-batch."""
        before = flat.grads.staged_bytes
        flat.grads.stage()
        self.sent.add(flat.index, len(flat.params))
        self.grad_meter.add(flat.grads.staged_bytes - before)

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
        zeroed = self._zeroed if set_to_none else self._with_gradients()
        self.left = {p for p in leaving if p.grad is not None or p in self.left}
        if self._pushed:
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
        return self.accumulates and self.has_gradients and not self._broken

    def _with_gradients(self) -> set[nn.Parameter]:
        """Return the parameters that have a gradient, as torch would see them."""
        return {p for flat in self.flats for p in flat.params if p.grad is not None} | self._zeroed

    def _withdraw(self) -> None:
        """Withdraw the gradients that were sent for the step under way."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reshard everything; called when memory is needed, and at the end."""
        self.gathering.reset()

    def begin_anew(self) -> None:
        """Drop all values, and the order in which units are needed, as in a worker that has just come."""
        self.reset()
        self.gathering.forget_orders()

    def statistics(self) -> dict[str, float]:
        """Return counters and memory of this worker; bytes and seconds."""
        return stats.measured(self.counters, sum(f.repeated for f in self.flats), self.meter, self.grad_meter)


def _refuse_transforms() -> None:
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
