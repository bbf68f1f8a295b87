"""Draws draft tokens with the noise that the target will draw with, so that both agree.

Draft models, Medusa and EAGLE use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.sampling.filters import FilterRows, filter_threshold, gumbel_noise
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence as Running
from protocol.sampling_params import GREEDY_BELOW

TOP_TOKENS = 32
"""Number of most likely tokens that noise is drawn for; draft and target seldom agree beyond."""


class DraftSampler:
    """Draws draft tokens for a fixed list of sequences."""

    def __init__(self, sequences: Sequence[Running], rows: Tensor, table: SamplingTable) -> None:
        """rows: [b] int64, rows of ``table``."""
        wanted = [s.request.sampling for s in sequences]
        noisy = [s for s in wanted if not s.is_greedy]
        self._noisy = bool(noisy)
        self._filters: FilterRows | None = None
        if self._noisy:
            temperature = table.column("temperature", rows)
            greedy = temperature < GREEDY_BELOW
            self._temperature = temperature.masked_fill_(greedy, 1.0)[:, None]
            self._scale = (~greedy).double()[:, None]  # of the noise
            self._keys = table.column("noise_key", rows)
            if any(s.has_filters for s in noisy):
                self._filters = FilterRows(
                    top_p=table.column("top_p", rows).masked_fill_(greedy, 1.0),
                    top_k=table.column("top_k", rows).masked_fill_(greedy, table.vocab),
                    min_p=table.column("min_p", rows).masked_fill_(greedy, 0.0),
                    any_top_p=any(s.top_p < 1.0 for s in noisy),
                    any_only_top_p=False,  # the top tokens' mass is taken for that of all tokens
                )

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw tokens [n] int64 for the first n sequences from logits [n, vocab] fp32. positions:
        [n] int64, index of the token to draw. The request's filters are applied to the draft's
        logits. Penalties and biases are left out, which lowers acceptance only."""
        if not self._noisy:
            return logits.max(dim=-1).indices  # a third of argmax's time on a CPU
        scores, ids = self._top_scores(logits, positions, TOP_TOKENS)
        best = scores.max(dim=-1, keepdim=True).indices
        return ids.gather(1, best)[:, 0]

    def ranked(
        self, logits: Tensor, positions: Tensor, most: int, tokens: Tensor | None = None
    ) -> Tensor:
        """Return the ``most`` best tokens of each sequence, best first: [n, most] int64. logits:
        [n, columns] fp32; positions: [n] int64; tokens: [columns] int64, the token ids of the
        columns, or None if they are token ids."""
        if not self._noisy:
            first = logits.max(-1).indices[:, None] if most == 1 else logits.topk(most).indices
            return first if tokens is None else tokens[first]
        scores, ids = self._top_scores(logits, positions, max(TOP_TOKENS, most), tokens)
        return ids.gather(1, scores.topk(most, dim=-1).indices)

    def _top_scores(
        self, logits: Tensor, positions: Tensor, top: int, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the noisy scores and the ids of the ``top`` most likely tokens: [n, top] each."""
        count, vocab = logits.shape
        values, ids = logits.topk(min(top, vocab), dim=-1)
        ids = ids if tokens is None else tokens[ids]
        values.div_(self._temperature[:count])
        scores = (
            gumbel_noise(self._keys[:count], positions, ids).mul_(self._scale[:count]).add_(values)
        )
        if self._filters is not None:
            cut = filter_threshold(values, values, self._filters.select(slice(count)))
            scores.masked_fill_(values < cut, float("-inf"))
        return scores, ids
