"""Checks that engines can enforce a request's grammar, before a worker gets the request.

Grammars of clients are compiled in child processes with limits (``grammar_pool``). Verdicts are
cached, because applications send the same schemas again and again.
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
from router.openai.chat.grammar_child import CompileRequest, GrammarVerdict
from router.openai.chat.grammar_pool import CompilePool
from router.openai.chat.output_plan import OutputPlan

MAX_SECONDS = 5.0
CHILDREN = 2
MAX_VERDICTS = 256
MAX_CACHED_CHARS = 8 << 20
REFUSAL_TTL_S = 60.0
"""Time after which a refused grammar may be compiled again."""


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
        _check_size(plan)
        verdict = self._known.get(_key(plan)) or await self._compile(plan, tenant)
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
                known := self._known.get(_key(plan))
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
            self._known.put(_key(plan), done.result())
        self._slots.leave(tenant)


def _key(plan: OutputPlan) -> str:
    """Return the cache key. Compiled grammars are JSON, so none of them begins with ``raw``."""
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


def _refusal(plan: OutputPlan, verdict: GrammarVerdict) -> ApiError:
    """Return the error, about the first wrong source, or about the last if each is right by
    itself."""
    field = plan.sources[min(verdict.place, len(plan.sources) - 1)].field
    if verdict.costly:
        return invalid(f"{field} is too complex: {verdict.problem}", field, "schema_too_large")
    return invalid(f"{field} cannot be used: {verdict.problem}", field, "invalid_schema")


class TenantSlots:
    """Admits at most ``width`` compilations at once, and one per tenant.

    Tenants that wait go in order, except those that have one in progress: no tenant waits behind
    the backlog of another for longer than the compilations in progress take.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._busy: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def enter(self, tenant: str, seconds: float) -> None:
        """Wait for a slot; the caller leaves it with ``leave``. Raises TimeoutError."""
        if self._can_enter(tenant):
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
        waiting = [(name, turn) for name, turn in self._waiting if not turn.done()]
        self._waiting.clear()
        for name, turn in waiting:
            if self._can_enter(name):
                self._busy.add(name)
                turn.set_result(None)
            else:
                self._waiting.append((name, turn))

    def _can_enter(self, tenant: str) -> bool:
        return len(self._busy) < self._width and tenant not in self._busy


class VerdictCache:
    """Verdicts on earlier grammars; the least recently used ones are dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, tuple[GrammarVerdict, float]] = OrderedDict()
        self._chars = 0

    def get(self, grammar: str) -> GrammarVerdict | None:
        if grammar not in self._entries:
            return None
        verdict, since = self._entries[grammar]
        if verdict.problem and self._clock() - since > REFUSAL_TTL_S:
            self._drop(grammar)
            return None
        self._entries.move_to_end(grammar)
        return verdict

    def put(self, grammar: str, verdict: GrammarVerdict) -> None:
        self._drop(grammar)
        self._entries[grammar] = (verdict, self._clock())
        self._chars += len(grammar) + len(verdict.grammar)
        while len(self._entries) > MAX_VERDICTS or self._chars > MAX_CACHED_CHARS:
            self._drop(next(iter(self._entries)))

    def _drop(self, grammar: str) -> None:
        if (kept := self._entries.pop(grammar, None)) is not None:
            self._chars -= len(grammar) + len(kept[0].grammar)
