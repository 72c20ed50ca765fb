"""What the workers of two nodes do on GPUs' stand-ins: each training twice, and the conformance suite."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps_lab.conformance import SPARES, DeviceBackend, run_conformance
from axon_ps_lab.device import Event, asarray, stand_in
from parity_model import Block, batch, build

STEPS = 2
OFFERS = ("download", "upload")
"""Copies from and to page-locked memory: what a GPU does for what leaves the machine."""


def wrapped(world: axon_ps.World, strategy: str, wire: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The transformer under a strategy, or DDP, and its optimizer."""
    if strategy == "DDP":
        ddp = parallel.DDP(build(), world.default_group)
        if wire != "float32":
            ddp.register_comm_hook({"bfloat16": "bf16"}.get(wire, wire))  # else "int8" or "top_k"
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    model = parallel.FSDP(
        build(),
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[strategy],
        mixed_precision=parallel.MixedPrecision(wire_dtype=getattr(torch, wire)),
        intra_node_size=2 if strategy == "HYBRID_SHARD" else None,
        unit_types={Block},
        plan_options=PlanOptions(chunk_numel=512, min_slice_numel=128),
    )
    kind = torch.optim.AdamW if strategy == "NO_SHARD" else parallel.AdamW
    return model, kind(model.parameters(), lr=3e-3)


def train(world: axon_ps.World, strategy: str, wire: str, on_device: bool) -> Any:
    """Final values, and per step what happened on the device."""
    with stand_in() if on_device else contextlib.nullcontext() as device:
        model, optimizer = wrapped(world, strategy, wire)
        steps: list[list[Event]] = []
        for step in range(STEPS):
            if device is not None:
                device.trace.take()
            model(batch(step, world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device is not None:
                steps.append(device.trace.take())
        # FSDP names parameters as the user's module does, DDP as torch's does
        state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        world.barrier(f"trained/{strategy}/{wire}")
        values = {name: value.float().numpy().copy() for name, value in state.items()}
    return values, [summary(events) for events in steps]


def train_each(world: axon_ps.World, cases: list[tuple[str, str]], on_device: bool) -> list[Any]:
    """Several trainings that leave nothing on the servers, one after the other in one job."""
    return [train(world, *case, on_device) for case in cases]


def summary(events: list[Event]) -> dict[str, Any]:
    """Bytes by kind of event, and the largest of those copies that are no stripe."""
    total: Counter[str] = Counter()
    for event in events:
        total[event.what] += event.size_bytes
    other = [e.size_bytes for e in events if e.what in ("get", "asarray", "torch")]
    return {"bytes": dict(total), "largest other": max(other, default=0)}


def conform(world: axon_ps.World) -> list[str]:
    """Failures of the suite on a group of both nodes, for device memory."""
    with stand_in():
        groups = [world.new_group(world.default_group.ranks) for _ in range(1 + SPARES)]
        backends = [DeviceBackend(g.backend_of(asarray(np.zeros(1, np.float32))), asarray) for g in groups]
        assert groups[0].statistics().keys() >= {"downloaded_bytes", "uploaded_bytes"}
        report = run_conformance(backends[0], exact_order=False, spares=backends[1:])
        world.barrier("conformance")
        for group in groups:
            group.close()
    return report.failures
