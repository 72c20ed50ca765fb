"""The order of acts in one wrapped model: gather before use, reshard after, push when complete, step at the end.

The hooks (`hooks.py`) call the runtime at autograd's events; the runtime decides; `FlatUnit` moves the bytes.

Note: [When a gradient is complete]
    Autograd runs a parameter's AccumulateGrad once per backward, after every use of the parameter in that backward
    has contributed. So a unit's gradient is complete when each of its parameters has fired. Reentrant activation
    checkpointing is the exception: each checkpointed call is a backward of its own. A unit that was used more than
    once since the last backward is therefore pushed when all of backward ends, not before.

Note: [When memory may be freed in backward]
    Once all trainable parameters of a module have fired, backward is most likely done with them; where parameters of it
    are frozen (an adapter's gradient is complete while the weights it adapts are still to be read), once the gradient
    of its inputs is there. The module counts as finished then, and is resharded when backward comes to another one, or
    ends. That is a guess about when, no more: what is read again is gathered again (`saved_tensors`).

Note: [Backward that is broken off]
    An error in backward leaves some gradients sent and others not made. Nothing is made of them: `zero_grad()` drops
    them, and withdraws what was sent, so that the step is aborted for all; until then a step or another backward is
    refused.

Note: [Memory]
    Under FULL_SHARD the parameters in memory are the root, the unit in use and one more: the next is gathered while
    its memory plus what is in use stays within two of the largest unit, and what fills the lines to the servers for a
    round trip where that is long (`shard.client.line`). What backward needs first, the units that
    forward used last, is not resharded in between if it fits, and so not gathered twice.

Note: [One version a step]
    While this worker is a member nothing commits without its vote, so all that a step reads is of one version. A worker
    that the coordinator gave up (it was frozen, or cut off) does not know it: others commit, units that it has mapped
    change while it reads them, and once it is back the rest of its step would be of a later version. So a forward that
    was not of one version from its first to its last read is made again, before anybody sees what came of it; and a
    step during which the version moved gets a void ticket: its gradients are not sent, and it aborts. (A step begins
    where the one before it ended, since that is when its batch is drawn: others may have had the same samples since. It
    begins anew where this worker itself asked for other parameters, as `load_checkpoint` does.)
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from axon_ps.errors import Misuse, StepAborted
from axon_ps.observe.moments import Moment, reached
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp import stats
from axon_ps.parallel.fsdp.abstract_runtime import AbstractRuntime
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit, check_unchanged, release_held
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.one_thread import OneThread
from axon_ps.parallel.fsdp.order import GatherOrder
from axon_ps.parallel.fsdp.steps import Position, StepBatch
from axon_ps.parallel.fsdp.tensors.loss_scale import LossScale
from axon_ps.parallel.fsdp.tensors.saved_tensors import SavedParameter
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.marks import Marks
from axon_ps.types import Hyper

TORN = "the parameters changed while they were read: the job went on without this worker; read them again"

_MAX_FORWARDS = 8
"""How often a forward is run before it raises; see Note: [One version a step]."""

BUFFERS = 2
"""How many of the largest unit the prefetched gathers, and the pushes under way, may hold each."""


_NOTHING = contextlib.nullcontext()


def ordinary_tensors() -> AbstractContextManager[object]:
    """Make ordinary tensors, also where the user's code is in inference mode: they outlive it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


class Runtime(AbstractRuntime):
    """The order of events in one wrapped model, wherever its steps are made: `ServerRuntime`, `ReplicatedRuntime`.

    Args:
        wrapping: how the model is wrapped.
        units: module units; the first is the root.
        gather_buffers: what gathers come into that cannot come into their unit.

    Attributes:
        flats: the flat units of all module units, in layout order.
        sent: gradients that have left this worker for the step under way, and what they are clipped to.
        has_gradients: whether a backward has been made for the step under way.
        loss_scale: what the loss was multiplied by; gradients are divided by it before they are pushed.
        syncing: whether gradients are pushed; not inside `no_sync()`.
        prefetched: a prefetch by hand is pending.
        marks: what it is doing, for profilers and traces.
        optimizers: those of ours that make its steps.
        current: the one of ours that was made last, which alone makes steps; None before there is one.
        moments_of: the version at which the moments began that the optimizer has.
        expected_hyper: the hyperparameters that the optimizer has now; None = the next step's cannot be known.
        batch: what the next backward's gradients are of, where a loader deals the samples; see `begin_batch`.
        decisions: how many steps have ended, whatever came of them.
        resends: how often the gradients of a step that was aborted are sent again; a copy of them is retained then.
        on_abort: called when a step was aborted, before anything is waited for; it may raise.
        buffers: those of the module, which checkpoints have.
        on_commit: called when a step has committed.
        left: parameters in no group whose gradients were forgotten here, and not in torch.
        last_reason: why the last step did not commit, in words.
    """

    def __init__(self, wrapping: Wrapping, units: Sequence[ModuleUnit], gather_buffers: BufferPool) -> None:
        self._wrapping = wrapping
        self.units = tuple(units)
        self.flats = tuple(flat for unit in self.units for flat in unit.flats)
        self.gather_buffers = gather_buffers
        self.meter = wrapping.meter
        self.grad_meter = Meter()
        self.counters = wrapping.counters
        self._orders = _first_orders(len(self.units))
        self._least_bytes = BUFFERS * max((u.nbytes for u in self.units[1:]), default=self.units[0].nbytes)
        self._budget_bytes = self._least_bytes
        self._eager = wrapping.prefetch and not wrapping.replicated
        self._stage_grads = wrapping.offload.stages_grads and not wrapping.replicated
        self._training = True
        self._callback_queued = False
        self._thread = OneThread(self)
        self._read: Position = (0, 0)  # when the forward began
        self._uses: list[int] = []  # of every unit, when the forward began
        self._forwards = 0  # attempts at this forward
        self.has_gradients = False
        self._pushed: set[int] = set()  # units whose gradients have left for this step
        self._zeroed: set[nn.Parameter] = set()  # their gradients are zeros, where torch's would be
        self.left: set[nn.Parameter] = set()
        self._finished: list[ModuleUnit] = []  # with which backward seems to be done
        self._broken = False  # the last backward was, and `zero_grad` was not called since
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
        self.marks = Marks()
        self.loss_scale = LossScale()
        self.prefetched = False

    def _extend_prefetch(self, extra_bytes: int) -> None:
        """From now on, gather (and push) so much more before it is needed; see Note: [Memory]."""
        self._budget_bytes = self._least_bytes + extra_bytes
        self.gather_buffers.extend(extra_bytes)

    def _begin_step(self) -> None:
        """The first forward of a step may be about to run."""

    def _gather_speculative(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """Behind its push, gather a unit as the step is expected to leave it."""

    # ------------------------------------------------------------------ forward

    @uncompiled
    def before_forward(self, unit: ModuleUnit, *_: object) -> None:
        """A module is about to run: unshard it.

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
            self.prefetched, self._training = False, torch.is_grad_enabled()
            self._settle_backward()
            self._orders[not self._training].restart()
            for other in self.units:  # a forward that raised may have left some behind
                other.depth = 0
            self.marks.begin("forward", in_profile=True)
            self._read = self.now
            self._uses = [other.uses for other in self.units]
            if self._training and not (self.has_gradients or self._forwards):
                self._begin_step()
        if not recomputing:
            unit.depth += 1
            unit.uses += torch.is_grad_enabled()
            unit.check_parameters()
        self._need(unit)
        if not (unit.is_root or recomputing):
            reached(Moment.FORWARD)

    def after_forward(self, unit: ModuleUnit) -> None:
        """A module has run: reshard it, unless it is needed again at once."""
        if in_backward():
            return
        unit.depth -= 1
        if unit.depth > 0:
            return
        check_unchanged(unit.flats)
        if unit.is_root:
            self.marks.end("forward")
        if not self._training:
            self._reshard(unit)
            if unit.is_root:
                self._orders[False].finish()
        elif not unit.is_root and not self._needed_soon(unit, self._orders[True].upcoming()):
            self._reshard(unit)
        self._prefetch()

    @property
    def torn(self) -> bool:
        """Whether what was read since the forward began is not of one version."""
        return self._read != self.now or any(flat.source.torn(flat) for flat in self.flats)

    def forward_again(self) -> bool:
        """After the root's forward: whether it must be made again. See Note: [One version a step].

        Raises:
            StepAborted: it was made often enough; the parameters change faster than it reads them.
        """
        if in_backward() or not self.torn:
            self._forwards = 0
            return False
        self._forwards += 1
        for unit, uses in zip(self.units, self._uses, strict=True):
            unit.uses = uses
            self._reshard(unit)
        if self._forwards == _MAX_FORWARDS:
            self._forwards = 0
            raise StepAborted(
                f"the parameters changed during each of {_MAX_FORWARDS} forwards: the job goes on without this worker"
            )
        self.counters.forwards_repeated += 1
        return True

    def _needed_soon(self, unit: ModuleUnit, upcoming: Iterable[int]) -> bool:
        """Whether it is among the upcoming units that there is room for; see Note: [Memory]."""
        room = self._budget_bytes
        for number in dict.fromkeys(upcoming):
            other = self.units[number]
            room -= 0 if other.is_root else sum(f.unsharded_bytes for f in other.flats)
            if room < 0:
                return False
            if other is unit:
                return True
        return False

    # ------------------------------------------------------------------ backward

    @uncompiled
    def before_backward(self, unit: ModuleUnit, grad: torch.Tensor) -> None:
        """The gradient of a module's output is there: unshard it again."""
        self._begin_backward()
        self._need(unit)
        if not unit.is_root:
            reached(Moment.BACKWARD)

    def gather_for_backward(self, flat: int) -> None:
        """Backward reads parameters of a flat unit, of this number."""
        self._begin_backward()
        self._need(self._unit_of[flat])

    def gather_saved(self, saved: SavedParameter) -> None:
        """Backward reads what was saved of a unit; see `saved_tensors`.

        Raises:
            Misuse: a step was made since forward, so that the values are gone.
        """
        self._begin_backward()
        unit, flat = self._unit_of[saved.flat.index], saved.flat
        if not flat.is_readable:
            self._need(unit)
        if saved.at != flat.values_at and saved.decisions != self.decisions:
            raise Misuse(
                f"backward needs unit {flat.unit.name!r} as forward read it, and a step was made since: those "
                "values are gone (torch's optimizers change them in place, which is an error there, too). Run forward "
                "again"
            )
        unit.held = unit.held or self._makes_graph

    def _begin_backward(self) -> None:
        """Backward has come here: to be called by whatever it meets first.

        Raises:
            Misuse: the one before was broken off, and what it left was not dropped; or its loss has another scale
                than that of the gradients that it would be added to.
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
        self._callback_queued = self._training = True
        self._makes_graph = torch.is_grad_enabled()
        self.marks.begin("backward", in_profile=False)  # autograd's own thread may end it
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @property
    def _is_busy(self) -> bool:
        """Whether a forward or a backward seems to be under way."""
        return self.units[0].depth > 0 or self._callback_queued

    def _settle_backward(self) -> None:
        """Outside of backward: if the last one was broken off, forget which gradients it had made."""
        if not self._callback_queued or in_backward():
            return
        self._callback_queued = False
        self._broken = self._broken or self._is_partial
        for unit in self.units:
            unit.fired.clear()
            unit.uses, unit.held = 0, False
            self._reshard(unit)
        self._finished.clear()
        self._orders[True].restart()
        self.marks.end("backward")

    @property
    def _is_partial(self) -> bool:
        """Whether a backward that was broken off now has left gradients that would count."""
        return self.has_gradients

    def check_backward(self) -> None:
        """Before a step: refuse gradients of a backward that was broken off, and values that somebody has changed.

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
        """A parameter's gradient is complete in this backward; see Note: [When a gradient is complete].

        Raises:
            Misuse: that of the step before was not dropped.
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
            self._finish(unit)
        if self._pushes_now and unit.uses <= 1:
            self._push(flat)
            unit.fired.clear()
        elif self._stages_now and unit.uses <= 1:
            self._stage(flat)
        self._prefetch()

    def inputs_done(self, unit: ModuleUnit) -> None:
        """The gradients of a module's inputs are there: backward is done with it, unless it is used again."""
        flat = unit.trainable
        if flat is None or len(unit.fired) in (0, unit.expected):
            self._finish(unit)

    def _finish(self, unit: ModuleUnit) -> None:
        """Backward is done with a unit; see Note: [When memory may be freed in backward]."""
        if not unit.is_root and unit not in self._finished:
            self._finished.append(unit)

    def _free_finished(self, needed: ModuleUnit) -> None:
        """Backward has come to another unit."""
        finished, self._finished = self._finished, []
        for unit in finished:
            if unit is not needed:
                self._free(unit)

    def _free(self, unit: ModuleUnit) -> None:
        """Reshard a unit in backward; behind its push, gather it as the step is expected to leave it."""
        self._reshard(unit)
        flat = unit.trainable
        if flat is not None and flat.index in self._pushed and not unit.held:
            self._gather_speculative(unit, flat)

    def _after_backward(self) -> None:
        """All of backward is done: push what is left, reshard everything but modules whose forward is under way."""
        self._callback_queued = False
        self._finished.clear()
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
        self._orders[True].finish()
        self.marks.end("backward")

    # ------------------------------------------------------------------ by hand

    def gather_all(self) -> None:
        """Unshard every unit, and block until it is."""
        self.agree()
        self._read = self.now
        with ordinary_tensors():
            for flat in self.flats:
                flat.start_gather()
                flat.unshard()

    def prefetch(self) -> None:
        """Begin to gather what the next forward needs first, as far as Note: [Memory] allows."""
        self.agree()
        self._orders[True].restart()
        self._training, self.prefetched = True, True
        self._prefetch(by_hand=True)

    def push_accumulated(self) -> None:
        """Push every gradient that was accumulated and not pushed yet, unless others of the step are still to come."""
        if self.accumulating:
            return
        for unit in reversed(self.units):
            flat = unit.trainable
            if flat is not None and flat.index not in self._pushed and flat.has_grads:
                self._push(flat)
                self._gather_speculative(unit, flat)

    # ------------------------------------------------------------------ memory

    def _need(self, unit: ModuleUnit) -> None:
        self._free_finished(unit)
        self._orders[self._training].visit(unit.number)
        began = time.perf_counter()
        with self.marks.within("gather wait", unit.name), ordinary_tensors():
            for flat in unit.flats:
                flat.start_gather()
            for flat in unit.flats:
                flat.unshard()
        self.counters.gather_wait_s += time.perf_counter() - began
        self._prefetch()

    def _prefetch(self, *, by_hand: bool = False) -> None:
        """Start gathering the next units expected, as far as Note: [Memory] allows."""
        if not (self._eager or by_hand):
            return
        for number in self._orders[self._training].upcoming():
            unit = self.units[number]
            for flat in [f for f in unit.flats if f.missing]:
                if not unit.is_root and self._reshardable_bytes() + flat.gather_bytes > self._budget_bytes:
                    return
                if not self.gather_buffers.has_room(flat.gather_bytes):
                    return
                with ordinary_tensors():
                    flat.start_gather()

    def _reshardable_bytes(self) -> int:
        """Memory of parameters beside the root: gathered, and under way."""
        return sum(f.reshardable_bytes for u in self.units[1:] for f in u.flats)

    def _reshard(self, unit: ModuleUnit) -> None:
        if not unit.held:
            for flat in unit.flats:
                flat.reshard()

    # ------------------------------------------------------------------ gradients

    def begin_batch(self, batch: StepBatch) -> None:
        """A loader gives the program a batch: the next backward's gradients are of it.

        Those that wait from the batches before it in this step will be multiplied by its weight when they are pushed,
        so that they are brought to it here.

        Raises:
            Misuse: it counts for nothing, and gradients of batches that do are waiting.
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
            staged_bytes = flat.staged_bytes
            flat.multiply_grads(before.weight / batch.weight)
            self.grad_meter.add(flat.staged_bytes - staged_bytes)

    @property
    def accumulating(self) -> bool:
        """Whether gradients stay here, since more of the step are still to come on this worker."""
        return self.batch is not None and not self.batch.is_last

    @property
    def accumulates(self) -> bool:
        """Whether this worker's gradient of the step is a sum over several batches, which must not be dropped."""
        return self.batch is not None and self.batch.count > 1

    @property
    def _pushes_now(self) -> bool:
        return self.syncing and not self.accumulating

    @property
    def _stages_now(self) -> bool:
        """Whether gradients are put aside; those of a micro-batch always, so that nothing clips them by themselves."""
        return self._stage_grads or self.accumulating

    def _stage(self, flat: FlatUnit) -> None:
        """Put the gradients of `no_sync()`, or of a micro-batch, aside."""
        before = flat.staged_bytes
        flat.stage_grads()
        self.sent.add(flat.index, len(flat.params))
        self.grad_meter.add(flat.staged_bytes - before)

    def zero_grad(self, *, set_to_none: bool, leaving: Iterable[nn.Parameter] = ()) -> bool:
        """Forget the gradients that there are, unless they are of a batch that an `ElasticLoader` has cut.

        Those that were sent for the step under way are withdrawn: the step is aborted, for all workers.

        Args:
            set_to_none: as of `torch.optim.Optimizer.zero_grad`: if not, they count as zeros in the steps to come.
            leaving: parameters whose gradients torch would leave as they are, to be added to.

        Returns:
            Whether they are forgotten.

        Raises:
            Misuse: some are on their way to other workers, which cannot be withdrawn.
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
            self.grad_meter.add(-flat.staged_bytes)
            flat.pop_grads()
            self.sent.drop(flat.index)
        self.sent.forget()
        self._zeroed = set() if set_to_none else zeroed
        self._broken = self.has_gradients = False
        return True

    @property
    def _sums_batches(self) -> bool:
        """Whether there are gradients of earlier micro-batches of the step."""
        return self.accumulates and self.has_gradients and not self._broken

    def _with_gradients(self) -> set[nn.Parameter]:
        """The parameters that have a gradient, as torch would see them."""
        return {p for flat in self.flats for p in flat.params if p.grad is not None} | self._zeroed

    def _withdraw(self) -> None:
        """Have what was sent for the step under way not count."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reshard everything; for code that wants the memory, and at the end."""
        self.prefetched = False
        for unit in self.units:
            unit.depth, unit.held = 0, False
            for flat in unit.flats:
                flat.discard_speculative()
            self._reshard(unit)
        self.gather_buffers.trim()

    def begin_anew(self) -> None:
        """Be as a worker that has just come: without values, and without knowing in which order units are needed."""
        self.reset()
        self._orders = _first_orders(len(self.units))

    def statistics(self) -> dict[str, float]:
        """Counters and memory of this worker; bytes and seconds."""
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


def _first_orders(units: int) -> dict[bool, GatherOrder]:
    """In which order units are expected to be needed, with and without a backward, before any was."""
    numbers = list(range(units))
    return {True: GatherOrder(numbers + numbers[::-1]), False: GatherOrder(numbers)}
