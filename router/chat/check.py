"""Whether a grammar can be built: asked before a worker gets it.

llguidance bounds what a grammar may cost (some 100 ms for the largest that was found), and lets go
of the interpreter lock meanwhile; so a thread and a deadline do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from protocol.sampling import MAX_GRAMMAR_BYTES
from router.chat.plan import OutputPlan
from router.errors import ApiError, invalid, timed_out

MAX_SECONDS = 5.0
KEPT = 256
"""Grammars known to be good; they come again with each request of an application."""


class GrammarChecker:
    """Of one router. ``close`` at the end."""

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, plan: OutputPlan) -> None:
        """Raises ApiError: 400 for a grammar that cannot be built, naming the field and what is
        wrong with it; 504 where there are so many to check that it takes too long."""
        if not plan.grammar or self._known(plan.grammar):
            return
        field = plan.sources[-1].field
        if len(plan.grammar) > MAX_GRAMMAR_BYTES:
            raise invalid(
                f"{field}: the grammar for this output has {len(plan.grammar)} characters;"
                f" at most {MAX_GRAMMAR_BYTES} are taken",
                field,
                "schema_too_large",
            )
        loop = asyncio.get_running_loop()
        checking = loop.run_in_executor(self._threads, find_fault, plan)
        try:
            fault = await asyncio.wait_for(checking, self._max_seconds)
        except TimeoutError:
            message = f"{field} was not checked within {self._max_seconds:g} s; try again"
            raise timed_out(message) from None
        if fault is not None:
            raise fault
        self._keep(plan.grammar)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _known(self, grammar: str) -> bool:
        if grammar not in self._good:
            return False
        self._good.move_to_end(grammar)
        return True

    def _keep(self, grammar: str) -> None:
        self._good[grammar] = None
        if len(self._good) > KEPT:
            self._good.popitem(last=False)


def find_fault(plan: OutputPlan) -> ApiError | None:
    """The first source that cannot be built, or the whole where each can."""
    whole = (plan.sources[-1].field, plan.grammar)
    for field, grammar in [*((s.field, s.grammar) for s in plan.sources), whole]:
        wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
        if wrong:
            what = " ".join(problems[0].split())[:500]
            return invalid(f"{field} cannot be used: {what}", field, "invalid_schema")
    return None
