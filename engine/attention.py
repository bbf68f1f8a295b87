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


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """Attention output [T, heads, head_dim] for the packed rows of ``batch``.

    q: [T, heads, head_dim]. k, v: [T, kv_heads, head_dim], this step's, already in the pool.
    keys, values: [pages, page_tokens, kv_heads, head_dim], one layer of the pool.
    """
    out = torch.empty_like(q)
    for group in batch.groups:
        out[: batch.decode_rows][group.rows] = _decode(
            q[: batch.decode_rows][group.rows], keys, values, group
        )
    for chunk in batch.chunks:
        rows = slice(chunk.start, chunk.start + chunk.count)
        out[rows] = _prefill(q[rows], k[rows], v[rows], keys, values, chunk)
    return out


def _decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup) -> Tensor:
    """One query token per row over its pages: [r, heads, head_dim]."""
    rows, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = keys.shape
    span = group.width * page_tokens
    k = keys.index_select(0, group.pages).view(rows, span, kv_heads, dim).transpose(1, 2)
    v = values.index_select(0, group.pages).view(rows, span, kv_heads, dim).transpose(1, 2)
    shared = heads // kv_heads
    grouped = q.reshape(rows, kv_heads, shared, dim)
    mask = group.mask.expand(rows, 1, shared, span).to(q.dtype)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(rows, heads, dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
    """A chunk of one prompt over its context and itself: [count, heads, head_dim]."""
    causal, mask = True, None
    if chunk.pages is not None:
        assert chunk.mask is not None
        span = chunk.context + chunk.count
        k = keys.index_select(0, chunk.pages).flatten(0, 1)[:span]
        v = values.index_select(0, chunk.pages).flatten(0, 1)[:span]
        causal, mask = False, chunk.mask.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
