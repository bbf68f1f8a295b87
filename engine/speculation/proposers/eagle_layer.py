"""The one layer of an EAGLE head, with KV of its own on the page numbers of the target's pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.batch import AttentionMetadata, DecodeGroup
from engine.kv_cache.kv_pool import make_pool
from engine.model.attention import paged_attention
from engine.model.decoder import DecoderModel
from engine.model.layers import TensorSource, build_attention_projections, build_dense_mlp
from engine.model.linear import make_draft_linear
from engine.model.norm_rotary import RmsNorm, apply_rotary_, rotary_table
from engine.model_config.config import ModelConfig
from protocol.block_keys import BLOCK_TOKENS

_WIDENED_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


class HeadLayer:
    """Attention and MLP of a Llama layer, given what its attention reads."""

    def __init__(
        self,
        get: TensorSource,
        config: ModelConfig,
        model: DecoderModel,
        *,
        pages: int,
        positions: int,
        inputs: int = 1,
    ) -> None:
        """get: a tensor of the layer by its name and shape. positions: of the longest text.
        inputs: what attention reads is so many times as wide as the layer."""
        self._config = c = config

        def widened(name: str, shape: tuple[int, ...]) -> Tensor:
            wide = (shape[0], shape[1] * inputs) if name.endswith(_WIDENED_PROJECTIONS) else shape
            return get(name, wide)

        self._qkv, self._out = build_attention_projections(
            widened, c, "self_attn.", make_draft_linear
        )
        norm = get("post_attention_layernorm.weight", (c.hidden_size,))
        self._mlp_norm = RmsNorm(norm, c.norm_eps)
        self._mlp = build_dense_mlp(get, c, "mlp.", make_draft_linear)
        self._turns = rotary_table(c.rope, c.head_dim, positions, model.device)
        format_ = c.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, view: AttentionMetadata
    ) -> Tensor:
        """The layer's output [T, hidden]. x: [T, inputs * hidden], what attention reads; residual:
        [T, hidden], what its output is added to. positions, slots: [T]. All rows are decode rows of
        ``view``; their KV is in the pool afterwards."""
        c, rows = self._config, len(x)
        heads = self._qkv(x).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        apply_rotary_(heads[:, : c.heads + c.kv_heads], self._turns[positions][:, None])
        self._pool.store(0, slots, kv)
        out = torch.empty_like(q)
        paged_attention(q, kv, self._pool.layer(0), view, out, scale=c.attention_scale, softcap=0.0)
        y = self._out.add(out.flatten(1), residual)
        return self._mlp.add(self._mlp_norm(y), y)


# MERGED engine.speculation.heads_reach
# What the passes of an EAGLE head attend to: of each text, what the head has seen.
#
# text       p p p p p p p | a a a a a b b | . . .
#                           ^ start         ^ length      a: KV is there, b: computed in pass 1
# pass 1     rows of b, each up to itself
# pass 2 ..  one row, of the draft that the pass before made, behind them

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EagleSpans:
    """Of ``b`` sequences, on the host."""

    start: Ints  # [b] first position that the head has seen
    done: Ints  # [b] first position without KV
    length: Ints  # [b] tokens known

    @property
    def owner(self) -> Ints:
        """Whose each row of the first pass is: [T]."""
        return np.repeat(np.arange(len(self.length)), self.length - self.done)

    @property
    def ends(self) -> Ints:
        """The last row of each sequence in the first pass: [b]."""
        return np.cumsum(self.length - self.done) - 1

    @property
    def positions(self) -> Ints:
        """Of the rows of the first pass: [T]."""
        owner = self.owner
        first = self.ends - (self.length - 1)  # row of a sequence's position 0, could it be
        return np.arange(len(owner)) - first[owner]


class EagleAttention:
    """The pages of ``b`` sequences that all passes read, and what their rows see of them."""

    def __init__(
        self, spans: EagleSpans, table: Tensor, passes: int, shared: int, dtype: torch.dtype
    ) -> None:
        """table: [b, max_pages] page ids. shared: query heads that share a key."""
        self._spans, self._shared, self._dtype = spans, shared, dtype
        self._device = device = table.device
        first = spans.start // BLOCK_TOKENS
        width = int(((spans.length + passes - 2) // BLOCK_TOKENS - first).max()) + 1
        columns = torch.from_numpy(first[:, None] + np.arange(width)).to(device)
        self._pages = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        self._base = torch.from_numpy(first * BLOCK_TOKENS).to(device)
        self._at = self._base[:, None] + torch.arange(width * BLOCK_TOKENS, device=device)
        self._before = self._at < torch.from_numpy(spans.start).to(device)[:, None]  # [b, span]

    def first(self) -> AttentionMetadata:
        """All rows that are not computed yet. Where a sequence has fewer than another, its first
        one stands again."""
        spans = self._spans
        pending = spans.length - spans.done
        queries = int(pending.max())
        back = np.minimum(np.arange(queries)[::-1], pending[:, None] - 1)  # [b, queries]
        last = torch.from_numpy(spans.length[:, None] - 1 - back).to(self._device)
        hidden = (self._at[:, None] > last[:, :, None]) | self._before[:, None]
        mask = self._mask(hidden).repeat_interleave(self._shared, 1)[:, None]
        total = int(spans.ends[-1]) + 1
        rows: Tensor | slice = slice(None)
        if total < len(pending) * queries:
            rows = torch.from_numpy((spans.ends[:, None] - back).ravel()).to(self._device)
        return self._view(mask, rows, total, queries)

    def later(self, going: Sequence[int]) -> list[AttentionMetadata]:
        """Of the passes after the first one: one row of each of the first ``going[i]`` sequences, a
        token further on in each pass."""
        if not going:
            return []
        ahead = np.arange(1, len(going) + 1)[:, None]
        newest = torch.from_numpy(self._spans.length - 1 + ahead).to(self._device)
        masks = self._mask((self._at > newest[:, :, None]) | self._before)  # [passes, b, span]
        return [
            self._view(mask[:count, None, None], slice(None), count)
            for mask, count in zip(masks.unbind(), going, strict=True)
        ]

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _view(
        self, mask: Tensor, rows: Tensor | slice, total: int, queries: int = 1
    ) -> AttentionMetadata:
        """mask: [c, 1, queries or one for all heads, span], of the first c sequences."""
        count = len(mask)
        group = DecodeGroup(rows, self._pages[:count], self._base[:count], mask, queries)
        return AttentionMetadata(total, (group,), ())
