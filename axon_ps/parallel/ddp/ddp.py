"""`DistributedDataParallel`: a replica of the module on every rank, with gradients averaged while backward runs.

Owns: the work around forward: buffers, parameters that are the same everywhere, ranks that run out of data.
Refuses: parameters on shard servers (`fsdp` has those) and gradients (`reducer` has them).

torch's wrapper runs over the backend "axon", too. This one needs no default process group, and averages outside of
`backward` as well. It raises `MemberLost`, say, where torch's reducer raises a `RuntimeError`. It refuses parameters
that were converted or replaced after wrapping. torch's wrapper does not average their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.host import fork
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.comm_hooks.hooks import CommunicationHook
from axon_ps.parallel.comm_hooks.registry import as_hook
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.ddp import replicas, torch_arguments
from axon_ps.parallel.ddp.buckets import GradientBucket, check_dtype
from axon_ps.parallel.ddp.reducer import Reducer
from axon_ps.parallel.ddp.synchronizer import GradSyncStrategy
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.fsdp.hooks import tensors_of
from axon_ps.types import ReduceOp, parse_member
from axon_ps.worker.world import World


class DistributedDataParallel(nn.Module):
    """Wrap a module so that all ranks train it together, each on data of its own (`DDP` is an alias).

    Use it like the module, with any torch optimizer made after wrapping. After `backward()` every `param.grad` is the
    average over the ranks, so equal optimizers leave equal parameters. Gradients travel in buckets while backward goes
    on. Buckets of host memory are shared by the ranks of a host. At first the buckets are in the reverse order of
    `parameters()`. From the second step on they are in the order in which rank 0's gradients came. (Li et al., "PyTorch
    Distributed", https://arxiv.org/abs/2006.15704.)

    Making it is collective. Outside of `no_sync()`, so are its forwards with gradients in training mode, when there are
    buffers to broadcast. So are its backwards there, unless the strategy is NO_SYNC. A forward in `eval()` mode, or
    without gradients, is not collective: one rank may evaluate by itself.

    A module may be wrapped again, after an error or in another group. Its earlier wrappers do nothing then.

    Names in `state_dict()` are those of torch's wrapper of the same name: they begin with "module.".

    Args:
        module: the module, the same on every rank; every rank gets rank 0's values.
        group: the ranks; None = all workers of the current world.
        bucket_size_mb: gradients that travel together, in MiB. The first bucket has at most 1 MiB. Each later
            bucket may be twice as large as the one before it, up to this size.
        broadcast_buffers: True or None = buffers (running statistics, say) become rank 0's before each training forward
            with gradients outside of `no_sync()`.
        gradient_as_bucket_view: True = `param.grad` is the bucket's memory. This saves as much memory as the gradients
            take. `grad.detach_()` and `zero_grad(set_to_none=False)` work in place then.
        find_unused_parameters: True = some parameters may get no gradient in some backward, on some ranks or all. It
            costs a walk over the graph each forward and a small all-reduce each backward. `param.grad` stays as it was
            if no rank used the parameter.
        grad_sync_strategy: the time at which buckets are reduced. With NO_SYNC, `sync_gradients()` reduces them.
        of_torch: other arguments of torch's DDP: `process_group`, `device_ids`, `bucket_cap_mb` and so on.

    Raises:
        LayoutMismatch: another rank wraps another module; the message names the difference.
        InvalidRequest: nothing in it is to be trained, it is wrapped already, a parameter is on the meta device or of a
            dtype that is not averaged, or `bucket_size_mb` is not above 0.
        Misuse: no group was given and there is no current world.

    After an error: the gradients of a backward that failed are undefined, and other ranks may wait for this one until
    their deadline. If a rank has died they get `MemberLost` at once. Then make a group of the ranks that are left, and
    wrap the module again.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | World | None = None,
        *,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool | None = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        grad_sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        **of_torch: Any,
    ) -> None:
        super().__init__()
        if of_torch:
            ours = torch_arguments.as_ours("DDP", torch_arguments.DDP, of_torch, {"group": group})
            group = ours.get("group", group)
            bucket_size_mb = ours.get("bucket_size_mb", bucket_size_mb)
            broadcast_buffers = ours.get("broadcast_buffers", broadcast_buffers)
        wrap.refuse_wrapped(module, "DistributedDataParallel")
        self.module = module
        self._group = current_group(group)
        self._strategy = parse_member(grad_sync_strategy, GradSyncStrategy, "grad_sync_strategy")
        self._broadcast_buffers = broadcast_buffers is None or broadcast_buffers
        self._joining = False
        if not bucket_size_mb > 0:
            raise InvalidRequest(f"bucket_size_mb is {bucket_size_mb}; it must be above 0")
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        for name, param in named:
            if param.is_meta:
                raise InvalidRequest(
                    f"parameter {name} is on the meta device; give it values before wrapping the module"
                )
            check_dtype(param.dtype, f"parameter {name}")
        if not named:
            raise InvalidRequest("no parameter of the module requires a gradient; there is nothing to average")
        self._tree = wrap.Tree(module, {param for _, param in named})
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        replicas.check_same(self._group, _described(module))
        self.sync_parameters()
        register("ddp", self)
        self._reducer = Reducer(
            named,
            self._group,
            bucket_bytes=int(bucket_size_mb * (1 << 20)),
            as_views=gradient_as_bucket_view,
            find_unused=find_unused_parameters,
            strategy=self._strategy,
        )

    # ------------------------------------------------------------------ as a module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            Misuse: the last backward was broken off; a parameter was replaced or added, has another dtype or device, or
                was frozen when it was wrapped and trains now; or this process is a fork of a worker.
            AxonError: the buffers could not be broadcast.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        fork.check()
        self._reducer.check_idle()
        self._check_parameters()
        if self.training and self._reducer.syncing:
            root = self._announce(True) if self._joining else 0
            if self._broadcast_buffers:
                replicas.broadcast(self._group, list(self.module.buffers()), root)
        output = self.module(*args, **kwargs)
        self._reducer.watch(list(tensors_of(output)))
        return output

    @uncompiled
    def _check_parameters(self) -> None:
        self._reducer.check_parameters()
        if late := next((name for name, param in self._frozen if param.requires_grad), ""):
            raise Misuse(
                f"parameter {late!r} was frozen when the module was wrapped and requires a gradient now, which would "
                "not be averaged. Wrap the module while it requires one, then freeze it: requires_grad_(False)"
            )
        if name := self._tree.look().untrained:  # by identity: a pruned parameter has another name
            raise Misuse(
                f"parameter {name!r} was {self._tree.change_of(name)} since the module was wrapped (an assignment of "
                "it or of a module, load_state_dict(assign=True)): its gradient would not be averaged. Copy values "
                "into the one before, or wrap the module again"
            )

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that train it."""
        return self._group

    @property
    def strategy(self) -> GradSyncStrategy:
        """The time at which gradients are averaged."""
        return self._strategy

    @property
    def buckets(self) -> tuple[GradientBucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return self._reducer.buckets

    def unwrap(self) -> nn.Module:
        """Return the user's module."""
        return self.module

    def into_inner(self) -> nn.Module:
        """Return `unwrap()`, by the name it has in the Rust crates."""
        return self.unwrap()

    def statistics(self) -> dict[str, float]:
        """Return counters.

        rounds           reductions of all gradients
        reduced_bytes    bytes of gradients, uncompressed
        buckets          number of buckets
        rebuilt          times that the buckets were made anew
        wait_s           seconds that backward waited at its end for reductions still under way
        """
        return self._reducer.statistics()

    # ------------------------------------------------------------------ synchronizing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards inside in `param.grad`. The next backward outside averages the sums."""
        before, self._reducer.syncing = self._reducer.syncing, False
        try:
            yield
        finally:
            self._reducer.syncing = before

    def sync_parameters(self, root: int = 0) -> None:
        """Replace parameters and buffers of every rank by the root's. Every rank calls it.

        Args:
            root: position in the group of the rank that has the values.
        """
        state = [*self.module.parameters(), *self.module.buffers()]
        replicas.broadcast(self._group, state, root)

    def sync_gradients(self) -> None:
        """Average `param.grad` over the ranks now. Every rank calls it.

        Call it with NO_SYNC, and after backwards in `no_sync()`. A missing gradient counts as zeros. If no rank has a
        gradient, it stays None.

        Raises:
            Misuse: a backward is under way, or was broken off.
            InvalidRequest: a gradient is sparse.
        """
        self._reducer.reduce_now()

    def register_comm_hook(self, hook: CommunicationHook | str | Callable[..., object] | None) -> CommunicationHook:
        """Average gradients by a hook from now on. Every rank must call it, with the same hook.

        Args:
            hook: a `CommunicationHook`; or the name of one, as for `comm_hook` ("bf16", "int8", "top_k", say); or a
                function of a bucket and a group that makes `bucket.flat` the average; None = the default.

        Returns:
            The hook. Its `state_dict()` has this rank's error feedback, which a checkpoint needs.

        Raises:
            InvalidRequest: it is none of these.
            Misuse: a backward is under way, or was broken off.
        """
        chosen = as_hook(hook)
        self._reducer.set_hook(chosen)
        return chosen

    # ------------------------------------------------------------------ uneven data

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow different numbers of batches on the ranks. Put the loop inside, on every rank.

        A rank that leaves the block takes part in the others' steps with gradients of zero until all have left. So
        averages are still over all ranks. Every rank ends with the parameters and buffers of the lowest rank of the
        last step. A rank's optimizer state is that of its own last step. Each step must be one training forward with
        gradients and one backward (more of both inside `no_sync()`). A step costs one small all-reduce more. torch
        calls this `Join`.

        If the body raises, the other ranks get no error.

        Raises:
            Misuse: the strategy is NO_SYNC, or this is inside another `join()`.
        """
        if self._joining or self._strategy is GradSyncStrategy.NO_SYNC:
            raise Misuse("join() needs a strategy that synchronizes, and no other join() around it")
        self._joining, root = True, -1
        try:
            yield
            while (active := self._announce(False)) >= 0:
                root = active
                if self._broadcast_buffers:
                    replicas.broadcast(self._group, list(self.module.buffers()), root)
                self._reducer.reduce_nothing()
            last = self._group.all_reduce(np.array([root], np.int64), ReduceOp.MAX)
            self.sync_parameters(max(0, int(last[0])))  # all left at the same step: every rank has the same values
        finally:
            self._joining = False

    def _announce(self, active: bool) -> int:
        """Exchange which ranks still have data, and return the lowest of them, or -1 if none has."""
        nobody = self._group.size
        mine = self._group.rank if active else nobody
        lowest = int(self._group.all_reduce(np.array([mine], np.int64), ReduceOp.MIN)[0])
        return lowest if lowest < nobody else -1


def _described(module: nn.Module) -> list[str]:
    """Return a line for every parameter and buffer."""
    params = [
        f"{name}: {p.dtype}{list(p.shape)}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    ]
    return params + [f"{name}: {b.dtype}{list(b.shape)}, a buffer" for name, b in module.named_buffers()]
