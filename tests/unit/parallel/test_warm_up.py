"""A first training step before the first one: everything is loaded, and nothing is left behind.

Tests of `parallel/warm_up.py`.
"""

from __future__ import annotations

import threading

import torch

from axon_ps.parallel.warm_up import warm_up


def test_it_leaves_no_thread_and_no_random_number_behind_whatever_torchs_defaults_are() -> None:
    before, threads = torch.get_rng_state(), threading.active_count()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        warm_up()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert threading.active_count() == threads
