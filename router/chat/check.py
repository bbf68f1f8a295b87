"""Whether an output can be held to a grammar: asked before a worker gets it.

What clients send is compiled in a child process with limits (``trial.py``), and only where the same
was not tried before: an application's schemas cost nothing.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.sampling import MAX_GRAMMAR_BYTES
from router.chat.lanes import Lanes
from router.chat.plan import OutputPlan
from router.chat.trial import Trials
from router.chat.trial_child import Trial, Verdict
from router.chat.verdicts import Verdicts
from router.errors import ApiError, invalid, overloaded

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
