"""Norms with the sum before them, and the gate of the MLP: one pass over their inputs each.

    add_rms_norm   grid (rows)             the reference is ``RmsNorm`` after an addition
    gate           grid (rows, columns)    the reference is ``gated_activation``

Each row is computed by one program in the same way for any number of rows, so its bits do not
depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_config.config import Activation

_GATE_BLOCK = 1024


@triton.jit
def add_rms_norm(
    x_ptr,  # [T, N]
    residual_ptr,  # [T, N], or anything without ADD
    weight_ptr,  # [N]
    normed_ptr,  # [T, N]
    sum_ptr,  # [T, N], or anything without ADD
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(normed_ptr + row + at, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate(
    x_ptr,  # [T, 2 * N]: gate, up
    out_ptr,  # [T, N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + row * (2 * N) + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * N) + N + at, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y = x / (1.0 + tl.exp(-x))
    else:
        # gelu(x) = x * sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3): the tanh form
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * z))
    tl.store(out_ptr + row * N + at, (y * up).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [T, N] normalized with ``weight`` [N], as a new tensor."""
    normed = torch.empty_like(x)
    _launch_norm(x, x, weight, normed, x, eps, add=False)
    return normed


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum; all [T, N], contiguous."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, normed, total, eps, add=True)
    return normed, total


def _launch_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    rows, width = x.shape
    assert x.is_contiguous() and residual.is_contiguous()
    block = triton.next_power_of_2(width)
    add_rms_norm[(rows,)](
        *(x, residual, weight, normed, total, eps),
        N=width,
        BLOCK=block,
        ADD=add,
        num_warps=min(16, max(1, block // 512)),
    )


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up [T, N] of ``gate_up`` [T, 2 * N], contiguous."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    gate[(rows, triton.cdiv(width // 2, _GATE_BLOCK))](
        gate_up, out, N=width // 2, BLOCK=_GATE_BLOCK, SILU=activation == "silu", num_warps=4
    )
    return out
