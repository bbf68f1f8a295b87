"""``Tenant``: one customer of the cluster, its share and its limits.

Read from the file of API keys (``router.tenants.key_file``). Every request carries the tenant of
its key from ``router.http.intake`` to the fair queue.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from protocol.requests import PRIORITIES
from router.common.errors import forbidden, invalid

KeyScope = Literal["generate", "monitor", "admin"]
"""``generate``: requests for tokens. ``monitor``: metrics, /sd, /ui. ``admin``: both."""

SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

DEFAULT_SCOPES: frozenset[KeyScope] = frozenset({"generate"})
"""Scopes of a key whose entry names none. Metrics name all tenants and what they use, and /sd lists
the addresses of all processes, so a customer's key does not read them."""

DEFAULT_PRIORITY = 0
"""Most urgent priority of a key whose entry names none."""


class TenantLimits(NamedTuple):
    """Limits of one tenant over all routers; None: no limit of its own."""

    concurrency: int | None = None  # choices in the cluster at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output tokens together


class Tenant(NamedTuple):
    """One customer of the cluster as one API key shows it; several keys may belong to it."""

    name: str
    priority: int = DEFAULT_PRIORITY  # most urgent one allowed to the key; lower is more urgent
    weight: float = 1.0  # share of the cluster among the tenants that compete for it
    limits: TenantLimits = TenantLimits()
    scopes: frozenset[KeyScope] = DEFAULT_SCOPES  # of the key

    def check_priority(self, priority: int) -> None:
        """Raises ApiError (400) for a priority that this tenant may not use."""
        if priority < self.priority:
            raise invalid(
                f"priority must be at least {self.priority} with this API key, not {priority}",
                "priority",
            )

    def check_scope(self, scope: KeyScope) -> None:
        """Raises ApiError (403) where the key does not have a scope."""
        if scope not in self.scopes:
            given = ", ".join(sorted(self.scopes))
            raise forbidden(
                f"this request needs an API key with the scope {scope!r}, but the one that was"
                f" sent has {given}; the operator of this server can add it in the file of API keys"
            )


DEFAULT_TENANT = Tenant("default", PRIORITIES[0], scopes=frozenset(SCOPES))
"""The tenant of all requests where there is no file of keys."""
