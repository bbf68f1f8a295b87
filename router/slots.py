"""Bits for workers: who has which, and whose is free again.

free --take--> in use --retire--> dead --bury--> swept, by whom holds masks --free--> free
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

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
