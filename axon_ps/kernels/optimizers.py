"""The compiled loops of the optimizers: one pass over memory each, parameters, state and wire copy together.

Owns: everything of this room that numba compiles, in one file on purpose. numba drops the code it cached on disk
when the file of the loop changed, but does not look at other files, so a loop must not inline a function from
elsewhere.
Refuses: to check its arguments. `ServerOptimizer.apply` has done so; these loops write where they are told.

Invariants:
- No contraction and no reordering of floating-point operations: every machine computes the same bits.
- One thread, GIL released.
- What a job does not use is passed as None, and numba compiles a loop without it: no state array, no branch, no wire
  copy, no weight decay (an untaken branch in the loop cost SGD a twentieth).

Note: [NaN afterwards]
    Rounding to bf16 by adding carries some NaNs into infinity or zero, and looking for them at every element made SGD's
    loop a tenth slower. So a loop tracks the largest magnitude it stored, which costs a maximum of integers, and goes
    over its parameters again only when that was a NaN's.

Shapes: every array is [n] and contiguous; f32, except `wire`: float32, uint16 for bf16, int16 for the bits of f16. All
factors are f64 scalars, rounded to f32 once before the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.extending import overload

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

F32 = np.float32
ZERO = np.float32(0.0)


def compiled(function: _Loop) -> _Loop:
    """Compiles at the first call for each combination of argument types, and caches the code on disk where it can."""
    try:
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # no directory for the cache (read-only installation, no home): compile once per process
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy")(function))


# ---- the wire copy -------------------------------------------------------------------------------------------------

U0, U1, U13, U16 = np.uint32(0), np.uint32(1), np.uint32(13), np.uint32(16)
MAGNITUDE = np.uint32(0x7FFF_FFFF)
INFINITY = np.uint32(0x7F80_0000)
HALF, HALF_BITS = np.float32(0.5), np.uint32(0x3F00_0000)


@compiled
def _bf16(value: Any) -> Any:
    """As `compress.cast.bf16_from_f32` (a test holds them equal), for all but NaN; uint16 bits."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> U16) & U1)) >> U16)


@compiled
def _f16(value: Any) -> Any:
    """As `compress.cast.f16_from_f32` (a test holds them equal); int16 bits."""
    bits = np.float32(value).view(np.uint32)
    magnitude = min(np.uint32(bits & MAGNITUDE), np.uint32(0x4780_0000))  # all from 2^16 on becomes infinity
    odd = np.uint32(np.uint32(magnitude >> U13) & U1)
    half = np.uint32(np.uint32(magnitude + np.uint32(0xC800_0FFF) + odd) >> U13)  # exponent less 112, rounded
    if magnitude < np.uint32(0x3880_0000):  # under 2^-14, subnormal: 0.5 has an ulp of 2^-24, so adding it rounds
        half = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + HALF).view(np.uint32) - HALF_BITS)
    if value != value:
        half = np.uint32(0x7E00)
    return np.int16(np.uint32(np.uint32(np.uint32(bits >> U16) & np.uint32(0x8000)) | half))


def _store(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    """Writes the wire copy of one parameter; `largest`, or its magnitude's bits if more. Only inside compiled loops.

    See Note: [NaN afterwards].
    """
    raise NotImplementedError


def _store_for(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    def nothing(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        return largest

    def bf16(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        wire[i] = _bf16(value)
        return max(largest, np.uint32(np.float32(value).view(np.uint32) & MAGNITUDE))

    def f16(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        wire[i] = _f16(value)
        return largest

    def f32(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        wire[i] = value
        return largest

    if not isinstance(wire, numba.types.Array):
        return nothing
    return {numba.types.uint16: bf16, numba.types.int16: f16}.get(wire.dtype, f32)


overload(_store)(_store_for)


def _store_nan(wire: Any, param: Any, largest: Any) -> None:
    """Writes the wire copy of every NaN among the parameters, if there is one. See Note: [NaN afterwards]."""
    raise NotImplementedError


def _store_nan_for(wire: Any, param: Any, largest: Any) -> Any:
    def nothing(wire: Any, param: Any, largest: Any) -> None:
        pass

    def bf16(wire: Any, param: Any, largest: Any) -> None:
        if largest > INFINITY:
            for i in range(param.size):
                if param[i] != param[i]:
                    wire[i] = np.uint16(np.uint32(np.float32(param[i]).view(np.uint32) | np.uint32(0x40_0000)) >> U16)

    if isinstance(wire, numba.types.Array) and wire.dtype == numba.types.uint16:
        return bf16
    return nothing


overload(_store_nan)(_store_nan_for)


@compiled
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """start + weight · (end - start), from the nearer end as torch.lerp does, so that a weight of 1 gives `end`."""
    if weight < HALF:
        return start + weight * (end - start)
    return end - (end - start) * (np.float32(1.0) - weight)


# ---- the optimizers ------------------------------------------------------------------------------------------------


@compiled
def sgd(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    wire: Any,
    grad_scale: Any,
    weight_decay: Any,
    lr: Any,
    carry: Any,
    intake: Any,
    nesterov: Any,
) -> None:
    """buffer = carry · buffer + intake · g; p -= lr · (buffer, or g + nesterov · buffer, or g).

    `momentum_buffer` is None without momentum, `nesterov` is None or the momentum.
    """
    grad_scale, lr = F32(grad_scale), F32(lr)
    carry, intake = F32(carry), F32(intake)
    largest = U0
    for i in range(param.size):
        p = param[i]
        g = grad[i] * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        if momentum_buffer is not None:
            buffer = momentum_buffer[i] * carry + intake * g
            momentum_buffer[i] = buffer
            if nesterov is not None:
                g = g + F32(nesterov) * buffer
            else:
                g = buffer
        p = p - lr * g
        param[i] = p
        largest = _store(wire, i, p, largest)
    _store_nan(wire, param, largest)


@compiled
def adam(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    wire: Any,
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
    """p = decay · p - step_size · m / (√v / root2 + eps), with m and v moved towards g and g².

    `weight_decay` is added to the gradient (Adam), `decay` multiplies the parameter (AdamW); root2 is √(1 - beta2^t).
    `max_exp_avg_sq` is None without amsgrad.
    """
    grad_scale, decay = F32(grad_scale), F32(decay)
    weight1, beta2, weight2 = F32(weight1), F32(beta2), F32(weight2)
    root2, eps, step_size = F32(root2), F32(eps), F32(step_size)
    largest = U0
    for i in range(param.size):
        p = param[i]
        g = grad[i] * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        m = _lerp(exp_avg[i], g, weight1)
        exp_avg[i] = m
        v = exp_avg_sq[i] * beta2 + weight2 * g * g
        exp_avg_sq[i] = v
        if max_exp_avg_sq is not None:
            peak = max_exp_avg_sq[i]
            v = peak if v <= peak else v  # a NaN stays one
            max_exp_avg_sq[i] = v
        p = p * decay - step_size * m / (np.sqrt(v) / root2 + eps)
        param[i] = p
        largest = _store(wire, i, p, largest)
    _store_nan(wire, param, largest)


@compiled
def adagrad(
    param: Any, grad: Any, total: Any, wire: Any, grad_scale: Any, weight_decay: Any, lr: Any, eps: Any
) -> None:
    """total += g²; p -= lr · g / (√total + eps)."""
    grad_scale, lr, eps = F32(grad_scale), F32(lr), F32(eps)
    largest = U0
    for i in range(param.size):
        p = param[i]
        g = grad[i] * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        s = total[i] + g * g
        total[i] = s
        p = p - lr * g / (np.sqrt(s) + eps)
        param[i] = p
        largest = _store(wire, i, p, largest)
    _store_nan(wire, param, largest)


@compiled
def rmsprop(
    param: Any,
    grad: Any,
    square_avg: Any,
    momentum_buffer: Any,
    grad_avg: Any,
    wire: Any,
    grad_scale: Any,
    weight_decay: Any,
    lr: Any,
    alpha: Any,
    weight: Any,
    momentum: Any,
    eps: Any,
) -> None:
    """s = alpha · s + weight · g²; d = g / (√(s - a²) + eps); p -= lr · (d, or buffer = momentum · buffer + d).

    `grad_avg` (a, moved towards g by `weight`) is None unless centered, `momentum_buffer` None without momentum.
    """
    grad_scale, lr = F32(grad_scale), F32(lr)
    alpha, weight, momentum, eps = F32(alpha), F32(weight), F32(momentum), F32(eps)
    largest = U0
    for i in range(param.size):
        p = param[i]
        g = grad[i] * grad_scale
        if weight_decay is not None:
            g = g + F32(weight_decay) * p
        s = square_avg[i] * alpha + weight * g * g
        square_avg[i] = s
        if grad_avg is not None:
            a = _lerp(grad_avg[i], g, weight)
            grad_avg[i] = a
            s = s - a * a
        root = np.sqrt(s) + eps
        if momentum_buffer is not None:
            buffer = momentum_buffer[i] * momentum + g / root
            momentum_buffer[i] = buffer
            p = p - lr * buffer
        else:
            p = p - lr * g / root
        param[i] = p
        largest = _store(wire, i, p, largest)
    _store_nan(wire, param, largest)


@compiled
def lion(
    param: Any,
    grad: Any,
    exp_avg: Any,
    wire: Any,
    grad_scale: Any,
    decay: Any,
    lr: Any,
    beta1: Any,
    weight1: Any,
    beta2: Any,
    weight2: Any,
) -> None:
    """p = decay · p - lr · sign(beta1 · m + weight1 · g); m = beta2 · m + weight2 · g."""
    grad_scale, decay, lr = F32(grad_scale), F32(decay), F32(lr)
    beta1, weight1, beta2, weight2 = F32(beta1), F32(weight1), F32(beta2), F32(weight2)
    largest = U0
    for i in range(param.size):
        g = grad[i] * grad_scale
        m = exp_avg[i]
        c = beta1 * m + weight1 * g
        step = lr if c > ZERO else (-lr if c < ZERO else c)  # sign(0) is 0, and a NaN stays one
        p = param[i] * decay - step
        exp_avg[i] = beta2 * m + weight2 * g
        param[i] = p
        largest = _store(wire, i, p, largest)
    _store_nan(wire, param, largest)
