"""Blocks that are being computed: who needs one of them waits for it. Torch-free."""

from __future__ import annotations

from engine.sequence import Sequence


class InFlight:
    """Keys that running prefills will commit. Block keys chain, so one look-up tells whether a
    prefix is on its way. A prefill that ends takes its keys along however it ends: nobody waits for
    what never comes."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """``sequence`` starts to compute its blocks; those it has in the cache are none of them."""
        for key in sequence.keys[sequence.committed :]:
            self._owner.setdefault(key, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It no longer computes: finished, preempted or dropped. Harmless for any other."""
        for key in sequence.keys:
            if self._owner.get(key) is sequence:
                del self._owner[key]

    def computes(self, key: bytes, order: tuple[int, int]) -> bool:
        """Whether a prefill at least as urgent as ``order`` computes the block. A less urgent one
        may itself have to wait, so that nobody waits for it."""
        owner = self._owner.get(key)
        return owner is not None and owner.order[0] <= order[0]
