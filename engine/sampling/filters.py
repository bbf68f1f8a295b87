"""Filters: the tokens that may be drawn are those whose scaled logit reaches the row's cut-off.

Min-p, then top-k, then top-p on the rest (in this order, as vLLM and transformers have it): each
keeps a head of the tokens in order of probability, so one number says what is left. Tokens that are
tied with the last one allowed are allowed, too: the set does not depend on how ties are sorted.

Noise is needed at the allowed tokens only. They are looked for among the ``HEADS[0]`` most likely;
rows whose set does not end there look further. What a row may draw is the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.noise import NoiseRows, gumbel

HEADS = (256, 8192)
"""On a CPU, 32 rows of 128k logits take 7 and 46 ms to find that many, and 340 ms to sort."""


@dataclass(frozen=True)
class FilterRows:
    """Filters of the rows, one element per row: [R]."""

    top_p: Tensor  # float32; 1: off
    top_k: Tensor  # int64; the vocabulary's size or more: off
    min_p: Tensor  # float32; 0: off
    nucleus: bool  # whether any row has a top_p

    def of(self, rows: Tensor) -> FilterRows:
        return FilterRows(self.top_p[rows], self.top_k[rows], self.min_p[rows], self.nucleus)


def cut_off(scaled: Tensor, head: Tensor, filters: FilterRows) -> Tensor:
    """Least scaled logit that is allowed: [R, 1].

    scaled: [R, vocab] logits / temperature. head: [R, K], its K greatest values, greatest first.
    Right where it is above the last of ``head`` or ``head`` is the whole row, else too high.

    min-p: Nguyen et al., Turning Up the Heat, 2024, section 3. top-k: Fan et al., Hierarchical
    Neural Story Generation, 2018, section 5.4. top-p: Holtzman et al., The Curious Case of Neural
    Text Degeneration, 2019, section 3.1: the smallest set whose probability reaches it.
    """
    peak = head[:, :1]
    last = (filters.top_k - 1).clamp(max=head.shape[1] - 1)[:, None]
    kth = head.gather(1, last)
    kth.masked_fill_(filters.top_k[:, None] >= scaled.shape[1], float("-inf"))
    floor = torch.maximum(peak + filters.min_p[:, None].log(), kth)
    if not filters.nucleus:
        return floor
    mass = (scaled - peak).exp_().mul_(scaled >= floor).sum(-1, keepdim=True)
    weight = (head - peak).exp_().mul_(head >= floor)
    before = weight.cumsum(-1).sub_(weight)  # probability of all that is likelier, times mass
    inside = before < filters.top_p[:, None] * mass  # the first one always
    count = inside.sum(-1, keepdim=True).clamp_(min=1)  # 0 only where logits are not numbers
    nucleus = head.gather(1, count - 1)
    # A top-k that ends beyond head: the mass of what it leaves is not known here.
    unknown = (filters.top_k[:, None] > head.shape[1]) & (floor == head[:, -1:])
    nucleus.masked_fill_(unknown | (filters.top_p[:, None] >= 1.0), float("-inf"))
    return torch.maximum(floor, nucleus)


def draw_filtered(logits: Tensor, rows: NoiseRows, filters: FilterRows) -> Tensor:
    """Tokens [R] int64 drawn from the allowed ones of logits [R, vocab] fp32."""
    vocab = logits.shape[1]
    scaled = logits / rows.temperature[:, None]
    return _draw(scaled, rows, filters, [*(size for size in HEADS if size < vocab), vocab])


def _draw(scaled: Tensor, rows: NoiseRows, filters: FilterRows, sizes: list[int]) -> Tensor:
    """Draw from the ``sizes[0]`` most likely tokens; rows that need more go on to the next size."""
    values, ids = scaled.topk(sizes[0], dim=-1)  # [R, sizes[0]], greatest first
    cut = cut_off(scaled, values, filters)
    score = gumbel(rows.keys, rows.positions, ids)
    score.add_(values).masked_fill_(values < cut, float("-inf"))
    tokens = ids.gather(1, score.max(dim=-1, keepdim=True).indices)[:, 0]
    if len(sizes) > 1:
        short = (cut <= values[:, -1:])[:, 0].nonzero()[:, 0]
        if len(short):
            further = _draw(scaled[short], rows.of(short), filters.of(short), sizes[1:])
            tokens[short] = further
    return tokens
