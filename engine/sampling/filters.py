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

HEADS = (64, 1024, 8192)
"""On a CPU, it takes 4, 17 and 46 ms to find so many in 32 rows of 128k logits, 340 ms to sort."""


@dataclass(frozen=True)
class FilterRows:
    """Filters of the rows, one element per row: [R]."""

    top_p: Tensor  # float32; 1: off
    top_k: Tensor  # int64; the vocabulary's size or more: off
    min_p: Tensor  # float32; 0: off
    nucleus: bool  # whether any row has a top_p
    alone: bool  # whether any row has a top_p and no other filter

    @classmethod
    def of_rows(cls, top_p: Tensor, top_k: Tensor, min_p: Tensor, vocab: int) -> FilterRows:
        nucleus = top_p < 1.0
        alone = nucleus & (top_k >= vocab) & (min_p == 0.0)
        return cls(top_p, top_k, min_p, bool(nucleus.any()), bool(alone.any()))

    def of(self, rows: Tensor | slice) -> FilterRows:
        return FilterRows(
            self.top_p[rows], self.top_k[rows], self.min_p[rows], self.nucleus, self.alone
        )


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
    weight = (head - peak).exp_().mul_(head >= floor)
    upto = weight.cumsum(dim=-1)
    mass = upto[:, -1:]  # of what the other filters leave: right where that ends within head
    if filters.alone:
        total = (scaled.logsumexp(dim=-1, keepdim=True) - peak).exp_()
        mass = torch.where(floor == float("-inf"), total, mass)
    inside = upto - weight < filters.top_p[:, None] * mass  # the first one always
    count = inside.sum(dim=-1, keepdim=True).clamp_(min=1)  # 0 only where logits are no numbers
    nucleus = head.gather(1, count - 1)
    off = filters.top_p[:, None] >= 1.0
    if head.shape[1] < scaled.shape[1]:
        off |= (floor > float("-inf")) & (floor <= head[:, -1:])  # mass was not right
    nucleus.masked_fill_(off, float("-inf"))
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
        # Where the last of the head may not be drawn at all, nothing beyond it may.
        last = values[:, -1:]
        short = ((cut <= last) & (last > float("-inf")))[:, 0].nonzero()[:, 0]
        if len(short):
            further = _draw(scaled[short], rows.of(short), filters.of(short), sizes[1:])
            tokens[short] = further
    return tokens
