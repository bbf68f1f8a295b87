"""What a fuzz target is, which ones there are, and the limits that every input is held to.

A target is one function of bytes. It raises nothing for any input: it catches the errors that the
decoder documents, and whatever else comes out of it is a defect, as is an input that takes more
time or memory than its length explains.
"""

from __future__ import annotations

import importlib
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TARGET_NAMES = (
    "bodies",
    "cache_events",
    "carriers",
    "decode_service",
    "frames",
    "http_connection",
    "model_config",
    "output_text",
    "prefill_peer",
    "records",
    "tool_calls",
    "weights",
    "worker_output",
    "yaml_files",
)

CORPUS = Path(__file__).parent / "corpus"
"""A folder for each target: inputs that reach far, and those that have failed once."""

LARGEST_INPUT = 1 << 16
"""Bytes of the largest input that is tried; a quadratic decoder shows at this size."""

_ATTEMPTS = 3  # of an input that was too slow: the machine may have been busy


class Budget(NamedTuple):
    """What an input may take: a base, and an amount for each of its bytes.

    Time is that of the calling thread's processor."""

    base_s: float = 0.1
    s_per_byte: float = 2e-5
    base_bytes: int = 1 << 20
    bytes_per_byte: int = 400

    def seconds(self, size: int) -> float:
        return self.base_s + self.s_per_byte * size

    def bytes(self, size: int) -> int:
        return self.base_bytes + self.bytes_per_byte * size


class FuzzTarget(NamedTuple):
    """One decoder under fuzz. ``fuzz_one`` raises only where the decoder breaks its promise."""

    name: str
    fuzz_one: Callable[[bytes], None]
    budget: Budget = Budget()
    examples: int = 120  # changed inputs in the tests of a commit

    @property
    def corpus(self) -> list[Path]:
        """Return the kept inputs."""
        return sorted((CORPUS / self.name).iterdir())


class OverBudget(AssertionError):
    """An input takes more time or memory than its length explains."""


def load_target(name: str) -> FuzzTarget:
    """Import a target's module, and with it the code under test."""
    found: FuzzTarget = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    assert found.name == name
    return found


def run_within_budget(target: FuzzTarget, data: bytes) -> None:
    """Run one input. Raises OverBudget, or what the target raises."""
    seconds, peak = _measured(target, data)
    most = target.budget.bytes(len(data))
    if peak > most:
        raise OverBudget(f"{target.name}: {len(data)} bytes take {peak} bytes, over {most}")
    limit = target.budget.seconds(len(data))
    for _ in range(_ATTEMPTS):
        if seconds <= limit:
            return
        began = time.thread_time()
        target.fuzz_one(data)
        seconds = time.thread_time() - began
    if seconds > limit:
        raise OverBudget(f"{target.name}: {len(data)} bytes take {seconds:.3f} s, over {limit:.3f}")


def _measured(target: FuzzTarget, data: bytes) -> tuple[float, int]:
    """Return the seconds and the most bytes that an input takes at once."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        began = time.thread_time()
        target.fuzz_one(data)
        seconds = time.thread_time() - began
        return seconds, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
