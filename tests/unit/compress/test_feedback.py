"""The residuals of compressed gradients, over steps that commit, abort, repeat and move."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.feedback import Feedback
from axon_ps.compress.registry import compressor
from axon_ps.types import Array

COMPRESSORS = [compressor("int8", block_numel=16), compressor("top_k", fraction=0.1), compressor("int4")]
COMPRESSORS += [compressor("block_top_k", fraction=0.1)]


def normals(numel: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def push(feedback: Feedback, c: Compressor, values: Array, step: int, begin: int = 0, addend: int = 0) -> Array:
    """What arrives of a gradient of elements [begin, begin + n)."""
    now, after = feedback.open(7, begin, begin + values.size, step, addend)
    out = np.empty(c.compressed_bytes(values.size), np.uint8)
    c.compress(values, out, now, after)
    back = np.empty(values.size, np.float32)
    c.decompress(out, back)
    return back


@pytest.mark.parametrize("c", COMPRESSORS, ids=lambda c: c.name)
def test_steps_that_do_not_commit_lose_and_double_nothing(c: Compressor) -> None:
    feedback, applied, given = Feedback(), np.zeros(200), np.zeros(200)
    for step in range(60):
        grad = normals(200, step)
        back = push(feedback, c, grad, step)
        if step % 7 == 3:  # sent again, after a broken connection
            assert push(feedback, c, grad, step).tobytes() == back.tobytes()
        committed = step % 3 != 1
        feedback.settle(step, committed=committed)
        if committed:
            applied, given = applied + back, given + grad
    now, _ = feedback.open(7, 0, 200, 99)
    assert np.abs(applied + now - given).max() < 1e-4  # an aborted step's gradient is in neither


@pytest.mark.parametrize("c", COMPRESSORS, ids=lambda c: c.name)
def test_the_residual_of_an_addend_is_sent_with_the_next_one(c: Compressor) -> None:
    feedback, applied, given = Feedback(), np.zeros(200), np.zeros(200)
    for step in range(30):
        sent, grads = np.zeros(200), np.zeros(200)
        for addend in ((0,), (0, 1), (0, 1, 2, 3), (1, 3), (2,))[step % 5]:
            grad = normals(200, 10 * step + addend)
            back = push(feedback, c, grad, step, addend=addend)
            assert push(feedback, c, grad, step, addend=addend).tobytes() == back.tobytes()
            sent, grads = sent + back, grads + grad
        feedback.settle(step, committed=step % 3 != 1)
        if step % 3 != 1:
            applied, given = applied + sent, given + grads
        assert feedback.nbytes == 200 * 4 * 2
    now, _ = feedback.open(7, 0, 200, 99)
    assert np.abs(applied + now - given).max() < 1e-4


@pytest.mark.parametrize("c", COMPRESSORS, ids=lambda c: c.name)
def test_of_a_clipped_step_the_residual_is_clipped_too(c: Compressor) -> None:
    feedback, grad = Feedback(), 100.0 * normals(200, 0)
    back = push(feedback, c, grad, 0)
    feedback.settle(0, committed=True, clip_factor=0.01)
    now, _ = feedback.open(7, 0, 200, 1)
    assert now.any()
    np.testing.assert_allclose(now, 0.01 * (grad - back), rtol=1e-5, atol=1e-6)


def test_a_step_never_settled_did_not_commit() -> None:
    feedback, c = Feedback(), COMPRESSORS[0]
    push(feedback, c, normals(50, 0), 1)
    feedback.settle(1, committed=True)
    residual = feedback.open(7, 0, 50, 2)[0].copy()
    push(feedback, c, normals(50, 1), 2)
    push(feedback, c, normals(50, 2), 3)
    feedback.settle(2, committed=True)  # too late
    assert feedback.open(7, 0, 50, 3)[0].tobytes() == residual.tobytes()


def test_ranges_are_apart_and_may_move() -> None:
    feedback, c = Feedback(), COMPRESSORS[0]
    for begin in (0, 100):
        push(feedback, c, normals(100, begin), 1, begin)
    feedback.settle(1, committed=True)
    low, high = (feedback.open(7, begin, begin + 100, 2)[0].copy() for begin in (0, 100))
    moved = feedback.open(7, 50, 150, 3)[0]
    assert moved.tobytes() == np.concatenate([low[50:], high[:50]]).tobytes()
    assert feedback.nbytes == 2 * moved.nbytes  # those it came from are gone
    feedback.clear()
    assert feedback.nbytes == 0
    assert not feedback.open(7, 0, 100, 4)[0].any()
