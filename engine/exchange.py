"""Cached blocks on their way to another worker, or from one. Nothing is computed here.

    export   pin what is cached --> held --finish--> gone
    import   pin what is cached, take pages for the rest --> importing --adopt--> gone

An import takes pages that nobody needs, and gives them back as soon as somebody does. Adopted or
given back, the blocks that have come whole stay in the prefix cache, where the next sequence with
this prefix finds them; those that have not are free.
"""

from __future__ import annotations

from engine.queues import Queues
from engine.sequence import Phase, Sequence


class Exchange(Queues):
    """The moves of sequences that stand for cached blocks alone."""

    def export(self, sequence: Sequence) -> None:
        """Hold the leading full blocks of the context that are cached, until ``finish``."""
        self._pin_cached(sequence)
        sequence.phase = Phase.HELD
        self._started.append(sequence)

    def import_(self, sequence: Sequence) -> tuple[int, int]:
        """Hold what is cached, and pages for what is missing of the full blocks, as many as there
        are. Returns the leading blocks that are cached, and those that have a page."""
        self._pin_cached(sequence)
        # Who runs may need a page each before long.
        spare = self.manager.available - len(self.decoding) - len(self.joining)
        missing = len(sequence.keys) - sequence.committed
        sequence.pages += self.manager.allocate(max(0, min(missing, spare)))
        sequence.phase = Phase.IMPORTING
        self.importing.append(sequence)
        return sequence.committed, len(sequence.pages)

    def adopt(self, sequence: Sequence) -> None:
        """Forget an import; what has come whole can be found from now on."""
        sequence.commit(self.manager)
        self._adopted.append((sequence.handle, sequence.computed))
        self.finish(sequence)

    def take_adopted(self) -> list[tuple[int, int]]:
        """Handles of the imports that have ended since the last call, each with the tokens that
        are cached now."""
        taken, self._adopted = self._adopted, []
        return taken

    def _reclaim(self) -> bool:
        """Have the pages of the latest import back; whether there was one."""
        if self.importing:
            self.adopt(self.importing[-1])
            return True
        return False

    def _pin_cached(self, sequence: Sequence) -> None:
        self.sequences[sequence.handle] = sequence
        keys = sequence.extend_keys()
        sequence.take_pages(self.manager, self.manager.cached(keys, len(keys)), 0)
