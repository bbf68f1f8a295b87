"""Prompt lookup (Saxena, Prompt Lookup Decoding, 2023): proposes what followed the same tokens.

    ... x = parse ( text ) ...... y = parse ( te
                                      ^^^^^^^^^^^ the last 4 tokens; at the match, "xt )" followed

It needs no model and no pass, and takes some microseconds a sequence. Instead of searching the
text, it keeps an index of the n-grams so far, and follows a match as long as it predicts correctly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.proposer import Proposer
from engine.uploads import upload

NGRAM_SIZES = (4, 2, 1)
"""Lengths n of the indexed n-grams, longest first; ``_add_few`` is written for these. Measured on
the demo model's answers to held-out code with 8 tokens a step: sizes 4 to 2 without 1 propose half
as often where text is sampled, and adding 3 gains nothing."""

MAX_MATCH_TOKENS = 16  # maximum number of tokens compared backwards to measure a new match
SMALL_UPDATE = 24  # up to this many tokens (about one step) are indexed one by one

INDEX_TOKENS_PER_STEP = 1024
"""Maximum number of tokens indexed in a step, about 0.3 ms. A long prompt takes several steps; what
is already indexed is used meanwhile."""


class NgramProposer(Proposer):
    """Proposes chains of tokens that followed the same n-gram earlier in prompt and output."""

    name = "ngram"

    def __init__(self, most: int) -> None:
        self.most = most
        self._indexes: dict[int, NgramIndex] = {}  # by row lease

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return chains for ``sequences`` [B]; see Proposer. rows: [B] int64."""
        budget = INDEX_TOKENS_PER_STEP
        counts, tokens = [0] * len(sequences), []
        for i, (sequence, count) in enumerate(zip(sequences, wanted, strict=True)):
            if count <= 0:
                continue
            index = self._indexes.get(sequence.row_lease)
            if index is None:
                index = self._indexes[sequence.row_lease] = NgramIndex(sequence.tokens)
            if budget > 0:
                budget -= index.extend(budget)
            found = index.propose(min(count, self.most))
            counts[i] = len(found)
            tokens += found
        return Drafts(counts, upload(tokens, rows.device))

    def forget(self, leases: Sequence[int]) -> None:
        for lease in leases:
            self._indexes.pop(lease, None)


class NgramIndex:
    """The n-grams of one text. The owner of ``tokens`` appends to it and removes nothing."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        # n -> hash of an n-gram -> its latest end. Hashes instead of n-grams: tuples would trigger
        # the garbage collector, and a hash collision only costs a wrong draft.
        self._ends: dict[int, dict[int, int]] = {n: {} for n in NGRAM_SIZES}
        self._indexed = 1  # n-grams that end before this place are in the index
        self._source = -1  # place of the predicted continuation; -1: none
        self._length = 0  # of the text when ``_source`` was found
        self._matched = 0  # tokens before ``_source`` that equal the end of the text

    def extend(self, most: int) -> int:
        """Index up to ``most`` more tokens and return their number. The last n-gram of the text is
        left out, because nothing follows it yet."""
        first, end = self._indexed, min(len(self._tokens), self._indexed + most)
        if first >= NGRAM_SIZES[0] and end - first <= SMALL_UPDATE:
            self._add_few(first, end)
        else:
            for n, ends in self._ends.items():
                self._add_many(n, ends, max(first, n), max(end, n))
        self._indexed = max(first, end)
        return self._indexed - first

    def _add_few(self, first: int, end: int) -> None:
        """Add the n-grams of all sizes that end before the places ``first`` .. ``end``."""
        four, two, one = self._ends.values()
        a, b, c = self._tokens[first - 4 : first - 1]
        for place, d in enumerate(self._tokens[first - 1 : end - 1], first):
            four[hash((a, b, c, d))] = two[hash((c, d))] = one[hash((d,))] = place
            a, b, c = b, c, d

    def _add_many(self, n: int, ends: dict[int, int], start: int, end: int) -> None:
        """Add n-grams in bulk, which is quicker for long texts."""
        columns = [self._tokens[start - n + i : end - n + i] for i in range(n)]
        grams = map(hash, zip(*columns, strict=True))
        ends.update(zip(grams, range(start, end), strict=True))

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` predicted next tokens. A match of m tokens yields at most 2 m - 1,
        because continuations of short chance matches are rarely correct beyond that. A match that
        reaches the end of the text repeats itself."""
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
        """Move the match on if it predicted all tokens appended since; return whether it did."""
        if self._source < 0:
            return False
        added = length - self._length
        source = self._source + added
        if self._tokens[self._length :] != self._tokens[self._source : source]:
            return False
        self._source, self._length = source, length
        self._matched += added
        return True

    def _find(self, length: int) -> None:
        """Find the latest earlier occurrence of the end of the text, by the longest n-gram."""
        self._source, self._length = -1, length
        for n, ends in self._ends.items():
            place = ends.get(hash(tuple(self._tokens[length - n :])), -1)
            if place >= 0:
                self._source = place
                self._matched = self._common(place, length, n)
                return

    def _common(self, place: int, length: int, known: int) -> int:
        """Count equal tokens before ``place`` and before the end, up to MAX_MATCH_TOKENS."""
        tokens = self._tokens
        most = min(MAX_MATCH_TOKENS, place)
        while known < most and tokens[place - known - 1] == tokens[length - known - 1]:
            known += 1
        return known
