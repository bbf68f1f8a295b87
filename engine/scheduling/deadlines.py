"""Finds the sequences whose requests have had no token for longer than their clients wait.

The engine adds every new sequence. ``EngineServer`` asks before each step, so that a prompt that
waited for too long is not computed, and one that is being computed or decoded goes no further. The
front has timers of its own (decode_worker/expiry.py); this holds also where the front is late, or
its own peer is gone.
"""

from __future__ import annotations

import heapq
import math

from engine.scheduling.sequence import Phase, Sequence

_COMPUTING = {Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.WAITING_ROW}
_AGAIN_S = 1.0
_SPARE = 64


class DeadlineQueue:
    """Sequences by the time at which they are looked at, in seconds of the engine's clock. One that
    has drawn tokens since the last look may go on, for as long as it may take to its next token.
    Most requests end long before: those are forgotten when they are more than half of the
    entries."""

    def __init__(self, sequences: dict[int, Sequence]) -> None:
        """``sequences``: those of the scheduler, by handle."""
        self._sequences = sequences
        self._heap: list[tuple[float, int, int]] = []  # (time, handle, tokens at the last look)

    def add(self, sequence: Sequence) -> None:
        """Watch a new sequence, if its first token has a deadline."""
        if sequence.token_due_s < math.inf:
            entry = (sequence.token_due_s, sequence.handle, len(sequence.tokens))
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._sequences) + _SPARE:
                # The new one is not among ``_sequences`` yet.
                known = self._sequences.keys() | {sequence.handle}
                self._heap = [entry for entry in self._heap if entry[1] in known]
                heapq.heapify(self._heap)

    def take_expired(self, now_s: float) -> list[int]:
        """Return the handles of the sequences that have expired and would be computed; the caller
        drops them. Others wait for KV or are held for a peer: that ends with their calls."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            _, handle, seen = heapq.heappop(self._heap)
            sequence = self._sequences.get(handle)
            if sequence is None:
                continue
            tokens = len(sequence.tokens)
            if tokens > seen:
                again_s = now_s + sequence.request.token_limit_s
            elif sequence.phase in _COMPUTING:
                expired.append(handle)
                continue
            else:
                again_s = now_s + _AGAIN_S
            if again_s < math.inf:
                heapq.heappush(self._heap, (again_s, handle, tokens))
        return expired
