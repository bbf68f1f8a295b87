"""Proposers without a model: one proposes random tokens, one knows the expected text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import ROOT, Drafts
from engine.speculation.proposers.proposer import Proposer

Text = Callable[[Running], Sequence[int]]
"""Function from a sequence to its complete expected text, prompt and output."""


class _Trees(Proposer):
    """Proposes a tree per sequence: ``width`` children, one of which has ``width`` children again.

    Width 1 makes chains."""

    def __init__(self, name: str, vocab: int, most: int, width: int, seed: int) -> None:
        assert width < vocab
        self.name = name
        self.most = most
        self._vocab, self._width, self._seed = vocab, width, seed

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        counts, tokens, parents = [], [], []
        for sequence, count in zip(sequences, wanted, strict=True):
            found = self._tree(sequence, min(count, self.most))
            counts.append(len(found))
            tokens += [token for token, _ in found]
            parents += [parent for _, parent in found]
        packed = torch.tensor(tokens, dtype=torch.int64, device=rows.device)
        return Drafts(counts, packed, None if self._width == 1 else parents)

    def _tree(self, sequence: Running, count: int) -> list[tuple[int, int]]:
        """Return (token, parent) of each node; equal positions of a request get equal trees."""
        place, parent = len(sequence.tokens), ROOT
        nodes: list[tuple[int, int]] = []
        while len(nodes) < count:
            draw = random.Random(f"{self._seed}/{sequence.request.id}/{place}")
            width = min(self._width, count - len(nodes))
            level = draw.sample(range(self._vocab), width)
            follow = draw.randrange(width)
            token = self._known(sequence, place, draw)
            if token is not None:
                if token in level:
                    level[level.index(token)] = level[follow]
                level[follow] = token
            parent, start = len(nodes) + follow, parent
            nodes += [(token, start) for token in level]
            place += 1
        return nodes

    def _known(self, sequence: Running, place: int, draw: random.Random) -> int | None:
        return None


class RandomDraft(_Trees):
    """Proposes random tokens."""

    def __init__(self, vocab: int, most: int, width: int = 1, seed: int = 0) -> None:
        super().__init__("random", vocab, most, width, seed)


class Oracle(_Trees):
    """Proposes the expected next token with probability ``right`` at each depth.

    It is one of ``width`` tokens; the others are random, as are all beyond the end of the text."""

    def __init__(
        self, text: Text, vocab: int, most: int, right: float, width: int = 1, seed: int = 0
    ) -> None:
        super().__init__("oracle", vocab, most, width, seed)
        self._text, self._right = text, right

    def _known(self, sequence: Running, place: int, draw: random.Random) -> int | None:
        text = self._text(sequence)
        return text[place] if draw.random() < self._right and place < len(text) else None
