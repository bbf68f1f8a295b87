"""A pool of child processes for work that threads could not stop: hostile grammars, long prompts.

    take an idle child, or start one --> send a line --> lines of reply; the child is idle again
                                         |  too much CPU or memory: the child dies, ChildDied      |
                                         |  killed between requests: retried once in another child |
                                         timeout: the child is killed, TimeoutError

A child is a program of this repository that uses ``router.common.child_program``. It writes one
line of JSON when it has started: an empty string, or what is wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
START_S = 20.0
"""Time until a child is ready: it loads Python and a large vocabulary."""

_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
_LIMIT_SIGNALS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGKILL)
"""Exit codes of a child that exceeds a limit: by its timer, or out of memory."""


class ChildNotReady(Exception):
    """The child could not start; the message says why."""


class ChildDied(Exception):
    """The child ended while it worked, with subprocess' return code ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a child process ended with {code}")
        self.code = code

    @property
    def is_unrelated(self) -> bool:
        """Return whether the end says nothing about the work: between requests, or killed."""
        return self.code in (0, -signal.SIGKILL, -signal.SIGTERM)

    @property
    def is_limit(self) -> bool:
        """Return whether the work has exceeded the child's limits."""
        return self.code in _LIMIT_SIGNALS


class ChildProcess:
    """One process, owned by the pool. Its environment holds none of the router's secrets."""

    def __init__(self, module: str, argument: Path) -> None:
        self._wire, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(argument)],
                cwd=ROOT,
                env={k: os.environ[k] for k in _ENVIRONMENT if k in os.environ},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # errors come by the socket
            )
        self._lines = self._wire.makefile("rb")
        self._is_ready = False

    def exchange(self, request: bytes, seconds: float, on_line: Callable[[bytes], bool]) -> None:
        """Send a request (one line) and call ``on_line`` with each line of the reply, until it
        returns True. Raises ChildNotReady, ChildDied or TimeoutError; the child is unusable
        then."""
        try:
            if not self._is_ready:
                problem = msgspec.json.decode(self._read(time.monotonic() + START_S), type=str)
                if problem:
                    raise ChildNotReady(problem)
                self._is_ready = True
            until = time.monotonic() + seconds
            self._wire.settimeout(max(0.001, seconds))
            self._wire.sendall(request + b"\n")
            while not on_line(self._read(until)):
                pass
        except (ConnectionError, EOFError):
            try:
                code = self.process.wait(START_S)
            except subprocess.TimeoutExpired:  # it has closed its socket, but lives
                raise TimeoutError from None
            raise ChildDied(code) from None

    def _read(self, until: float) -> bytes:
        self._wire.settimeout(max(0.001, until - time.monotonic()))
        line: bytes = self._lines.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def close(self) -> None:
        """Kill the process; idempotent, and safe while another thread waits for it."""
        self.process.kill()
        self.process.wait()
        self._wire.close()


class ChildPool:
    """The children of one router that run one program. ``exchange`` blocks, so there are as many
    children as calling threads."""

    def __init__(self, module: str, argument: Path) -> None:
        self._module = module
        self._argument = argument
        self._lock = threading.Lock()
        self._idle: list[ChildProcess] = []
        self._children: set[ChildProcess] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all children."""
        with self._lock:
            return [child.process.pid for child in self._children]

    def exchange(self, request: bytes, seconds: float, on_line: Callable[[bytes], bool]) -> None:
        """Let a child work on a request, see ``ChildProcess.exchange``.

        Raises TimeoutError where no reply came in time, ChildDied for work that ends a child, and
        ChildNotReady.
        """
        for is_retry in (False, True):
            child = self._acquire()
            try:
                child.exchange(request, seconds, on_line)
            except ChildDied as death:
                self._discard(child)
                if death.is_unrelated and not is_retry:
                    continue
                raise
            except BaseException:
                self._discard(child)
                self._start_spare()
                raise
            self._release(child)
            return

    def close(self) -> None:
        """Kill all children. Threads that still wait get a TimeoutError."""
        with self._lock:
            self._closed = True
            children, self._idle = list(self._children), []
        for child in children:
            self._discard(child)

    def _acquire(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise TimeoutError
            if self._idle:
                return self._idle.pop()
            child = ChildProcess(self._module, self._argument)  # a close must not miss it
            self._children.add(child)
            return child

    def _start_spare(self) -> None:
        """Start a child if none is idle, so that the next call need not wait for its start."""
        with self._lock:
            if not self._closed and not self._idle:
                child = ChildProcess(self._module, self._argument)
                self._children.add(child)
                self._idle.append(child)

    def _release(self, child: ChildProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)

    def _discard(self, child: ChildProcess) -> None:
        child.close()
        with self._lock:
            self._children.discard(child)
