"""Which tokens of whom have the draft model's KV. Torch-free.

The draft's pool has the target's page numbers, and nobody is asked before a page changes hands:
what is in it is known by who wrote it last, and what for.

    text        t0 ... t31 | t32 ... t63 | t64 t65 t66
    page        p          | q           | r
    writer      3            9             9             the stay that wrote last
    key         K0           K1            -             of the block that is whole, once it has one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sequence import Sequence as Running
from protocol.blocks import BLOCK_TOKENS


@dataclass
class _Stay:
    tokens: int = 0  # leading tokens of the text whose KV is there
    blocks: int = 0  # leading blocks of these that are known by their keys
    start: int = 0  # of what was guessed beyond the text
    guessed: Sequence[int] = field(default_factory=tuple)  # and is there, if it came true


class Known:
    """Counts KV by stay and by page. Wrong where somebody else writes to the pool."""

    def __init__(self, pages: int) -> None:
        self._writer = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._stays: dict[int, _Stay] = {}

    def tokens(self, sequence: Running) -> int:
        """Leading tokens of ``sequence`` whose KV is in the pool."""
        stay = self._stays.get(sequence.seating)
        if stay is None:
            stay = self._stays[sequence.seating] = _Stay()
        if stay.guessed:
            self._resolve(sequence, stay)
        if stay.blocks < sequence.committed:
            self._look(sequence, stay)
        return stay.tokens

    def _resolve(self, sequence: Running, stay: _Stay) -> None:
        """Keep what came true, on pages that have not been given back meanwhile."""
        came = _common(sequence.tokens, stay.start, stay.guessed)
        stay.tokens, stay.guessed = stay.start + came, ()
        for block in range(stay.start // BLOCK_TOKENS, -(-stay.tokens // BLOCK_TOKENS)):
            if self._writer[sequence.pages[block]] != sequence.seating:
                stay.tokens = min(stay.tokens, max(stay.start, block * BLOCK_TOKENS))

    def _look(self, sequence: Running, stay: _Stay) -> None:
        """At the blocks that have got a key since: a page may have been replaced by another one of
        the same key, and may hold what another stay computed."""
        for block in range(stay.blocks, sequence.committed):
            page, key = sequence.pages[block], sequence.keys[block]
            end = (block + 1) * BLOCK_TOKENS
            if self._writer[page] == sequence.seating and end <= stay.tokens:
                self._key[page] = key
            elif self._key[page] == key:
                stay.tokens = max(stay.tokens, end)
            else:
                if self._writer[page] != sequence.seating:
                    stay.tokens = min(stay.tokens, end - BLOCK_TOKENS)
                return
            stay.blocks = block + 1

    def write(self, sequence: Running, tokens: int, guesses: int = 0) -> None:
        """The KV of the first ``tokens`` tokens of its text is there with this step, and that of
        ``guesses`` tokens that may follow the text, to be told by ``guess``."""
        stay = self._stays[sequence.seating]
        for block in range(stay.tokens // BLOCK_TOKENS, -(-(tokens + guesses) // BLOCK_TOKENS)):
            page = sequence.pages[block]
            self._writer[page], self._key[page] = sequence.seating, None
        stay.tokens = tokens
        self._look(sequence, stay)

    def guess(self, seating: int, tokens: Sequence[int]) -> None:
        """The guesses that were written."""
        stay = self._stays[seating]
        stay.start, stay.guessed = stay.tokens, tokens

    def forget(self, seatings: Sequence[int]) -> None:
        """These stays are over; what is known by key stays known."""
        for seating in seatings:
            self._stays.pop(seating, None)


def _common(text: Sequence[int], start: int, guessed: Sequence[int]) -> int:
    """Leading tokens of ``guessed`` that the text has from ``start`` on."""
    for i, token in enumerate(guessed):
        if start + i >= len(text) or text[start + i] != token:
            return i
    return len(guessed)
