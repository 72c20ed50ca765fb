"""What happens when, in one wrapped model: gather before use, reshard after, push when complete, step at the end.

The hooks (`hooks.py`) call the runtime at autograd's events; the runtime decides; `FlatUnit` moves the bytes.

Note: [When a gradient is complete]
    Autograd runs a parameter's AccumulateGrad once per backward, after every use of the parameter in that backward
    has contributed. So a unit's gradient is complete when each of its parameters has fired. Reentrant activation
    checkpointing is the exception: each checkpointed call is a backward of its own. A unit that was used more than
    once since the last backward is therefore pushed when all of backward ends, not before.

Note: [When memory may be freed in backward]
    Once all trainable parameters of a module have fired, every operation that reads them has run. That is not so for
    frozen parameters beside them (an adapter's gradient is complete while the weights it adapts are still to be read),
    so a module with frozen parameters is resharded when the gradient of its inputs is there, or when backward ends.

Note: [Memory]
    Under FULL_SHARD the parameters in memory are the root, the unit in use and one more: the next is gathered while
    its memory plus what is in use stays within two of the largest unit. What backward needs first, the units that
    forward used last, is not resharded in between if it fits, and so not gathered twice.

Note: [Speculative gathers]
    Under SHARD_GRAD_OP a step would push the whole model one way and only then pull it the other way. When gradients
    are not clipped, what a unit will be is known to its servers as soon as every replica has pushed it; so each unit is
    gathered right behind its own push, into a buffer beside the current values, expecting the hyperparameters that the
    optimizer has now. `step()` commits the buffers if the decision is as expected and discards them if not, so nobody
    ever sees parameters of a step that did not commit. This costs a second copy of the parameters, as they travel. It
    begins once a step went by without clipping.
    Under FULL_SHARD the units that the next forward needs first are gathered so, as many as there is room for once
    backward has freed them: straight into their own memory, which is free then.

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

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.errors import Misuse, StepAborted
from axon_ps.observe.moments import Moment, reached
from axon_ps.parallel.dtypes import TORCH_DTYPES, scale_into
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, array_of
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.order import GatherOrder
from axon_ps.parallel.fsdp.sent_gradients import SentGradients
from axon_ps.parallel.fsdp.steps import Expecting, Mapping, OnDevice, Pending, SharedBuffers, Speculation, Steps
from axon_ps.types import Decision, DType, Hyper, OptimizerSpec, Outcome, StepResult
from axon_ps.worker.steps.ticket import Ticket

_MAX_FORWARDS = 8
"""How often a forward is run before it raises; see Note: [One version a step]."""

_BUFFERS = 2
"""How many of the largest unit the prefetched gathers, and the pushes under way, may hold each."""


@dataclass(eq=False)
class ModuleUnit:
    """A module whose parameters are gathered together: its trainable and its frozen flat unit.

    Attributes:
        number: position in module order; 0 is the root.
        name: name of the module; "" for the root.
        module: the module.
        flats: one or two flat units.
    """

    number: int
    name: str
    module: nn.Module
    flats: list[FlatUnit]
    depth: int = 0  # forwards of it under way
    uses: int = 0  # forwards with gradients since the last backward
    fired: set[nn.Parameter] = field(default_factory=set)

    @property
    def is_root(self) -> bool:
        """Whether it stays unsharded between forward and backward."""
        return self.number == 0

    @property
    def trainable(self) -> FlatUnit | None:
        """The flat unit that the optimizer moves."""
        return next((f for f in self.flats if f.trainable), None)

    @property
    def has_frozen(self) -> bool:
        """Whether it has a frozen flat unit."""
        return any(not f.trainable for f in self.flats)

    @property
    def nbytes(self) -> int:
        """Memory of it when gathered."""
        return sum(f.nbytes for f in self.flats)


@dataclass
class Counters:
    """The counters of `statistics()`."""

    gathers: int = 0
    host_gathers: int = 0
    gathered_bytes: int = 0
    pushed_bytes: int = 0
    gather_wait_s: float = 0.0
    push_wait_s: float = 0.0
    forwards_repeated: int = 0
    step_wait_s: float = 0.0
    steps_committed: int = 0
    steps_not_committed: int = 0


class Runtime:
    """The order of events in one wrapped model.

    Args:
        steps: the worker's half of a step.
        units: module units; the first is the root.
        grad_wire: what gradients travel as.
        meter: counts the bytes of gathered parameters.
        pinned: page-lock host buffers.
        stage_grads: move gradients of `no_sync()` to host memory.
        prefetch: gather the next units before they are needed.

    Attributes:
        sent: gradients that have left this worker for the step under way, and what they are clipped to.
        agree: called at the start of every forward, before anything is gathered; None = nothing to agree on.
        grad_scale: what the loss was multiplied by; gradients are divided by it before they are pushed.
        prefetched: a prefetch by hand is pending.
    """

    def __init__(
        self,
        steps: Steps,
        units: Sequence[ModuleUnit],
        *,
        grad_wire: DType,
        meter: Meter,
        pinned: bool,
        stage_grads: bool = False,
        prefetch: bool = True,
    ) -> None:
        self.steps = self._steps = steps
        self._speculation = steps.parameters if isinstance(steps.parameters, Speculation) else None
        self.units = tuple(units)
        self._grad_wire = grad_wire
        self.meter = meter
        numbers = [u.number for u in self.units]
        self._orders = {
            True: GatherOrder(numbers + numbers[::-1]),
            False: GatherOrder(numbers),
        }
        largest = max((u.nbytes for u in self.units[1:]), default=self.units[0].nbytes)
        self._budget_bytes = _BUFFERS * largest
        flats = [f for u in self.units for f in u.flats]
        make = steps.gradients.buffer if isinstance(steps.gradients, SharedBuffers) and not pinned else None
        if isinstance(steps.parameters, Mapping):
            for flat in flats:
                flat.may_map(steps.parameters)
        self._device = steps.device if isinstance(steps, OnDevice) else None
        if self._device is not None:
            for flat in flats:
                flat.gather_on_device()
        buffers_bytes = _BUFFERS * max(f.gather_bytes for f in flats)
        buffers_bytes += sum(f.gather_bytes for f in flats if f.resident and f.trainable)
        self.gather_buffers = BufferPool(buffers_bytes, meter, pinned=pinned, device=self._device)
        self._grad_meter = Meter()
        most_numel = max((f.unit.numel for f in flats if f.trainable), default=0)
        self._out = BufferPool(
            _BUFFERS * most_numel * grad_wire.itemsize, self._grad_meter, pinned=pinned, device=self._device, make=make
        )
        self._training = True
        self._callback_queued = False
        self._ticket: Ticket | None = None
        self._read: tuple[int, int] = (0, 0)  # (epoch, version) when the forward began
        self._uses: list[int] = []  # of every unit, when the forward began
        self._forwards = 0  # attempts at this forward
        self._began: tuple[int, int] | None = None  # (epoch, version) when the step began
        self._has_gradients = False  # whether the step has any
        self._pushes: dict[int, Pending] = {}
        self._expected: Sequence[Hyper] | None = None  # of this step; see Note: [Speculative gathers]
        self._unclipped = False
        self.expected_hyper: Callable[[], Sequence[Hyper]] | None = None
        self.syncing = True
        self.sent = SentGradients()
        self.grad_scale = 1.0
        self.agree: Callable[[], None] | None = None
        self.prefetched = False
        self._stage_grads = stage_grads
        self._eager = prefetch
        self.counters = Counters()

    # ------------------------------------------------------------------ forward

    def before_forward(self, unit: ModuleUnit) -> None:
        """A module is about to run: unshard it."""
        recomputing = in_backward()
        if unit.is_root and not recomputing:
            if self.agree is not None:
                self.agree()
            self.prefetched = False
            self._training = torch.is_grad_enabled()
            self._callback_queued = False
            self._orders[not self._training].restart()
            for other in self.units:  # a forward that raised may have left some behind
                other.depth = 0
            self._read = self._now
            self._uses = [other.uses for other in self.units]
            first = not self._has_gradients and not self._forwards
            if self._training and first and (self._began is None or self._replaced_by_us):
                self._began = self._read
        if not recomputing:
            unit.depth += 1
            unit.uses += torch.is_grad_enabled()
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
        if not self._training:
            self._reshard(unit)
            if unit.is_root:
                self._orders[False].finish()
        elif not unit.is_root and not self._needed_soon(unit, self._orders[True].upcoming()):
            self._reshard(unit)
        self._prefetch()

    @property
    def _now(self) -> tuple[int, int]:
        """(epoch, version) that this worker computes with."""
        return self._steps.view.epoch, self._steps.view.version

    @property
    def _replaced_by_us(self) -> bool:
        """Whether, since the step began, this worker itself asked for the parameters that it now computes with."""
        return self._began is not None and self._began[0] < self._read[0] == self._steps.view.asked_epoch

    @property
    def torn(self) -> bool:
        """Whether what was read since the forward began is not of one version."""
        return self._read != self._now or any(f.torn(self._steps) for u in self.units for f in u.flats)

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

    def before_backward(self, unit: ModuleUnit) -> None:
        """The gradient of a module's output is there: unshard it again."""
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._need(unit)
        if not unit.is_root:
            reached(Moment.BACKWARD)

    def grad_ready(self, unit: ModuleUnit, param: nn.Parameter) -> None:
        """A parameter's gradient is complete in this backward; see Note: [When a gradient is complete]."""
        unit.fired.add(param)
        self._has_gradients = True
        flat = unit.trainable
        assert flat is not None
        if len(unit.fired) < len(flat.params):
            return
        if not unit.has_frozen and not unit.is_root:
            self._reshard(unit)
        if self.syncing and unit.uses <= 1:
            self._push(flat)
            self._gather_speculative(unit, flat)
            unit.fired.clear()
        elif self._stage_grads and unit.uses <= 1:
            self._stage(flat)
        self._prefetch()

    def inputs_done(self, unit: ModuleUnit) -> None:
        """The gradients of a module's inputs are there: nothing in backward reads it any more."""
        flat = unit.trainable
        complete = flat is None or len(unit.fired) in (0, len(flat.params))
        if not unit.is_root and complete:
            self._reshard(unit)
            self._prefetch()

    def _after_backward(self) -> None:
        """All of backward is done: push what is left, reshard everything."""
        self._callback_queued = False
        for unit in reversed(self.units):
            flat = unit.trainable
            if flat is not None and unit.fired:
                if self.syncing:
                    self._push(flat)
                elif self._stage_grads:
                    self._stage(flat)
            unit.fired.clear()
            unit.uses = 0
            self._reshard(unit)
            if flat is not None and flat.index in self._pushes:
                self._gather_speculative(unit, flat)
        self._orders[True].finish()

    # ------------------------------------------------------------------ by hand

    def gather_all(self) -> None:
        """Unshard every unit, and block until it is."""
        if self.agree is not None:
            self.agree()
        self._read = self._now
        for unit in self.units:
            for flat in unit.flats:
                self._gather(flat)
                flat.unshard(self._steps, self.gather_buffers)

    def prefetch(self) -> None:
        """Begin to gather what the next forward needs first, as far as Note: [Memory] allows."""
        if self.agree is not None:
            self.agree()
        self._orders[True].restart()
        self._training, self.prefetched = True, True
        self._prefetch(by_hand=True)

    def push_accumulated(self) -> None:
        """Push every gradient that was accumulated and not pushed yet."""
        for unit in reversed(self.units):
            flat = unit.trainable
            if flat is not None and flat.index not in self._pushes and flat.has_grads:
                self._push(flat)
                self._gather_speculative(unit, flat)

    # ------------------------------------------------------------------ memory

    def _need(self, unit: ModuleUnit) -> None:
        self._orders[self._training].visit(unit.number)
        began = time.perf_counter()
        for flat in unit.flats:
            self._gather(flat)
        for flat in unit.flats:
            flat.unshard(self._steps, self.gather_buffers)
        self.counters.gather_wait_s += time.perf_counter() - began
        self._prefetch()

    def _gather(self, flat: FlatUnit) -> None:
        if not flat.is_current(self._steps) and not flat.is_gathering(self._steps):
            self._count_gather(flat)
            flat.start_gather(self._steps, self.gather_buffers)

    def _count_gather(self, flat: FlatUnit) -> None:
        if not flat.remote(self._steps):
            self.counters.host_gathers += 1
            return
        self.counters.gathers += 1
        self.counters.gathered_bytes += flat.unit.numel * flat.wire.itemsize

    def _prefetch(self, *, by_hand: bool = False) -> None:
        """Start gathering the next units expected, as far as Note: [Memory] allows."""
        if not (self._eager or by_hand):
            return
        for number in self._orders[self._training].upcoming():
            unit = self.units[number]
            missing = [f for f in unit.flats if not f.is_current(self._steps) and not f.is_gathering(self._steps)]
            if not missing:
                continue
            for flat in missing:
                if not unit.is_root and self._reshardable_bytes() + flat.gather_bytes > self._budget_bytes:
                    return
                if not self.gather_buffers.has_room(flat.gather_bytes):
                    return
                self._gather(flat)

    def _reshardable_bytes(self) -> int:
        """Memory of parameters beside the root: gathered, and under way."""
        return sum(f.reshardable_bytes for u in self.units[1:] for f in u.flats)

    def _reshard(self, unit: ModuleUnit) -> None:
        for flat in unit.flats:
            flat.reshard(self.gather_buffers)

    # ------------------------------------------------------------------ gradients

    def _push(self, flat: FlatUnit) -> None:
        """Flatten, scale, cast and send a unit's gradient; a parameter without one counts as zero."""
        if flat.index in self._pushes:
            raise Misuse(
                f"a second backward before optimizer.step(): the first one's gradient of unit {flat.unit.name!r} was "
                "sent already. Step after each backward, with an optimizer of axon_ps.parallel; to accumulate, run all "
                "backwards but the last one of a step inside model.no_sync()"
            )
        ticket = self._current_ticket()
        began = time.perf_counter()
        self._out.wait_for_room(flat.unit.numel * self._grad_wire.itemsize)
        self.counters.push_wait_s += time.perf_counter() - began
        buffer = self._out.take(flat.unit.numel, TORCH_DTYPES[self._grad_wire])
        scale = 1.0 / (ticket.num_replicas * self.grad_scale)
        self._grad_meter.add(-flat.staged_bytes)
        with torch.no_grad():
            grads = flat.pop_grads()
            target = buffer
            if self._device is None and any(g is not None and cuda.memory().is_on_device(g) for g in grads):
                # assembled on the device, so that one copy goes to the host
                target = torch.empty_like(buffer, device=flat.flat.device)
            for spec, grad in zip(flat.unit.parameters, grads, strict=True):
                scale_into(target[spec.offset : spec.end].view(spec.shape), grad, scale)
            if target is not buffer:
                buffer.copy_(target)
        self.counters.pushed_bytes += buffer.nbytes
        self.sent.add(flat.index, len(flat.params))
        sent = array_of(buffer, self._grad_wire) if self._device is None else buffer
        self._pushes[flat.index] = self._steps.gradients.push(flat.index, sent, ticket, lambda: self._out.give(buffer))

    def _gather_speculative(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """Behind its push, gather a unit as the step is expected to leave it, if it is resident or needed first."""
        if self._speculation is None or self._expected is None or self._ticket is None or flat.has_speculative:
            return
        if not flat.resident:
            if not (self._eager and flat.vacant and self._needed_soon(unit, self._orders[True].first())):
                return
            if not unit.is_root and self._reshardable_bytes() + flat.nbytes > self._budget_bytes:
                return
        self._count_gather(flat)
        flat.start_speculative(self._speculation, self.gather_buffers, self._ticket, self._expected)

    def _stage(self, flat: FlatUnit) -> None:
        """Move gradients of `no_sync()` to the host."""
        before = flat.staged_bytes
        flat.stage_grads()
        self.sent.add(flat.index, len(flat.params))
        self._grad_meter.add(flat.staged_bytes - before)

    def _current_ticket(self) -> Ticket:
        if self._ticket is None:
            self._ticket = self._steps.ticket(self._began)
            speculates = self._unclipped and not self._ticket.is_void
            self._expected = self.expected_hyper() if speculates and self.expected_hyper is not None else None
            if isinstance(self._steps, Expecting):
                self._steps.expect(self._expected)
        return self._ticket

    # ------------------------------------------------------------------ the step

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """Give the job its optimizer.

        Raises:
            LayoutMismatch: another worker made another one.
        """
        self._steps.register_optimizer(spec)

    def step(self, hyper: Sequence[Hyper]) -> StepResult:
        """Send what was not sent, vote, wait for the decision, and start gathering for the next step."""
        began = time.perf_counter()
        max_norm, norm = self.sent.checked_max_norm(), None
        try:
            ticket = self._current_ticket()
            for unit in self.units:
                flat = unit.trainable
                if flat is None or flat.index in self._pushes:
                    continue
                if flat.has_grads:
                    self._push(flat)
                    self._gather_speculative(unit, flat)
                else:
                    self._pushes[flat.index] = self._steps.gradients.push(flat.index, None, ticket)
            decision = self._steps.vote(ticket, list(self._pushes.values()), max_norm=max_norm, hyper=hyper)
            norm = decision.grad_norm
            if decision.outcome is Outcome.ABORT:
                self._steps.view.job.wait_complete()
        except BaseException:
            self._settle_speculative(as_expected=False)
            raise
        finally:
            self._unclipped = max_norm == 0.0
            self.sent.decided(norm)
            self._ticket, self._began, self._has_gradients = None, self._steps.view.latest, False
            self._pushes = {}
            self.counters.step_wait_s += time.perf_counter() - began
        committed = decision.outcome is Outcome.COMMIT
        as_expected = committed and decision.clip_factor == 1.0 and decision.hyper == self._expected
        self._settle_speculative(as_expected=as_expected)
        self.counters.steps_committed += committed
        self.counters.steps_not_committed += not committed
        self._training = True
        self._prefetch()
        reached(Moment.BETWEEN_STEPS, decision.version)
        return StepResult(
            committed=committed, version=decision.version, grad_norm=decision.grad_norm, reason=decision.reason
        )

    def take_step(self, decide: Callable[[], Decision]) -> StepResult:
        """A step that needs no gradients; what `decide` gives is its decision.

        Raises:
            Misuse: gradients were sent for the step under way.
        """
        if self._pushes or self._ticket is not None:
            raise Misuse("gradients were sent for the step under way; call optimizer.step() before you copy")
        began = time.perf_counter()
        try:
            decision = decide()
            if decision.outcome is Outcome.ABORT:
                self._steps.view.job.wait_complete()
        finally:
            self._began = self._steps.view.latest
            self.counters.step_wait_s += time.perf_counter() - began
        committed = decision.outcome is Outcome.COMMIT
        self.counters.steps_committed += committed
        self.counters.steps_not_committed += not committed
        self._prefetch()
        return StepResult(committed=committed, version=decision.version, grad_norm=0.0, reason=decision.reason)

    def drop_unsent(self) -> None:
        """Forget the gradients that were not pushed."""
        for flat in (f for u in self.units for f in u.flats if f.index not in self._pushes):
            flat.pop_grads()
            self.sent.drop(flat.index)

    def _settle_speculative(self, *, as_expected: bool) -> None:
        for unit in self.units:
            for flat in unit.flats:
                if as_expected:
                    flat.commit_speculative(self._steps, self.gather_buffers)
                else:
                    flat.discard_speculative(self.gather_buffers)
        self._expected = None

    def reset(self) -> None:
        """Reshard everything; for code that wants the memory, and at the end."""
        self.prefetched = False
        for unit in self.units:
            unit.depth = 0
            for flat in unit.flats:
                flat.discard_speculative(self.gather_buffers)
            self._reshard(unit)
        self.gather_buffers.trim()
        self._out.trim()

    def statistics(self) -> dict[str, float]:
        """Counters and memory of this worker; bytes and seconds."""
        return {
            **{k: float(v) for k, v in vars(self.counters).items()},
            "gathers_repeated": float(sum(flat.repeated for unit in self.units for flat in unit.flats)),
            "param_memory_bytes": float(self.meter.current_bytes),
            "peak_param_memory_bytes": float(self.meter.peak_bytes),
            "grad_buffer_bytes": float(self._grad_meter.current_bytes),
            "peak_grad_buffer_bytes": float(self._grad_meter.peak_bytes),
            "peak_memory_bytes": float(self.meter.peak_bytes + self._grad_meter.peak_bytes),
        }


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (a forward now is a recomputation)."""
    task: int = torch._C._current_graph_task_id()
    return task != -1
