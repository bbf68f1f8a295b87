"""Prompt lookup as a proposer: no model, no pass, some microseconds a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.proposer import VerifiedStep

# MERGED engine.speculation.lookup
# A text that looks up its own end: what followed the last time that these tokens stood here.
#
#     ... x = parse ( text ) ...... y = parse ( te
#                                       ^^^^^^^^^^^ the end, 4 tokens of it; before, "xt )" followed
#
# Prompt lookup (Saxena, Prompt Lookup Decoding, 2023), with an index of the n-grams so far
# instead of
# a search, and with a match that is followed as long as it is right. Torch-free.

NGRAM_SIZES = (4, 2, 1)
"""Lengths n of the n-grams that are looked up, the longest first. Measured on the demo model's
answers to held-out code, at 8 tokens a step: from 4 down to 2 without 1, it proposes half as often
where text is drawn at random, and 3 adds nothing between 4 and 2."""

MAX_MATCH_TOKENS = 16
"""Tokens that a new match is compared backwards for at most."""

SMALL_UPDATE = 8
"""Tokens of a step or so: taken into the index one by one."""


class NgramIndex:
    """The index over one text. It belongs to whoever appends to ``tokens``; nothing is removed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        # n -> hash of an n-gram -> its latest end. Not the n-gram: tuples would have the garbage
        # collector run, and two that share a hash cost a wrong guess.
        self._ends: dict[int, dict[int, int]] = {n: {} for n in NGRAM_SIZES}
        self._indexed = 1  # n-grams that end before this place are in the index
        self._source = -1  # where the tokens that should come next stand; -1: nowhere
        self._length = 0  # of the text when ``_source`` was found
        self._matched = 0  # tokens before ``_source`` that equal the end of the text

    def index(self, most: int) -> int:
        """Take up to ``most`` more tokens into the index; returns how many. Only an n-gram that
        something follows is of use, so the last one of the text is not."""
        first, end = self._indexed, min(len(self._tokens), self._indexed + most)
        take = self._take_few if end - first <= SMALL_UPDATE else self._take_many
        for n, ends in self._ends.items():
            take(n, ends, max(first, n), end)
        self._indexed = max(first, end)
        return self._indexed - first

    def _take_few(self, n: int, ends: dict[int, int], start: int, end: int) -> None:
        tokens = self._tokens
        for place in range(start, end):
            ends[hash(tuple(tokens[place - n : place]))] = place

    def _take_many(self, n: int, ends: dict[int, int], start: int, end: int) -> None:
        """The same, at a third of the time for each and a microsecond more for all."""
        columns = [self._tokens[start - n + i : end - n + i] for i in range(n)]
        grams = map(hash, zip(*columns, strict=True))
        ends.update(zip(grams, range(start, end), strict=True))

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens that should come next, as far as the index goes.

        At most 2 m - 1 after a match of m tokens: of what follows a chance match of one or two,
        little comes true beyond. A match that reaches the end of the text goes on in itself.
        """
        length = len(self._tokens)
        if not self._follow(length):
            self._find(length)
        if self._source < 0:
            return []
        count = min(most, 2 * self._matched - 1)
        found = list(self._tokens[self._source : self._source + count])
        while 0 < len(found) < count:
            found += found[: count - len(found)]  # text of period length - source
        return found

    def _follow(self, length: int) -> bool:
        """Whether all that has come since is what stands at the match; then it goes on."""
        if self._source < 0:
            return False
        came = length - self._length
        source = self._source + came
        if self._tokens[self._length :] != self._tokens[self._source : source]:
            return False
        self._source, self._length = source, length
        self._matched += came
        return True

    def _find(self, length: int) -> None:
        """The latest place where the end of the text stood before, by the longest n-gram."""
        self._source, self._length = -1, length
        for n, ends in self._ends.items():
            place = ends.get(hash(tuple(self._tokens[length - n :])), -1)
            if place >= 0:
                self._source = place
                self._matched = self._common(place, length, n)
                return

    def _common(self, place: int, length: int, known: int) -> int:
        """Equal tokens before ``place`` and before the end of the text, ``MAX_MATCH_TOKENS`` at most."""
        tokens = self._tokens
        most = min(MAX_MATCH_TOKENS, place)
        while known < most and tokens[place - known - 1] == tokens[length - known - 1]:
            known += 1
        return known


INDEX_TOKENS_PER_STEP = 1024
"""Tokens of text that are indexed in a step at most: about 0.3 ms. A long prompt takes some steps,
and what is indexed of it is of use meanwhile."""


class NgramProposer:
    """Proposes chains of what followed the same tokens earlier in prompt and output."""

    name = "ngram"
    wants_hidden = False
    caught_up_s = 0.0

    def __init__(self, most: int) -> None:
        self.most = most
        self._lookups: dict[int, NgramIndex] = {}  # by seating

    def passes(self, nodes: int) -> int:
        return 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        budget = INDEX_TOKENS_PER_STEP
        counts, tokens = [0] * len(sequences), []
        for i, (sequence, count) in enumerate(zip(sequences, wanted, strict=True)):
            if count <= 0:
                continue
            lookup = self._lookups.get(sequence.row_lease)
            if lookup is None:
                lookup = self._lookups[sequence.row_lease] = NgramIndex(sequence.tokens)
            if budget > 0:
                budget -= lookup.index(budget)
            found = lookup.propose(min(count, self.most))
            counts[i] = len(found)
            tokens += found
        return Drafts(counts, torch.tensor(tokens, dtype=torch.int64, device=rows.device))

    def saw(self, advance: VerifiedStep) -> None:
        pass

    def forget(self, seatings: Sequence[int]) -> None:
        for seating in seatings:
            self._lookups.pop(seating, None)
