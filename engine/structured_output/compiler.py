"""Compile grammars to matchers in threads, so that the engine's loop never waits. Torch-free.

    get_cached()  a copy at once, if the grammar is in the cache
    submit() --thread--> take_finished(): the matcher; or the error of the grammar; or Unavailable
                         where other grammars took the time, so that another worker may be faster;
                         at most COMPILE_DEADLINE_S later

Routers compile a grammar before they send it: the limits here are a second line of defence. A model
folder without a usable ``tokenizer.json`` refuses requests with grammars only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llguidance import LLTokenizer

from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest, Unavailable

CompileResult = GrammarMatcher | InvalidRequest | Unavailable

log = logging.getLogger("baton.engine")

COMPILE_DEADLINE_S = 10.0
"""Longest duration from ``submit`` to a result, including the time in the queue."""

MAX_COMPILE_S = 5.0
"""Longest duration of one compilation in its thread: five times the limit of the routers."""

MAX_CACHED_GRAMMARS = 16
MAX_CACHED_CHARS = 1 << 20
"""Limits of the cache, in grammars and in their characters; it evicts the least recently used."""

COMPILE_THREADS = 2


def invalid_grammar(why: str) -> InvalidRequest:
    """Return the error of a wrong grammar. It names ``response_format``, where grammars come
    from."""
    return InvalidRequest(
        f"the grammar cannot be used: {why}", "response_format", "invalid_grammar"
    )


class _Job:
    """A grammar in a thread, or in the queue for one."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.began: float | None = None  # on the clock
        self.compiling: Future[GrammarMatcher]


class _Waiting(NamedTuple):
    """A sequence that waits for a job."""

    job: _Job
    until: float  # on the clock


class GrammarCompiler:
    """Compiles for one model of ``vocab`` tokens, of which ``eos`` end a text. The engine process
    creates one; ``PendingCommands`` is its only caller."""

    def __init__(
        self,
        folder: Path,
        vocab: int,
        eos: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab = vocab
        self._eos = list(eos)
        self._clock = clock
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._waiting: dict[int, _Waiting] = {}  # by handle

    def get_cached(self, grammar: str) -> GrammarMatcher | None:
        """Return a matcher at the grammar's start, if the grammar is in the cache."""
        if (known := self._cache.get(grammar)) is None:
            return None
        self._cache.move_to_end(grammar)
        return known.copy()

    def submit(self, handle: int, grammar: str) -> None:
        """Compile ``grammar`` for ``handle``; handles with equal text share one job."""
        same = (w.job for w in self._waiting.values() if w.job.grammar == grammar)
        if (job := next(same, None)) is None:
            job = _Job(grammar)
            job.compiling = self._threads.submit(self._run, job)
        self._waiting[handle] = _Waiting(job, self._clock() + COMPILE_DEADLINE_S)

    def cancel(self, handle: int) -> None:
        """Forget ``handle``, and cancel its job if no other handle waits for it."""
        waiting = self._waiting.pop(handle, None)
        if waiting and all(w.job is not waiting.job for w in self._waiting.values()):
            waiting.job.compiling.cancel()

    def take_finished(self) -> list[tuple[int, CompileResult]]:
        """Return the handles that need not wait any longer, each with its result."""
        now = self._clock()
        out = []
        for handle, waiting in list(self._waiting.items()):
            if (result := self._result(waiting, now)) is not None:
                out.append((handle, result))
                self.cancel(handle)
        return out

    def _result(self, waiting: _Waiting, now: float) -> CompileResult | None:
        """The result; None while the handle has to wait."""
        job = waiting.job
        if job.compiling.done():
            return self._compiled(job)
        if job.began is not None and now - job.began >= MAX_COMPILE_S:
            return invalid_grammar(f"it was not compiled within {MAX_COMPILE_S:g} s")
        if now >= waiting.until:
            return Unavailable(f"the grammar's turn did not come within {COMPILE_DEADLINE_S:g} s")
        return None

    def _compiled(self, job: _Job) -> GrammarMatcher | InvalidRequest:
        error = job.compiling.exception()
        if isinstance(error, InvalidRequest):
            return error
        if error is not None:  # a client's grammar must not end the engine, whatever bug it hits
            log.error("a grammar could not be compiled", exc_info=error)
            return invalid_grammar(f"it failed with {type(error).__name__}")
        self._add_to_cache(job.grammar, job.compiling.result())
        return job.compiling.result().copy()

    def _add_to_cache(self, grammar: str, matcher: GrammarMatcher) -> None:
        self._cache[grammar] = matcher
        self._cache.move_to_end(grammar)
        while (
            len(self._cache) > MAX_CACHED_GRAMMARS or sum(map(len, self._cache)) > MAX_CACHED_CHARS
        ):
            self._cache.popitem(last=False)

    # ---- in the threads ---------------------------------------------------------------------

    def _run(self, job: _Job) -> GrammarMatcher:
        job.began = self._clock()
        return self._compile(job.grammar)

    def _compile(self, grammar: str) -> GrammarMatcher:
        """Raises InvalidRequest."""
        matcher = GrammarMatcher.compile(self._load_tokenizer(), grammar)
        if matcher.problem:
            raise invalid_grammar(matcher.problem)
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        """The model's tokenizer, read on first use."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_grammar_tokenizer(self._path, self._vocab, self._eos)
            return self._tokenizer


def load_grammar_tokenizer(path: Path, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer in ``path`` with ``vocab`` tokens, or more where the file has more.
    Raises InvalidRequest where it cannot be read."""
    ends = list(eos) or None
    try:
        text = path.read_text()
        with contextlib.suppress(ValueError):  # the file has more tokens than the model
            return LLTokenizer(text, n_vocab=vocab, eos_token=ends)
        return LLTokenizer(text, eos_token=ends)
    except (OSError, ValueError) as error:
        why = str(error.strerror if isinstance(error, OSError) else error)
        raise invalid_grammar(f"the model's {path.name} cannot be read: {why}") from error
