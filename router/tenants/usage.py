"""What each tenant has used: counted in one router, and exchanged with the others.

    request accepted, response ends --add--> UsageBook --own()--> Redis, in the background
    other routers' records --on_others--> quotas, virtual counters of the fair queue

``router.tenants.usage_exchange`` carries it. No request waits for Redis; without it every router
knows its own part only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import msgspec

OthersListener = Callable[[str, "TenantUsage"], None]
"""Called with a tenant's name and what other routers have served to it since the last call."""


class TenantUsage(msgspec.Struct, frozen=True):
    """Amounts since the start of a router."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0  # weighted tokens, in the unit of router/fairness/virtual_counters.py

    def plus(self, other: TenantUsage) -> TenantUsage:
        """Return the sum of both."""
        return TenantUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.service + other.service,
        )


class UsageBook:
    """The usage of every tenant in one router. Created with the router's state."""

    def __init__(self) -> None:
        self._own: dict[str, TenantUsage] = {}
        self._changed: set[str] = set()
        self._listeners: list[OthersListener] = []

    def add(self, tenant: str, usage: TenantUsage) -> None:
        """Count what this router has served to a tenant."""
        self._own[tenant] = self._own.get(tenant, TenantUsage()).plus(usage)
        self._changed.add(tenant)

    def own(self) -> Mapping[str, TenantUsage]:
        """Return the amounts of this router, by the tenant's name."""
        return self._own

    def take_changed(self) -> set[str]:
        """Return the tenants whose amounts have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def retain(self, tenants: Container[str]) -> None:
        """Forget tenants that are no longer in the file of API keys."""
        self._own = {name: usage for name, usage in self._own.items() if name in tenants}

    def listen(self, listener: OthersListener) -> None:
        """Call ``listener`` for what other routers serve, from now on."""
        self._listeners.append(listener)

    def on_others(self, tenant: str, usage: TenantUsage) -> None:
        """Pass on what other routers have served since the last exchange."""
        for listener in self._listeners:
            listener(tenant, usage)
