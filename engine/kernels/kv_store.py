"""What happens to the projections of a step before attention, in one pass over them.

    QK norm -> rotary embedding -> rounding to the fp8 grid -> the pool

grid (rows, groups of heads). Queries are rotated in place. Keys and values are rotated, rounded and
written to the pool, and written back rounded, so that attention sees what the pool holds. The
references are ``RmsNorm``, ``apply_rotary_`` and ``KVPool.store``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import MIN_EXPONENT, finite, pack_e4m3, round_rows

_HEADS_PER_PROGRAM = 4


@dataclass(frozen=True)
class HeadNorms:
    """Weights [head_dim] of the norms of queries and keys, in the order of interleaved pairs."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True)
class PoolLayer:
    """One layer of a pool. ``values`` [pages, 32, 2, kv_heads, head_dim] have the model's type, or
    uint8 with ``exponents`` [pages, 32, 2, kv_heads]. ``rounds``: values are rounded to the fp8
    grid."""

    values: Tensor
    exponents: Tensor | None
    rounds: bool


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def rotate_and_store(
    x_ptr,  # [T, HEADS + 2 * KV_HEADS, D]
    x_stride,
    rotation_ptr,  # [positions, D] fp32: cos and sin of each pair
    position_ptr,  # [T] int64
    slot_ptr,  # [T] int64; -1: not stored
    q_norm_ptr,
    k_norm_ptr,
    eps,
    kv_ptr,
    exponents_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    known = head < HEADS + 2 * KV_HEADS
    mask = known[:, None] & (d < D)[None, :]
    at = x_ptr + row * x_stride + head[:, None] * D + d[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    if NORM:
        q_weight = tl.load(q_norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        x = tl.where(is_value[:, None], x, x * scale[:, None] * weight)
    position = tl.load(position_ptr + row)
    turn = tl.load(rotation_ptr + position * D + d, mask=d < D, other=0.0)
    cos, sin = tl.split(tl.reshape(turn, [BLOCK_D // 2, 2]))
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
    turned = tl.join(
        even * cos[None, :] - odd * sin[None, :], even * sin[None, :] + odd * cos[None, :]
    )
    x = tl.where(is_value[:, None], x, tl.reshape(turned, [BLOCK_H, BLOCK_D]))
    if ROUND:
        rounded, exponent = round_rows(x)
        x = tl.where(is_query[:, None], x, rounded)
    else:
        x = tl.where(is_query[:, None], x, finite(x))
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=mask)
    slot = tl.load(slot_ptr + row)
    stored = (known & (head >= HEADS)) & (slot >= 0)
    to = slot * (2 * KV_HEADS) + head - HEADS
    mask = stored[:, None] & (d < D)[None, :]
    if FP8:
        tl.store(kv_ptr + to[:, None] * D + d[None, :], pack_e4m3(x, exponent), mask=mask)
        tl.store(exponents_ptr + to, (exponent - MIN_EXPONENT).to(tl.uint8), mask=stored)
    else:
        values = x.to(kv_ptr.dtype.element_ty)
        tl.store(kv_ptr + to[:, None] * D + d[None, :], values, mask=mask)


def rotate_and_store_(
    projected: Tensor,
    rotation: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: HeadNorms | None,
    layer: PoolLayer,
    heads: int,
) -> None:
    """Rotate queries and keys of ``projected`` [T, heads + 2 * kv_heads, head_dim] in place, and
    write keys and values to ``slots`` [T] int64 of the pool; -1 stores nothing.

    rotation: [positions, head_dim] fp32, cos and sin of each pair. positions: [T] int64. With
    ``norms`` queries and keys are normalized before.
    """
    rows, all_heads, head_dim = projected.shape
    kv_heads = layer.values.shape[3]
    assert all_heads == heads + 2 * kv_heads and projected.stride(1) == head_dim
    weight = projected if norms is None else norms.query
    rotate_and_store[(rows, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        *(projected, projected.stride(0), rotation, positions, slots),
        *(weight, weight if norms is None else norms.key, 0.0 if norms is None else norms.eps),
        layer.values,
        layer.values if layer.exponents is None else layer.exponents,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=_HEADS_PER_PROGRAM,
        NORM=norms is not None,
        ROUND=layer.rounds,
        FP8=layer.values.dtype == torch.uint8,
        num_warps=4,
    )
