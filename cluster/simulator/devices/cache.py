"""What a worker has cached: whole blocks, the least recently used go first; and who holds what.

Blocks are those of the trace (512 tokens in Mooncake's): coarser than the product's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.placement.prefix_index import PrefixIndex

BLOCK = 512
"""Tokens."""


class Cache:
    """A prefix is used from its end to its beginning, so that it is never without its beginning."""

    def __init__(self, name: str, index: PrefixIndex, tokens: int) -> None:
        self._name = name
        self._index = index
        self._tokens = tokens
        self._loose = 0  # tokens of live sequences that are in no block
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def held(self, keys: Sequence[bytes]) -> int:
        """Tokens of the prefix that are here."""
        count = 0
        for key in keys:
            if key not in self._blocks:
                break
            count += 1
        return count * BLOCK

    def use(self, keys: Sequence[bytes]) -> None:
        """All of these are here now."""
        blocks = self._blocks
        new = [key for key in keys if key not in blocks]
        for key in new:
            blocks[key] = None
        for key in reversed(keys):
            blocks.move_to_end(key)
        if new:
            self._index.store(self._name, new)
            self._shrink()

    def take(self, tokens: int) -> None:
        """So many more (or fewer) tokens are in use that no block holds."""
        self._loose += tokens
        if tokens > 0 and self._blocks:
            self._shrink()

    def _shrink(self) -> None:
        limit = max(0, self._tokens - self._loose) // BLOCK
        gone = []
        while len(self._blocks) > limit:
            gone.append(self._blocks.popitem(last=False)[0])
        if gone:
            self._index.evict(self._name, gone)

    def clear(self) -> None:
        self._blocks.clear()
        self._index.remove(self._name)
