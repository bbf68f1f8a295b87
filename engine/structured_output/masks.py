"""Which tokens the grammars of a step's rows allow: packed on the host, applied on the device.

A bitmask is int32 [rows, words], 32 tokens a word, the lowest bit first. It is filled in a thread
that needs no interpreter lock, while the model computes the logits that it is for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance import numpy as fill
from numpy.typing import NDArray
from torch import Tensor

from engine.structured_output.matcher import Matcher

Bits = NDArray[np.int32]
"""[rows, words]"""

MAX_THREADS = 8


def words_for(vocab: int) -> int:
    """int32 words that hold a bit for each of ``vocab`` tokens."""
    return -(-vocab // 32)


def forbidden(bits: Bits, vocab: int, device: torch.device) -> Tensor:
    """Tokens that may not be drawn: [rows, vocab] bool on ``device``."""
    if device.type == "cpu":
        bytes_ = (~bits).view(np.uint8)
        unpacked = np.unpackbits(bytes_, axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    return unpacked_on_device(torch.from_numpy(~bits).to(device), vocab)


def unpacked_on_device(words: Tensor, vocab: int) -> Tensor:
    """The first ``vocab`` bits of each row of words [rows, words] int32: [rows, vocab] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()


class Barred(NamedTuple):
    """What may not be drawn in some rows of a step's logits, in order."""

    at: list[int]  # [S] rows of the logits
    tokens: Tensor  # [S, vocab] bool


def forbid_(logits: Tensor, barred: Barred) -> None:
    """Make it impossible, in place, to draw what is barred. logits: [R, vocab] fp32."""
    if len(barred.at) == len(logits):
        logits.masked_fill_(barred.tokens, float("-inf"))
    else:
        rows = torch.tensor(barred.at, device=logits.device)
        logits[rows] = logits[rows].masked_fill_(barred.tokens, float("-inf"))


class Filling(NamedTuple):
    """Masks that are being filled, for the rows ``at``."""

    at: list[int]
    bits: Future[Bits]

    def barred(self, vocab: int, device: torch.device) -> Barred:
        """Waits for them."""
        return Barred(self.at, forbidden(self.bits.result(), vocab, device))


class Masker:
    """Fills the masks of one engine; its matchers are all of one vocabulary."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(MAX_THREADS, max(1, (os.cpu_count() or 2) // 2))
        self._executor: LLExecutor | None = None  # it starts threads: only when it is needed
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, grammars: Sequence[Matcher | None]) -> Filling | None:
        """Begin to fill the masks of a step, given the grammar of each row of its logits; None
        where no row has one. No matcher may move until they are there."""
        return self.start_verification(grammars, [()] * len(grammars), range(len(grammars)))

    def start_verification(
        self,
        grammars: Sequence[Matcher | None],
        drafts: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> Filling | None:
        """As ``start``, where sequences have several rows: from row ``starts`` [B] of the logits on
        one after none, the first, ... all of its ``drafts`` [B], which fit its grammar."""
        bound = [
            (grammar, chain, start)
            for grammar, chain, start in zip(grammars, drafts, starts, strict=True)
            if grammar is not None
        ]
        if not bound:
            return None
        at = [row for _, chain, start in bound for row in range(start, start + 1 + len(chain))]
        matchers, chains = [grammar for grammar, _, _ in bound], [chain for _, chain, _ in bound]
        return Filling(at, self._beside.submit(self.fill, matchers, chains))

    def fill(
        self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Bits:
        """Masks [rows, words] of the next tokens, one row for each matcher and for each of its
        ``drafts``, which fit. A matcher with a problem allows only the end of the text."""
        chains = [list(chain) for chain in drafts or [()] * len(matchers)]
        firsts = list(accumulate((1 + len(chain) for chain in chains), initial=0))
        bits = np.zeros((firsts.pop(), words_for(matchers[0].vocab)), dtype=np.int32)
        self._fill(matchers, chains, firsts, bits)
        for matcher, chain, first in zip(matchers, chains, firsts, strict=True):
            matcher.go_on()
            if matcher.recover():
                self._walk(matcher, chain, bits[first : first + 1 + len(chain)])
        return bits

    def _fill(
        self, matchers: Sequence[Matcher], chains: list[list[int]], firsts: list[int], bits: Bits
    ) -> None:
        single: list[tuple[LLMatcher, int]] = []
        several: list[tuple[LLMatcher, int, list[int]]] = []
        for matcher, chain, first in zip(matchers, chains, firsts, strict=True):
            if chain:
                several.append((matcher.inner, first, chain))
            else:
                single.append((matcher.inner, first))
        if single:
            fill.fill_next_token_bitmask_par(self._executing(), single, bits)
        if several:
            fill.fill_next_token_bitmask_par_with_draft_tokens(self._executing(), several, bits)

    def _walk(self, matcher: Matcher, chain: list[int], bits: Bits) -> None:
        """Fill bits [1 + drafts, words] as if the drafts were drawn, one step after the other."""
        walker = matcher.copy()
        for row in range(1 + len(chain)):
            if row:
                walker.advance(chain[row - 1])
            self._fill([walker], [[]], [0], bits[row : row + 1])
            if walker.problem:
                matcher.expect(row, walker.problem)
                return

    def _executing(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        return self._executor
