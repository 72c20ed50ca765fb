"""`FlatUnit`: one unit's parameters as views of one flat tensor whose memory comes and goes.

Note: [Memory that comes and goes]
    While a unit is unsharded its parameters are views of `flat`. Resharding resizes flat's *storage* to zero bytes.
    Gathering resizes it back and fills it, so that the parameters stay the same objects. Autograd saves no memory of
    them in forward, but a `SavedParameter`, which gathers the unit again when backward reads it. See `saved_tensors`.

    While a unit is resharded, its parameters are NaN expanded to their shape, because a view of the emptied storage
    would crash. They are of a class that raises when values are read or written. See `sharded_parameter`. Values also
    cannot be read between uses if they stay in memory (SHARD_GRAD_OP): they may be those of an older version.

    After `tensor.numpy()` a tensor could never be resized. So the loop's thread writes through a raw view of the memory
    (`sources._window`), which exists only while a gather is under way and the storage cannot be resized.

Note: [Mapped units]
    If the unit's server is on this host and the unit has a `MappedSource`, `flat` is the server's own wire copy,
    mapped. Gathering waits until it is at the version wanted, and resharding makes it unreadable. Nothing is allocated
    or copied, and the tensors that autograd saved stay valid. Another mapping comes only with another server, which has
    the same values at the same version.

Note: [States of a unit]
    The state of a unit (`UnitState`) tells whether `flat` has values, and whether others are on their way (of a decided
    version or of an undecided step). `_TRANSITIONS` has every change of state:

    SHARDED                 nothing here
    GATHERING               nothing here, values on their way
    SPECULATIVE             nothing here any more, those of an undecided step on their way
    UNSHARDED               `flat` has values: those of `values_at`, which may be an older version
    UNSHARDED_GATHERING     it has, and newer ones come into a buffer beside it, or into memory that will be mapped
    UNSHARDED_SPECULATIVE   it has, and those of an undecided step come into a buffer beside it (SHARD_GRAD_OP, if
                            they must be cast or copied to a GPU)

    The values on their way are one `PendingGather`. If another version of a unit is needed before a step is decided,
    the values of that step are dropped, since it cannot commit any more.

Note: [Views that outlive their unit]
    A forward may return a view of a parameter (`return self.pe[:n]`, `Normal(mu, self.std)`, `weight.detach()`), and
    the program reads it later. To free memory under a view would end the process. So memory that has other holders
    than the unit is left to them, and the unit gets other memory with its next values. The view has its values for as
    long as they are current, as in torch. Once the unit has others, the view is filled with NaN, since torch would show
    the new ones there.

A unit is gathered *directly* into `flat` when the wire dtype is the compute dtype and the memory is of the same kind.
Otherwise it is gathered into a buffer that `unshard` copies (and casts) from. Under HYBRID_SHARD on GPUs the buffer is
in device memory, otherwise in host memory. A direct gather overwrites `flat`, also if the unit is resident: after an
aborted step it is gathered once more. `sources` has the ways in which values come.

Shapes: flat: param_dtype[unit_numel]; buffer: wire[unit_numel]. A unit of raw parameters has words, f32, in both. If
some of its parameters are cast, `flat` is divided as `Wrapping.computed` says, and the buffer as the layout.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from axon_ps.errors import AxonError, InternalError, Misuse, StepAborted
from axon_ps.parallel.fsdp.sources import ParameterSource, PendingGather
from axon_ps.parallel.fsdp.steps import Mapped, Position
from axon_ps.parallel.fsdp.tensors import saved_tensors
from axon_ps.parallel.fsdp.tensors.sharded_parameter import become, set_own_data, states_of
from axon_ps.parallel.fsdp.tensors.unit_gradients import UnitGradients
from axon_ps.parallel.fsdp.wrap import Slot, Tree, WrappedUnit, Wrapping
from axon_ps.parallel.precision import TORCH_DTYPES, views_of
from axon_ps.parallel.wrapper import Uncopied
from axon_ps.types import Hyper
from axon_ps.worker.steps.ticket import Ticket


class UnitState(enum.Enum):
    """The states of `flat`, and of a gather that is under way. See Note: [States of a unit]."""

    SHARDED = (False, False, False)
    GATHERING = (False, True, False)
    SPECULATIVE = (False, False, True)
    UNSHARDED = (True, False, False)
    UNSHARDED_GATHERING = (True, True, False)
    UNSHARDED_SPECULATIVE = (True, False, True)

    def __init__(self, has_values: bool, gathering: bool, speculative: bool) -> None:
        self.has_values = has_values
        self.gathering = gathering
        self.speculative = speculative


_TRANSITIONS = {
    UnitState.SHARDED: {UnitState.GATHERING, UnitState.SPECULATIVE},
    UnitState.GATHERING: {UnitState.UNSHARDED, UnitState.SHARDED},  # finished; abandoned
    UnitState.SPECULATIVE: {UnitState.GATHERING, UnitState.SHARDED},  # committed; discarded
    UnitState.UNSHARDED: {
        UnitState.SHARDED,  # resharded
        UnitState.GATHERING,  # over values that are no longer current
        UnitState.SPECULATIVE,  # over values that nothing reads any more
        UnitState.UNSHARDED_GATHERING,
        UnitState.UNSHARDED_SPECULATIVE,
    },
    UnitState.UNSHARDED_GATHERING: {UnitState.UNSHARDED},  # finished or abandoned
    UnitState.UNSHARDED_SPECULATIVE: {UnitState.UNSHARDED_GATHERING, UnitState.UNSHARDED},  # committed; discarded
}


_NAN: Final = 0xFF
"""Bytes of this value are NaN in every floating-point dtype."""


def _holders(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and other objects that have this memory."""
    return torch._C._storage_Use_Count(storage._cdata)


class Outliving:
    """The memory of one unit that was left to others. See Note: [Views that outlive their unit]."""

    def __init__(self) -> None:
        self._left: list[tuple[Position | None, StorageWeakRef]] = []

    def leave(self, storage: torch.UntypedStorage, at: Position | None) -> None:
        """Leave this memory, with values of this (epoch, version), to its other holders."""
        self._left.append((at, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def expire(self, at: Position | None) -> None:
        """Fill memory that was left to others with NaN, if its values are not of this (epoch, version)."""
        for storage in [self._alive(ref) for left, ref in self._left if left != at]:
            if storage is not None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_NAN)
        self._left = [(left, ref) for left, ref in self._left if left == at and self._alive(ref) is not None]

    @staticmethod
    def _alive(ref: StorageWeakRef) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


class FlatUnit:
    """One unit of the layout in this worker's memory.

    Args:
        wrapped: its number and layout and its parameters, whose `data` is set from now on.
        source: the source of its values.
        wrapping: the options with which the model is wrapped.
        resident: retain the values between uses (SHARD_GRAD_OP, and frozen units).

    Attributes:
        state: see Note: [States of a unit].
        unit: its layout.
        index: its number in the layout.
        params: its parameters, in layout order.
        names: of each, its names in the user's module.
        pushes: True if this worker pushes its gradient.
        grads: their gradients.
        nbytes: memory of `flat`.
        wire: the dtype of gathered values.
        wire_bytes: memory of the unit in that dtype.
        values_at: (epoch, version) of the values in `flat`; None = it has none.
        runtime: returns the runtime, which gathers it when backward reads what was saved of it; None = not yet set.
        retained: True if the values stay in some memory although the strategy reshards the unit.
    """

    sharded = True
    """True if values and gradients are elsewhere between uses."""
    swapped = False
    """True if the module computes with a copy, while the optimizer updates the values themselves on this worker."""

    def __init__(
        self,
        wrapped: WrappedUnit,
        source: ParameterSource,
        wrapping: Wrapping,
        *,
        resident: bool,
    ) -> None:
        self.index = wrapped.number
        self.unit = unit = wrapped.unit
        self.params = wrapped.params
        self.names = wrapped.names or tuple((p.name, *p.aliases) for p in unit.parameters)
        self.pushes = wrapped.pushes
        self.source = source
        self._computed = wrapping.computed(unit)
        dtype, device = wrapping.flat_of(unit), wrapping.device
        self.wire = wrapping.wire_of(unit)
        self.wire_bytes = unit.numel * self.wire.itemsize
        self.resident = resident
        self.retained = wrapping.retains(unit)
        self._meter = wrapping.meter
        self._counters = wrapping.counters
        self.state = UnitState.SHARDED
        self.values_at: Position | None = None
        self.runtime: Callable[[], saved_tensors.Gatherer | None] = lambda: None
        self._pending: PendingGather | None = None  # while a gather is under way
        self._classes = [states_of(type(p)) for p in self.params] if self.sharded else []
        self._readable: bool | None = None
        self._nan = torch.empty(4, dtype=torch.float32, device=device)  # as large as an element of any dtype
        self._dtype = dtype
        dtypes = [TORCH_DTYPES[p.dtype] if unit.raw else dtype for p in self._computed.parameters]
        self._sharded_data = [
            self._nan.view(d)[:1].view(()).expand(p.shape) for d, p in zip(dtypes, unit.parameters, strict=True)
        ]
        self._mapped: Mapped | None = None  # the memory of `flat`; None = memory of our own
        self._allocated = False
        self._outliving = Outliving()
        self._set_flat(torch.empty(self._computed.numel, dtype=dtype, device=device))
        self.nbytes = self.flat.nbytes
        self._free_flat()  # the parameters' own values are dropped
        stage_device = torch.device("cpu") if wrapping.offload.stages_grads else wrapping.device
        self.grads = UnitGradients(unit, self.params, self.flat.device, stage_device)
        self.repeated = 0  # gathers that were begun again, since the one under way was of no use
        self._versions: list[int] = []  # autograd's counts of changes in place, when the parameters became readable

    @property
    def trainable(self) -> bool:
        """True if the optimizer updates it."""
        return self.unit.trainable

    @property
    def gather_bytes(self) -> int:
        """Memory that a gather needs before `unshard`. A copy from host memory needs none."""
        return self.source.gather_bytes(self)

    @property
    def unsharded_bytes(self) -> int:
        """Memory while it is unsharded: `flat`, and the buffer of the gather if there is one."""
        return self.nbytes + (self.wire_bytes if self.source.buffered else 0)

    @property
    def reshardable_bytes(self) -> int:
        """Memory that resharding frees: of `flat` (0 when resident), and of a gather that is under way."""
        in_use = self.nbytes if self._allocated and not self.resident else 0
        if self.state.gathering and self._pending is not None:
            buffer = self._pending.buffer
            return max(in_use, self._pending.flat_bytes) + (0 if buffer is None else buffer.nbytes)
        return in_use

    # ------------------------------------------------------------------ values

    @property
    def is_current(self) -> bool:
        """True if the values in `flat` are current."""
        return self.values_at is not None and self.values_at == self.source.wanted(self)

    @property
    def missing(self) -> bool:
        """True if current values are neither here nor being gathered."""
        return self._is_missing(self.source.wanted(self))

    def _is_missing(self, wanted: Position) -> bool:
        if self.values_at == wanted:
            return False
        return not self.state.gathering or self._pending is None or self._pending.at != wanted

    @property
    def may_speculate(self) -> bool:
        """True if the values of an undecided step may be gathered now: nothing reads those that they overwrite."""
        if not self.source.speculates(self) or self.state not in (UnitState.SHARDED, UnitState.UNSHARDED):
            return False
        if self.source.buffered and not self.source.retains:
            return self.resident
        return not self._readable and (self.resident or self.source.retains or not self._allocated)

    def start_gather(self, *, again: bool = False) -> None:
        """Begin to gather, unless current values are here or being gathered. `again` = do not count it."""
        wanted = self.source.wanted(self)
        if not self._is_missing(wanted):
            return
        self.abandon()
        if not again:
            self._count(remote=self.source.is_remote(wanted))
        pending = self.source.start(self, wanted)
        beside = self.state.has_values and not pending.in_place
        self._enter(UnitState.UNSHARDED_GATHERING if beside else UnitState.GATHERING, pending)

    def renew(self) -> None:
        """Drop resident values whose memory was withdrawn since they were read: the unit is on another server now."""
        if self.resident and self.source.torn(self):
            self.abandon()
            self.free_storage()

    def start_speculative(self, ticket: Ticket, hyper: Sequence[Hyper]) -> None:
        """Begin to gather the expected result of this step, if `may_speculate`."""
        self._count(remote=True)
        pending = self.source.start_speculative(self, ticket, hyper)
        beside = self.state.has_values and not pending.in_place
        self._enter(UnitState.UNSHARDED_SPECULATIVE if beside else UnitState.SPECULATIVE, pending)

    def commit_speculative(self) -> None:
        """Make the speculative gather the ordinary one: the step committed as expected."""
        if self.state.speculative and (pending := self._pending) is not None:
            pending.at = self.source.wanted(self)
            self._enter(UnitState.UNSHARDED_GATHERING if self.state.has_values else UnitState.GATHERING, pending)

    def discard_speculative(self) -> None:
        """Cancel the speculative gather and free its memory: the step was not decided as expected."""
        if self.state.speculative:
            self.abandon()

    def abandon(self) -> None:
        """Stop the gather under way. Its memory is not touched afterwards."""
        if (pending := self._pending) is not None:
            self.source.cancel(pending)
            self._enter(UnitState.UNSHARDED if self.state.has_values else UnitState.SHARDED)
            if pending.in_place:
                self.free_storage()

    def unshard(self) -> None:
        """Block until the parameters have current values."""
        while not self.is_current:
            self.start_gather(again=True)
            if (pending := self._pending) is None or not self.state.gathering:
                continue
            try:
                result = pending.result if pending.work is None else pending.work.wait()
            except AxonError as error:
                # restored to an older version meanwhile: gather that; after a speculative gather: make an ordinary one
                again = pending.speculative or (
                    isinstance(error, StepAborted) and pending.at != self.source.wanted(self)
                )
                self.abandon()
                if not again:
                    raise
                self.repeated += 1
                continue
            except BaseException:
                self.abandon()
                raise
            if self.source.finish(self, pending, result):
                self._set_data(self._views)
                self.values_at = pending.at
                self._enter(UnitState.UNSHARDED)
                self.expire_views()
        self._set_readable(True)

    def reshard(self) -> None:
        """Free the memory, unless the unit is resident. Values cannot be read until the next `unshard`."""
        if self.state.gathering:
            self.abandon()
        if not self.resident and not self.state.speculative:
            self.free_storage()
        self._set_readable(False)

    def _enter(self, state: UnitState, pending: PendingGather | None = None) -> None:
        """Enter another state. Only this method changes it."""
        if state not in _TRANSITIONS[self.state]:
            raise InternalError(f"unit {self.unit.name!r} cannot go from {self.state.name} to {state.name}")
        self.state, self._pending = state, pending
        if not state.has_values:
            self.values_at = None

    def _count(self, *, remote: bool) -> None:
        if not remote:
            self._counters.host_gathers += 1
            return
        self._counters.gathers += 1
        self._counters.gathered_bytes += self.wire_bytes

    @property
    def is_readable(self) -> bool:
        """True if the parameters have current values, for readers."""
        return bool(self._readable) and self.is_current

    def check_unchanged(self) -> None:
        """Refuse writes to the parameters: the values are the servers', and the writes would be lost.

        Raises:
            Misuse: a parameter was changed in place. The memory is freed, so that the change is not read.
        """
        versions = [p._version for p in self.params]
        if versions == self._versions or not (self._readable and self.sharded):
            return
        changed = zip(self.unit.parameters, versions, self._versions, strict=True)
        names = [p.name for p, now, before in changed if now != before]
        self.abandon()
        self.free_storage()
        raise Misuse(
            f"parameter {names[0]!r} was changed in place (an assignment, clamp_(), "
            "Embedding(max_norm=...)), and what is written to the memory of a sharded parameter is lost. Make it a "
            "buffer, give it to ignored_parameters, compute the changed value in forward (torch.nn.utils.parametrize "
            "before wrapping), or use ShardingStrategy.NO_SHARD; see docs/wrapped_model.md"
        )

    # ------------------------------------------------------------------ memory

    def allocate(self) -> None:
        """Allocate memory for the values, if there is none."""
        if not self._allocated:
            self._allocated = True
            if self._mapped is None:
                self._storage.resize_(self.nbytes)
            self._meter.add(self.nbytes)

    def fill(self, values: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy (and cast) values into `flat`."""
        self.allocate()
        is_cast = self._computed is not self.unit
        pairs = [(self.flat, values)] if not is_cast else zip(self._views, views_of(values, self.unit), strict=True)
        with torch.no_grad():
            for target, given in pairs:
                target.copy_(given, non_blocking=non_blocking)

    def use_memory(self, mapped: Mapped | None) -> None:
        """Set `flat` to memory that was mapped. None = memory of our own, which is not allocated yet."""
        self._mapped = mapped
        if mapped is not None:
            self._set_flat(torch.from_numpy(mapped.values).view(self._dtype))
        else:
            self._set_flat(torch.empty(self.unit.numel, dtype=self._dtype, device="cpu"))
            self._storage.resize_(0)

    def expire_views(self) -> None:
        """Expire views if a step has been made since. See Note: [Views that outlive their unit]."""
        self._outliving.expire(self.source.wanted(self))

    def free_storage(self) -> None:
        """Free the memory, resident or not, while no gather is under way."""
        at = self.values_at
        if self.state is UnitState.UNSHARDED:
            self._enter(UnitState.SHARDED)
        if self._allocated:
            self._allocated = False
            self._free_flat(at)
            self._meter.add(-self.nbytes)

    # ------------------------------------------------------------------ parameters

    def _set_flat(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._storage = flat.untyped_storage()
        if self.sharded or self.swapped:
            saved_tensors.belongs(self._storage, self)
        self._views = views_of(flat, self._computed)
        self._holders = _holders(self._storage)

    def _free_flat(self, at: Position | None = None) -> None:
        self._nan.view(torch.uint8).fill_(_NAN)  # the program may have written to it
        self._set_data(self._sharded_data)
        self._set_readable(False)
        if self._mapped is not None:
            self._mapped.discard_writes()
            return
        if _holders(self._storage) > self._holders:  # see Note: [Views that outlive their unit]
            self._outliving.leave(self._storage, at)
            self._set_flat(torch.empty_like(self.flat))
        self._storage.resize_(0)

    def _set_data(self, values: Sequence[torch.Tensor]) -> None:
        """Set `data` of the parameters."""
        self._set_readable(True)
        for param, value in zip(self.params, values, strict=True):
            set_own_data(param, value)

    def _set_readable(self, readable: bool) -> None:
        """Make the values of the parameters readable, or not. See `sharded_parameter`."""
        if self._readable is not readable:
            self._readable = readable
            if readable:
                self._versions = [p._version for p in self.params]
            for param, classes in zip(self.params, self._classes, strict=False):
                become(param, classes[readable])


@dataclass(eq=False)
class ModuleUnit(Uncopied):
    """A module whose parameters are gathered together: its trainable and its frozen flat units.

    Attributes:
        number: position in module order; 0 is the root.
        name: name of the module; "" for the root.
        module: the module.
        flats: its flat units; none for a root without parameters of its own.
        slots: the entries of modules that have its parameters.
        tree: the root's: all modules and parameters.
        grad_hooks: by parameter, the hook that calls `Runtime.grad_ready` when its gradient is there.
    """

    number: int
    name: str
    module: nn.Module
    flats: list[FlatUnit]
    depth: int = 0  # forwards of it under way
    uses: int = 0  # forwards with gradients since the last backward
    fired: set[nn.Parameter] = field(default_factory=set)
    expected: int = 0  # number of parameters that will fire: those that require a gradient
    pushes: list[tuple[int, bool, bool]] = field(default_factory=list)  # of its forwards under way; see `hooks`
    held: bool = False  # a graph of a gradient reads its memory without hooks
    slots: list[Slot] = field(default_factory=list)
    tree: Tree | None = None
    grad_hooks: dict[nn.Parameter, RemovableHandle] = field(default_factory=dict)

    def watch_gradients(self, grad_ready: Callable[[nn.Parameter], object]) -> list[RemovableHandle]:
        """Call `grad_ready` when autograd has made the gradient of a trainable parameter; return the hooks."""
        for param in (param for flat in self.trained for param in flat.params):
            self.grad_hooks[param] = param.register_post_accumulate_grad_hook(grad_ready)  # type: ignore[no-untyped-call]
        return list(self.grad_hooks.values())

    def check_parameters(self) -> None:
        """Refuse changes to the parameters since the model was wrapped, if they have no effect. A forward calls it.

        Hooks that the user has registered since are moved before ours, which may send the gradient.

        Raises:
            Misuse: a parameter was replaced, removed or added, or was frozen then and requires a gradient now.
        """
        self.check_replaced()
        if self.tree is not None and torch.is_grad_enabled() and (name := self.tree.untrained):
            raise Misuse(
                f"parameter {name!r} was {self.tree.change_of(name)} since the model was wrapped, and no worker would "
                "train it: the parameters that a model has when it is wrapped are averaged and moved. Add and replace "
                "modules before wrapping; or let it require no gradient"
            )
        for param, hook in self.grad_hooks.items():
            others = param._post_accumulate_grad_hooks
            if next(reversed(others)) != hook.id:
                others[hook.id] = others.pop(hook.id)  # a frozen parameter takes no new hook
        self.expected = 0
        for flat in self.flats:
            requiring = [p.name for p, own in zip(flat.unit.parameters, flat.params, strict=True) if own.requires_grad]
            if flat.trainable:
                self.expected += len(requiring)
            elif requiring:
                raise Misuse(
                    f"parameter {requiring[0]!r} was frozen when the model was wrapped and requires a gradient now: "
                    "the shard servers do not train it. Wrap the model while it requires one and freeze it afterwards: "
                    "a parameter without a gradient is left alone by the optimizer"
                )

    def check_replaced(self) -> None:
        """Refuse a parameter that was replaced by another one.

        Raises:
            Misuse: the message names it.
        """
        name = next((slot.name for slot in self.slots if slot.is_empty), "")
        if not name and self.tree is not None:
            name = self.tree.look().replaced
        if name:
            raise Misuse(
                f"parameter {name!r} was replaced since the model was wrapped (an assignment of it or of a module, "
                "load_state_dict(assign=True), functional_call, a parametrization), and the shard servers train "
                "the one before. Change its values with load_state_dict() of the wrapped model; replace it before "
                "wrapping"
            )

    @property
    def is_root(self) -> bool:
        """True for the root, which stays unsharded between forward and backward."""
        return self.number == 0

    @property
    def trained(self) -> list[FlatUnit]:
        """The flat units that the optimizer updates: none, one, or two if other lines of a mesh have one of them."""
        return [flat for flat in self.flats if flat.trainable]

    @property
    def has_frozen(self) -> bool:
        """True if it has a frozen flat unit."""
        return any(not f.trainable for f in self.flats)

    @property
    def nbytes(self) -> int:
        """Its memory when gathered."""
        return sum(f.nbytes for f in self.flats)


def check_unchanged(flats: Sequence[FlatUnit]) -> None:
    """Refuse writes to parameters of these units. See `FlatUnit.check_unchanged`."""
    for flat in flats:
        flat.check_unchanged()


def release_held(units: Sequence[ModuleUnit]) -> None:
    """Reshard the units that were held for graphs of gradients, which are not read any more."""
    for unit in (u for u in units if u.held):
        unit.held = False
        for flat in unit.flats if not unit.depth else ():
            flat.reshard()
