"""What routers tell each other about their tenants' usage, and what follows from it. Pure.

    OwnReport      UsageBook, running choices --> UsageRecord, with recently active tenants only
    PeerReports    UsageRecords of the others --> differences since the last look, running choices

``router.tenants.usage_exchange`` carries the records through Redis. Records are not trusted: wrong
ones are ignored, and what one can add is bounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from router.tenants.usage import TenantUsage

TENANTS_MAX = 1024
"""Tenants in one record."""

RECORD_BYTES = 64 << 10
"""Bytes of a record at most."""

_ENTRY_BYTES = 56  # of a tenant beside its name, at most

ACTIVE_S = 60.0
"""Seconds that a tenant stays in the record after its last use. A reader that misses more of them
misses what was used meanwhile."""

PEERS_MAX = 1024
FORGET_S = 300.0
"""Seconds after its last record for which a router's amounts are remembered."""

_AMOUNT_MAX = 2**53
_REQUESTS_PER_S = 1e5
_TOKENS_PER_S = 1e7
_SERVICE_PER_S = 1e6
"""Weighted tokens that one router is believed to serve: more than the uncached prompts of some
dozens of fast workers. A counter that is told wrongly is behind for as long as it takes to serve
what was told."""

_RUNNING_MAX = 1 << 15  # choices of a tenant in one router: many more than it lets in
_SECONDS_MAX = 10.0


class ReportedUsage(msgspec.Struct, frozen=True, array_like=True):
    """One tenant in one router, since it became active there."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    service: float
    running: int

    @property
    def usage(self) -> TenantUsage:
        return TenantUsage(self.requests, self.prompt_tokens, self.output_tokens, self.service)

    @property
    def is_valid(self) -> bool:
        counts = (self.requests, self.prompt_tokens, self.output_tokens, self.running)
        return all(0 <= count <= _AMOUNT_MAX for count in counts) and (
            0.0 <= self.service <= _AMOUNT_MAX
        )


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one router tells the others."""

    instance: str
    tenants: dict[str, ReportedUsage]


def is_valid_usage(record: UsageRecord) -> bool:
    """Return whether a router can have written this record."""
    return (
        len(record.instance) <= 256
        and len(record.tenants) <= TENANTS_MAX
        and all(usage.is_valid for usage in record.tenants.values())
    )


class _Activity(NamedTuple):
    base: TenantUsage  # amounts when the tenant became active
    last: TenantUsage
    changed: float  # when ``last`` changed, in seconds


class OwnReport:
    """Makes this router's records.

    Amounts count from when a tenant became active, so that one that was left out of the record and
    comes back is not taken for one that has used all of it at once.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._active: dict[str, _Activity] = {}
        self._known: dict[str, TenantUsage] = {}  # amounts of tenants that were active once

    def record(
        self,
        own: Mapping[str, TenantUsage],
        changed: Collection[str],
        running: Mapping[str, int],
        now: float,
    ) -> UsageRecord:
        """Return the record of this moment.

        ``own``: amounts of all tenants, ``changed``: names of those that have changed since the
        last call, ``running``: choices in this router, ``now`` in seconds.
        """
        for name in {*changed, *running, *self._active}:
            if name in own or name in running:
                self._follow(name, own.get(name, TenantUsage()), bool(running.get(name)), now)
            else:
                self._active.pop(name, None)
        if len(self._known) > len(own):
            self._known = {name: usage for name, usage in self._known.items() if name in own}
        self._deactivate_surplus()
        tenants = {
            name: _reported(found, running.get(name, 0)) for name, found in self._active.items()
        }
        return UsageRecord(instance=self._instance, tenants=tenants)

    def _follow(self, name: str, usage: TenantUsage, runs: bool, now: float) -> None:
        activity = self._active.get(name)
        if activity is None:
            base = self._known.get(name, TenantUsage())
            if usage != base or runs:
                self._active[name] = _Activity(base, usage, now)
        elif usage != activity.last or runs:
            self._active[name] = activity._replace(last=usage, changed=now)
        elif now - activity.changed > ACTIVE_S:
            self._deactivate(name)

    def _deactivate(self, name: str) -> None:
        self._known[name] = self._active.pop(name).last

    def _deactivate_surplus(self) -> None:
        """Keep the latest tenants that fit into a record; others are not told of for now."""
        left, size = TENANTS_MAX, RECORD_BYTES - 512
        for name in sorted(self._active, key=lambda name: -self._active[name].changed):
            left, size = left - 1, size - _ENTRY_BYTES - len(name.encode())
            if left < 0 or size < 0:
                self._deactivate(name)


class _Peer(NamedTuple):
    amounts: dict[str, TenantUsage]  # as last reported
    seen: float


class PeerReports:
    """What the other routers have reported so far.

    ``is_known``: whether a name is a tenant's; others are ignored.
    """

    def __init__(self, instance: str, is_known: Callable[[str], bool]) -> None:
        self._instance, self._is_known = instance, is_known
        self._peers: dict[str, _Peer] = {}

    def differences(self, records: Iterable[UsageRecord], now: float) -> dict[str, TenantUsage]:
        """Return what tenants have used in other routers since the last call.

        The first record of a router adds nothing: what it tells may be long ago.
        """
        changes: dict[str, TenantUsage] = {}
        for record in records:
            if record.instance == self._instance:
                continue
            peer = self._peers.get(record.instance)
            amounts = {n: r.usage for n, r in record.tenants.items() if self._is_known(n)}
            if peer is not None:
                for name, usage in amounts.items():
                    change = _change(usage, peer.amounts.get(name), now - peer.seen)
                    if change != TenantUsage():
                        changes[name] = changes.get(name, TenantUsage()).plus(change)
            elif len(self._peers) >= PEERS_MAX:
                continue
            self._peers[record.instance] = _Peer(amounts, now)
        self._forget(now)
        return changes

    def running(self, records: Iterable[UsageRecord]) -> dict[str, int]:
        """Return the choices that run in other routers, by tenant."""
        counts: Counter[str] = Counter()
        for record in records:
            if record.instance != self._instance:
                for name, reported in record.tenants.items():
                    if reported.running and self._is_known(name):
                        counts[name] += min(reported.running, _RUNNING_MAX)
        return dict(counts)

    def _forget(self, now: float) -> None:
        for instance in [i for i, p in self._peers.items() if now - p.seen > FORGET_S]:
            del self._peers[instance]


def _reported(activity: _Activity, running: int) -> ReportedUsage:
    base, last = activity.base, activity.last
    return ReportedUsage(
        max(0, last.requests - base.requests),
        max(0, last.prompt_tokens - base.prompt_tokens),
        max(0, last.output_tokens - base.output_tokens),
        max(0.0, last.service - base.service),
        running,
    )


def _change(usage: TenantUsage, before: TenantUsage | None, seconds: float) -> TenantUsage:
    """Return what came to ``before``; at most what a router can serve in these seconds."""
    if before is None or any(
        new < old
        for new, old in zip(
            msgspec.structs.astuple(usage), msgspec.structs.astuple(before), strict=True
        )
    ):
        before = TenantUsage()  # the tenant became active again
    seconds = min(max(seconds, 0.1), _SECONDS_MAX)
    tokens = math.ceil(_TOKENS_PER_S * seconds)
    return TenantUsage(
        min(usage.requests - before.requests, math.ceil(_REQUESTS_PER_S * seconds)),
        min(usage.prompt_tokens - before.prompt_tokens, tokens),
        min(usage.output_tokens - before.output_tokens, tokens),
        min(usage.service - before.service, _SERVICE_PER_S * seconds),
    )
