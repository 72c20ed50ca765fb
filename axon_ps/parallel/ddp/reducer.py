"""`Reducer`: averages the gradients of a module's parameters over the ranks while backward runs.

Owns: the hooks on parameters, the buckets, the reductions of one backward. Refuses: the module; parameters and their
names are all it has. The wrapper (`ddp`) calls it for each forward.

Phases of one backward that synchronizes:
1. A parameter's gradient is complete, and the user's post-accumulate hooks have run (ours is moved behind them). The
   gradient is copied to its view of a bucket, unless it is that view.
2. A bucket is sent when its gradients are complete and the buckets before it have been sent (`rounds.Round`).
3. Autograd is done (its final callback). The reductions are waited for, and `param.grad` gets the averages.

Invariants:
- Buckets travel in a sub-group of their own, so they are not mixed with the user's calls in the group.
- A parameter has one hook of ours, of the reducer that was made last. The hook is registered on the tensor,
  because autograd replaces the node that accumulates the gradient when the parameter's data are set (`double()`, say).
- Everything else that is collective happens in the caller's thread, in the order of the program.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.comm_hooks.hooks import AllReduceHook, CommunicationHook
from axon_ps.parallel.ddp import buckets
from axon_ps.parallel.ddp.buckets import GradientBucket
from axon_ps.parallel.ddp.synchronizer import GradSyncStrategy
from axon_ps.parallel.rounds import Round
from axon_ps.types import ReduceOp

FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket: small, so that the first bytes travel early."""

_AGAIN = (
    "got its gradient twice in one backward: it is used inside a checkpoint with use_reentrant=True (use False), or "
    "backward went through something that forward did not return (find_unused_parameters=False allows that)"
)

_counted: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class Reducer:
    """See this module.

    Making it is collective.

    Args:
        named: the parameters to train, each once, in the order of forward; the same on every rank.
        group: the ranks.
        bucket_bytes: size of the largest bucket.
        as_views: True = `param.grad` is the bucket's memory.
        find_unused: True = a backward may leave parameters out.
        strategy: the time at which buckets are reduced.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_bytes: int,
        as_views: bool,
        find_unused: bool,
        strategy: GradSyncStrategy,
    ) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.syncing = True
        self._strategy = strategy
        self._control = group
        self._group = _own_group(group)
        self._bucket_bytes = bucket_bytes
        self._as_views = as_views
        self._find_unused = find_unused
        self._order = list(reversed(range(len(named))))
        self._ready_order: list[int] | None = []  # the order of the first backward; None once buckets follow it
        self._used = torch.zeros(len(named), dtype=torch.uint8, device="cpu")
        self._reachable: set[int] = set()
        self._index: dict[Tensor, int] = {param: i for i, param in enumerate(self.params)}
        self._round: Round | None = None
        self._counters = {"rounds": 0, "reduced_bytes": 0, "wait_s": 0.0, "rebuilt": 0}
        self._hook: CommunicationHook = AllReduceHook()
        self._hook.attach(self._group)
        self._plan = self._planned()
        self._buckets, self._views = buckets.build(self.params, self._plan, self._group)
        for param in self.params:
            if (before := _own_hook(param)) is not None:  # the wrapper that came last reduces it
                del param._post_accumulate_grad_hooks[before]
        self._put_hooks_last()

    def set_hook(self, hook: CommunicationHook) -> None:
        """Average buckets by another hook from now on."""
        self.check_idle()
        hook.attach(_own_group(self._control))
        self._hook = hook

    @property
    def buckets(self) -> tuple[GradientBucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return tuple(self._buckets)

    def statistics(self) -> dict[str, float]:
        """Return the counters of `DistributedDataParallel.statistics`."""
        return {**self._counters, "buckets": len(self._buckets)}

    # ------------------------------------------------------------------ calls of the wrapper

    def check_idle(self) -> None:
        """Check that no backward is under way, and that none was broken off."""
        if self._round is not None:
            raise Misuse(
                "a backward is under way, or was broken off by an error, and some gradients are on their way to the "
                "other ranks; wrap the module again if it was broken off"
            )

    def check_parameters(self) -> None:
        """Check, before a forward, that the gradients will fit into the buckets."""
        for index in range(len(self.params)):
            self._check_fits(index)
        self._put_hooks_last()

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Find the parameters that a backward from forward's outputs reaches, and add hooks that run when it begins."""
        watched = [tensor for tensor in outputs if tensor.requires_grad]
        if self._strategy is GradSyncStrategy.NO_SYNC or not watched:
            return
        if self._find_unused:
            self._reachable |= {self._index[leaf] for leaf in leaves(watched) if leaf in self._index}
        me = weakref.ref(self)
        for tensor in (t for t in watched if t.grad_fn is not None):
            tensor.register_hook(partial(_backward_begins, me))  # type: ignore[no-untyped-call]

    def reduce_now(self) -> None:
        """Average `param.grad`, outside of any backward. A gradient that no rank has stays None. All ranks call it."""
        self.check_idle()
        for index, param in enumerate(self.params):
            self._used[index] = self._used[index] or param.grad is not None
        self._round = self._new_round()
        ready_order, self._ready_order = self._ready_order, None
        self._finish(find_unused=True)
        self._ready_order = ready_order

    def reduce_nothing(self) -> None:
        """Take part in a backward of the other ranks with gradients of zero, and drop the results."""
        self.check_idle()
        before = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self._round = self._new_round()
        self._finish(find_unused=True, announce=self._find_unused)
        for param, grad in zip(self.params, before, strict=True):
            param.grad = grad

    # ------------------------------------------------------------------ one backward

    def _put_hooks_last(self) -> None:
        """Move our hook of each parameter behind those that the user has registered since."""
        for index, param in enumerate(self.params):
            hooks = param._post_accumulate_grad_hooks
            if hooks and _is_own(next(reversed(hooks.values()))):
                continue
            if (ours := _own_hook(param)) is not None:
                hooks[ours] = hooks.pop(ours)
            elif param.requires_grad:
                hook = partial(_grad_ready, weakref.ref(self), index)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _check_fits(self, index: int) -> None:
        param, view = self.params[index], self._views[index]
        if (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
            raise Misuse(
                f"parameter {self.names[index]!r} was {view.dtype}{list(view.shape)} on {view.device} when the module "
                f"was wrapped and is {param.dtype}{list(param.shape)} on {param.device} now (double(), half(), to()), "
                "and the ranks average what it was. Convert the module before it is wrapped, or wrap it again"
            )

    @property
    def _active(self) -> bool:
        return self.syncing and self._strategy is not GradSyncStrategy.NO_SYNC

    def backward_begins(self) -> None:
        """Begin a round when some gradient has arrived at forward's result, or at a parameter.

        The hook of forward's result runs first. So the final callback is queued for the outer backward, and not for a
        backward that a checkpoint with use_reentrant=True runs inside. A rank that uses no parameters takes part, too.
        """
        if self._round is not None or not self._active:
            return
        self._round = self._new_round()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if self._find_unused and self._reachable:
            for index in self._order:
                if index not in self._reachable:
                    self._copy_to_bucket(index)

    def output_ready(self) -> None:
        """Begin a round at the gradient of one of forward's results. No parameter's hooks are being called then."""
        if self._round is None:
            self._put_hooks_last()
        self.backward_begins()

    def grad_ready(self, index: int) -> None:
        """Take `param.grad`, which is complete as far as this backward goes."""
        self._used[index] = 1
        if not self._active:
            return
        self.backward_begins()
        if self._ready_order is not None:
            self._ready_order.append(index)
        self._copy_to_bucket(index)

    def _backward_ends(self) -> None:
        assert self._round is not None
        if not self._find_unused and len(self._round.missing) == len(self.params):
            self._round = None  # torch.autograd.grad() of something else than parameters
            return
        self._finish(find_unused=self._find_unused)

    def _new_round(self) -> Round:
        return Round(self._plan, self._start, overlapped=self._strategy is GradSyncStrategy.OVERLAPPED)

    def _start(self, position: int) -> Work[Any]:
        bucket = self._buckets[position]
        self._counters["reduced_bytes"] += bucket.numel * bucket.dtype.itemsize
        return self._hook.start(bucket)

    @torch.no_grad()
    def _copy_to_bucket(self, index: int) -> None:
        """Copy the gradient to its view of its bucket, or zeros if there is none."""
        assert self._round is not None
        if index not in self._round.missing:
            raise Misuse(f"{self.names[index]} {_AGAIN}")
        self._check_fits(index)
        param, view = self.params[index], self._views[index]
        grad = param.grad
        if grad is None:
            view.zero_()
        elif grad.layout is not torch.strided:
            raise InvalidRequest(
                f"the gradient of {self.names[index]} is {grad.layout}; only dense ones are averaged (sparse=False)"
            )
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            if self._as_views:
                param.grad = view.detach()
        self._round.ready(index)

    @torch.no_grad()
    def _finish(self, *, find_unused: bool, announce: bool | None = None) -> None:
        """Wait for the averages. If `announce`, exchange which parameters were used. `grad` of the others stays."""
        round_ = self._round
        assert round_ is not None
        if round_.missing and not find_unused:
            raise Misuse(self._without_gradient(sorted(round_.missing)))
        for index in list(round_.missing):
            self._copy_to_bucket(index)
        round_.start_complete()
        begin_s, used = time.perf_counter(), self._used
        if find_unused if announce is None else announce:
            used = self._control.all_reduce(used.clone(), ReduceOp.MAX)
        for bucket, _ in zip(self._buckets, round_.results(), strict=True):
            for index, view in zip(bucket.members, bucket.views, strict=True):
                if used[index]:
                    self._set_grad(self.params[index], view)
        self._counters["wait_s"] += time.perf_counter() - begin_s
        self._counters["rounds"] += 1
        self._used.zero_()
        self._reachable.clear()
        self._round = None
        if self._ready_order is not None:
            self._rebuild(self._ready_order)

    def _set_grad(self, param: nn.Parameter, view: Tensor) -> None:
        if self._as_views:
            param.grad = view.detach()  # an object of its own: double() and the like set its data
        elif param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)

    def _without_gradient(self, missing: Sequence[int]) -> str:
        names = ", ".join(self.names[i] for i in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        return (
            f"backward gave no gradient to {names}{more}, so the ranks cannot average: if forward does not always use "
            "every parameter, wrap the module with find_unused_parameters=True; if it never uses these, freeze them "
            "with requires_grad_(False) before it is wrapped"
        )

    # ------------------------------------------------------------------ the order of buckets

    def _planned(self) -> list[tuple[int, ...]]:
        first_bytes = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        return buckets.assign(self.params, self._order, first_bytes=first_bytes, bucket_bytes=self._bucket_bytes)

    def _rebuild(self, ready_order: Sequence[int]) -> None:
        """Rebuild the buckets in the order in which rank 0's gradients came the first time. Every rank calls it."""
        self._ready_order = None
        first = dict.fromkeys(ready_order)
        order = [*first, *(index for index in self._order if index not in first)]
        self._order = self._control.broadcast(np.array(order, np.int64)).tolist()
        plan = self._planned()
        if plan == self._plan:
            return
        before, self._plan = self._buckets, plan
        self._buckets, self._views = buckets.build(self.params, plan, self._group)
        self._hook.rebuild(before, self._buckets)
        self._counters["rebuilt"] += 1


def leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that a backward from `outputs` would give gradients to."""
    found: list[Tensor] = [tensor for tensor in outputs if tensor.grad_fn is None]
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                todo.append(following)
    return found


def _own_group(group: ProcessGroup) -> ProcessGroup:
    """Make a sub-group of all ranks for buckets alone. Ranks make their reducers in the same order, so names agree."""
    number = _counted.get(group, 0)
    _counted[group] = number + 1
    return group.named_group(f"gradients{number}", range(group.size))


def _grad_ready(reducer: weakref.ref[Reducer], index: int, _: Tensor) -> None:
    if (found := reducer()) is not None:
        found.grad_ready(index)


def _is_own(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _grad_ready


def _own_hook(param: nn.Parameter) -> int | None:
    """Return the key of a reducer's hook among those of a parameter, or None if it has none."""
    hooks = param._post_accumulate_grad_hooks or {}
    return next((key for key, hook in hooks.items() if _is_own(hook)), None)


def _backward_begins(reducer: weakref.ref[Reducer], _: Tensor) -> None:
    if (found := reducer()) is not None:
        found.output_ready()
