"""The program of one end of a link: ``python -m bench.kv_link.child sender|receiver``.

Jobs come as lines of JSON on standard input, and their results go to standard output as lines that
begin with "@". A job names a medium, which is imported and created when it is first named: NIXL's
process has only torch and NIXL installed, so this module imports the standard library alone.

    open      create the end of a medium                    -> what the other end must know
    connect   take what ``open`` of the other end returned  -> None
    run       answer "began", then move bytes               -> seconds, and details of the medium
    digest    of the bytes that the last run moved          -> a number, the same at both ends
    usage     CPU seconds of this process and its children so far
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from cluster.local.die_with_parent import die_with_parent

MEDIA = {
    "socket": "bench.kv_link.media.sockets:SocketEnd",
    "socket+tls": "bench.kv_link.media.sockets:TlsSocketEnd",
    "grpc": "bench.kv_link.media.bare_grpc:GrpcEnd",
    "gloo": "bench.kv_link.media.bare_gloo:GlooEnd",
    "memcpy": "bench.kv_link.media.bare_memory:MemcpyEnd",
    "nixl": "bench.kv_link.media.nixl_end:NixlEnd",
    "product": "bench.kv_link.product.product_end:ProductEnd",
}
"""Class of the end of each medium."""


class LinkEnd(Protocol):
    """One end of one medium, in the sender or in the receiver."""

    def open(self, options: dict[str, Any]) -> Any:
        """Listen or allocate, and return what the other end must know (JSON)."""

    def connect(self, other: Any) -> None:
        """Connect to the other end. Both ends are called at once."""

    def run(self, job: dict[str, Any]) -> Any:
        """Move ``job["bytes"]`` bytes, and return when they have arrived, as far as this end can
        know. Return None, or details (JSON): "seconds" and "bytes" replace what was measured
        around the call."""

    def digest(self, job: dict[str, Any]) -> int:
        """Return a checksum of the bytes of the last run."""

    def close(self) -> None: ...


def cpu_seconds() -> float:
    """Return the CPU seconds, user and system, of this process and of its children so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    others = sum(_thread_seconds(pid) for pid in _descendants(os.getpid()))
    return usage.ru_utime + usage.ru_stime + others


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _numbers(children):
            yield child
            yield from _descendants(child)


def _thread_seconds(pid: int) -> float:
    """Return the CPU seconds of the living threads of a process."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(sum(_numbers(stat)[:1]) for stat in stats) / 1e9


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file of a thread, none if the thread has ended."""
    try:
        return [int(number) for number in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class LinkChild:
    """Runs the jobs of one process. ``sending`` tells its ends which role they have."""

    def __init__(self, sending: bool, answers: Any) -> None:
        self._sending = sending
        self._answers = answers
        self._ends: dict[str, LinkEnd] = {}  # by the name that the parent has given

    def handle(self, line: str) -> None:
        job = json.loads(line)
        try:
            answer: Any = {"result": getattr(self, f"_{job['step']}")(job)}
        except Exception as error:  # a medium may fail in any way; the parent reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._answer(answer)

    def _answer(self, answer: Any) -> None:
        self._answers.write(f"@{json.dumps(answer)}\n")
        self._answers.flush()

    def _open(self, job: dict[str, Any]) -> Any:
        module, _, name = MEDIA[job["medium"]].partition(":")
        end: LinkEnd = getattr(importlib.import_module(module), name)(self._sending)
        self._ends[job["name"]] = end
        return end.open(job["options"])

    def _connect(self, job: dict[str, Any]) -> None:
        self._ends[job["name"]].connect(job["other"])

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        self._answer("began")
        began = time.perf_counter()
        details = self._ends[job["name"]].run(job)
        return {"seconds": time.perf_counter() - began, "details": details}

    def _digest(self, job: dict[str, Any]) -> int:
        return self._ends[job["name"]].digest(job)

    def _usage(self, job: dict[str, Any]) -> float:
        return cpu_seconds()

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


def main() -> None:
    die_with_parent(os.getppid())  # also while it is stopped between two runs
    # Only answers go to the pipe; what libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        child = LinkChild(sys.argv[1] == "sender", answers)
        try:
            for line in sys.stdin:
                child.handle(line)
        finally:
            child.close()


if __name__ == "__main__":
    main()
