"""Every public argument that is a choice, of an enum or a class: its names and torch's enums, or refused by name.

The signatures are walked, so a new argument fails here until `CHOICES` has it.
Tests of `types.parse_member` and `parallel/fsdp/arguments.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp as TorchReduceOp
from torch.distributed import fsdp as torchs

import axon_ps
import axon_ps.data
import axon_ps.parallel as ours
from axon_ps import ProcessGroup, ReduceOp, World, subscribe
from axon_ps.compress import Int8
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import (
    DDP,
    FSDP,
    Asynchronous,
    CPUOffload,
    DiLoCo,
    GradSyncStrategy,
    MixedPrecision,
    Pipeline,
    PipelineSchedule,
    PipelineStage,
    ShardingStrategy,
    Synchronous,
    fully_shard,
    sharded_model,
)
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.rpc.security import Security
from axon_ps.sharding.plan import PlanOptions
from axon_ps.types import DType, parse_member

CHOSEN = r"\bOp\b|dtype|DType|Policy|MixedPrecision|type\[|PlanOptions|Compressor"
"""In annotations: what is chosen, beside members of our enums."""

INTERNAL = re.compile(
    r"(\w+Backend|BlockTopK|TopK|Int4|Int8|CommunicationHook|MixedPrecision\.(compute|wire))\b"
    r"|TrafficEstimate\.strategy|Subscription\.dtype|save_pretrained\.dtype"
)
"""Called by our own code, with values that were checked before; the last is in `test_dtype_arguments.py`."""

Spellings = Mapping[Any, Sequence[Any]]


class Foreign(enum.Enum):
    """An enum of somebody else, with names of ours."""

    FULL_SHARD = "full_shard"
    SUM = "sum"
    ASYNC = "async"
    BFLOAT16 = "bfloat16"


class Choice(NamedTuple):
    """An argument that is a choice.

    Attributes:
        take: passes a value; returns its meaning.
        right: by meaning, its spellings.
        misspelt: a string that is none.
        accepted: the beginning of the list of what is accepted.
    """

    take: Callable[[Any], Any]
    right: Spellings
    misspelt: str
    accepted: str


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OPS: Spellings = {
    ReduceOp.SUM: ["sum", "SUM", ReduceOp.SUM, TorchReduceOp.SUM],
    ReduceOp.AVERAGE: ["average", "mean", "AVG", ReduceOp.MEAN, TorchReduceOp.AVG],
    ReduceOp.MAX: ["Max", TorchReduceOp.MAX],
}
DTYPES: Spellings = {BF16: [BF16, "bfloat16", "bf16", "torch.bfloat16", DType.BF16], F64: [F64, "float64", "double"]}
NUMPYS: Spellings = {
    np.dtype(np.float64): [float, "float64", np.float64, F64, DType.F64],
    np.dtype(np.int32): ["int32", np.int32, "i32"],
}
WIRES: Spellings = {DType.BF16: [BF16, "bfloat16", DType.BF16], DType.F32: [F32, "float32", "fp32", Int8(), "int8"]}
STRATEGIES: Spellings = {
    ShardingStrategy.FULL_SHARD: ["full_shard", "FULL_SHARD", "zero_3", torchs.ShardingStrategy.FULL_SHARD],
    ShardingStrategy.SHARD_GRAD_OP: ["shard-grad-op", ShardingStrategy.ZERO_2, torchs.ShardingStrategy.SHARD_GRAD_OP],
}
NO_SHARD: Spellings = {ShardingStrategy.NO_SHARD: ["no_shard", torchs.ShardingStrategy.NO_SHARD]}
OFFLOADS: Spellings = {
    CPUOffload.FULL: ["full", "FULL", True, CPUOffload.FULL, torchs.CPUOffload(offload_params=True)],
    CPUOffload.NONE: ["none", False, torchs.CPUOffload()],
}
PRECISIONS: Spellings = {
    MixedPrecision(param_dtype=BF16): [*DTYPES[BF16], True, MixedPrecision(param_dtype="bf16")],
    MixedPrecision(): [None, False],
}
KINDS: Spellings = {2: [nn.Linear, [nn.Linear], {nn.Linear}], 1: [(), nn.Conv2d]}
PLANS: Spellings = {PlanOptions(): [PlanOptions()]}
POLICIES: Spellings = {
    "Synchronous()": [None, "sync", "Synchronous", Synchronous()],
    "Asynchronous()": ["async", "ASYNC", Asynchronous()],
}
SYNC: Spellings = {
    GradSyncStrategy.NO_SYNC: ["no_sync", "NO-SYNC", GradSyncStrategy.NO_SYNC],
    GradSyncStrategy.SYNCHRONOUS: ["synchronous"],
}
SCHEDULES: Spellings = {
    PipelineSchedule.GPIPE: ["gpipe", "GPipe", PipelineSchedule.GPIPE],
    PipelineSchedule.ONE_F_ONE_B: ["1f1b", "1F1B", "one_f_one_b"],
}
PREFETCHES: Spellings = {None: [None, "backward_pre", *torchs.BackwardPrefetch]}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def reduced(name: str) -> Choice:
    def take(given: Any) -> Any:
        group, data = ProcessGroup.mock(), np.ones(2, np.float32)
        getattr(group, name)([data] if name == "all_reduce_each" else data, op=given)
        return group.calls.recorder.entries()[-1].call.op

    return Choice(take, OPS, "summ", "sum, product, min, max, average")


def received(given: Any) -> Any:
    first, second = ProcessGroup.mock(2)
    sending = first.send(np.empty(2, axon_ps.collectives.arrays.numpy_dtype(given)), 1, async_op=True)
    got = second.recv(src=0, shape=2, dtype=given)
    sending.wait()
    return got.dtype


def subscribed(given: Any) -> Any:
    with subscribe(coordinator="h:1", job="j", security=Security(token="t"), dtype=given) as subscription:
        wanted = subscription._subscriber._wanted_dtype
    return None if wanted is None else TORCH_DTYPES[wanted]


def layer(make: Callable[..., nn.Module]) -> Choice:
    return Choice(lambda given: next(make(dtype=given).parameters()).dtype, DTYPES, "bfloat61", "float32, bfloat16")


def wire(name: str) -> Choice:
    def take(given: Any) -> Any:
        sent = MixedPrecision(**{"wire_dtype": F32, name: given}).wire(F32)
        return sent.grad if name == "reduce_dtype" else sent.param

    return Choice(take, WIRES, "bfloat61", "float32, bfloat16, float16")


def diloco(name: str, meaning: Callable[[Any], Any], right: Spellings, misspelt: str, accepted: str) -> Choice:
    def take(given: Any) -> Any:
        inner = module()
        made = DiLoCo(inner, torch.optim.SGD(inner.parameters(), lr=0.1), inner_steps=2, **{name: given})
        return meaning(made._fragments[0].spec)

    return Choice(take, right, misspelt, accepted)


OF_FSDP: dict[str, tuple[Callable[[FSDP], Any], Spellings, str, str]] = {
    "sharding_strategy": (lambda m: m.strategy, STRATEGIES, "full_shart", "ShardingStrategy.FULL_SHARD, "),
    "cpu_offload": (lambda m: m._wrapping.offload, OFFLOADS, "ful", "CPUOffload.NONE, CPUOffload.PARAMS"),
    "mixed_precision": (
        lambda m: m._wrapping.precision,
        PRECISIONS,
        "bf61",
        "a MixedPrecision, a floating-point dtype",
    ),
    "unit_types": (lambda m: len([f for f in m.runtime.flats if f.unit.parameters]), KINDS, "Linear", "module classes"),
    "plan_options": (lambda m: m.spec.options, PLANS, "big", "PlanOptions(...) or None"),
    "policy": (lambda m: str(m.spec.policy), POLICIES, "asynk", 'Synchronous() or "sync"'),
    "backward_prefetch": (lambda m: None, PREFETCHES, "backwards", "backward_pre, backward_post, None"),
}
"""By argument of FSDP: its meaning for a model, and the rest of a `Choice`."""


def of_wrapper(
    wrap: Callable[..., FSDP], argument: str, like: str | None = None, more: Spellings | None = None
) -> Choice:
    meaning, right, misspelt, accepted = OF_FSDP[like or argument]
    return Choice(
        lambda given: meaning(wrap(module(), **{argument: given})), {**right, **(more or {})}, misspelt, accepted
    )


def by_fsdp(inner: nn.Module, **given: Any) -> FSDP:
    return FSDP(inner, **{"sharding_strategy": "shard_grad_op" if "policy" in given else "full_shard", **given})


def by_fully_shard(inner: nn.Module, **given: Any) -> Any:
    wrapping = sharded_model(fully_shard(inner, **given))._wrapping
    precision = dataclasses.replace(wrapping.precision, cast_forward_inputs=True)  # each module casts its own
    return SimpleNamespace(_wrapping=SimpleNamespace(precision=precision, offload=wrapping.offload))


CHOICES: dict[str, Choice] = {
    **{f"ProcessGroup.{n}.op": reduced(n) for n in ("all_reduce", "all_reduce_each", "reduce", "reduce_scatter")},
    **{f"{each}recv.dtype": Choice(received, NUMPYS, "flaot64", "float32, ") for each in ("", "ProcessGroup.")},
    "empty_shared.dtype": Choice(
        lambda given: axon_ps.empty_shared(2, given, group=ProcessGroup.mock()).dtype, NUMPYS, "flaot64", "float32, "
    ),
    "subscribe.dtype": Choice(subscribed, {BF16: DTYPES[BF16], None: [None]}, "bfloat61", "float32, bfloat16, float16"),
    **{
        f"{name}.{argument}": of_wrapper(by_fsdp, argument, more=NO_SHARD if argument == "sharding_strategy" else None)
        for name in ("FSDP", "FullyShardedDataParallel")
        for argument in OF_FSDP
    },
    "fully_shard.mp_policy": of_wrapper(
        by_fully_shard,
        "mp_policy",
        "mixed_precision",
        {MixedPrecision(param_dtype=torch.float16): [torchs.MixedPrecisionPolicy(param_dtype=torch.float16)]},
    ),
    "fully_shard.offload_policy": of_wrapper(
        by_fully_shard,
        "offload_policy",
        "cpu_offload",
        {CPUOffload.FULL: [torchs.CPUOffloadPolicy()], CPUOffload.NONE: [None, torchs.OffloadPolicy()]},
    ),
    **{
        f"{name}.grad_sync_strategy": Choice(
            lambda given: DDP(module(), grad_sync_strategy=given)._strategy, SYNC, "nosync", "synchronous, overlapped"
        )
        for name in ("DDP", "DistributedDataParallel")
    },
    "GradientSynchronizer.strategy": Choice(
        lambda given: ours.GradientSynchronizer(given).strategy, SYNC, "nosync", "synchronous, overlapped, no_sync"
    ),
    "Pipeline.schedule": Choice(
        lambda given: Pipeline([PipelineStage(nn.Linear(2, 2))], num_microbatches=2, schedule=given).schedule,
        SCHEDULES,
        "gpip",
        "gpipe, 1f1b, interleaved-1f1b, zero-bubble",
    ),
    "Pipeline.from_modules.schedule": Choice(
        lambda given: Pipeline.from_modules([nn.Linear(2, 2)], 1, num_microbatches=2, schedule=given).schedule,
        SCHEDULES,
        "gpip",
        "gpipe, 1f1b",
    ),
    "TrafficEstimate.of.strategy": Choice(
        lambda given: ours.estimate(module(), workers=2, nodes=1).of(given).strategy,
        STRATEGIES,
        "full_shart",
        "full_sh",
    ),
    "ColumnParallelLinear.dtype": layer(
        lambda **given: ours.ColumnParallelLinear(2, 2, True, ProcessGroup.mock(), **given)
    ),
    "RowParallelLinear.dtype": layer(lambda **given: ours.RowParallelLinear(2, 2, True, ProcessGroup.mock(), **given)),
    "TensorParallelAttention.dtype": layer(
        lambda **given: ours.TensorParallelAttention(2, 2, ProcessGroup.mock(), **given)
    ),
    "SyncBatchNorm.dtype": layer(partial(ours.SyncBatchNorm, 2)),
    "GradientBucket.dtype": Choice(
        lambda given: ours.GradientBucket(2, dtype=given).dtype, DTYPES, "bfloat61", "float32, bfloat16"
    ),
    **{
        f"MixedPrecision.{name}": Choice(
            lambda given, name=name: getattr(MixedPrecision(**{name: given}), name), DTYPES, "bfloat61", "float32, bf"
        )
        for name in ("param_dtype", "output_dtype", "buffer_dtype")
    },
    **{f"MixedPrecision.{name}": wire(name) for name in ("wire_dtype", "reduce_dtype")},
    "MixedPrecision.uncast_types": Choice(
        lambda given: MixedPrecision(uncast_types=given).uncast_types,
        {(nn.Linear,): [nn.Linear, [nn.Linear], {nn.Linear}], (): [()]},
        "Linear",
        "module classes",
    ),
    "DiLoCo.wire_dtype": diloco("wire_dtype", lambda spec: spec.precision.grad, WIRES, "bfloat61", "float32, bfloat16"),
    "DiLoCo.param_wire_dtype": diloco(
        "param_wire_dtype",
        lambda spec: spec.precision.param_compression is None,
        {True: [F32, "float32"], False: [Int8(), "int8"]},
        "float23",
        "float32, ",
    ),
    "DiLoCo.unit_types": diloco("unit_types", lambda spec: len(spec.layout.units), KINDS, "Linear", "module classes"),
    "DiLoCo.plan_options": diloco("plan_options", lambda spec: spec.options, PLANS, "big", "PlanOptions(...) or None"),
}
MODULES = [axon_ps, axon_ps.data, ours]
OF_ADAPTERS = ("sharding_strategy", "cpu_offload", "mixed_precision", "unit_types")
if importlib.util.find_spec("accelerate"):
    import axon_ps.huggingface as hf

    MODULES.append(hf)
    CHOICES |= {
        f"ServerPlugin.{name}": of_wrapper(lambda inner, **given: hf.ServerPlugin(**given).wrap(inner), name)
        for name in OF_ADAPTERS
    }
    CHOICES["on_servers.trainer"] = Choice(
        lambda given: hf.on_servers(given), {}, "Trainer", "give transformers.Trainer"
    )
if importlib.util.find_spec("lightning"):
    import axon_ps.lightning as lightning

    MODULES.append(lightning)
    CHOICES |= {
        f"AxonStrategy.{name}": of_wrapper(
            lambda inner, **given: FSDP(inner, **lightning.AxonStrategy(**given)._how), name
        )
        for name in OF_ADAPTERS
    }


def public_functions() -> Iterator[tuple[str, Any]]:
    """The public functions and methods."""
    for module_ in MODULES:
        for name in module_.__all__:
            public = getattr(module_, name)
            if not inspect.isclass(public):
                functions = [(name, public)] if callable(public) else []
            elif issubclass(public, (BaseException, enum.Enum)):
                continue
            else:
                members = inspect.getmembers(public, callable)
                functions = [(name, public.__init__)] + [
                    (f"{name}.{method}", member)
                    for method, member in members
                    if not method.startswith("_") and str(getattr(member, "__module__", "")).startswith("axon_ps")
                ]
            yield from ((called, one) for called, one in functions if inspect.isfunction(one) or inspect.ismethod(one))


def enums() -> set[str]:
    """The names of our enums that are loaded."""
    todo, found = [enum.Enum], set()
    while todo:
        for each in todo.pop().__subclasses__():
            todo.append(each)
            if each.__module__.startswith("axon_ps"):
                found.add(each.__name__)
    return found


def test_every_argument_that_is_a_choice_is_here() -> None:
    pattern = re.compile("|".join([CHOSEN, *(rf"\b{name}\b" for name in enums())]))
    arguments = {
        f"{called}.{argument.name}": str(argument.annotation)
        for called, function in public_functions()
        for argument in inspect.signature(function).parameters.values()
    }
    chosen = {name for name, annotation in arguments.items() if pattern.search(annotation) and not INTERNAL.match(name)}
    assert {"FSDP.sharding_strategy", "ProcessGroup.all_reduce.op"} <= chosen
    assert chosen - CHOICES.keys() == set()


@pytest.mark.parametrize("name", CHOICES)
def test_right_ones_have_one_meaning_in_every_spelling(name: str, world: World) -> None:
    choice = CHOICES[name]
    for meaning, spellings in choice.right.items():
        for given in spellings:
            assert choice.take(given) == meaning, given


@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_one_is_refused_by_name(name: str, world: World) -> None:
    choice = CHOICES[name]
    for given in (choice.misspelt, 3, *Foreign):
        with pytest.raises(InvalidRequest) as caught:
            choice.take(given)
        assert str(caught.value).startswith(f"{name.rpartition('.')[2]} is {given!r}"), given
        assert choice.accepted in str(caught.value)


def test_no_model_computes_in_integers(world: World) -> None:
    for name, choice in CHOICES.items():
        if choice.right in (DTYPES, PRECISIONS) and name != "GradientBucket.dtype":
            with pytest.raises(InvalidRequest, match=rf"^{name.rpartition('.')[2]} is torch.int32; (use|give) "):
                choice.take(torch.int32)


def test_an_enum_of_torchs_with_other_names_is_refused_and_so_are_classes() -> None:
    for given in (torchs.BackwardPrefetch.BACKWARD_PRE, ReduceOp.SUM, ShardingStrategy, torchs.ShardingStrategy, None):
        with pytest.raises(InvalidRequest, match=r"^strategy is .*; use one of full_shard, .*\(ShardingStrategy\)$"):
            parse_member(given, ShardingStrategy, "strategy")


def test_the_nearest_name_is_meant() -> None:
    with pytest.raises(InvalidRequest, match="is 'full_shard' meant"):
        parse_member("Full-Shart", ShardingStrategy, "strategy")
    with pytest.raises(InvalidRequest, match=r"use one of backward_pre, backward_post, None \(BackwardPrefetch\)$"):
        parse_member(1, torchs.BackwardPrefetch, "backward_prefetch", also=["None"])
