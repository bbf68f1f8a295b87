"""Which worker holds which blocks: block key -> bitmask of workers.

Prefixes are closed: a worker that holds a block holds all before it, as its cache evicts children
first. So along a prompt a mask only loses bits, and where it does is found by bisection, for all
workers at once. While reports of a change are on their way, this may be untrue for a moment; then a
match is too long or too short, never more.

    slot (a bit):  free --store--> in use --clear, remove--> dead --sweep of every entry--> free

A dead slot's blocks match nobody from that moment on; their entries go later, some at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

# MERGED router.slots
# Bits for workers: who has which, and whose is free again.
#
# free --take--> in use --retire--> dead --bury--> swept, by whom holds masks --free--> free

_MASKS = 4096  # whose names are kept


class Slots:
    """``live``: bits in use. ``dead``: bits that masks may still have, of nobody any more."""

    def __init__(self) -> None:
        self.live = 0
        self.dead = 0
        self.count = 0
        self.bits: dict[str, int] = {}  # by instance
        self._names: dict[int, str] = {}  # by bit
        # Naming many workers one by one is slow. So names are kept by mask; where the mask is new,
        # by the mask of some of eight slots.
        self._together: dict[int, list[str]] = {}
        self._eights: list[dict[int, list[str]]] = []
        self._free: list[int] = []

    def take(self, instance: str) -> int:
        """A bit for a new instance."""
        assert instance not in self.bits
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self.count
            if self.count % 8 == 0:
                self._eights.append({})
            self.count += 1
        self.bits[instance] = bit
        self._names[bit] = instance
        self.live |= bit
        return bit

    def retire(self, instance: str) -> None:
        """The instance, if there is one, has no bit any more."""
        bit = self.bits.pop(instance, 0)
        if bit:
            del self._names[bit]
            self._together.clear()
            self._eights[(bit.bit_length() - 1) >> 3].clear()
            self.live ^= bit
            self.dead |= bit

    def bury(self) -> int:
        """Hand the dead bits over, to be taken out of every mask and then given to ``free``."""
        mask, self.dead = self.dead, 0
        return mask

    def free(self, mask: int) -> None:
        self._free += _bits(mask)
        self._free.sort(reverse=True)  # the lowest goes next, so that masks stay narrow

    def mask(self, instances: Collection[str]) -> int:
        """The bits of those that have one."""
        mask = 0
        for instance in instances:
            mask |= self.bits.get(instance, 0)
        return mask

    def name(self, mask: int, value: int, found: dict[str, int]) -> None:
        """Put ``value`` into ``found`` for each instance of ``mask``, all of them live."""
        names = self._together.get(mask)
        if names is None:
            names = self._all_names(mask)
            if len(self._together) >= _MASKS:
                self._together.clear()
            self._together[mask] = names
        found.update(dict.fromkeys(names, value))

    def _all_names(self, mask: int) -> list[str]:
        names = []
        for at, byte in enumerate(mask.to_bytes(len(self._eights), "little")):
            if byte:
                eight = self._eights[at]
                if byte not in eight:
                    eight[byte] = [self._names[bit << 8 * at] for bit in _bits(byte)]
                names += eight[byte]
        return names


def _bits(mask: int) -> Iterator[int]:
    """The single bits that make up the mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


SHARDS = 256  # by the first byte of a key; a portion of a sweep is one of them at least
_KEY_OBJECT_BYTES = 64  # a bytes object of 16, rounded up by the allocator
_MANY_DEAD = 256  # slots


class PrefixIndex:
    """At most ``max_blocks`` entries: what is stored beyond them is passed over and counted."""

    def __init__(self, max_blocks: int = 16_000_000) -> None:
        self.passed_over = 0
        self._max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._entries = 0
        self._slots = Slots()
        self._sweeping = 0  # dead bits that the sweep under way takes out
        self._swept = 0  # shards that it is through with

    # ---- lookup -----------------------------------------------------------------------------

    def match(
        self, keys: Sequence[bytes], instances: Collection[str] | None = None
    ) -> dict[str, int]:
        """Of each worker that holds the first of ``keys``, how many of them it holds from there
        on. ``instances``: look at these only. About log2(keys) probes for each depth at which the
        prefix of some worker ends."""
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
                self._slots.name(held ^ after, high, found)
                held = after
                if not held:
                    return found
            if not rest:
                break
            low = high
            high, after = rest.pop()
            after &= held
        self._slots.name(held, len(keys), found)
        return found

    # ---- changes ----------------------------------------------------------------------------

    def store(self, instance: str, keys: Sequence[bytes]) -> None:
        """The worker holds these blocks; a prefix before what extends it."""
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
        """The worker holds these blocks no more. Unknown ones are passed over."""
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
        """The worker holds nothing. O(1); ``sweep`` does the rest."""
        self._slots.retire(instance)
        if self._slots.dead.bit_count() > _MANY_DEAD:  # who clears without end pays at once
            while self.sweep(self._entries + SHARDS):
                pass

    remove = clear
    """The worker is gone. A worker is known as long as something was stored for it."""

    def load(self, instance: str, keys: Sequence[bytes]) -> None:
        """The worker holds exactly these blocks."""
        self.clear(instance)
        self.store(instance, keys)

    # ---- sweeping ---------------------------------------------------------------------------

    def sweep(self, budget: int) -> bool:
        """Look at about ``budget`` entries, at a shard's at least, for blocks of dead slots.

        Returns whether there is more to sweep."""
        if not self._sweeping:
            self._sweeping, self._swept = self._slots.bury(), 0
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
        """Blocks known, those of dead slots included until they are swept."""
        return self._entries

    @property
    def memory_bytes(self) -> int:
        """About what the entries take: tables and keys. Masks are shared, and not counted."""
        tables = sum(sys.getsizeof(shard) for shard in self._shards)
        return tables + self._entries * _KEY_OBJECT_BYTES
