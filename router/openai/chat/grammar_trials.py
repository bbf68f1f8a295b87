"""Children of a router in which grammars are tried out: threads could not be stopped.

take an idle child, or start one --> ask it --> verdict: it is idle again
                                        |  too much CPU or memory: it dies, which is one
                                        |  killed by somebody else: once more, in another one
                                        |  out of time: it is killed, TimeoutError
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

from router.openai.chat.trial_child import CPU_S, MEMORY_BYTES, Trial, Verdict, Word

ROOT = Path(__file__).parents[3]
START_S = 20.0
"""To the first word of a child: Python, and a large vocabulary."""

TOO_COSTLY = f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile"
_ENDS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGKILL)
"""How a child ends that does too much: by its timer, or out of memory."""


class Died(Exception):
    """The child ended while it was at the grammar ``at``; ``code`` as subprocess has it."""

    def __init__(self, at: int, code: int) -> None:
        super().__init__(f"a child that tries grammars ended with {code}")
        self.at = at
        self.code = code

    @property
    def innocent(self) -> bool:
        """It ended between trials, or somebody killed it: this says nothing of the grammar."""
        return self.code in (0, -signal.SIGKILL, -signal.SIGTERM)


class Child:
    """One process. Its environment holds none of the router's secrets."""

    def __init__(self, tokenizer: Path) -> None:
        self._wire, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "router.openai.chat.trial_child", str(tokenizer)],
                cwd=ROOT,
                env={
                    k: os.environ[k]
                    for k in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
                    if k in os.environ
                },
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what is wrong comes by the socket
            )
        self._lines = self._wire.makefile("rb")
        self._said: Verdict | None = None
        self._ready = False

    def ask(self, trial: bytes, seconds: float) -> Verdict:
        """``trial``: as JSON. Raises Died or TimeoutError; the child is of no more use then."""
        at = 0
        try:
            if not self._ready:
                self._ready = True
                if (first := self._word(time.monotonic() + START_S)).verdict is not None:
                    return first.verdict
            until = time.monotonic() + seconds
            self._wire.settimeout(seconds)
            self._wire.sendall(trial + b"\n")
            while (word := self._word(until)).verdict is None:
                at = word.at
            return word.verdict
        except (ConnectionError, EOFError):
            raise Died(at, self.process.wait(START_S)) from None

    def _word(self, until: float) -> Word:
        self._wire.settimeout(max(0.001, until - time.monotonic()))
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return msgspec.json.decode(line, type=Word)

    def close(self) -> None:
        """May be called again, and while another thread asks."""
        self.process.kill()
        self.process.wait()
        self._wire.close()


class Trials:
    """``try_out`` blocks: as many children as threads call it at once."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the children that there are."""
        with self._lock:
            return [child.process.pid for child in self._children]

    def try_out(self, trial: Trial, seconds: float) -> Verdict:
        """Raises TimeoutError where no verdict came, which is not the grammar's fault,
        and UnicodeEncodeError for what is no text."""
        encoded = msgspec.json.encode(trial)
        for again in (False, True):
            child = self._take()
            try:
                verdict = child.ask(encoded, seconds)
            except Died as death:
                self._end(child)
                if death.innocent and not again:
                    continue
                why = TOO_COSTLY if death.code in _ENDS else "it cannot be compiled"
                return Verdict(why, death.at, costly=True)
            except BaseException:
                self._end(child)
                raise
            self._give(child)
            return verdict
        raise AssertionError("the second time is the last one")

    def close(self) -> None:
        """Those who still wait get a TimeoutError."""
        with self._lock:
            self._closed = True
            children, self._idle = list(self._children), []
        for child in children:
            self._end(child)

    def _take(self) -> Child:
        with self._lock:
            if self._closed:
                raise TimeoutError
            if self._idle:
                return self._idle.pop()
            child = Child(self._tokenizer)  # some milliseconds; a close must not miss it
            self._children.add(child)
            return child

    def _give(self, child: Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)

    def _end(self, child: Child) -> None:
        child.close()
        with self._lock:
            self._children.discard(child)
