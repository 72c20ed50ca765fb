"""Memory as a formula, from the counters that `axon-ps status` shows."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.host.malloc import retain_message_memory
from axon_ps.types import DType
from engine_driver import Servers, job_of, layout_of, one_group

TRAINABLE, FROZEN = 5000, 3000
LAYOUT = layout_of([TRAINABLE], [FROZEN], frozen=[1])


@pytest.mark.parametrize(("param", "itemsize"), [(DType.F32, 4), (DType.BF16, 2), (DType.F16, 2)])
@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("sgd", 0), ("lion", 1)])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_memory_formula(param: DType, itemsize: int, optimizer: str, moments: int, num_servers: int) -> None:
    """Per trainable element: master 4 + accumulator 4 + moments 4 each + one wire copy; frozen: master + wire copy.

    The wire copy is the frames, so each chunk adds a header of at most 32 bytes.
    """
    spec = job_of(LAYOUT, chunk_numel=512, param=param)
    servers = Servers(spec, num_servers, optimizer=one_group(LAYOUT, optimizer, lr=0.1))
    servers.upload([np.zeros(u.numel, np.float32) for u in LAYOUT.units])
    for _ in range(3):
        values = [e.statistics() for e in servers.engines]
        total = {name: sum(v[name] for v in values) for name in values[0]}
        assert total["master_bytes"] == 4 * (TRAINABLE + FROZEN)
        assert total["accumulator_bytes"] == 4 * TRAINABLE
        assert total["state_bytes"] == 4 * TRAINABLE * moments
        chunks = sum(len(s.chunks.bounds) for e in servers.engines for s in e.slices.values())
        wire = itemsize * (TRAINABLE + FROZEN)
        assert wire < total["frame_bytes"] <= wire + 32 * chunks
        servers.train_step([[np.ones(TRAINABLE, np.float32), None]])


def test_every_chunk_is_encoded_once_a_version() -> None:
    servers = Servers(job_of(LAYOUT, chunk_numel=512))
    servers.upload([np.zeros(u.numel, np.float32) for u in LAYOUT.units])
    (engine,) = servers.engines
    assert engine.statistics()["encodings"] == 10 + 6
    servers.train_step([[np.ones(TRAINABLE, np.float32), None]])
    for _ in range(4):
        engine.parameters.frames(0, 0, TRAINABLE)
    assert engine.statistics()["encodings"] == 10 + 6 + 10


def test_message_memory_is_kept_where_malloc_can() -> None:
    assert retain_message_memory() is retain_message_memory()
