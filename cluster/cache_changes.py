"""What a worker has cached, and which changes of it Redis has not been told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from protocol.events import ENTRY_KEYS, SNAPSHOT_KEYS, Change, Kind, pack_keys

BACKLOG_KEYS = 16 * ENTRY_KEYS
SNAPSHOT_MIN_CHANGES = 2 * ENTRY_KEYS


class Changes:
    """Bounded: with more than BACKLOG_KEYS to tell, it is ``lost``, and so it starts. Then only
    the set of keys is kept, and a snapshot of it must be told."""

    def __init__(self) -> None:
        self.lost = True
        self.pending_keys = 0
        self._pending: list[Change] = []
        self._keys: dict[bytes, None] = {}  # parents before children, as they were stored
        self._since_told = 0  # keys stored or evicted since the last snapshot

    def stored(self, keys: Sequence[bytes]) -> None:
        self._keys.update(dict.fromkeys(keys))
        self._note(Kind.STORED, keys)

    def evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)
        self._note(Kind.EVICTED, keys)

    def cleared(self) -> None:
        self._keys.clear()
        self._note(Kind.CLEARED, ())

    def _note(self, kind: Kind, keys: Sequence[bytes]) -> None:
        if not keys and kind is not Kind.CLEARED:
            return
        self._since_told += max(len(keys), 1)
        if self.lost:
            return
        self._pending.append(Change(kind, pack_keys(keys)))
        self.pending_keys += max(len(keys), 1)
        if self.pending_keys > BACKLOG_KEYS:
            self.lose()

    def lose(self) -> None:
        """What was told did not arrive, or too much is to be told."""
        self.lost = True
        self.take()

    def take(self) -> list[Change]:
        """The changes to tell, once, in order."""
        pending, self._pending, self.pending_keys = self._pending, [], 0
        return pending

    def told(self) -> Iterable[bytes]:
        """All keys, for a snapshot that is told now."""
        self.lost = False
        self._since_told = 0
        return islice(self._keys, SNAPSHOT_KEYS)

    @property
    def any(self) -> bool:
        """Something changed since the last snapshot."""
        return self._since_told > 0

    @property
    def many(self) -> bool:
        """So much changed since the last snapshot that a new one is worth its size."""
        return self._since_told >= max(SNAPSHOT_MIN_CHANGES, len(self._keys) // 2)
