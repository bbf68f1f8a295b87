"""What a draft model draws: with the noise that the target will draw with, so that they meet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.sampling.filters import FilterRows, cut_off
from engine.sampling.noise import gumbel
from engine.sampling.selection import GREEDY_BELOW, filtered_by
from engine.sampling.table import KEY, MIN_P, TEMPERATURE, TOP_K, TOP_P, SamplingTable
from engine.sequence import Sequence as Running

HEAD = 32
"""Most likely tokens that noise is drawn for. Beyond them, draft and target seldom agree."""


class Draws:
    """The draws of some sequences, in their order."""

    def __init__(self, sequences: Sequence[Running], rows: Tensor, table: SamplingTable) -> None:
        """rows: [b] int64, rows of ``table``."""
        wanted = [s.request.sampling for s in sequences]
        noisy = [s for s in wanted if s.temperature >= GREEDY_BELOW]
        self._noisy = bool(noisy)
        self._filters: FilterRows | None = None
        if self._noisy:
            temperature = table.floats[rows, TEMPERATURE]
            greedy = temperature < GREEDY_BELOW
            self._temperature = temperature.masked_fill_(greedy, 1.0)[:, None]
            self._scale = (~greedy).double()[:, None]  # of the noise
            self._keys = table.ints[rows, KEY]
            if any(filtered_by(s) for s in noisy):
                self._filters = FilterRows(
                    top_p=table.floats[rows, TOP_P].masked_fill_(greedy, 1.0),
                    top_k=table.ints[rows, TOP_K].masked_fill_(greedy, table.vocab),
                    min_p=table.floats[rows, MIN_P].masked_fill_(greedy, 0.0),
                    nucleus=any(s.top_p < 1.0 for s in noisy),
                    alone=False,  # the mass of the head is taken for that of all tokens
                )

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] int64 for the first n sequences, from logits [n, vocab] fp32.

        positions: [n] int64, the index of the token to draw. Filters are the request's, on the
        draft's own logits; penalties and biases are left out: a draft without them is met less
        often, and as right.
        """
        if not self._noisy:
            return logits.max(dim=-1).indices  # a third of argmax's time on a CPU
        scores, ids = self._scores(logits, positions, HEAD)
        best = scores.max(dim=-1, keepdim=True).indices
        return ids.gather(1, best)[:, 0]

    def ranked(
        self, logits: Tensor, positions: Tensor, most: int, tokens: Tensor | None = None
    ) -> Tensor:
        """The ``most`` most promising tokens of each instead of one, best first: [n, most].
        ``tokens``: which token a column of the logits stands for; None: its own index."""
        if not self._noisy:
            first = logits.max(-1).indices[:, None] if most == 1 else logits.topk(most).indices
            return first if tokens is None else tokens[first]
        scores, ids = self._scores(logits, positions, max(HEAD, most), tokens)
        return ids.gather(1, scores.topk(most, dim=-1).indices)

    def _scores(
        self, logits: Tensor, positions: Tensor, head: int, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of the ``head`` most likely tokens, and which these are: [n, head] each."""
        count, vocab = logits.shape
        values, ids = logits.topk(min(head, vocab), dim=-1)
        ids = ids if tokens is None else tokens[ids]
        values.div_(self._temperature[:count])
        scores = gumbel(self._keys[:count], positions, ids).mul_(self._scale[:count]).add_(values)
        if self._filters is not None:
            cut = cut_off(values, values, self._filters.of(slice(count)))
            scores.masked_fill_(values < cut, float("-inf"))
        return scores, ids
