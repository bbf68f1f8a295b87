"""``VerdictCache``: verdicts on the grammars that each tenant has sent before.

Tenants share nothing: the time and the error of a request would tell one tenant which schemas
another has used. Owned by ``GrammarChecker``.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from router.openai.chat.grammar_child import GrammarVerdict

MAX_VERDICTS = 256
"""Most verdicts of one tenant."""

MAX_TENANT_CHARS = 4 << 20
MAX_CACHED_CHARS = 32 << 20
"""Most characters of the grammars of one tenant, and of all."""

_ENTRY_CHARS = 512
"""What an entry takes beside its text."""

REFUSAL_TTL_S = 60.0
"""Time after which a refused grammar may be compiled again."""


class _Entry(NamedTuple):
    verdict: GrammarVerdict
    since: float
    chars: int


class _TenantVerdicts:
    """One tenant's verdicts, the least recently used one first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.chars = 0

    def put(self, grammar: str, entry: _Entry) -> None:
        self.drop(grammar)
        self.entries[grammar] = entry
        self.chars += entry.chars

    def drop(self, grammar: str) -> None:
        if (kept := self.entries.pop(grammar, None)) is not None:
            self.chars -= kept.chars

    def drop_oldest(self) -> int:
        """Return the characters of the dropped entry."""
        before = self.chars
        self.drop(next(iter(self.entries)))
        return before - self.chars


class VerdictCache:
    """Verdicts on earlier grammars. The tenant that holds most gives up its least recently used
    ones where there are too many in all, so a flood of one tenant costs the others nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, _TenantVerdicts] = {}
        self._chars = 0  # of all tenants

    def get(self, tenant: str, grammar: str) -> GrammarVerdict | None:
        known = self._tenants.get(tenant)
        entry = None if known is None else known.entries.get(grammar)
        if known is None or entry is None:
            return None
        if entry.verdict.problem and self._clock() - entry.since > REFUSAL_TTL_S:
            before = known.chars
            known.drop(grammar)
            self._chars -= before - known.chars
            return None
        known.entries.move_to_end(grammar)
        return entry.verdict

    def put(self, tenant: str, grammar: str, verdict: GrammarVerdict) -> None:
        known = self._tenants.setdefault(tenant, _TenantVerdicts())
        chars = len(grammar) + len(verdict.grammar) + _ENTRY_CHARS
        before = known.chars
        known.put(grammar, _Entry(verdict, self._clock(), chars))
        while len(known.entries) > MAX_VERDICTS or known.chars > MAX_TENANT_CHARS:
            known.drop_oldest()
        self._chars += known.chars - before
        while self._chars > MAX_CACHED_CHARS:
            name, largest = max(self._tenants.items(), key=lambda item: item[1].chars)
            self._chars -= largest.drop_oldest()
            if not largest.entries:
                del self._tenants[name]
