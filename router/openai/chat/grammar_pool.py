"""Compiles grammars in child processes of a router (``grammar_child``), within their limits."""

from __future__ import annotations

from pathlib import Path

import msgspec

from router.common.child_pool import ChildDied, ChildNotReady, ChildPool
from router.openai.chat.grammar_child import (
    CPU_S,
    MEMORY_BYTES,
    CompileReply,
    CompileRequest,
    GrammarVerdict,
)

TOO_COSTLY = f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile"


class CompilePool:
    """The children of one router. ``compile`` blocks."""

    def __init__(self, tokenizer: Path) -> None:
        self._children = ChildPool("router.openai.chat.grammar_child", tokenizer)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all children."""
        return self._children.pids

    def compile(self, request: CompileRequest, seconds: float) -> GrammarVerdict:
        """Return the verdict. Raises TimeoutError where none came, which is not the grammar's
        fault, and UnicodeEncodeError for invalid Unicode."""
        last = CompileReply()

        def read(line: bytes) -> bool:
            nonlocal last
            last = msgspec.json.decode(line, type=CompileReply)
            return last.verdict is not None

        try:
            self._children.exchange(msgspec.json.encode(request), seconds, read)
        except ChildNotReady as problem:
            return GrammarVerdict(str(problem))
        except ChildDied as death:
            why = TOO_COSTLY if death.is_limit else "it cannot be compiled"
            return GrammarVerdict(why, last.at, costly=True)
        assert last.verdict is not None, "the exchange ends with a verdict"
        return last.verdict

    def close(self) -> None:
        """Kill all children. Threads that still wait get a TimeoutError."""
        self._children.close()
