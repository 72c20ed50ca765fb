"""The compiled loops of optimizers: one pass over parameters, gradients and state, including the wire copy.

Refuses: to check its arguments. `UpdateRule.apply` has done so.

Invariant: an argument that a job does not use is None, and numba compiles an optimizer's loop without it: no state
array, no branch, no wire copy, no digest, no weight decay (an untaken branch in the loop cost SGD a twentieth).

Note: [NaN afterwards]
    Rounding to bf16 by adding carries some NaNs into infinity or zero. Testing for them at every element made SGD's
    loop a tenth slower. So an optimizer's loop tracks the largest magnitude it stored, which costs a maximum of
    integers. It goes over its parameters again only when that was a NaN's.

Shapes: every array is [n] and contiguous. All are f32 except `wire` and `digests`. The element type of `wire` tells its
format, as in `kernels.rounding`. `digests` is u64[2, m], as in `UpdateRule.apply`, with a column for each array of the
loop. With them n is at most `kernels.digest.SUMMED_NUMEL`. A loop's sums of an array's old and new elements are named
after its elements, with `old_` and `new_`. Factors are f64 scalars, rounded to f32 once before the loop.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from axon_ps.kernels.compiled import compiled
from axon_ps.kernels.digest import add_digests, none_summed, with_value
from axon_ps.kernels.rounding import HALF, INFINITY32, MAGNITUDE32, U0, U16, round_to_bf16, store

F32 = np.float32
ZERO = np.float32(0.0)


def _store_wire(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    """Write the wire copy of a parameter; returns the maximum of `largest` and its magnitude. Only in compiled loops.

    See Note: [NaN afterwards].
    """
    raise NotImplementedError


def _store_nans(wire: Any, param: Any, largest: Any) -> None:
    """Write the wire copy of every NaN among the parameters, if there is one. See Note: [NaN afterwards]."""
    raise NotImplementedError


def _store_wire_for(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    def nothing(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        return largest

    def bf16(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        wire[i] = np.uint16(np.uint32(round_to_bf16(bits) >> U16))
        return max(largest, np.uint32(bits & MAGNITUDE32))

    def any_number(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        store(wire, i, value)
        return largest

    if not isinstance(wire, numba.types.Array):
        return nothing
    return bf16 if wire.dtype == numba.types.uint16 else any_number


def _store_nans_for(wire: Any, param: Any, largest: Any) -> Any:
    def nothing(wire: Any, param: Any, largest: Any) -> None:
        pass

    def bf16(wire: Any, param: Any, largest: Any) -> None:
        if largest > INFINITY32:
            for i in range(param.size):
                if param[i] != param[i]:
                    store(wire, i, param[i])

    return bf16 if isinstance(wire, numba.types.Array) and wire.dtype == numba.types.uint16 else nothing


overload(_store_wire)(_store_wire_for)
overload(_store_nans)(_store_nans_for)


@compiled
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Return start + weight · (end - start), from the nearer end as torch.lerp does: a weight of 1 gives `end`."""
    if weight < HALF:
        return start + weight * (end - start)
    return end - (end - start) * (np.float32(1.0) - weight)


@compiled
def sgd(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    wire: Any,
    digests: Any,
    grad_scale: Any,
    weight_decay: Any,
    lr: Any,
    carry: Any,
    intake: Any,
    nesterov: Any,
) -> None:
    """Apply SGD: buffer = carry · buffer + intake · g; p -= lr · (buffer, or g + nesterov · buffer, or g).

    `momentum_buffer` is None without momentum. `nesterov` is None or the momentum.
    """
    grad_scale, lr = F32(grad_scale), F32(lr)
    carry, intake = F32(carry), F32(intake)
    largest = U0
    old_p = new_p = old_g = old_buffer = new_buffer = none_summed(digests)
    for i in range(param.size):
        p, g = param[i], grad[i]
        old_p, old_g = with_value(old_p, p), with_value(old_g, g)
        g = g * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        if momentum_buffer is not None:
            buffer = momentum_buffer[i]
            old_buffer = with_value(old_buffer, buffer)
            buffer = buffer * carry + intake * g
            momentum_buffer[i] = buffer
            new_buffer = with_value(new_buffer, buffer)
            if nesterov is not None:
                g = g + F32(nesterov) * buffer
            else:
                g = buffer
        p = p - lr * g
        param[i] = p
        new_p = with_value(new_p, p)
        largest = _store_wire(wire, i, p, largest)
    add_digests(digests, 0, old_p, new_p)
    if momentum_buffer is not None:
        add_digests(digests, 1, old_buffer, new_buffer)
    add_digests(digests, -1, old_g, none_summed(digests))
    _store_nans(wire, param, largest)


@compiled
def adam(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    wire: Any,
    digests: Any,
    grad_scale: Any,
    weight_decay: Any,
    decay: Any,
    weight1: Any,
    beta2: Any,
    weight2: Any,
    root2: Any,
    eps: Any,
    step_size: Any,
) -> None:
    """Apply Adam: p = decay · p - step_size · m / (√v / root2 + eps), after m and v have moved towards g and g².

    `weight_decay` · p is added to the gradient (Adam). `decay` multiplies p (AdamW). root2 is √(1 - beta2^t).
    `max_exp_avg_sq` is None without amsgrad.
    """
    grad_scale, decay = F32(grad_scale), F32(decay)
    weight1, beta2, weight2 = F32(weight1), F32(beta2), F32(weight2)
    root2, eps, step_size = F32(root2), F32(eps), F32(step_size)
    largest = U0
    old_p = new_p = old_g = old_m = new_m = old_v = new_v = old_peak = new_peak = none_summed(digests)
    for i in range(param.size):
        p, g = param[i], grad[i]
        old_p, old_g = with_value(old_p, p), with_value(old_g, g)
        g = g * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        m, v = exp_avg[i], exp_avg_sq[i]
        old_m, old_v = with_value(old_m, m), with_value(old_v, v)
        m = _lerp(m, g, weight1)
        exp_avg[i] = m
        v = v * beta2 + weight2 * g * g
        exp_avg_sq[i] = v
        new_m, new_v = with_value(new_m, m), with_value(new_v, v)
        if max_exp_avg_sq is not None:
            peak = max_exp_avg_sq[i]
            old_peak = with_value(old_peak, peak)
            v = peak if v <= peak else v  # a NaN stays NaN
            max_exp_avg_sq[i] = v
            new_peak = with_value(new_peak, v)
        p = p * decay - step_size * m / (np.sqrt(v) / root2 + eps)
        param[i] = p
        new_p = with_value(new_p, p)
        largest = _store_wire(wire, i, p, largest)
    add_digests(digests, 0, old_p, new_p)
    add_digests(digests, 1, old_m, new_m)
    add_digests(digests, 2, old_v, new_v)
    if max_exp_avg_sq is not None:
        add_digests(digests, 3, old_peak, new_peak)
    add_digests(digests, -1, old_g, none_summed(digests))
    _store_nans(wire, param, largest)


@compiled
def adagrad(
    param: Any, grad: Any, total: Any, wire: Any, digests: Any, grad_scale: Any, weight_decay: Any, lr: Any, eps: Any
) -> None:
    """Apply Adagrad: total += g²; p -= lr · g / (√total + eps)."""
    grad_scale, lr, eps = F32(grad_scale), F32(lr), F32(eps)
    largest = U0
    old_p = new_p = old_g = old_s = new_s = none_summed(digests)
    for i in range(param.size):
        p, g = param[i], grad[i]
        old_p, old_g = with_value(old_p, p), with_value(old_g, g)
        g = g * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        s = total[i]
        old_s = with_value(old_s, s)
        s = s + g * g
        total[i] = s
        new_s = with_value(new_s, s)
        p = p - lr * g / (np.sqrt(s) + eps)
        param[i] = p
        new_p = with_value(new_p, p)
        largest = _store_wire(wire, i, p, largest)
    add_digests(digests, 0, old_p, new_p)
    add_digests(digests, 1, old_s, new_s)
    add_digests(digests, -1, old_g, none_summed(digests))
    _store_nans(wire, param, largest)


@compiled
def rmsprop(
    param: Any,
    grad: Any,
    square_avg: Any,
    momentum_buffer: Any,
    grad_avg: Any,
    wire: Any,
    digests: Any,
    grad_scale: Any,
    weight_decay: Any,
    lr: Any,
    alpha: Any,
    weight: Any,
    momentum: Any,
    eps: Any,
) -> None:
    """Apply RMSprop.

    s = alpha · s + weight · g²; d = g / (√(s - a²) + eps); p -= lr · (d, or buffer = momentum · buffer + d).
    `grad_avg` (a, moved towards g by `weight`) is None unless centered. `momentum_buffer` is None without momentum.
    """
    grad_scale, lr = F32(grad_scale), F32(lr)
    alpha, weight, momentum, eps = F32(alpha), F32(weight), F32(momentum), F32(eps)
    largest = U0
    old_p = new_p = old_g = old_s = new_s = old_buffer = new_buffer = old_a = new_a = none_summed(digests)
    for i in range(param.size):
        p, g = param[i], grad[i]
        old_p, old_g = with_value(old_p, p), with_value(old_g, g)
        g = g * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        s = square_avg[i]
        old_s = with_value(old_s, s)
        s = s * alpha + weight * g * g
        square_avg[i] = s
        new_s = with_value(new_s, s)
        if grad_avg is not None:
            a = grad_avg[i]
            old_a = with_value(old_a, a)
            a = _lerp(a, g, weight)
            grad_avg[i] = a
            new_a = with_value(new_a, a)
            s = s - a * a
        root = np.sqrt(s) + eps
        if momentum_buffer is not None:
            buffer = momentum_buffer[i]
            old_buffer = with_value(old_buffer, buffer)
            buffer = buffer * momentum + g / root
            momentum_buffer[i] = buffer
            new_buffer = with_value(new_buffer, buffer)
            p = p - lr * buffer
        else:
            p = p - lr * g / root
        param[i] = p
        new_p = with_value(new_p, p)
        largest = _store_wire(wire, i, p, largest)
    add_digests(digests, 0, old_p, new_p)
    add_digests(digests, 1, old_s, new_s)
    if momentum_buffer is not None:
        add_digests(digests, 2, old_buffer, new_buffer)
    if grad_avg is not None:
        add_digests(digests, -2, old_a, new_a)
    add_digests(digests, -1, old_g, none_summed(digests))
    _store_nans(wire, param, largest)


@compiled
def lion(
    param: Any,
    grad: Any,
    exp_avg: Any,
    wire: Any,
    digests: Any,
    grad_scale: Any,
    decay: Any,
    lr: Any,
    beta1: Any,
    weight1: Any,
    beta2: Any,
    weight2: Any,
) -> None:
    """Apply Lion: p = decay · p - lr · sign(beta1 · m + weight1 · g); m = beta2 · m + weight2 · g."""
    grad_scale, decay, lr = F32(grad_scale), F32(decay), F32(lr)
    beta1, weight1, beta2, weight2 = F32(beta1), F32(weight1), F32(beta2), F32(weight2)
    largest = U0
    old_p = new_p = old_g = old_m = new_m = none_summed(digests)
    for i in range(param.size):
        p, g, m = param[i], grad[i], exp_avg[i]
        old_p, old_g, old_m = with_value(old_p, p), with_value(old_g, g), with_value(old_m, m)
        g = g * grad_scale
        c = beta1 * m + weight1 * g
        step = lr if c > ZERO else (-lr if c < ZERO else c)  # sign(0) is 0, and a NaN stays NaN
        p = p * decay - step
        m = beta2 * m + weight2 * g
        exp_avg[i] = m
        new_m = with_value(new_m, m)
        param[i] = p
        new_p = with_value(new_p, p)
        largest = _store_wire(wire, i, p, largest)
    add_digests(digests, 0, old_p, new_p)
    add_digests(digests, 1, old_m, new_m)
    add_digests(digests, -1, old_g, none_summed(digests))
    _store_nans(wire, param, largest)
