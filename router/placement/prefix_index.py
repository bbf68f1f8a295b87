"""The prefix index of a router: block key -> bitmask of the workers whose cache holds the block.

A worker that holds a block holds all blocks before it, as its cache evicts leaves first. So along a
prompt a mask only loses bits, and where it does is found by bisection, for all workers at once.
While events are still in flight this may be untrue for a moment; then a match is too long or too
short, and nothing worse.

    slot (one bit per worker):  free --store--> in use --clear--> dead --sweep of all entries-->
    free

Blocks of a dead slot match no worker from then on; their entries are removed later, a portion at a
time. ``index_reader`` keeps the index up to date, and the placer looks prompts up in it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

_MAX_NAMED_MASKS = 4096  # masks whose worker names are kept
SHARDS = 256  # by the first byte of a key; a sweep looks at one shard at least
_KEY_OBJECT_BYTES = 64  # a bytes object of length 16, rounded up by the allocator
_MAX_DEAD = 256  # slots


class WorkerSlots:
    """Assigns a bit to each worker. ``live``: bits in use; ``dead``: bits without a worker that
    masks may still contain.

        free --take--> in use --retire--> dead --take_dead--> being swept --free--> free
    """

    def __init__(self) -> None:
        self.live = 0
        self.dead = 0
        self.count = 0
        self.bits: dict[str, int] = {}  # by instance
        self._names: dict[int, str] = {}  # by bit
        # Naming many workers one by one is slow. So names are kept by mask, and for the parts of a
        # new mask by byte (eight slots).
        self._names_by_mask: dict[int, list[str]] = {}
        self._names_by_byte: list[dict[int, list[str]]] = []
        self._free: list[int] = []

    def take(self, instance: str) -> int:
        """Return a bit for a new instance."""
        assert instance not in self.bits
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self.count
            if self.count % 8 == 0:
                self._names_by_byte.append({})
            self.count += 1
        self.bits[instance] = bit
        self._names[bit] = instance
        self.live |= bit
        return bit

    def retire(self, instance: str) -> None:
        """Turn the bit of the instance, if it has one, into a dead bit."""
        bit = self.bits.pop(instance, 0)
        if bit:
            del self._names[bit]
            self._names_by_mask.clear()
            self._names_by_byte[(bit.bit_length() - 1) >> 3].clear()
            self.live ^= bit
            self.dead |= bit

    def take_dead(self) -> int:
        """Return the dead bits, for the caller to remove from every mask and to pass to
        ``free``."""
        mask, self.dead = self.dead, 0
        return mask

    def free(self, mask: int) -> None:
        self._free += _bits(mask)
        self._free.sort(reverse=True)  # the lowest goes next, so that masks stay narrow

    def mask(self, instances: Collection[str]) -> int:
        """Return the bits of these instances."""
        mask = 0
        for instance in instances:
            mask |= self.bits.get(instance, 0)
        return mask

    def assign(self, mask: int, value: int, found: dict[str, int]) -> None:
        """Set ``found[instance] = value`` for each instance of ``mask``, all of them live."""
        names = self._names_by_mask.get(mask)
        if names is None:
            names = self._all_names(mask)
            if len(self._names_by_mask) >= _MAX_NAMED_MASKS:
                self._names_by_mask.clear()
            self._names_by_mask[mask] = names
        found.update(dict.fromkeys(names, value))

    def _all_names(self, mask: int) -> list[str]:
        names = []
        for at, byte in enumerate(mask.to_bytes(len(self._names_by_byte), "little")):
            if byte:
                known = self._names_by_byte[at]
                if byte not in known:
                    known[byte] = [self._names[bit << 8 * at] for bit in _bits(byte)]
                names += known[byte]
        return names


class PrefixIndex:
    """The index of one router. Blocks beyond ``max_blocks`` entries are skipped and counted."""

    def __init__(self, max_blocks: int = 16_000_000) -> None:
        self.passed_over = 0
        self._max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._entries = 0
        self._slots = WorkerSlots()
        self._sweeping = 0  # dead bits that the current sweep removes
        self._swept = 0  # shards that the current sweep has finished

    # ---- lookup -----------------------------------------------------------------------------

    def match(
        self, keys: Sequence[bytes], instances: Collection[str] | None = None
    ) -> dict[str, int]:
        """Return the number of leading ``keys`` that each worker holds; workers without the first
        are left out. ``instances``: consider only these. Takes about log2(keys) probes for each
        depth at which the prefix of some worker ends."""
        found: dict[str, int] = {}
        if not keys:
            return found
        shards = self._shards
        key = keys[0]
        held = shards[key[0]].get(key, 0)  # workers that hold the blocks up to ``low``
        held &= self._slots.live if instances is None else self._slots.mask(instances)
        if not held:
            return found
        low, high = 0, len(keys) - 1
        key = keys[high]
        after = shards[key[0]].get(key, 0) & held  # those that hold the block ``high``
        rest: list[tuple[int, int]] = []  # further (high, after) to the right, nearest last
        while True:
            if held != after:
                while high - low > 1:
                    middle = (low + high) >> 1
                    key = keys[middle]
                    mask = shards[key[0]].get(key, 0) & held
                    if mask == held:
                        low = middle
                    else:
                        if mask != after:
                            rest.append((high, after))
                        high, after = middle, mask
                self._slots.assign(held ^ after, high, found)
                held = after
                if not held:
                    return found
            if not rest:
                break
            low = high
            high, after = rest.pop()
            after &= held
        self._slots.assign(held, len(keys), found)
        return found

    # ---- changes ----------------------------------------------------------------------------

    def store(self, instance: str, keys: Sequence[bytes]) -> None:
        """Add blocks that the worker holds now, parents first."""
        bit = self._slots.bits.get(instance) or self._slots.take(instance)
        room = self._max_blocks - self._entries
        shards = self._shards
        new = 0
        before, with_bit = 0, bit  # neighbours mostly have one mask: then they share the object
        for key in keys:
            shard = shards[key[0]]
            mask = shard.get(key)
            if mask is None:
                if new == room:
                    self.passed_over += 1
                    continue
                shard[key] = bit
                new += 1
            elif not mask & bit:
                if mask != before:
                    before, with_bit = mask, mask | bit
                shard[key] = with_bit
        self._entries += new

    def evict(self, instance: str, keys: Sequence[bytes]) -> None:
        """Remove blocks that the worker has evicted; unknown ones are ignored."""
        bit = self._slots.bits.get(instance)
        if bit is None:
            return
        shards = self._shards
        gone = 0
        before, without_bit = bit, 0
        for key in keys:
            shard = shards[key[0]]
            mask = shard.get(key, 0)
            if mask & bit:
                if mask != before:
                    before, without_bit = mask, mask ^ bit
                if without_bit:
                    shard[key] = without_bit
                else:
                    del shard[key]
                    gone += 1
        self._entries -= gone

    def clear(self, instance: str) -> None:
        """Remove all blocks of the worker, known or gone. O(1); ``sweep`` does the rest."""
        self._slots.retire(instance)
        if self._slots.dead.bit_count() > _MAX_DEAD:  # bounds the garbage of repeated clears
            while self.sweep(self._entries + SHARDS):
                pass

    # ---- sweeping ---------------------------------------------------------------------------

    def sweep(self, budget: int) -> bool:
        """Remove dead bits from about ``budget`` entries, from those of one shard at least. Return
        whether there is more to sweep."""
        if not self._sweeping:
            self._sweeping, self._swept = self._slots.take_dead(), 0
            if not self._sweeping:
                return False
        while budget > 0 and self._swept < SHARDS:
            budget -= len(self._shards[self._swept]) + 1
            self._sweep_shard(self._swept)
            self._swept += 1
        if self._swept == SHARDS:
            self._slots.free(self._sweeping)
            self._sweeping = 0
        return bool(self._sweeping or self._slots.dead)

    def _sweep_shard(self, number: int) -> None:
        shard, sweeping = self._shards[number], self._sweeping
        size = len(shard)
        for key in [key for key, mask in shard.items() if mask & sweeping]:
            left = shard[key] & ~sweeping
            if left:
                shard[key] = left
            else:
                del shard[key]
        self._entries -= size - len(shard)
        if len(shard) < size // 2:
            self._shards[number] = dict(shard.items())  # a dict never shrinks by itself

    # ---- size -------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Return the number of known blocks, those of dead slots included until they are swept."""
        return self._entries

    @property
    def memory_bytes(self) -> int:
        """Estimate the bytes of tables and keys. Masks are shared, and not counted."""
        tables = sum(sys.getsizeof(shard) for shard in self._shards)
        return tables + self._entries * _KEY_OBJECT_BYTES


def _bits(mask: int) -> Iterator[int]:
    """Yield the single bits of the mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
