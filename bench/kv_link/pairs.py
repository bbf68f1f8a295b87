"""Pairs of processes, a sender and a receiver, that move bytes in turns."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.kv_link.media.memory import GIGABYTE

STEP_S = 60.0
"""Limit of one step of a child. A transfer takes some 0.5 s at most; importing torch takes 3 s."""

CLOSE_S = 5.0


class LinkRun(msgspec.Struct, frozen=True):
    """One transfer: the seconds of its active end, which knows when everything has arrived."""

    nbytes: int
    seconds: float
    cpu_s: float  # of both processes and their children
    details: dict[str, Any] = {}  # of the active end

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / GIGABYTE

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.nbytes * GIGABYTE


class _ChildRecord(msgspec.Struct, frozen=True):
    """What a child measured in one run."""

    seconds: float
    details: dict[str, Any] | None = None


class LinkProcess:
    """One child process. It works only between a job and its answer."""

    def __init__(self, role: str, python: Path, environment: dict[str, str]) -> None:
        self.role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.kv_link.child", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def tell(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")

    def answer(self) -> Any:
        """Return the next answer. Raises RuntimeError if the child reports an error, ends, or says
        nothing for STEP_S."""
        deadline = time.monotonic() + STEP_S
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if not found:
                self._buffer += self._read(deadline)
                continue
            self._buffer = rest
            if line.startswith(b"@"):
                answer = msgspec.json.decode(line[1:])
                if isinstance(answer, dict) and "error" in answer:
                    raise RuntimeError(f"{self.role}: {answer['error']}")
                return answer

    def ask(self, job: dict[str, Any]) -> Any:
        self.tell(job)
        return self.answer()["result"]

    def _read(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{self.role}: no answer within {STEP_S:g} s")
        data = os.read(pipe, 1 << 16)
        if not data:
            raise RuntimeError(f"{self.role} ended: {self._last_line()}")
        return data

    def _last_line(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process: by the end of its input, or else by a signal."""
        self.signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class LinkPair:
    """A sender and a receiver with the same interpreter. ``close`` ends both.

    Processes that compute also while they wait, as NIXL's do, are ``stopped_between`` runs, so that
    they do not slow the others."""

    def __init__(
        self,
        python: Path = Path(sys.executable),
        environment: dict[str, str] | None = None,
        *,
        stopped_between: bool = False,
    ) -> None:
        self._stopped_between = stopped_between
        self._sender = LinkProcess("sender", python, environment or {})
        self._receiver = LinkProcess("receiver", python, environment or {})
        self._receiver_starts: set[str] = set()

    def open(
        self,
        name: str,
        medium: str,
        options: dict[str, Any] | None = None,
        *,
        receiver_starts: bool = False,
    ) -> Any:
        """Open ``medium`` as ``name`` at both ends and connect them. Return what the end that waits
        has said of itself. Raises RuntimeError."""
        if receiver_starts:
            self._receiver_starts.add(name)
        with self._awake():
            return self._open(name, medium, options)

    def _open(self, name: str, medium: str, options: dict[str, Any] | None) -> Any:
        passive, active = self._order(name)
        job = {"step": "open", "name": name, "medium": medium, "options": options or {}}
        for end in (passive, active):
            end.tell(job)
        there, here = passive.answer()["result"], active.answer()["result"]
        passive.tell({"step": "connect", "name": name, "other": here})
        active.ask({"step": "connect", "name": name, "other": there})
        passive.answer()
        return there

    def run(self, name: str, nbytes: int, **options: Any) -> LinkRun:
        """Move ``nbytes`` bytes. Raises RuntimeError."""
        with self._awake():
            return self._run(name, nbytes, options)

    def _run(self, name: str, nbytes: int, options: dict[str, Any]) -> LinkRun:
        passive, active = self._order(name)
        job = {"step": "run", "name": name, "bytes": nbytes, **options}
        before = self._cpu_seconds()
        for end in (passive, active):
            end.tell(job)
            assert end.answer() == "began"
        try:
            record = msgspec.convert(active.answer()["result"], _ChildRecord)
        finally:
            passive.answer()
        details = record.details or {}
        return LinkRun(
            nbytes=details.get("bytes", nbytes),
            seconds=details.get("seconds", record.seconds),
            cpu_s=self._cpu_seconds() - before,
            details=details,
        )

    def _cpu_seconds(self) -> float:
        return sum(float(end.ask({"step": "usage"})) for end in (self._sender, self._receiver))

    def check(self, name: str, nbytes: int, **options: Any) -> None:
        """Raise RuntimeError unless both ends hold the same bytes after the last run."""
        job = {"step": "digest", "name": name, "bytes": nbytes, **options}
        with self._awake():
            sent, came = self._sender.ask(job), self._receiver.ask(job)
        if sent != came:
            raise RuntimeError(f"{name}: the digest of what was sent is {sent}, not {came}")

    def _order(self, name: str) -> tuple[LinkProcess, LinkProcess]:
        """Return the end that waits and the end that starts a transfer."""
        if name in self._receiver_starts:
            return self._sender, self._receiver
        return self._receiver, self._sender

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        if not self._stopped_between:
            yield
            return
        for end in (self._sender, self._receiver):
            end.signal(signal.SIGCONT)
        yield
        for end in (self._sender, self._receiver):
            end.signal(signal.SIGSTOP)

    def close(self) -> None:
        for end in (self._sender, self._receiver):
            end.close()
