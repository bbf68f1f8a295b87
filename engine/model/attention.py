"""Attention over the paged KV pool in plain torch: the CPU backend, and the reference for kernels.

Three cases occur, and each uses torch's fused attention without padding between sequences: decode
rows grouped by length (the query heads that share a KV head become queries of one sequence), a
prompt's first chunk (causal over itself), and a later chunk (over its pages). The rotary position
embedding of queries and keys (Su et al., RoFormer, section 3.4.2) is here as well.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.attention_metadata import AttentionMetadata, DecodeGroup, PromptChunk
from engine.kv_cache.kv_pool import LayerCache
from engine.model_config.config import RopeConfig

GATHERED_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""KV that decode attention gathers at a time: on a CPU it stays in the cache between gathering and
use, on a GPU it bounds the memory that attention takes."""


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    softcap: float,
) -> None:
    """Compute attention of the packed rows of a batch into ``out`` [T, heads, head_dim].

    q: [T, heads, head_dim]. kv: [T, 2, kv_heads, head_dim], of this step, already in the pool.
    ``softcap``: scores become cap * tanh(score / cap) (Gemma 2, section 2); 0: off.
    """
    kernel = _AttentionKernel(scale, softcap)
    rows = metadata.decode_rows
    for group in metadata.groups:
        if isinstance(group.rows, slice):
            _decode(q[:rows], cache, group, out[:rows], kernel)
        else:
            own = q[group.rows]
            _decode(own, cache, group, own, kernel)  # each portion is read before it is written
            out[group.rows] = own
    for chunk in metadata.chunks:
        at = slice(chunk.start, chunk.start + chunk.count)
        out[at] = _prefill(q[at], kv[at], cache, chunk, kernel)


class _AttentionKernel:
    """Torch's fused attention, or separate operations where scores have a soft cap."""

    def __init__(self, scale: float, softcap: float) -> None:
        self._scale, self._softcap = scale, softcap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return [b, heads, queries, dim].

        q: [b, heads, queries, dim]; k, v: [b, kv_heads, span, dim]; mask: broadcast to [b, heads,
        queries, span], or None for causal attention."""
        shared = q.shape[1] // k.shape[1]
        if shared > 1 and mask is not None and q.device.type == "cuda":
            # The fused kernels that take a mask do not support grouped-query attention.
            k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
        if not self._softcap:
            options = {"is_causal": mask is None, "enable_gqa": shared > 1}
            return F.scaled_dot_product_attention(q, k, v, mask, scale=self._scale, **options)
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = (q @ k.transpose(-1, -2)).float() * self._scale
        scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if mask is None:
            mask = scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        return (scores + mask).softmax(-1).to(v.dtype) @ v


def _decode(
    q: Tensor, cache: LayerCache, group: DecodeGroup, out: Tensor, kernel: _AttentionKernel
) -> None:
    """Attention of each sequence's queries over its pages; q, out: [r * queries, heads, dim]."""
    _, heads, dim = q.shape
    kv_heads, queries = cache.kv_heads, group.queries
    sequences, width = group.pages.shape
    portion = max(1, GATHERED_BYTES[q.device.type] // (width * cache.page_bytes))
    for start in range(0, sequences, portion):
        at = slice(start, min(start + portion, sequences))
        gathered = cache.gather(group.pages[at].flatten())
        span = gathered.view(at.stop - start, -1, 2, kv_heads, dim)
        k, v = span.permute(2, 0, 3, 1, 4).unbind()  # [r, kv_heads, span, head_dim]
        rows = slice(at.start * queries, at.stop * queries)
        # The queries of a KV head are the rows of the sequence, times the heads that share it.
        grouped = q[rows].view(-1, queries, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        attended = kernel(grouped.flatten(2, 3), k, v, group.mask[at])
        split = attended.view(-1, kv_heads, queries, heads // kv_heads, dim)
        out[rows] = split.transpose(1, 2).reshape(-1, heads, dim)


def _prefill(
    q: Tensor, kv: Tensor, cache: LayerCache, chunk: PromptChunk, kernel: _AttentionKernel
) -> Tensor:
    """Attention of a prompt chunk over its context and itself: [count, heads, head_dim]."""
    if chunk.pages is not None:
        kv = cache.gather(chunk.pages).flatten(0, 1)[: chunk.span]
    k, v = kv.permute(1, 2, 0, 3).unbind()  # [kv_heads, span, head_dim]
    attended = kernel(q.transpose(0, 1)[None], k[None], v[None], chunk.mask)
    return attended[0].transpose(0, 1)


def rotary_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Compute cos + i sin of every angle: [positions, head_dim / 2] complex64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = rope.theta**-half
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_positions * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequency = frequency * (blend + (1 - blend) / rope.factor)
    # transformers rounds the inverse frequencies to fp32 before the product; so do we.
    frequency = frequency.float()
    angles = torch.arange(positions).float()[:, None] * frequency
    return torch.polar(torch.ones_like(angles), angles).to(device)


def apply_rotary_(x: Tensor, rotation: Tensor) -> None:
    """Apply the rotary embedding to x [T, heads, head_dim] in place, in fp32 whatever x is.

    rotation: [T, 1, head_dim / 2] complex64, rows of ``rotary_table``. A pair is two neighbours of
    the last dimension: see ``interleave_rotary_pairs``.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotation))


def interleave_rotary_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows [heads * head_dim, ...] from halves (i, i + d/2) to neighbours
    (2i, 2i + 1).

    The rotary embedding is one complex product then. Queries and keys are permuted alike, so their
    dot products, and with them the model, stay the same.
    """
    dim = len(weight) // heads
    return weight.view(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)
