"""Checks that engines can enforce a request's grammar, before a worker gets the request.

Grammars of clients are compiled in child processes with limits (``grammar_pool``). Verdicts are
cached for each tenant, because applications send the same schemas again and again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.sampling_params import MAX_GRAMMAR_BYTES
from router.common.errors import ApiError, invalid, overloaded
from router.common.tenant_slots import TenantSlots
from router.openai.chat.grammar_child import CompileRequest, GrammarVerdict
from router.openai.chat.grammar_pool import CompilePool
from router.openai.chat.output_plan import OutputPlan
from router.openai.chat.verdict_cache import VerdictCache

MAX_SECONDS = 5.0
CHILDREN = 2


class GrammarChecker:
    """The checker of one router, closed with it. ``tokenizer``: path of the ``tokenizer.json``."""

    def __init__(self, tokenizer: Path, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(CHILDREN, thread_name_prefix="grammar")
        self._slots = TenantSlots(CHILDREN)
        self._known = VerdictCache()
        self.pool = CompilePool(tokenizer)

    async def check(self, plan: OutputPlan, tenant: str = "") -> OutputPlan:
        """Return the plan, which has a grammar, with the grammar in llguidance's form.

        Raises ApiError: 400 for a grammar that is invalid or too complex, with the field and the
        problem; 429 where other compilations leave no time for it.
        """
        check_grammar_size(plan)
        verdict = self._known.get(tenant, _key(plan)) or await self._compile(plan, tenant)
        if verdict.problem:
            raise _refusal(plan, verdict)
        return plan._replace(grammar=verdict.grammar) if verdict.grammar else plan

    def close(self) -> None:
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, plan: OutputPlan, tenant: str) -> GrammarVerdict:
        field = plan.sources[-1].field
        try:
            await self._slots.enter(tenant, self._max_seconds)
            if (
                known := self._known.get(tenant, _key(plan))
            ) is not None:  # compiled for another request meanwhile
                self._slots.leave(tenant)
                return known
            loop = asyncio.get_running_loop()
            compiling = loop.run_in_executor(self._threads, self._compile_in_child, plan)
            # Also if the client has left by then.
            compiling.add_done_callback(lambda done: self._record(plan, tenant, done))
            return await asyncio.shield(compiling)
        except UnicodeEncodeError:
            why = f"{field} must be text, but holds half of a surrogate pair"
            raise invalid(why, field) from None
        except TimeoutError:
            why = f"{field} could not be checked within {self._max_seconds:g} s; try again"
            raise overloaded(why, self._max_seconds) from None

    def _compile_in_child(self, plan: OutputPlan) -> GrammarVerdict:
        """Compile in a child process; runs in a thread."""
        parts = tuple(source.grammar for source in plan.sources)
        whole = () if plan.grammar in parts else (plan.grammar,)
        request = CompileRequest(parts + whole, raw=plan.sources[-1].raw)
        return self.pool.compile(request, self._max_seconds)

    def _record(self, plan: OutputPlan, tenant: str, done: asyncio.Future[GrammarVerdict]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._known.put(tenant, _key(plan), done.result())
        self._slots.leave(tenant)


def _key(plan: OutputPlan) -> str:
    """Return the cache key. Compiled grammars are JSON, so none of them begins with ``raw``."""
    return f"raw {plan.grammar}" if plan.sources[-1].raw else plan.grammar


def check_grammar_size(plan: OutputPlan) -> None:
    """Raises ApiError (400) for a grammar that is longer than engines take."""
    if len(plan.grammar) > MAX_GRAMMAR_BYTES:
        field = plan.sources[-1].field
        raise invalid(
            f"{field}: the grammar for this output has {len(plan.grammar)} characters;"
            f" at most {MAX_GRAMMAR_BYTES} are taken",
            field,
            "schema_too_large",
        )


def _refusal(plan: OutputPlan, verdict: GrammarVerdict) -> ApiError:
    """Return the error, about the first wrong source, or about the last if each is right by
    itself."""
    field = plan.sources[min(verdict.place, len(plan.sources) - 1)].field
    if verdict.costly:
        return invalid(f"{field} is too complex: {verdict.problem}", field, "schema_too_large")
    return invalid(f"{field} cannot be used: {verdict.problem}", field, "invalid_schema")
