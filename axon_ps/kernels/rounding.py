"""The compiled loops of casts, sums and optimizers, and the rounding to bf16 and f16 that they have in common.

Owns: whatever rounds an f32, in one file on purpose: see `kernels.compiled`.
Refuses: to check its arguments. `compress.cast` and `ServerOptimizer.apply` have done so; these loops write where they
are told.

Invariant: what a job does not use is passed as None, and numba compiles an optimizer's loop without it: no state array,
no branch, no wire copy, no weight decay (an untaken branch in the loop cost SGD a twentieth).

Note: [NaN afterwards]
    Rounding to bf16 by adding carries some NaNs into infinity or zero, and looking for them at every element made SGD's
    loop a tenth slower. So an optimizer's loop tracks the largest magnitude it stored, which costs a maximum of
    integers, and goes over its parameters again only when that was a NaN's.

Shapes: every array is [n] and contiguous. Its element type tells a loop how to read it: float32 is itself, uint16 is
bf16, int16 holds the bits of an f16 (numba has no half precision on CPUs). An optimizer's arrays are f32 (not
`wire`); its factors are f64 scalars, rounded to f32 once before the loop.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from axon_ps.kernels.compiled import compiled

F32 = np.float32
ZERO = np.float32(0.0)
PARTIAL_SUMS = 64
"""Independent f64 partial sums of `sum_of_squares`: element i is added to sum i mod PARTIAL_SUMS."""
_BLOCK_NUMEL = 4096
"""How much `accumulate_last` adds before it squares: a multiple of PARTIAL_SUMS that stays in the first-level cache."""

U0, U1, U13, U16 = np.uint32(0), np.uint32(1), np.uint32(13), np.uint32(16)
SIGN16, MAGNITUDE16 = np.uint32(0x8000), np.uint32(0x7FFF)
MAGNITUDE32, INFINITY32 = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
HALF, HALF_BITS = np.float32(0.5), np.uint32(0x3F00_0000)


# ---- one element ---------------------------------------------------------------------------------------------------


@compiled
def _round_to_bf16(bits: Any) -> Any:
    """The bits of an f32 that is no NaN, rounded: the upper half are those of the nearest bf16."""
    return np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> U16) & U1))


@compiled
def bf16_from_f32(value: Any) -> Any:
    """The bf16 nearest to an f32, as uint16 bits."""
    bits = np.float32(value).view(np.uint32)
    rounded = _round_to_bf16(bits)
    if value != value:  # NaN: rounding could carry it into infinity
        rounded = np.uint32(bits | np.uint32(0x40_0000))
    return np.uint16(np.uint32(rounded >> U16))


@compiled
def f32_from_bf16(bits: Any) -> Any:
    """The f32 that a bf16, given as uint16 bits, stands for. Exact."""
    return np.uint32(np.uint32(bits) << U16).view(np.float32)


@compiled
def f16_from_f32(value: Any) -> Any:
    """The f16 nearest to an f32, as int16 bits."""
    bits = np.float32(value).view(np.uint32)
    magnitude = min(np.uint32(bits & MAGNITUDE32), np.uint32(0x4780_0000))  # all from 2^16 on becomes infinity
    odd = np.uint32(np.uint32(magnitude >> U13) & U1)
    half = np.uint32(np.uint32(magnitude + np.uint32(0xC800_0FFF) + odd) >> U13)  # exponent less 112, rounded
    if magnitude < np.uint32(0x3880_0000):  # under 2^-14, subnormal: 0.5 has an ulp of 2^-24, so adding it rounds
        half = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + HALF).view(np.uint32) - HALF_BITS)
    if value != value:
        half = np.uint32(0x7E00)
    return np.int16(np.uint32(np.uint32(np.uint32(bits >> U16) & SIGN16) | half))


@compiled
def f32_from_f16(bits: Any) -> Any:
    """The f32 that an f16, given as int16 bits, stands for. Exact, also where the processor flushes subnormals."""
    half = np.uint32(np.uint16(bits))
    sign = np.uint32(np.uint32(half & SIGN16) << U16)
    magnitude = np.uint32(half & MAGNITUDE16)
    if magnitude < np.uint32(0x400):  # zero or subnormal: as the last bits of a number in [0.5, 1), less 0.5
        out = np.float32(np.uint32(magnitude | HALF_BITS).view(np.float32) - HALF).view(np.uint32)
    elif magnitude < np.uint32(0x7C00):
        out = np.uint32(np.uint32(magnitude << U13) + np.uint32(0x3800_0000))
    elif magnitude == np.uint32(0x7C00):
        out = INFINITY32
    else:
        out = np.uint32(np.uint32(magnitude << U13) | np.uint32(0x7FC0_0000))
    return np.uint32(out | sign).view(np.float32)


def _load(array: Any, i: Any) -> Any:
    """Element i of an array, as f32. Only inside compiled loops."""
    raise NotImplementedError


def _store(array: Any, i: Any, value: Any) -> Any:
    """Writes an f32 to element i of an array. Only inside compiled loops."""
    raise NotImplementedError


def _load_for(array: Any, i: Any) -> Any:
    def bf16(array: Any, i: Any) -> Any:
        return f32_from_bf16(array[i])

    def f16(array: Any, i: Any) -> Any:
        return f32_from_f16(array[i])

    def f32(array: Any, i: Any) -> Any:
        return array[i]

    return {numba.types.uint16: bf16, numba.types.int16: f16}.get(array.dtype, f32)


def _store_for(array: Any, i: Any, value: Any) -> Any:
    def bf16(array: Any, i: Any, value: Any) -> Any:
        array[i] = bf16_from_f32(value)

    def f16(array: Any, i: Any, value: Any) -> Any:
        array[i] = f16_from_f32(value)

    def f32(array: Any, i: Any, value: Any) -> Any:
        array[i] = value

    return {numba.types.uint16: bf16, numba.types.int16: f16}.get(array.dtype, f32)


def _store_wire(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    """Writes the wire copy of one parameter; `largest`, or its magnitude's bits if more. Only inside compiled loops.

    See Note: [NaN afterwards].
    """
    raise NotImplementedError


def _store_nans(wire: Any, param: Any, largest: Any) -> None:
    """Writes the wire copy of every NaN among the parameters, if there is one. See Note: [NaN afterwards]."""
    raise NotImplementedError


def _store_wire_for(wire: Any, i: Any, value: Any, largest: Any) -> Any:
    def nothing(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        return largest

    def bf16(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        wire[i] = np.uint16(np.uint32(_round_to_bf16(bits) >> U16))
        return max(largest, np.uint32(bits & MAGNITUDE32))

    def any_number(wire: Any, i: Any, value: Any, largest: Any) -> Any:
        _store(wire, i, value)
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
                    _store(wire, i, param[i])

    return bf16 if isinstance(wire, numba.types.Array) and wire.dtype == numba.types.uint16 else nothing


overload(_load)(_load_for)
overload(_store)(_store_for)
overload(_store_wire)(_store_wire_for)
overload(_store_nans)(_store_nans_for)


@compiled
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """start + weight · (end - start), from the nearer end as torch.lerp does, so that a weight of 1 gives `end`."""
    if weight < HALF:
        return start + weight * (end - start)
    return end - (end - start) * (np.float32(1.0) - weight)


# ---- casts and sums ------------------------------------------------------------------------------------------------


@compiled
def convert(src: Any, dst: Any) -> None:
    """dst = src, rounded or widened."""
    for i in range(src.size):
        _store(dst, i, _load(src, i))


@compiled
def convert_with_residual(src: Any, dst: Any, residual: Any) -> None:
    """dst = src + residual, rounded; the residual becomes the rounding error, and stays where that is not finite."""
    for i in range(src.size):
        value = src[i] + residual[i]
        _store(dst, i, value)
        error = np.float32(value - _load(dst, i))
        if np.isfinite(error):
            residual[i] = error


@compiled
def accumulate(acc: Any, chunk: Any, first: bool) -> None:
    """acc += chunk, or acc = chunk for the first; acc: f32."""
    if first:
        for i in range(acc.size):
            acc[i] = _load(chunk, i)
    else:
        for i in range(acc.size):
            acc[i] += _load(chunk, i)


@compiled
def _add_squares(sums: Any, acc: Any) -> None:
    """Adds the square of element i to sum i mod PARTIAL_SUMS. A constant number of sums is what lets it vectorise."""
    aligned = acc.size // PARTIAL_SUMS * PARTIAL_SUMS
    for i in range(0, aligned, PARTIAL_SUMS):
        for j in range(PARTIAL_SUMS):
            value = np.float64(acc[i + j])
            sums[j] += value * value
    for i in range(aligned, acc.size):
        value = np.float64(acc[i])
        sums[i - aligned] += value * value


@compiled
def _total(sums: Any) -> Any:
    total = 0.0
    for j in range(PARTIAL_SUMS):
        total += sums[j]
    return total


@compiled
def sum_of_squares(acc: Any) -> Any:
    """The sum of the squares of acc: f32, in f64: element i in partial sum i mod PARTIAL_SUMS, then their total."""
    sums = np.zeros(PARTIAL_SUMS, np.float64)
    _add_squares(sums, acc)
    return _total(sums)


@compiled
def accumulate_last(acc: Any, chunk: Any, first: bool) -> Any:
    """`accumulate`, then `sum_of_squares(acc)`, block by block while a block is in the first-level cache."""
    sums = np.zeros(PARTIAL_SUMS, np.float64)
    for start in range(0, acc.size, _BLOCK_NUMEL):
        block = acc[start : start + _BLOCK_NUMEL]
        accumulate(block, chunk[start : start + _BLOCK_NUMEL], first)
        _add_squares(sums, block)
    return _total(sums)


# ---- optimizers ------------------------------------------------------------------------------------------------


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
        largest = _store_wire(wire, i, p, largest)
    _store_nans(wire, param, largest)


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
        largest = _store_wire(wire, i, p, largest)
    _store_nans(wire, param, largest)


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
        largest = _store_wire(wire, i, p, largest)
    _store_nans(wire, param, largest)


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
        largest = _store_wire(wire, i, p, largest)
    _store_nans(wire, param, largest)


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
        largest = _store_wire(wire, i, p, largest)
    _store_nans(wire, param, largest)
