"""Verdicts on grammars that came before: applications send the same ones again and again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from router.chat.trial_child import Verdict

KEPT = 256
KEPT_CHARS = 8 << 20
WRONG_S = 60.0
"""For so long a grammar that was refused is not tried again."""


class Verdicts:
    """The ones that were not asked for in the longest time go first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[Verdict, float]] = OrderedDict()
        self._chars = 0

    def get(self, grammar: str) -> Verdict | None:
        if grammar not in self._kept:
            return None
        verdict, since = self._kept[grammar]
        if verdict.wrong and self._clock() - since > WRONG_S:
            self._drop(grammar)
            return None
        self._kept.move_to_end(grammar)
        return verdict

    def keep(self, grammar: str, verdict: Verdict) -> None:
        self._drop(grammar)
        self._kept[grammar] = (verdict, self._clock())
        self._chars += len(grammar) + len(verdict.grammar)
        while len(self._kept) > KEPT or self._chars > KEPT_CHARS:
            self._drop(next(iter(self._kept)))

    def _drop(self, grammar: str) -> None:
        if (kept := self._kept.pop(grammar, None)) is not None:
            self._chars -= len(grammar) + len(kept[0].grammar)
