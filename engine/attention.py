"""Attention over the paged pool, in plain torch: the CPU backend, and the oracle for kernels.

Three shapes occur, and each goes to torch's fused attention without padding between sequences:
decode rows grouped by length (the query heads that share a KV head ride as queries of one
sequence), a prompt's first chunk (causal over itself), and a later chunk (over its pages).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, Chunk, DecodeGroup


def attend(q: Tensor, kv: Tensor, pool: Tensor, batch: Batch) -> Tensor:
    """Attention output [T, heads, head_dim] for the packed rows of ``batch``.

    q: [T, heads, head_dim]. kv: [T, 2, kv_heads, head_dim], this step's, already in the pool.
    pool: [pages, page_tokens, 2, kv_heads, head_dim], one layer.
    """
    if not batch.chunks and len(batch.groups) == 1:
        return _decode(q, pool, batch.groups[0])
    out = torch.empty_like(q)
    for group in batch.groups:
        out[: batch.decode_rows][group.rows] = _decode(
            q[: batch.decode_rows][group.rows], pool, group
        )
    for chunk in batch.chunks:
        rows = slice(chunk.start, chunk.start + chunk.count)
        out[rows] = _prefill(q[rows], kv[rows], pool, chunk)
    return out


def _decode(q: Tensor, pool: Tensor, group: DecodeGroup) -> Tensor:
    """One query token per row over its pages: [r, heads, head_dim]."""
    rows, heads, dim = q.shape
    kv_heads = pool.shape[3]
    gathered = pool.index_select(0, group.pages).view(rows, -1, 2, kv_heads, dim)
    k, v = gathered.permute(2, 0, 3, 1, 4).unbind()  # [r, kv_heads, span, head_dim]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask)
    return out.reshape(rows, heads, dim)


def _prefill(q: Tensor, kv: Tensor, pool: Tensor, chunk: Chunk) -> Tensor:
    """A chunk of one prompt over its context and itself: [count, heads, head_dim]."""
    if chunk.pages is not None:
        kv = pool.index_select(0, chunk.pages).flatten(0, 1)[: chunk.context + chunk.count]
    k, v = kv.permute(1, 2, 0, 3).unbind()  # [kv_heads, span, head_dim]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
