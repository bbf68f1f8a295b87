"""Token masks of the grammars in a step: filled on the host, applied on the device.

A bitmask is int32 [rows, words] with 32 tokens per word, the lowest bit first. A thread that needs
no interpreter lock fills it while the model computes the logits that it is for.
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
from llguidance import numpy as llguidance_masks
from numpy.typing import NDArray
from torch import Tensor

from engine.structured_output.matcher import GrammarMatcher
from engine.uploads import upload

Bitmask = NDArray[np.int32]
"""[rows, words]"""

MAX_THREADS = 8


def bitmask_words(vocab: int) -> int:
    """Return the number of int32 words that hold one bit for each of ``vocab`` tokens."""
    return -(-vocab // 32)


def forbidden_mask(bits: Bitmask, vocab: int, device: torch.device) -> Tensor:
    """Return the tokens that must not be drawn: [rows, vocab] bool on ``device``."""
    if device.type == "cpu":
        bytes_ = (~bits).view(np.uint8)
        unpacked = np.unpackbits(bytes_, axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    return unpack_bits(torch.from_numpy(bits).to(device, non_blocking=True).bitwise_not_(), vocab)


def unpack_bits(words: Tensor, vocab: int) -> Tensor:
    """Return the first ``vocab`` bits of each row of words [rows, words] int32: [rows, vocab]
    bool, on the device of ``words``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = (words.view(torch.uint8)[:, :, None] >> shifts).bitwise_and_(1)
    return bits.view(torch.bool).flatten(1)[:, :vocab]


class ForbiddenTokens(NamedTuple):
    """Tokens that must not be drawn in some rows of a step's logits, in order."""

    at: list[int]  # [S] rows of the logits
    tokens: Tensor  # [S, vocab] bool


def mask_forbidden_(logits: Tensor, forbidden: ForbiddenTokens) -> None:
    """Set the logits [R, vocab] fp32 of forbidden tokens to -inf, in place."""
    if len(forbidden.at) == len(logits):
        logits.masked_fill_(forbidden.tokens, float("-inf"))
    else:
        rows = upload(forbidden.at, logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden.tokens, float("-inf"))


class PendingMasks(NamedTuple):
    """Masks that a thread is filling, for the rows ``at`` of the logits."""

    at: list[int]
    bits: Future[Bitmask]

    def wait(self, vocab: int, device: torch.device) -> ForbiddenTokens:
        """Wait for the masks and return the tokens that they forbid."""
        return ForbiddenTokens(self.at, forbidden_mask(self.bits.result(), vocab, device))

    def copy_to(self, bits: Tensor, rows: Tensor) -> None:
        """Wait for the masks, and copy them to where a kernel reads them: the packed masks into the
        first rows of ``bits`` [masks, words] int32, and into ``rows`` [R] int32 the mask of each
        row of the logits, -1 for those without one."""
        own = torch.from_numpy(self.bits.result())
        index = np.full(len(rows), -1, dtype=np.int64)
        index[self.at] = np.arange(len(self.at))
        bits[: len(own), : own.shape[1]].copy_(own[:, : bits.shape[1]], non_blocking=True)
        rows.copy_(upload(index, rows.device))


class MaskFiller:
    """Fills the masks of one engine; its matchers all have one vocabulary."""

    def __init__(self, threads: int | None = None, *, pinned: bool = False) -> None:
        """``pinned``: masks are filled in memory that a GPU copies from in stream order, without
        the host waiting for it."""
        self._pinned = pinned
        self._threads = threads or min(MAX_THREADS, max(1, (os.cpu_count() or 2) // 2))
        self._executor: LLExecutor | None = None  # starts threads, so it is created on first use
        self._background = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(
        self,
        grammars: Sequence[GrammarMatcher | None],
        drafts: Sequence[Sequence[int]] | None = None,
        starts: Sequence[int] | None = None,
    ) -> PendingMasks | None:
        """Begin to fill the masks of a step, given the grammar of each sequence that draws; return
        None where no sequence has one. No matcher may advance until the masks are complete.

        Without drafts, row i of the logits is that of sequence i. With them, row ``starts[i]``
        follows the text of sequence i, and the next rows follow one, two, ... all of its
        ``drafts[i]``, which match its grammar.
        """
        drafts = [()] * len(grammars) if drafts is None else drafts
        starts = range(len(grammars)) if starts is None else starts
        bound = [
            (grammar, chain, start)
            for grammar, chain, start in zip(grammars, drafts, starts, strict=True)
            if grammar is not None
        ]
        if not bound:
            return None
        at = [row for _, chain, start in bound for row in range(start, start + 1 + len(chain))]
        matchers, chains = [grammar for grammar, _, _ in bound], [chain for _, chain, _ in bound]
        return PendingMasks(at, self._background.submit(self.fill, matchers, chains))

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Bitmask:
        """Return masks [rows, words] of the next tokens: one row for each matcher and one for each
        of its ``drafts``, which match. A matcher with a problem allows only the end of the text."""
        chains = [list(chain) for chain in drafts or [()] * len(matchers)]
        firsts = list(accumulate((1 + len(chain) for chain in chains), initial=0))
        shape = (firsts.pop(), bitmask_words(matchers[0].vocab))
        # The array keeps torch's pinned memory, which torch reuses only after the copies from it.
        bits: Bitmask = torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned).numpy()
        self._fill(matchers, chains, firsts, bits)
        for matcher, chain, first in zip(matchers, chains, firsts, strict=True):
            matcher.clear_expected_problem()
            if matcher.recover_from_drafts():
                self._fill_stepwise(matcher, chain, bits[first : first + 1 + len(chain)])
        return bits

    def _fill(
        self,
        matchers: Sequence[GrammarMatcher],
        chains: list[list[int]],
        firsts: list[int],
        bits: Bitmask,
    ) -> None:
        single: list[tuple[LLMatcher, int]] = []
        several: list[tuple[LLMatcher, int, list[int]]] = []
        for matcher, chain, first in zip(matchers, chains, firsts, strict=True):
            if chain:
                several.append((matcher.inner, first, chain))
            else:
                single.append((matcher.inner, first))
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        if single:
            llguidance_masks.fill_next_token_bitmask_par(self._executor, single, bits)
        if several:
            llguidance_masks.fill_next_token_bitmask_par_with_draft_tokens(
                self._executor, several, bits
            )

    def _fill_stepwise(self, matcher: GrammarMatcher, chain: list[int], bits: Bitmask) -> None:
        """Fill bits [1 + drafts, words] as if the drafts were drawn, one step after the other."""
        walker = matcher.copy()
        for row in range(1 + len(chain)):
            if row:
                walker.advance(chain[row - 1])
            self._fill([walker], [[]], [0], bits[row : row + 1])
            if walker.problem:
                matcher.expect_problem(row, walker.problem)
                return
