"""The proposers that the benchmark of speculation compares, and two that exist for it alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.speculation_runs import Make
from engine.sequence import Sequence as Running
from engine.speculation.drafts import Drafts
from engine.speculation.loading import load_proposer
from engine.speculation.ngram import NGram
from engine.speculation.proposer import Advance
from engine.speculation.source import Method, Source

Text = Callable[[str], Sequence[int]]
"""All tokens of the request with this id, prompt and output."""


class _Free:
    """Costs next to nothing, and keeps nothing."""

    wants_hidden = False
    caught_up_s = 0.0

    def __init__(self, most: int) -> None:
        self.most = most

    def passes(self, nodes: int) -> int:
        return 0

    def saw(self, advance: Advance) -> None:
        pass

    def forget(self, seatings: Sequence[int]) -> None:
        pass


class Guess(_Free):
    """Tokens at random: a draft that is of no use."""

    name = "random"

    def __init__(self, most: int, vocab: int) -> None:
        super().__init__(most)
        self._vocab = vocab
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        size = (sum(wanted),)
        tokens = torch.randint(self._vocab, size, generator=self._generator).to(rows.device)
        return Drafts(wanted, tokens)


class Synthetic(_Free):
    """Knows the text, and says each of its tokens with the probability ``acceptance``; so that
    drafts of a model that nobody has trained a draft for are accepted as if somebody had."""

    name = "synthetic"

    def __init__(self, most: int, text: Text, acceptance: float) -> None:
        super().__init__(most)
        self._text, self._acceptance = text, acceptance
        self._draw = random.Random(0)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        tokens: list[int] = []
        for sequence, count in zip(sequences, wanted, strict=True):
            at = len(sequence.tokens)
            known = self._text(sequence.request.id)[at : at + count]
            assert len(known) == count, "the text is not known so far"
            tokens += [t if self._draw.random() < self._acceptance else t ^ 1 for t in known]
        return Drafts(wanted, torch.tensor(tokens, dtype=torch.int64, device=rows.device))


def ngram() -> Make:
    return lambda engine, most: NGram(most)


def guess() -> Make:
    return lambda engine, most: Guess(most, engine.model.config.vocab_size)


def of_folder(method: Method, folder: Path, target: Path) -> Make:
    """A draft model, or heads, of the model in ``target``."""
    return lambda engine, most: load_proposer(Source(method, folder), engine, most, target)
