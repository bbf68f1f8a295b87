"""The single layer of an EAGLE head, and the attention metadata of its passes.

The layer has KV of its own under the page numbers of the target's pool. Its passes attend only to
what the head has seen of each text:

    text       p p p p p p p | a a a a a b b | . . .
                              ^ start         ^ length   a: KV is in the pool, b: computed in pass 1
    pass 1     rows of b, each attending up to itself
    pass 2 ..  one row of each sequence: the draft of the pass before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.attention_metadata import AttentionMetadata, DecodeGroup
from engine.kv_cache.kv_pool import make_pool
from engine.model.attention import apply_rotary_, paged_attention, rotary_table
from engine.model.decoder import DecoderModel
from engine.model.layers import TensorSource, build_attention_projections, build_dense_mlp
from engine.model.linear import RmsNorm, make_draft_linear
from engine.model_config.config import ModelConfig
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

_WIDENED_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


class HeadLayer:
    """Attention and MLP of a Llama layer, whose attention input the caller normalizes. An EAGLE
    head creates it; the layer owns its KV pool."""

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
        """``get`` returns a tensor of the layer by name and shape. ``positions`` is the maximum
        length of a text. The attention input is ``inputs`` times as wide as the layer."""
        self._config = c = config

        def load_wide(name: str, shape: tuple[int, ...]) -> Tensor:
            """Load a tensor of shape [out, in], or [out, inputs * in] for q, k and v."""
            wide = (shape[0], shape[1] * inputs) if name.endswith(_WIDENED_PROJECTIONS) else shape
            return get(name, wide)

        self._qkv, self._out = build_attention_projections(
            load_wide, c, "self_attn.", make_draft_linear
        )
        norm = get("post_attention_layernorm.weight", (c.hidden_size,))
        self._mlp_norm = RmsNorm(norm, c.norm_eps)
        self._mlp = build_dense_mlp(get, c, "mlp.", make_draft_linear)
        self._rotary = rotary_table(c.rope, c.head_dim, positions, model.device)
        format_ = c.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, view: AttentionMetadata
    ) -> Tensor:
        """Return the layer's output [T, hidden] and write the KV of its rows to the pool. x: [T,
        inputs * hidden], the attention input; residual: [T, hidden], added to its output.
        positions, slots: [T]. All rows are decode rows of ``view``."""
        c, rows = self._config, len(x)
        heads = self._qkv(x).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        apply_rotary_(heads[:, : c.heads + c.kv_heads], self._rotary[positions][:, None])
        self._pool.store(0, slots, kv)
        out = torch.empty_like(q)
        paged_attention(q, kv, self._pool.layer(0), view, out, scale=c.attention_scale, softcap=0.0)
        y = self._out.add(out.flatten(1), residual)
        return self._mlp.add(self._mlp_norm(y), y)


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EagleSpans:
    """What an EAGLE head knows of ``b`` sequences before a proposal; arrays are on the host."""

    start: Ints  # [b] first position that the head knows
    done: Ints  # [b] first position without KV
    length: Ints  # [b] tokens of the text

    @property
    def owner(self) -> Ints:
        """[T] index of the sequence of each row of the first pass."""
        return np.repeat(np.arange(len(self.length)), self.length - self.done)

    @property
    def ends(self) -> Ints:
        """[b] last row of each sequence in the first pass."""
        return np.cumsum(self.length - self.done) - 1

    @property
    def positions(self) -> Ints:
        """[T] positions of the rows of the first pass."""
        owner = self.owner
        first = self.ends - (self.length - 1)  # row that position 0 would have
        return np.arange(len(owner)) - first[owner]


class EagleAttention:
    """Attention metadata of all passes over ``b`` sequences, which read the same pages."""

    def __init__(
        self, spans: EagleSpans, table: Tensor, passes: int, shared: int, dtype: torch.dtype
    ) -> None:
        """table: [b, max_pages] page ids; shared: query heads per KV head."""
        self._spans, self._shared, self._dtype = spans, shared, dtype
        self._device = device = table.device
        first = spans.start // BLOCK_TOKENS
        width = int(((spans.length + passes - 2) // BLOCK_TOKENS - first).max()) + 1
        columns = upload(first[:, None] + np.arange(width), device)
        self._pages = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        self._base = upload(first * BLOCK_TOKENS, device)
        self._at = self._base[:, None] + torch.arange(width * BLOCK_TOKENS, device=device)
        self._before = self._at < upload(spans.start, device)[:, None]  # [b, span]

    def first_pass(self) -> AttentionMetadata:
        """Return the metadata of the pass over all rows without KV. Shorter sequences repeat their
        first row."""
        spans = self._spans
        pending = spans.length - spans.done
        queries = int(pending.max())
        back = np.minimum(np.arange(queries)[::-1], pending[:, None] - 1)  # [b, queries]
        last = upload(spans.length[:, None] - 1 - back, self._device)
        hidden = (self._at[:, None] > last[:, :, None]) | self._before[:, None]
        mask = self._mask(hidden).repeat_interleave(self._shared, 1)[:, None]
        total = int(spans.ends[-1]) + 1
        rows: Tensor | slice = slice(None)
        if total < len(pending) * queries:
            rows = upload((spans.ends[:, None] - back).ravel(), self._device)
        return self._view(mask, rows, total, queries)

    def later_passes(self, going: Sequence[int]) -> list[AttentionMetadata]:
        """Return the metadata of the passes after the first one. Pass i has one row of each of the
        first ``going[i]`` sequences, one token further each time."""
        if not going:
            return []
        ahead = np.arange(1, len(going) + 1)[:, None]
        newest = upload(self._spans.length - 1 + ahead, self._device)
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
        """mask: [c, 1, queries * heads or 1, span], of the first c sequences."""
        count = len(mask)
        group = DecodeGroup(rows, self._pages[:count], self._base[:count], mask, queries)
        return AttentionMetadata(total, (group,), ())
