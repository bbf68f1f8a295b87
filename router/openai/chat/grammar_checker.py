"""Whether an output can be held to a grammar: asked before a worker gets it.

What clients send is compiled in a child process with limits (``trial.py``), and only where the same
was not tried before: an application's schemas cost nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.sampling_params import MAX_GRAMMAR_BYTES
from router.common.errors import ApiError, invalid, overloaded
from router.openai.chat.grammar_trials import Trials
from router.openai.chat.output_plan import OutputPlan
from router.openai.chat.trial_child import Trial, Verdict

# MERGED router.chat.lanes
# Who may have a grammar tried out now: so many at once, and of each tenant one.
#
# Those who wait go in order, but for tenants that have one at work: nobody waits behind another's
# flood for longer than what is at work already.


class Lanes:
    """``width``: how many at once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._busy: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def enter(self, tenant: str, seconds: float) -> None:
        """``leave`` once for each. Raises TimeoutError."""
        if self._open(tenant):
            self._busy.add(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, turn))
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.leave(tenant)
            turn.cancel()
            raise
        if not turn.done():
            turn.cancel()
            raise TimeoutError

    def leave(self, tenant: str) -> None:
        self._busy.remove(tenant)
        still = [(name, turn) for name, turn in self._waiting if not turn.done()]
        self._waiting.clear()
        for name, turn in still:
            if self._open(name):
                self._busy.add(name)
                turn.set_result(None)
            else:
                self._waiting.append((name, turn))

    def _open(self, tenant: str) -> bool:
        return len(self._busy) < self._width and tenant not in self._busy


# MERGED router.chat.verdicts
# Verdicts on grammars that came before: applications send the same ones again and again.

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


MAX_SECONDS = 5.0
CHILDREN = 2


class GrammarChecker:
    """Of one router. ``tokenizer``: the path of its ``tokenizer.json``. ``close`` at the end."""

    def __init__(self, tokenizer: Path, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(CHILDREN, thread_name_prefix="grammar")
        self._lanes = Lanes(CHILDREN)
        self._known = Verdicts()
        self.trials = Trials(tokenizer)

    async def check(self, plan: OutputPlan, tenant: str = "") -> OutputPlan:
        """The plan with a grammar as engines take it.

        Raises ApiError: 400 for a grammar that cannot be held or costs too much, naming the field
        and what is wrong with it; 429 where the tenant's others, or others' leave no time for it.
        """
        if not plan.grammar:
            return plan
        _check_size(plan)
        verdict = self._known.get(_key(plan)) or await self._ask(plan, tenant)
        if verdict.wrong:
            raise _refusal(plan, verdict)
        return plan._replace(grammar=verdict.grammar) if verdict.grammar else plan

    def close(self) -> None:
        self.trials.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, plan: OutputPlan, tenant: str) -> Verdict:
        field = plan.sources[-1].field
        try:
            await self._lanes.enter(tenant, self._max_seconds)
            if (known := self._known.get(_key(plan))) is not None:  # by another's, meanwhile
                self._lanes.leave(tenant)
                return known
            loop = asyncio.get_running_loop()
            trying = loop.run_in_executor(self._threads, self._try_out, plan)
            # Whether or not the client is still there then.
            trying.add_done_callback(lambda done: self._tried(plan, tenant, done))
            return await asyncio.shield(trying)
        except UnicodeEncodeError:
            why = f"{field} must be text, but holds half of a surrogate pair"
            raise invalid(why, field) from None
        except TimeoutError:
            why = f"{field} could not be checked within {self._max_seconds:g} s; try again"
            raise overloaded(why, self._max_seconds) from None

    def _try_out(self, plan: OutputPlan) -> Verdict:
        """In a thread."""
        parts = tuple(source.grammar for source in plan.sources)
        whole = () if plan.grammar in parts else (plan.grammar,)
        trial = Trial(parts + whole, raw=plan.sources[-1].raw)
        return self.trials.try_out(trial, self._max_seconds)

    def _tried(self, plan: OutputPlan, tenant: str, done: asyncio.Future[Verdict]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._known.keep(_key(plan), done.result())
        self._lanes.leave(tenant)


def _key(plan: OutputPlan) -> str:
    """A text for one meaning: a raw grammar never begins as JSON does."""
    return f"raw {plan.grammar}" if plan.sources[-1].raw else plan.grammar


def _check_size(plan: OutputPlan) -> None:
    if len(plan.grammar) > MAX_GRAMMAR_BYTES:
        field = plan.sources[-1].field
        raise invalid(
            f"{field}: the grammar for this output has {len(plan.grammar)} characters;"
            f" at most {MAX_GRAMMAR_BYTES} are taken",
            field,
            "schema_too_large",
        )


def _refusal(plan: OutputPlan, verdict: Verdict) -> ApiError:
    """By the first source that is wrong, or the last where each is right by itself."""
    field = plan.sources[min(verdict.place, len(plan.sources) - 1)].field
    if verdict.costly:
        return invalid(f"{field} is too complex: {verdict.wrong}", field, "schema_too_large")
    return invalid(f"{field} cannot be used: {verdict.wrong}", field, "invalid_schema")
