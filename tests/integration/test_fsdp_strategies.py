"""Every strategy: equal to plain torch, resumed bit for bit under any other, bytes and memory as the formulas say.

All of it runs in the same four worker processes, one job after the other, because starting a process costs more than
training in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tables
from fsdp_worker import BLOCKS, DECAY, OPTIONS, PRECISIONS, WIDTH, Case
from job_worker import Job
from many_jobs import run_jobs
from parity_model import Values, distance, train_plain
from tables import Record

STEPS, RESUMED = 4, 2
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
OFFLOADS = ("NONE", "PARAMS", "FULL", "OPTIMIZER_STATES")
TOLERANCE = {"f32": 1e-5, "bf16 wire": 0.03, "bf16": 0.03, "fp16": 0.03, "int8": 0.3, "int4": 0.3}
"""Largest ||a - b|| / ||b|| of a parameter after STEPS of AdamW, which turns the rounding of a small gradient into a
step of nearly full size: of a bias that began at zero, such steps are all there is."""
NORMS = 0.03
"""The same of gradient norms, at most."""


Task = tuple[str, Case, tuple[Any, ...]]


def pairwise() -> list[Case]:
    """Every pair of strategy, offload, precision and world size: an orthogonal array of 16 rows over GF(4)."""
    twice = (0, 2, 3, 1)
    cases = []
    for a, strategy in enumerate(STRATEGIES):
        for b, offload in enumerate(OFFLOADS):
            workers = 1 + (a ^ twice[b])
            cases.append(
                Case(
                    strategy=strategy,
                    offload=offload,
                    precision=list(PRECISIONS)[a ^ b],
                    workers=workers,
                    servers=1 + b % 2,
                    per_node=min(workers, 3 if workers == 3 else 2) if strategy == "HYBRID_SHARD" else 1,
                    local=strategy == "NO_SHARD" and offload != "OPTIMIZER_STATES",
                )
            )
    return cases


def two(strategy: str, offload: str = "NONE", precision: str = "f32", *, local: bool = False, parts: int = 1) -> Case:
    """Two workers; on one node if they share units."""
    return Case(
        strategy=strategy,
        offload=offload,
        precision=precision,
        workers=2,
        servers=2,
        per_node=2 if strategy == "HYBRID_SHARD" else 1,
        local=local,
        parts=parts,
    )


PARITY = [
    *pairwise(),
    Case(strategy="FULL_SHARD", precision="int8", workers=2, servers=2),
    Case(strategy="SHARD_GRAD_OP", precision="int8", workers=3, servers=2),
    Case(strategy="HYBRID_SHARD", precision="int8", workers=2, servers=1, per_node=2),
    Case(strategy="HYBRID_SHARD", precision="int8", workers=4, servers=2, per_node=2),
    Case(strategy="HYBRID_SHARD", precision="int8", offload="PARAMS", workers=3, servers=2, per_node=3),
    Case(strategy="FULL_SHARD", precision="int4", workers=2, servers=2),
    Case(strategy="SHARD_GRAD_OP", precision="int4", workers=3, servers=2),
    Case(strategy="HYBRID_SHARD", precision="int4", offload="PARAMS", workers=4, servers=2, per_node=2),
    *(two(strategy, parts=4) for strategy in STRATEGIES),
    two("FULL_SHARD", "PARAMS", "bf16 wire", parts=2),
    two("SHARD_GRAD_OP", precision="int8", parts=4),
    Case(strategy="HYBRID_SHARD", precision="int4", workers=4, servers=2, per_node=2, parts=2),
]
SPECULATIVE = [
    two("HYBRID_SHARD"),
    Case(strategy="HYBRID_SHARD", workers=4, servers=2, per_node=2, precision="bf16 wire"),
    Case(strategy="HYBRID_SHARD", workers=4, servers=2, per_node=2, precision="int4"),
    Case(strategy="SHARD_GRAD_OP", workers=3, servers=2, precision="int4"),
    Case(strategy="FULL_SHARD", workers=2, servers=2, offload="PARAMS"),
    Case(strategy="FULL_SHARD", workers=2, servers=2, precision="int4"),
    *(two(strategy, parts=2) for strategy in STRATEGIES[:3]),
    two("SHARD_GRAD_OP", precision="int4", parts=4),
]
RESUMERS = [*(two(s) for s in STRATEGIES), two("NO_SHARD", local=True)]
MEASURED = [
    *((two(s, o), False) for s in STRATEGIES for o in OFFLOADS),
    (two("FULL_SHARD", precision="bf16"), False),
    (two("FULL_SHARD", precision="fp16"), False),
    (two("SHARD_GRAD_OP", precision="bf16"), False),
    (two("HYBRID_SHARD", precision="bf16 wire"), False),
    (two("FULL_SHARD"), True),
    (two("SHARD_GRAD_OP"), True),
    (two("FULL_SHARD", "PARAMS"), True),
    (two("HYBRID_SHARD"), True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """Per kind of task, per task, what each of its workers returned."""
    directory = tmp_path_factory.mktemp("fsdp")
    full, local = str(directory / "full"), str(directory / "local")
    kinds: dict[str, list[Task]] = {
        "parity": [("run_case", case, (STEPS,)) for case in PARITY],
        "save": [
            ("save_and_go_on", two("FULL_SHARD"), (full, RESUMED)),
            ("save_and_go_on", two("NO_SHARD", local=True), (local, RESUMED)),
        ],
        "resume": [("go_on", case, (full, RESUMED)) for case in RESUMERS],
        "resume from NO_SHARD": [("go_on", two("FULL_SHARD"), (local, RESUMED))],
        "replace": [("replace", two(s), (str(directory / f"dcp-{s}"),)) for s in STRATEGIES],
        "speculative": [("run_case", case, (4, max_norm)) for case in SPECULATIVE for max_norm in (0.0, 1e9)],
        "diverge": [("diverge", two("HYBRID_SHARD"), ())],
        "uninterrupted": [("run_case", two("FULL_SHARD"), (4, 0.0))],
        "measure": [("measure", case, (adapter,)) for case, adapter in MEASURED],
    }
    jobs = [
        Job(
            function=f"fsdp_worker:{name}",
            args=(case, *args),
            workers=case.workers,
            servers=case.servers,
            per_node=case.per_node,
        )
        for kind in kinds.values()
        for name, case, args in kind
    ]
    by_job = iter(run_jobs(jobs, directory))
    return {kind: [next(by_job) for _ in made] for kind, made in kinds.items()}


def assert_same_bits(values: Values, expected: Values) -> None:
    """Bit for bit."""
    assert list(values) == list(expected)
    assert not [name for name, value in expected.items() if not np.array_equal(values[name], value)]


def test_every_strategy_equals_plain_torch_on_the_joined_batch(
    results: dict[str, list[list[Any]]], record_property: Record
) -> None:
    torch.set_num_threads(1)
    plain = {n: train_plain("AdamW", {**OPTIONS, "weight_decay": DECAY}, n, STEPS) for n in range(1, 5)}
    for case, workers in zip(PARITY, results["parity"], strict=True):
        expected, norms = plain[case.workers]
        assert len(workers) == case.workers
        off = max(distance(values, expected) for values, _ in workers)
        norms_off = max(float(np.abs(np.array(got) / norms - 1).max()) for _, got in workers)
        tables.add(
            record_property,
            tables.PARITY,
            wrapper=f"FSDP {case.strategy}",
            setting=f"offload {case.offload}, {case.servers} servers",
            precision=case.precision,
            workers=case.workers,
            off_by=f"{off:.1e}",
            norms_off_by=f"{norms_off:.1e}",
            allowed=f"{TOLERANCE[case.precision]:g}",
        )
        assert off <= TOLERANCE[case.precision], case
        assert norms_off <= min(NORMS, TOLERANCE[case.precision]), case
        for values, _ in workers:
            assert_same_bits(values, workers[0][0])


def test_a_resumed_run_is_the_run_that_did_not_stop(results: dict[str, list[list[Any]]]) -> None:
    for number, workers in enumerate(results["save"]):
        for first, again, (version, extra, _) in workers:
            assert_same_bits(again, first)
            assert_same_bits(first, workers[0][0])
            assert (version, extra) == (RESUMED, {"step": RESUMED})
        assert [wrote for _, _, (_, _, wrote) in workers] == [True, False], number


def test_a_checkpoint_goes_on_bit_for_bit_under_every_strategy(results: dict[str, list[list[Any]]]) -> None:
    expected = results["save"][0][0][0]
    for case, workers in zip(RESUMERS, results["resume"], strict=True):
        for values in workers:
            if case.local:  # torch's AdamW rounds otherwise than our kernels
                assert distance(values, expected) <= 1e-5
            else:
                assert_same_bits(values, expected)
    for values in results["resume from NO_SHARD"][0]:
        assert distance(values, results["save"][1][0][0]) <= 1e-5


def test_values_are_replaced_and_training_goes_on_from_them(results: dict[str, list[list[Any]]]) -> None:
    uninterrupted = results["uninterrupted"][0][0][0]
    for workers in results["replace"]:
        for before, doubled, partly, again, after in workers:
            assert_same_bits(doubled, {name: 2 * value for name, value in before.items()})
            assert_same_bits(partly, doubled | {"norm.weight": np.ones(16, np.float32)})
            assert_same_bits(again, before)
            assert_same_bits(after, uninterrupted)


def test_parts_that_a_node_pulls_speculatively_are_those_pulled_after_the_decision(
    results: dict[str, list[list[Any]]],
) -> None:
    """Where gradients are clipped nothing is pulled speculatively; the norm given here clips none of them."""
    for speculative, plain in zip(results["speculative"][::2], results["speculative"][1::2], strict=True):
        for values, norms in speculative:
            assert norms == plain[0][1]
            assert_same_bits(values, plain[0][0])


def test_workers_of_a_node_that_run_other_units_are_told_and_nothing_moves(results: dict[str, list[list[Any]]]) -> None:
    for words, version in results["diverge"][0]:
        assert "in the same order" in words
        assert version == 0


BLOCK, ADAPTER, ROOT = 2 * WIDTH * WIDTH + 2 * WIDTH, 8 * WIDTH, 2 * WIDTH
BYTES = {"f32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "bf16 wire": (2, 2)}
"""Bytes of an element on its way from the servers, and to them."""


def test_a_step_moves_the_bytes_of_the_formulas(results: dict[str, list[list[Any]]], record_property: Record) -> None:
    for (case, adapter), workers in zip(MEASURED, results["measure"], strict=True):
        params = BLOCKS * BLOCK + ROOT
        trainable = BLOCKS * ADAPTER if adapter else params
        gathered = trainable  # once for the whole node under HYBRID_SHARD
        if case.strategy == "FULL_SHARD" and case.offload not in ("PARAMS", "FULL") and not adapter:
            gathered = 2 * params - ROOT - 2 * BLOCK  # the root stays, and the last two blocks; or all adapters
        if case.strategy == "NO_SHARD":
            gathered = 0
        pushed = 0 if case.strategy == "NO_SHARD" else trainable
        nodes = 1 if case.strategy == "HYBRID_SHARD" else case.workers
        param_bytes, grad_bytes = BYTES[case.precision]
        received, sent = sum(w[0] for w in workers), sum(w[1] for w in workers)
        expected_in, expected_out = nodes * param_bytes * gathered, nodes * grad_bytes * pushed
        tables.add(
            record_property,
            "Payload bytes of a step, all workers together",
            wrapper=f"FSDP {case.strategy}{' + adapter' if adapter else ''}",
            offload=case.offload,
            precision=case.precision,
            received=received,
            by_formula=expected_in,
            sent=sent,
            by_the_formula=expected_out,
        )
        assert received == expected_in, case
        assert sent == expected_out, case


def test_memory_is_what_was_estimated(results: dict[str, list[list[Any]]], record_property: Record) -> None:
    for (case, adapter), workers in zip(MEASURED, results["measure"], strict=True):
        params = BLOCKS * (BLOCK + (ADAPTER if adapter else 0)) + ROOT
        trainable = BLOCKS * ADAPTER if adapter else params
        on_servers = case.strategy != "NO_SHARD"
        # master 4, and of what is trained the sum 4 and two moments 8, on every server that holds it; and one copy as
        # it travels
        each = 4 * params + 12 * trainable
        server = min(2, case.servers) * each + BYTES[case.precision][0] * params if on_servers else 0
        _, _, estimate, measured, servers = workers[0]
        tables.add(
            record_property,
            "Memory at its peak, in bytes: by formula, and measured",
            wrapper=f"FSDP {case.strategy}{' + adapter' if adapter else ''}",
            offload=case.offload,
            precision=case.precision,
            parameters=estimate["param_memory_bytes"],
            measured=int(measured["peak_param_memory_bytes"]),
            gradients=estimate["grad_memory_bytes"],
            were=int(measured["peak_grad_buffer_bytes"]),
            servers=server,
            have=servers,
        )
        for _, _, estimate, measured, servers in workers:
            assert measured["peak_param_memory_bytes"] == pytest.approx(estimate["param_memory_bytes"], rel=0.1), case
            assert measured["peak_grad_buffer_bytes"] == pytest.approx(estimate["grad_memory_bytes"], rel=0.1), case
            total = estimate["param_memory_bytes"] + estimate["grad_memory_bytes"]
            assert measured["peak_memory_mb"] == pytest.approx(total / (1 << 20), rel=0.1), case
            assert 0 <= measured["current_allocation_mb"] <= measured["peak_memory_mb"]
            assert servers == pytest.approx(server, rel=0.1), case
