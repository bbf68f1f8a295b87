"""The child's side of ``router.common.child_pool``: its socket, and the limits of its work.

Work that takes too much CPU or memory ends the process, by SIGPROF or out of memory. The process
also ends with its parent: its work takes a limited time, and then the socket is found closed.
"""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec


class ChildWire:
    """The socket to the parent, file descriptor 0. One per program."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # inherited otherwise
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._wire = socket.socket(fileno=0)

    def say_ready(self, problem: str = "") -> None:
        """Tell the parent that the program has started, or why it has not."""
        self.send(problem)

    def send(self, reply: object) -> None:
        """Write a reply as a line of JSON."""
        self._wire.sendall(msgspec.json.encode(reply) + b"\n")

    def serve(self, memory_bytes: int, work: Callable[[bytes], None]) -> None:
        """Call ``work`` for each request, until the parent ends or a request has left too much
        memory behind. Each request may add ``memory_bytes`` to the process."""
        most = _address_space() + memory_bytes
        for line in self._lines():
            size = _address_space()
            if size > most:  # left over by earlier requests: a fresh process takes over
                return
            _bound_memory(size + memory_bytes)
            work(line)

    def _lines(self) -> Iterator[bytes]:
        with self._wire.makefile("rb") as lines:
            while line := lines.readline():
                yield line


def limit_cpu(seconds: float) -> None:
    """End the process after so much more processor time; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def short_text(what: object) -> str:
    """Return an error as one short line."""
    return " ".join(str(what).split())[:500]


def _bound_memory(most: int) -> None:
    """Limit the address space to ``most`` bytes, or to less where the operator has set less."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))


def _address_space() -> int:
    """Return the bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
