"""Gathers the KV of prompts from the pool for a prefill attention that reads plain tensors.

grid (tokens): each program copies K and V of one token in all heads. The reference is ``gather`` of
the pools' layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import MIN_EXPONENT, power_of_two, unpack_e4m3


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def gather_tokens(
    kv_ptr,
    exponents_ptr,
    slot_ptr,  # [n] int64
    out_ptr,  # [n, 2, KV_HEADS, D]
    VECTORS: tl.constexpr,  # 2 * KV_HEADS
    BLOCK_V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    v, d = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D)
    mask = (v < VECTORS)[:, None] & (d < D)[None, :]
    at = tl.load(slot_ptr + token) * VECTORS + v
    x = tl.load(kv_ptr + at[:, None] * D + d[None, :], mask=mask, other=0)
    if FP8:
        exponent = tl.load(exponents_ptr + at, mask=v < VECTORS, other=0).to(tl.int32)
        x = unpack_e4m3(x) * power_of_two(exponent + MIN_EXPONENT)[:, None]
    to = (token * VECTORS + v)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, x.to(out_ptr.dtype.element_ty), mask=mask)


def gather_slots(kv: Tensor, exponents: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the KV in ``slots`` [n] int64 of one layer as [n, 2, kv_heads, head_dim] in ``dtype``.

    kv: [pages, 32, 2, kv_heads, head_dim] values, or uint8 with ``exponents`` [pages, 32, 2,
    kv_heads].
    """
    _, _, _, kv_heads, head_dim = kv.shape
    out = torch.empty((len(slots), 2, kv_heads, head_dim), dtype=dtype, device=kv.device)
    gather_tokens[(len(slots),)](
        *(kv, kv if exponents is None else exponents, slots, out),
        VECTORS=2 * kv_heads,
        BLOCK_V=triton.next_power_of_2(2 * kv_heads),
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        FP8=exponents is not None,
        num_warps=4,
    )
    return out
