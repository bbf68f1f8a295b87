"""``Tenant``: one customer of the cluster, its share and its limits.

Read from the file of API keys (``router.tenants.key_file``). Every request carries the tenant of
its key from ``router.http.intake`` to the fair queue.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from protocol.requests import PRIORITIES
from router.common.errors import invalid

Scope = Literal["generate", "monitor", "admin"]
"""``generate``: requests for tokens. ``monitor``: metrics, /sd, /ui. ``admin``: both."""

DEFAULT_PRIORITY = 0
"""Most urgent priority of a key whose entry names none."""


class TenantLimits(NamedTuple):
    """Limits of one tenant over all routers; None: no limit of its own."""

    concurrency: int | None = None  # requests in the cluster at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output tokens together


class Tenant(NamedTuple):
    """One customer of the cluster; several API keys may belong to it."""

    name: str
    priority: int = DEFAULT_PRIORITY  # most urgent one allowed; lower is more urgent
    weight: float = 1.0  # share of the cluster among the tenants that compete for it
    limits: TenantLimits = TenantLimits()
    scopes: frozenset[Scope] = frozenset({"generate", "monitor"})  # of the key that was used

    def check_priority(self, priority: int) -> None:
        """Raises ApiError (400) for a priority that this tenant may not use."""
        if priority < self.priority:
            raise invalid(
                f"priority must be at least {self.priority} with this API key, not {priority}",
                "priority",
            )


DEFAULT_TENANT = Tenant(
    "default", PRIORITIES[0], scopes=frozenset({"generate", "monitor", "admin"})
)
"""The tenant of all requests where there is no file of keys."""
