"""`DistributedDataParallel` among threads: errors, buckets, hooks' feedback, what is collective and what is not.

Tests of `parallel/ddp/ddp.py`, `parallel/ddp/reducer.py`, `parallel/ddp/replicas.py`,
`parallel/comm_hooks/compressed.py`, `parallel/comm_hooks/hooks.py`, `parallel/comm_hooks/host_values.py`,
`parallel/comm_hooks/int8.py` and `parallel/comm_hooks/registry.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, LayoutMismatch, MemberLost, Misuse
from axon_ps.parallel import DDP, CommunicationHook, comm_hook
from mock_ranks import close, on_ranks, rand


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_ranks_that_wrap_different_modules_are_told_where_they_differ() -> None:
    def body(group: ProcessGroup) -> None:
        module = nn.Linear(4, 3 if group.rank == 1 else 2)
        message = r"'weight: torch.float32\[3, 4\]' where rank 0 has 'weight: torch.float32\[2, 4\]'"
        with pytest.raises(LayoutMismatch, match=message if group.rank == 1 else r"the ranks \[1\] of"):
            DDP(module, group)

    on_ranks(3, body)


def test_what_cannot_be_wrapped() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match="nothing to average"):
            DDP(nn.ReLU(), group)
        with pytest.raises(InvalidRequest, match="weight is on the meta device"):
            DDP(nn.Linear(2, 2, device="meta"), group)
        with pytest.raises(InvalidRequest, match="complex64, which is not reduced"):
            DDP(nn.Linear(2, 2, dtype=torch.complex64), group)
        with pytest.raises(InvalidRequest, match="bucket_size_mb is 0"):
            DDP(nn.Linear(2, 2), group, bucket_size_mb=0)
        model = DDP(nn.Embedding(4, 2, sparse=True), group)
        with pytest.raises(InvalidRequest, match="sparse=False"):
            model(torch.tensor([1])).sum().backward()

    on_ranks(1, body)


def test_parameters_without_a_gradient_are_named() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(two_layers(), group)
        with pytest.raises(Misuse, match=r"no gradient to 1\.weight, 1\.bias, .*find_unused_parameters=True"):
            model.module[0](torch.ones(1, 4)).sum().backward()
        with pytest.raises(Misuse, match="broken off"):
            model(torch.ones(1, 4))
        model.zero_grad()
        again = DDP(model.module, group)
        again(torch.ones(1, 4)).sum().backward()
        assert (again.statistics()["rounds"], model.statistics()["rounds"]) == (1, 0)

    on_ranks(1, body)


def test_a_parameter_that_is_replaced_is_named_and_one_that_is_moved_is_found() -> None:
    def body(group: ProcessGroup) -> None:
        model: Any = DDP(two_layers(), group)
        prune.identity(model.module[0], "weight")
        model(torch.ones(1, 4)).sum().backward()
        model.module[1].bias = nn.Parameter(torch.ones_like(model.module[1].bias))
        with pytest.raises(Misuse, match=r"'1\.bias' was replaced since the module was wrapped"):
            model(torch.ones(1, 4))

    on_ranks(1, body)


def test_a_parameter_that_was_frozen_when_wrapped_and_trains_later_is_named() -> None:
    def body(group: ProcessGroup) -> None:
        module = two_layers()
        module[0].requires_grad_(False)
        model = DDP(module, group)
        model(torch.ones(1, 4)).sum().backward()
        module[0].requires_grad_(True)
        with pytest.raises(Misuse, match=r"'0\.weight' was frozen when the module was wrapped"):
            model(torch.ones(1, 4))
        module[0].requires_grad_(False)
        model(torch.ones(1, 4)).sum().backward()

    on_ranks(2, body)


def another_head(module: Any) -> None:
    module[1] = nn.Linear(8, 2)


def one_more_layer(module: Any) -> None:
    module.append(nn.Linear(2, 2))


def thawed_later(module: Any) -> None:
    module.append(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_head, r"'1\.weight' was replaced"),
        (one_more_layer, r"'2\.weight' was added"),
        (thawed_later, r"'2\.weight' was added"),
    ],
)
def test_a_module_that_is_replaced_or_added_is_named(change: Callable[[Any], None], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        model: Any = DDP(two_layers(), group)
        change(model.module)
        if change is thawed_later:
            model(torch.ones(1, 4)).sum().backward()
            model.module[2].requires_grad_(True)
        for _ in range(2):
            with pytest.raises(Misuse, match=message + " since the module was wrapped"):
                model(torch.ones(1, 4))
        DDP(model.module, group)(torch.ones(1, 4)).sum().backward()

    on_ranks(2, body)


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(module: Any) -> None:
    parametrize.register_parametrization(module[0], "weight", Twice())


def there_and_back(module: Any) -> None:
    module[0].bfloat16()
    module.float()


def pruned(module: Any) -> None:
    prune.random_unstructured(module[1], "weight", 0.0)


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("change", [parametrized, there_and_back, pruned])
def test_gradients_are_averaged_whatever_autograd_makes_anew(
    change: Callable[[Any], None], find_unused: bool, as_views: bool
) -> None:
    module = two_layers()

    def body(group: ProcessGroup) -> None:
        plain = copy.deepcopy(module)
        model = DDP(copy.deepcopy(module), group, gradient_as_bucket_view=as_views, find_unused_parameters=find_unused)
        for step in range(3):
            for rank in range(2):
                (plain(rand(3, 4, seed=2 * step + rank)).square().mean() / 2).backward()
            model(rand(3, 4, seed=2 * step + group.rank)).square().mean().backward()
            for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
                close(ours.grad, theirs.grad)
            if not step:
                change(plain)
                change(model.module)
            model.zero_grad()
            plain.zero_grad()

    on_ranks(2, body)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    r"'0\.weight' was torch\.float32\[8, 4\] on cpu .* is torch\.float64": lambda module: module.double(),
    r"'1\.bias' was torch\.float32\[2\] .* is torch\.bfloat16": lambda module: module[1].bias.data.bfloat16(),
    r"'1\.bias' was torch\.float32\[2\] on .* is torch\.float32\[1\]": lambda module: module[1].bias.data[:1],
}


@pytest.mark.parametrize("message", CONVERSIONS)
def test_a_parameter_that_does_not_fit_the_buckets_any_more_is_named(message: str) -> None:
    def body(group: ProcessGroup) -> None:
        model: Any = DDP(two_layers(), group)
        changed = CONVERSIONS[message](model.module)
        if isinstance(changed, Tensor):
            model.module[1].bias.data = changed
        x = torch.ones(1, 4, dtype=model.module[0].weight.dtype)
        with pytest.raises(Misuse, match=message):
            model(x)
        if changed is model.module:
            with pytest.raises(Misuse, match=r"'1\.bias' was torch\.float32"):
                model.module(x).sum().backward()  # past the wrapper
            again = DDP(model.module, group)
            again(x).sum().backward()

    on_ranks(1, body)


class Checkpointed(nn.Module):
    """The first layer is recomputed `times` times in backward, inside a backward of its own."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[assignment]
        return self.outer(x)  # type: ignore[no-any-return]


def test_reentrant_checkpoints_work_and_a_gradient_that_comes_twice_is_named() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(Checkpointed(1), group)
        model(torch.full((1, 4), 1.0 + group.rank, requires_grad=True)).sum().backward()
        grad = model.module.inner.weight.grad
        assert grad is not None
        assert model.statistics()["rounds"] == 1
        model = DDP(Checkpointed(2), group)
        with pytest.raises(Misuse, match=r"inner\..* got its gradient twice.*use_reentrant=True"):
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()

    on_ranks(1, body)


def test_gradients_of_inputs_are_not_reduced() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(two_layers(), group)
        x = torch.ones(1, 4, requires_grad=True)
        output = model(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        (output + slope.square().sum()).backward()
        assert model.statistics()["rounds"] == 1

    on_ranks(2, body)


def test_buckets_follow_the_order_in_which_gradients_come() -> None:
    class Backwards(nn.Module):
        """Uses its layers in the reverse order of their names, so gradients come in the order of names."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    def body(group: ProcessGroup) -> None:
        model = DDP(Backwards(), group, bucket_size_mb=1e-4)
        assert [bucket.members for bucket in model.buckets] == [[2], [1], [0]]
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            assert [bucket.members for bucket in model.buckets] == [[0], [1], [2]]
        assert model.statistics()["rebuilt"] == 1
        assert model.statistics()["reduced_bytes"] == 2 * 3 * 64 * 4

    on_ranks(2, body)


def test_one_rank_may_evaluate_alone() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), group)
        before = len(model.process_group.calls.recorder.entries())
        if group.rank == 0:
            model.eval()
            model(torch.ones(2, 4))
            with torch.no_grad():
                model.train()(torch.ones(2, 4))
        assert len(model.process_group.calls.recorder.entries()) == before
        group.barrier()
        model.sync_parameters(root=0)
        assert float(model.module[1].num_batches_tracked) == 1.0

    on_ranks(2, body)


def test_a_rank_that_is_lost_ends_the_backward_of_the_others() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(two_layers(), group)
        loss = model(torch.ones(1, 4)).sum()
        if group.rank == 1:
            group.abort(MemberLost("rank 1 has gone"))
        with pytest.raises(MemberLost, match="rank 1 has gone"):
            loss.backward()

    on_ranks(2, body)


def test_gradients_that_were_scaled_come_back() -> None:
    """A gradient scaler skips the step in which some rank's gradients overflow, on every rank."""

    def body(group: ProcessGroup) -> None:
        model = DDP(nn.Linear(4, 1, bias=False), group)
        model.register_comm_hook("fp16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=100)
        before = model.module.weight.detach().clone()
        for step in range(3):
            scaler.scale(model(torch.full((1, 4), 1.0 + group.rank)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(model.module.weight, before) is (step == 0)  # 2 * 2**15 is too much for f16, on rank 1
        assert scaler.get_scale() == 2.0**14
        torch.testing.assert_close(model.module.weight.detach(), before - 2 * 0.1 * 1.5)

    on_ranks(2, body)


def test_two_wrappers_train_at_once() -> None:
    def body(group: ProcessGroup) -> None:
        first, second = DDP(two_layers(), group), DDP(nn.Linear(2, 2), group)
        second(first(torch.ones(3, 4) * (1 + group.rank))).sum().backward()
        for model in (first, second):
            for param in model.parameters():
                assert param.grad is not None
                everybody = group.all_gather(param.grad.reshape(1, -1))
                assert torch.equal(everybody[0], everybody[1])

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("name", "options"), [("bf16", {"error_feedback": True}), ("int8", {}), ("int4", {}), ("top_k", {"fraction": 0.1})]
)
def test_with_feedback_the_sum_of_what_arrives_is_the_sum_of_the_gradients(name: str, options: Any) -> None:
    """Over k steps of one gradient g the averages add up to k g, but for errors that do not grow with k.

    Those of int8 do, as its root: averages are rounded at random.
    """
    steps = 40

    def body(group: ProcessGroup) -> list[Tensor]:
        model = DDP(two_layers(), group, bucket_size_mb=1e-4)  # rebuilt after the first step: errors move along
        hook = model.register_comm_hook(comm_hook(name, **options))
        truth = [torch.randn(p.shape, generator=torch.Generator().manual_seed(9)) for p in model.parameters()]
        total = [torch.zeros_like(g) for g in truth]
        scale = 1.0 + 2.0 * group.rank  # the average of 1 and 3 is 2
        for _ in range(steps):
            sum((p * g * scale).sum() for p, g in zip(model.parameters(), truth, strict=True)).backward()
            for s, p in zip(total, model.parameters(), strict=True):
                assert p.grad is not None
                s += p.grad
                p.grad = None
        largest = max(float(g.abs().max()) for g in truth)
        for s, g in zip(total, truth, strict=True):
            bound = {"bf16": 0.4, "int8": 0.1, "int4": 1.0, "top_k": 40.0}[
                name
            ]  # k = 1 or so of each segment: an error waits 10 steps
            assert float((s - 2 * steps * g).abs().max()) < bound * largest
        assert all(name.split(".")[0] in ("residual", "average") for name in hook.state_dict())
        return total

    first, second = on_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_hook_goes_on_from_its_state() -> None:
    def body(group: ProcessGroup) -> None:
        def run(model: DDP, steps: range) -> list[Tensor]:
            for step in steps:
                model(
                    torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 10 * group.rank))
                ).sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        uninterrupted, saved, rest = (DDP(two_layers(), group) for _ in range(3))
        for model in (saved, rest):
            model.load_state_dict(uninterrupted.state_dict())
        hooks = [model.register_comm_hook("int8") for model in (uninterrupted, saved, rest)]
        expected = run(uninterrupted, range(4))
        before = run(saved, range(2))
        hooks[2].load_state_dict(hooks[1].state_dict())
        for param, grad in zip(rest.parameters(), before, strict=True):
            param.grad = grad
        assert all(torch.equal(a, b) for a, b in zip(run(rest, range(2, 4)), expected, strict=True))
        with pytest.raises(InvalidRequest, match="'x' is no error of ours"):
            hooks[0].load_state_dict({"x": torch.zeros(1)})

    on_ranks(2, body)


def test_infinite_gradients_arrive_and_are_forgotten() -> None:
    def body(group: ProcessGroup) -> None:
        for name in ("bf16", "int8", "int4", "top_k"):
            model = DDP(nn.Linear(4, 4, bias=False), group)
            model.register_comm_hook(comm_hook(name, error_feedback=True))
            for scale in (1.0, float("inf"), 1.0):
                model.zero_grad()
                model(torch.full((1, 4), 1.0 + group.rank)).sum().mul(scale).backward()
                assert model.module.weight.grad is not None
                assert bool(model.module.weight.grad.isfinite().all()) is (scale == 1.0), name

    on_ranks(2, body)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "top_k"])
def test_hooks_take_f64_and_fewer_elements_than_ranks(name: str) -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(nn.Linear(1, 1, bias=False, dtype=torch.float64), group)
        model.register_comm_hook(name)
        model(torch.full((1, 1), 1.0 + group.rank, dtype=torch.float64)).sum().backward()
        assert model.module.weight.grad is not None
        assert float(model.module.weight.grad) == 2.0
        assert model.module.weight.grad.dtype is torch.float64

    on_ranks(3, body)


def test_hooks_that_are_not() -> None:
    def body(group: ProcessGroup) -> None:
        model = DDP(nn.Linear(2, 2), group)
        for given, message in (("int2", "no hook 'int2'"), (7, "given was a int")):
            with pytest.raises(InvalidRequest, match=message):
                model.register_comm_hook(given)  # type: ignore[arg-type]
        for name in ("bf16", "int8"):
            with pytest.raises(InvalidRequest, match=f"'{name}' takes no block_numel"):
                comm_hook(name, block_numel=3)
        assert isinstance(model.register_comm_hook(None), CommunicationHook)

    on_ranks(1, body)
