"""Workers of torchrun meet at torch's own store. Tests of `worker/bootstrap/torch_store.py`."""

from __future__ import annotations

import sys

import pytest

from axon_ps.errors import ConfigurationError, Unreachable
from axon_ps.host.ports import free_ports
from axon_ps.worker.bootstrap.torch_store import torch_store
from axon_ps.worker.environment import LaunchInfo
from deadlines import HANG_S

pytest.importorskip("torch")


def test_the_worker_of_rank_0_serves_the_store_and_our_keys_have_a_prefix() -> None:
    address, alone = f"127.0.0.1:{free_ports()}", LaunchInfo(launcher=None, rank=0, world_size=1)
    ours = torch_store(address, alone, "ours", HANG_S)
    ours.set("key", "value")
    assert ours.get("key") == b"value"
    assert ours.underlying_store.get("ours/key") == b"value"


def test_a_store_that_does_not_answer_is_named() -> None:
    address, other = f"127.0.0.1:{free_ports()}", LaunchInfo(launcher=None, rank=1, world_size=2)
    with pytest.raises(Unreachable, match=rf"torch's store at {address} \(MASTER_ADDR, MASTER_PORT\).*cannot be used"):
        torch_store(address, other, "ours", 0.0)


def test_a_store_that_needs_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    with pytest.raises(ConfigurationError, match=r"torch is not installed: install axon-ps\[torch\]"):
        torch_store("node0:29500", LaunchInfo(launcher=None, rank=0, world_size=1), "ours", HANG_S)
