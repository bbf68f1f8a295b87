"""What runs in the child processes of bench.engine, and how they are told: JSON lines over pipes.

A contestant loads a model, then generates greedily whenever it is told to: a batch of prompts that
all come at once, so many new tokens for each, one compute thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol

import msgspec

KINDS = ("engine", "generate", "generate_batch")
ENGINE, *PEERS = KINDS


class Job(msgspec.Struct, frozen=True):
    """``load``: a model folder to load; else prompts to run on the loaded one."""

    load: str = ""
    prompts: list[list[int]] = []
    new_tokens: int = 0


class Run(msgspec.Struct, frozen=True):
    """How a job went. ``error``: why it did not."""

    wall_s: float = 0.0
    decode_rate: float = 0.0  # tokens per second while every sequence decodes
    tokens: list[list[int]] = []
    error: str = ""


class Contestant(Protocol):
    def load(self, folder: str) -> None: ...

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run: ...


def steady_rate(stamps: Sequence[Sequence[float]]) -> float:
    """Tokens per second from the moment when every sequence has its first token until one has its
    last. ``stamps``: the times of the tokens of each sequence, in seconds; 0.0 where there is no
    such time."""
    began = max(times[0] for times in stamps)
    ended = min(times[-1] for times in stamps)
    count = sum(began < at <= ended for times in stamps for at in times)
    return count / (ended - began) if ended > began else 0.0


class Child:
    """A contestant in a process of its own. It computes only between ``ask`` and its return, so
    that several can take turns."""

    def __init__(self, kind: str, core: int | None) -> None:
        self.kind = kind
        self.error = ""  # why it is out
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "bench.contestant_main", kind]
        self._process = subprocess.Popen(
            command if core is None else [*command, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: Job) -> Run:
        """Raises nothing for a contestant that fails: it is out, and ``error`` says why."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self.error:
            return Run(error=self.error)
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        run = msgspec.json.decode(line, type=Run) if line else Run(error=self._last_words())
        self.error = run.error
        return run

    def _last_words(self) -> str:
        self._process.wait(timeout=30)  # the pipe may close before the last word is written
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"it ended: {lines[-1] if lines else 'without a word'}"

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._log.close()
