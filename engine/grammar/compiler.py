"""Grammars to matchers, in a thread of their own: the engine's loop never waits. Torch-free.

    get()  known: a copy, at once
    ask() --thread--> take(): the matcher or what is wrong, at most DEADLINE_S later

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

from engine.grammar.matcher import Matcher
from protocol.errors import InvalidRequest

log = logging.getLogger("baton.engine")

DEADLINE_S = 10.0
"""From the request to its matcher, those before it in line included."""

KEPT = 32
"""Compiled grammars; the one that was not used for longest goes first."""

THREADS = 2


def refusal(why: str) -> InvalidRequest:
    """The grammar is wrong: the fault of ``response_format``, where grammars come from."""
    return InvalidRequest(
        f"the grammar cannot be used: {why}", "response_format", "invalid_grammar"
    )


class _Asked(NamedTuple):
    grammar: str
    compiling: Future[Matcher]
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
        same = (a.compiling for a in self._asked.values() if a.grammar == grammar)
        compiling = next(same, None) or self._threads.submit(self._compile, grammar)
        self._asked[handle] = _Asked(grammar, compiling, self._clock() + DEADLINE_S)

    def forget(self, handle: int) -> None:
        """Nobody waits for it any more."""
        asked = self._asked.pop(handle, None)
        if asked and all(a.compiling is not asked.compiling for a in self._asked.values()):
            asked.compiling.cancel()

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return bool(self._asked)

    def take(self) -> list[tuple[int, Matcher | InvalidRequest]]:
        """Handles that need not wait any longer, each with its outcome."""
        now = self._clock()
        out: list[tuple[int, Matcher | InvalidRequest]] = []
        for handle, asked in list(self._asked.items()):
            if asked.compiling.done():
                out.append((handle, self._outcome(asked)))
            elif now >= asked.until:
                out.append((handle, refusal(f"it was not compiled within {DEADLINE_S:g} s")))
            else:
                continue
            self.forget(handle)
        return out

    def _outcome(self, asked: _Asked) -> Matcher | InvalidRequest:
        error = asked.compiling.exception()
        if isinstance(error, InvalidRequest):
            return error
        if error is not None:  # what a client sends must not end the engine, whatever it finds
            log.error("a grammar could not be compiled", exc_info=error)
            return refusal(f"it failed with {type(error).__name__}")
        self._keep(asked.grammar, asked.compiling.result())
        return asked.compiling.result().copy()

    def _keep(self, grammar: str, matcher: Matcher) -> None:
        self._kept[grammar] = matcher
        self._kept.move_to_end(grammar)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    # ---- in the threads ---------------------------------------------------------------------

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
