"""A pool of child processes in which a router compiles grammars: threads could not be stopped.

take an idle child, or start one --> send the request --> verdict; the child is idle again
                                         |  too much CPU or memory: the child dies; a verdict, too |
                                         killed by another process: retried once, in another child |
                                         timeout: the child is killed, TimeoutError
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from router.openai.chat.grammar_child import (
    CPU_S,
    MEMORY_BYTES,
    CompileReply,
    CompileRequest,
    GrammarVerdict,
)

ROOT = Path(__file__).parents[3]
START_S = 20.0
"""Time until a child is ready: it loads Python and a large vocabulary."""

TOO_COSTLY = f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile"
_LIMIT_SIGNALS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGKILL)
"""Exit codes of a child that exceeds a limit: by its timer, or out of memory."""


class ChildDied(Exception):
    """The child ended while it compiled the grammar ``at``, with subprocess' return code
    ``code``."""

    def __init__(self, at: int, code: int) -> None:
        super().__init__(f"a child that compiles grammars ended with {code}")
        self.at = at
        self.code = code

    @property
    def is_unrelated(self) -> bool:
        """Return whether the end says nothing about the grammar: between requests, or killed."""
        return self.code in (0, -signal.SIGKILL, -signal.SIGTERM)


class CompileChild:
    """One process, owned by the pool. Its environment holds none of the router's secrets."""

    def __init__(self, tokenizer: Path) -> None:
        self._wire, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "router.openai.chat.grammar_child", str(tokenizer)],
                cwd=ROOT,
                env={
                    k: os.environ[k]
                    for k in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
                    if k in os.environ
                },
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # errors come by the socket
            )
        self._lines = self._wire.makefile("rb")
        self._ready = False

    def compile(self, request: bytes, seconds: float) -> GrammarVerdict:
        """Send a request (JSON) and return its verdict. Raises ChildDied or TimeoutError; the child
        is unusable then."""
        at = 0
        try:
            if not self._ready:
                self._ready = True
                if (first := self._read_reply(time.monotonic() + START_S)).verdict is not None:
                    return first.verdict
            until = time.monotonic() + seconds
            self._wire.settimeout(seconds)
            self._wire.sendall(request + b"\n")
            while (reply := self._read_reply(until)).verdict is None:
                at = reply.at
            return reply.verdict
        except (ConnectionError, EOFError):
            raise ChildDied(at, self.process.wait(START_S)) from None

    def _read_reply(self, until: float) -> CompileReply:
        self._wire.settimeout(max(0.001, until - time.monotonic()))
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return msgspec.json.decode(line, type=CompileReply)

    def close(self) -> None:
        """Kill the process; idempotent, and safe while another thread waits for it."""
        self.process.kill()
        self.process.wait()
        self._wire.close()


class CompilePool:
    """The children of one router. ``compile`` blocks, so there are as many children as calling
    threads."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._idle: list[CompileChild] = []
        self._children: set[CompileChild] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all children."""
        with self._lock:
            return [child.process.pid for child in self._children]

    def compile(self, request: CompileRequest, seconds: float) -> GrammarVerdict:
        """Return the verdict. Raises TimeoutError where none came, which is not the grammar's
        fault, and UnicodeEncodeError for invalid Unicode."""
        encoded = msgspec.json.encode(request)
        for is_retry in (False, True):
            child = self._acquire()
            try:
                verdict = child.compile(encoded, seconds)
            except ChildDied as death:
                self._discard(child)
                if death.is_unrelated and not is_retry:
                    continue
                why = TOO_COSTLY if death.code in _LIMIT_SIGNALS else "it cannot be compiled"
                return GrammarVerdict(why, death.at, costly=True)
            except BaseException:
                self._discard(child)
                raise
            self._release(child)
            return verdict
        raise AssertionError("the second attempt returns or raises")

    def close(self) -> None:
        """Kill all children. Threads that still wait get a TimeoutError."""
        with self._lock:
            self._closed = True
            children, self._idle = list(self._children), []
        for child in children:
            self._discard(child)

    def _acquire(self) -> CompileChild:
        with self._lock:
            if self._closed:
                raise TimeoutError
            if self._idle:
                return self._idle.pop()
            child = CompileChild(self._tokenizer)  # some milliseconds; a close must not miss it
            self._children.add(child)
            return child

    def _release(self, child: CompileChild) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)

    def _discard(self, child: CompileChild) -> None:
        child.close()
        with self._lock:
            self._children.discard(child)
