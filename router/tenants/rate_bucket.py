"""``RateBucket`` enforces a limit per minute as a token bucket. Pure: times are passed in.

    level = limit at most, limit / 60 more each second; every use takes from it, below 0 if need be

The bucket holds a minute's amount, so that a tenant that was quiet may use it at once: any minute
has at most twice the limit, and a long time has the limit on average. Used by
``router.tenants.quotas``.
"""

from __future__ import annotations

MINUTE_S = 60.0

DEBT_LIMITS = 10
"""Reports of other routers take the level down to this many limits below 0, which is ten minutes
of debt. They come from Redis, and no wrong report may lock a tenant out for longer."""


class RateBucket:
    """What one tenant may still use; ``limit`` per minute. Times are in seconds of one clock."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """Return what may be used now; below 0: debt."""
        if now > self._at:
            self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE_S)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Count what was used in this router, even if it is more than is left."""
        self._level = self.level(now) - amount

    def take_reported(self, amount: float, now: float) -> None:
        """Count what other routers say was used with them, see ``DEBT_LIMITS``."""
        level = self.level(now)
        self._level = min(level, max(level - amount, -DEBT_LIMITS * float(self.limit)))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` is left; 0: it is now."""
        return max(0.0, (amount - self.level(now)) * MINUTE_S / self.limit)

    def change_limit(self, limit: int, now: float) -> None:
        """Use another limit; what was used stays used."""
        used = self.limit - self.level(now)
        self.limit, self._level = limit, limit - used
