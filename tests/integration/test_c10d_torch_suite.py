"""The most telling of PyTorch's own collective tests over "axon"; `make lab NAME=torch-suite` runs all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="PyTorch's own tests need expecttest")

import torch_suite
from deadlines import HANG_S

CHOSEN = (
    "test_all_gather",
    "test_all_reduce_coalesced",
    "test_all_reduce_complex",
    "test_all_reduce_full_group",
    "test_all_reduce_sum",
    "test_all_to_all",
    "test_batch_isend_irecv_gloo",
    "test_broadcast",
    "test_ddp_comm_hook",
    "test_ddp_join",
    "test_ddp_sync_bn",
    "test_ddp_uneven_inputs",
    "test_gather",
    "test_irecv",
    "test_isend",
    "test_new_subgroups",
    "test_reduce_scatter",
    "test_reduce_sum",
    "test_scatter",
    "test_send_recv",
    "test_sparse_all_reduce",
)


def test_pytorchs_own_tests_pass() -> None:
    outcomes = torch_suite.run_everywhere(CHOSEN, timeout_s=HANG_S)
    failed = {name: why for name, ((kind, why), _) in outcomes.items() if kind == "failed"}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert sum(kind == "passed" for (kind, _), _ in outcomes.values()) >= 50
