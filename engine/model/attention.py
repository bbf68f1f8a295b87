"""Attention over the paged pool, in plain torch: the CPU backend, and the oracle for kernels.

Three shapes occur, and each goes to torch's fused attention without padding between sequences:
decode rows grouped by length (the query heads that share a KV head ride as queries of one
sequence), a prompt's first chunk (causal over itself), and a later chunk (over its pages).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.batching.batch import Chunk, DecodeGroup, View
from engine.kv_cache.kv_pool import LayerCache

PORTION_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Decode rows are attended to in portions of so much gathered KV: on a CPU it stays in the cache
between its gathering and its use, on a GPU it bounds the memory that attention takes."""


def attend(
    q: Tensor,
    kv: Tensor,
    cache: LayerCache,
    view: View,
    out: Tensor,
    *,
    scale: float,
    softcap: float,
) -> None:
    """Attention of the packed rows of a batch, into ``out`` [T, heads, head_dim].

    q: [T, heads, head_dim]. kv: [T, 2, kv_heads, head_dim], this step's, already in the pool.
    ``softcap``: scores become cap * tanh(score / cap); 0: they stay (Gemma 2, section 2).
    """
    score = _Score(scale, softcap)
    rows = view.decode_rows
    for group in view.groups:
        if isinstance(group.rows, slice):
            _decode(q[:rows], cache, group, out[:rows], score)
        else:
            part = q[group.rows]
            _decode(part, cache, group, part, score)  # a portion is read before it is written
            out[group.rows] = part
    for chunk in view.chunks:
        at = slice(chunk.start, chunk.start + chunk.count)
        out[at] = _prefill(q[at], kv[at], cache, chunk, score)


class _Score:
    """How queries meet keys: fused where torch can, spelled out with a soft cap."""

    def __init__(self, scale: float, softcap: float) -> None:
        self._scale, self._softcap = scale, softcap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: [b, heads, queries, dim], k and v: [b, kv_heads, span, dim]; ``mask`` None: causal."""
        shared = q.shape[1] // k.shape[1]
        if shared > 1 and mask is not None and q.device.type == "cuda":
            # The fused kernels that take a mask do not know of heads that share.
            k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
        if not self._softcap:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=shared > 1,
            )
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self._scale
        scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if mask is None:
            mask = scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        return (scores + mask).softmax(-1).to(v.dtype) @ v


def _decode(q: Tensor, cache: LayerCache, group: DecodeGroup, out: Tensor, score: _Score) -> None:
    """The query tokens of each sequence over its pages, into ``out`` [r * queries, heads, dim]."""
    _, heads, dim = q.shape
    kv_heads, queries = cache.kv_heads, group.queries
    sequences, width = group.pages.shape
    portion = max(1, PORTION_BYTES[q.device.type] // (width * cache.page_bytes))
    for start in range(0, sequences, portion):
        at = slice(start, min(start + portion, sequences))
        gathered = cache.gather(group.pages[at].flatten())
        span = gathered.view(at.stop - start, -1, 2, kv_heads, dim)
        k, v = span.permute(2, 0, 3, 1, 4).unbind()  # [r, kv_heads, span, head_dim]
        rows = slice(at.start * queries, at.stop * queries)
        # The rows of a sequence, and of these the heads that share keys, are its queries.
        grouped = q[rows].view(-1, queries, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        attended = score(grouped.flatten(2, 3), k, v, group.mask[at])
        split = attended.view(-1, kv_heads, queries, heads // kv_heads, dim)
        out[rows] = split.transpose(1, 2).reshape(-1, heads, dim)


def _prefill(q: Tensor, kv: Tensor, cache: LayerCache, chunk: Chunk, score: _Score) -> Tensor:
    """A chunk of one prompt over its context and itself: [count, heads, head_dim]."""
    if chunk.pages is not None:
        kv = cache.gather(chunk.pages).flatten(0, 1)[: chunk.span]
    k, v = kv.permute(1, 2, 0, 3).unbind()  # [kv_heads, span, head_dim]
    attended = score(q.transpose(0, 1)[None], k[None], v[None], chunk.mask)
    return attended[0].transpose(0, 1)
