"""Decides when a read counts as stuck."""

from __future__ import annotations


class PeerProgress:
    """The reads from one peer that are under way. They share a link, so none of them is stuck while
    another one from the same peer ends now and then."""

    def __init__(self) -> None:
        self._reads: dict[int, None] = {}  # in order of their beginning
        self._moved_at = 0.0

    def began(self, read: int, now: float) -> None:
        if not self._reads:
            self._moved_at = now
        self._reads[read] = None

    def ended(self, read: int, now: float) -> None:
        del self._reads[read]
        self._moved_at = now

    def stuck(self, now: float, limit_s: float) -> int | None:
        """Return the oldest read if no read has ended for ``limit_s``, else None."""
        if self._reads and now - self._moved_at >= limit_s:
            return next(iter(self._reads))
        return None
