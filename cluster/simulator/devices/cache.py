"""The prefix cache of one simulated worker: whole blocks, of which the least recently used go.

Blocks are those of the trace (512 tokens in Mooncake's), which is coarser than the product's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.placement.prefix_index import PrefixIndex

CACHE_BLOCK_TOKENS = 512


class SimulatedCache:
    """The cached blocks of one worker, reported to the router's ``PrefixIndex``.

    A prefix is touched from its end to its beginning, so that eviction never removes the beginning
    of a prefix before the rest.
    """

    def __init__(self, name: str, index: PrefixIndex, tokens: int) -> None:
        self._name = name
        self._index = index
        self._tokens = tokens
        self._unhashed = 0  # tokens of live sequences that are in no block
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Return how many tokens of the prefix ``keys`` are cached."""
        count = 0
        for key in keys:
            if key not in self._blocks:
                break
            count += 1
        return count * CACHE_BLOCK_TOKENS

    def insert(self, keys: Sequence[bytes]) -> None:
        """Store the blocks of a prefix and mark all of them as used now."""
        blocks = self._blocks
        new = [key for key in keys if key not in blocks]
        for key in new:
            blocks[key] = None
        for key in reversed(keys):
            blocks.move_to_end(key)
        if new:
            self._index.store(self._name, new)
            self._evict()

    def reserve(self, tokens: int) -> None:
        """Take ``tokens`` more (or fewer) tokens of the pool for what no block holds."""
        self._unhashed += tokens
        if tokens > 0 and self._blocks:
            self._evict()

    def _evict(self) -> None:
        limit = max(0, self._tokens - self._unhashed) // CACHE_BLOCK_TOKENS
        gone = []
        while len(self._blocks) > limit:
            gone.append(self._blocks.popitem(last=False)[0])
        if gone:
            self._index.evict(self._name, gone)

    def clear(self) -> None:
        self._blocks.clear()
        self._index.clear(self._name)
