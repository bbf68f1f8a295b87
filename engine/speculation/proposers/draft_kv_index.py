"""Which tokens of each sequence have KV in the pool of a draft model.

The target's scheduler reassigns pages without telling the draft model, so the index records who
wrote a page last, and for which block:

    text        t0 ... t31 | t32 ... t63 | t64 t65 t66
    page        p          | q           | r
    writer      3            9             9             row lease that wrote last
    key         K0           K1            -             block key, once the block is complete
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduling.sequence import Sequence as Running
from protocol.block_keys import BLOCK_TOKENS


@dataclass
class _DraftKvState:
    tokens: int = 0  # leading tokens of the text whose KV is in the pool
    blocks: int = 0  # leading blocks of these whose keys are recorded
    start: int = 0  # position of the first draft token
    drafts: Sequence[int] = field(default_factory=tuple)  # tokens whose KV was written as drafts


class DraftKvIndex:
    """Which tokens of each sequence have KV in the draft model's pool, by row lease and by page. It
    assumes that only its DraftModel writes to the pool."""

    def __init__(self, pages: int) -> None:
        self._writer = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._states: dict[int, _DraftKvState] = {}

    def tokens(self, sequence: Running) -> int:
        """Return the number of leading tokens of ``sequence`` whose KV is in the pool."""
        state = self._states.get(sequence.row_lease)
        if state is None:
            state = self._states[sequence.row_lease] = _DraftKvState()
        if state.drafts:
            self._keep_matching_drafts(sequence, state)
        if state.blocks < sequence.committed:
            self._check_keys(sequence, state)
        return state.tokens

    def _keep_matching_drafts(self, sequence: Running, state: _DraftKvState) -> None:
        """Count draft tokens that became text, on pages that were not reassigned meanwhile."""
        matching = _common(sequence.tokens, state.start, state.drafts)
        state.tokens, state.drafts = state.start + matching, ()
        for block in range(state.start // BLOCK_TOKENS, -(-state.tokens // BLOCK_TOKENS)):
            if self._writer[sequence.pages[block]] != sequence.row_lease:
                state.tokens = min(state.tokens, max(state.start, block * BLOCK_TOKENS))

    def _check_keys(self, sequence: Running, state: _DraftKvState) -> None:
        """Check blocks that became complete. Such a page may have been replaced by another one with
        the same key, whose KV another sequence computed."""
        for block in range(state.blocks, sequence.committed):
            page, key = sequence.pages[block], sequence.keys[block]
            end = (block + 1) * BLOCK_TOKENS
            if self._writer[page] == sequence.row_lease and end <= state.tokens:
                self._key[page] = key
            elif self._key[page] == key:
                state.tokens = max(state.tokens, end)
            else:
                if self._writer[page] != sequence.row_lease:
                    state.tokens = min(state.tokens, end - BLOCK_TOKENS)
                return
            state.blocks = block + 1

    def record_write(self, sequence: Running, tokens: int, drafts: int = 0) -> None:
        """Record that this step writes the KV of the first ``tokens`` tokens of the text, and of
        ``drafts`` draft tokens after it, which ``record_drafts`` reports later."""
        state = self._states[sequence.row_lease]
        for block in range(state.tokens // BLOCK_TOKENS, -(-(tokens + drafts) // BLOCK_TOKENS)):
            page = sequence.pages[block]
            self._writer[page], self._key[page] = sequence.row_lease, None
        state.tokens = tokens
        self._check_keys(sequence, state)

    def record_drafts(self, lease: int, tokens: Sequence[int]) -> None:
        """Record the draft tokens whose KV was written."""
        state = self._states[lease]
        state.start, state.drafts = state.tokens, tokens

    def forget(self, leases: Sequence[int]) -> None:
        """Remove ended row leases; KV of blocks with keys stays known."""
        for lease in leases:
            self._states.pop(lease, None)


def _common(text: Sequence[int], start: int, drafts: Sequence[int]) -> int:
    """Count the leading tokens of ``drafts`` that equal the text from ``start`` on."""
    for i, token in enumerate(drafts):
        if start + i >= len(text) or text[start + i] != token:
            return i
    return len(drafts)
