"""Grammars to matchers, in a thread of their own: the engine's loop never waits. Torch-free.

    get()  known: a copy, at once
    ask() --thread--> take(): the matcher; or what is wrong with it; or, where others' took the
                              time, that another worker may be quicker; at most DEADLINE_S later

Routers try grammars out before they send them: the limits here are a second line.
A model folder without a usable ``tokenizer.json`` refuses grammars, and nothing else.
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

from engine.structured_output.matcher import Matcher
from protocol.errors import InvalidRequest, Unavailable

Outcome = Matcher | InvalidRequest | Unavailable

log = logging.getLogger("baton.engine")

DEADLINE_S = 10.0
"""From the request to its matcher, those before it in line included."""

COMPILE_S = 5.0
"""For a grammar alone, once a thread has taken it: five times what routers let through."""

KEPT = 16
KEPT_CHARS = 1 << 20
"""Compiled grammars, and their characters; the one that was not used for longest goes first."""

THREADS = 2


def refusal(why: str) -> InvalidRequest:
    """The grammar is wrong: the fault of ``response_format``, where grammars come from."""
    return InvalidRequest(
        f"the grammar cannot be used: {why}", "response_format", "invalid_grammar"
    )


class _Work:
    """A grammar in a thread, or in line for one."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.began: float | None = None  # on the clock
        self.compiling: Future[Matcher]


class _Asked(NamedTuple):
    work: _Work
    until: float  # on the clock


class Compiler:
    """Of one model: ``vocab`` tokens, of which ``eos`` end a text."""

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
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._reading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._asked: dict[int, _Asked] = {}

    def get(self, grammar: str) -> Matcher | None:
        """At the grammar's start, if it is known."""
        if (known := self._kept.get(grammar)) is None:
            return None
        self._kept.move_to_end(grammar)
        return known.copy()

    def ask(self, handle: int, grammar: str) -> None:
        """Compile it for ``handle``; the same text once for all that wait for it."""
        same = (a.work for a in self._asked.values() if a.work.grammar == grammar)
        if (work := next(same, None)) is None:
            work = _Work(grammar)
            work.compiling = self._threads.submit(self._run, work)
        self._asked[handle] = _Asked(work, self._clock() + DEADLINE_S)

    def forget(self, handle: int) -> None:
        """Nobody waits for it any more."""
        asked = self._asked.pop(handle, None)
        if asked and all(a.work is not asked.work for a in self._asked.values()):
            asked.work.compiling.cancel()

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return bool(self._asked)

    def take(self) -> list[tuple[int, Outcome]]:
        """Handles that need not wait any longer, each with its outcome."""
        now = self._clock()
        out = []
        for handle, asked in list(self._asked.items()):
            if (outcome := self._outcome(asked, now)) is not None:
                out.append((handle, outcome))
                self.forget(handle)
        return out

    def _outcome(self, asked: _Asked, now: float) -> Outcome | None:
        """None: it is to wait."""
        work = asked.work
        if work.compiling.done():
            return self._made(work)
        if work.began is not None and now - work.began >= COMPILE_S:
            return refusal(f"it was not compiled within {COMPILE_S:g} s")
        if now >= asked.until:
            return Unavailable(f"the grammar's turn did not come within {DEADLINE_S:g} s")
        return None

    def _made(self, work: _Work) -> Matcher | InvalidRequest:
        error = work.compiling.exception()
        if isinstance(error, InvalidRequest):
            return error
        if error is not None:  # what a client sends must not end the engine, whatever it finds
            log.error("a grammar could not be compiled", exc_info=error)
            return refusal(f"it failed with {type(error).__name__}")
        self._keep(work.grammar, work.compiling.result())
        return work.compiling.result().copy()

    def _keep(self, grammar: str, matcher: Matcher) -> None:
        self._kept[grammar] = matcher
        self._kept.move_to_end(grammar)
        while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARS:
            self._kept.popitem(last=False)

    # ---- in the threads ---------------------------------------------------------------------

    def _run(self, work: _Work) -> Matcher:
        work.began = self._clock()
        return self._compile(work.grammar)

    def _compile(self, grammar: str) -> Matcher:
        """Raises InvalidRequest."""
        matcher = Matcher.compile(self._vocabulary(), grammar)
        if matcher.problem:
            raise refusal(matcher.problem)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        """The tokenizer as llguidance needs it; read when it is first needed."""
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = read_tokenizer(self._path, self._vocab, self._eos)
            return self._tokenizer


def read_tokenizer(path: Path, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """With ``vocab`` tokens, or more where the file has more. Raises InvalidRequest."""
    ends = list(eos) or None
    try:
        text = path.read_text()
        with contextlib.suppress(ValueError):  # more tokens than the model has
            return LLTokenizer(text, n_vocab=vocab, eos_token=ends)
        return LLTokenizer(text, eos_token=ends)
    except (OSError, ValueError) as error:
        raise refusal(f"the model's {path.name} cannot be read: {_short(error)}") from error


def _short(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)
