"""``BodyBudget``: the bytes of request bodies that one router holds while they are read and parsed.

A request takes its place in the router after its body has been parsed. Until then only its bytes
tell what it costs: thousands of connections may each send a body of the greatest size. Counted is
what has come, not what is announced: a client that announces much and sends nothing holds nothing.
One per router; ``accept_request`` opens a claim for each body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.common.errors import RETRY_AFTER, ApiError, overloaded

BODIES = 32
"""Bodies of the greatest size that a router holds at once, of all tenants."""

TENANT_SHARE = 4
"""One tenant has at most this part (1 / 4) of the bytes."""

FREE_BYTES = 16 << 10
"""Bodies up to this size are not counted, and never refused: one for each connection is little."""


class BodyBudget:
    """Counts the bytes of the bodies in one router. ``max_body_bytes``: the greatest size of one.

    ``held``: bytes by tenant.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = BODIES * max_body_bytes
        self._tenant_limit = self._limit // TENANT_SHARE
        self.held: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def open(self, tenant: str) -> Iterator[BodyClaim]:
        """Count one body for as long as the context lasts."""
        claim = BodyClaim(self, tenant)
        try:
            yield claim
        finally:
            claim.release()

    def take(self, tenant: str, count: int) -> None:
        """Raise ApiError where ``count`` bytes more are too many: 429 for the tenant, 503 in
        all."""
        if self.held[tenant] + count > self._tenant_limit:
            raise overloaded(
                f"request bodies of {self.held[tenant]} bytes are being read for this API key, of"
                " at most"
                f" {self._tenant_limit} at once",
                1.0,
            )
        if self._total + count > self._limit:
            message = f"bodies of {self._total} bytes are being read, of at most {self._limit}"
            raise ApiError(
                503,
                f"{message} at once; try again shortly",
                type="service_unavailable",
                code="overloaded",
                headers=RETRY_AFTER,
            )
        self.held[tenant] += count
        self._total += count

    def give_back(self, tenant: str, count: int) -> None:
        """Take bytes out of the count."""
        self._total -= count
        self.held[tenant] -= count
        if not self.held[tenant]:
            del self.held[tenant]


class BodyClaim:
    """The bytes of one body. Created by ``BodyBudget.open``."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._held = 0

    def grow(self, size: int) -> None:
        """Count the body with ``size`` bytes from now on. Raises ApiError, see
        ``BodyBudget.take``."""
        if size > FREE_BYTES:
            self._budget.take(self._tenant, size - self._held)
            self._held = size

    def release(self) -> None:
        """Count nothing of the body any more. May be called again."""
        if self._held:
            held, self._held = self._held, 0
            self._budget.give_back(self._tenant, held)
