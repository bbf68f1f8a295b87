"""Parts of ``bench.gpu`` that go wrong on purpose."""

from __future__ import annotations

import time

from bench.gpu.part import GpuResult, PartContext


def fine(context: PartContext) -> None:
    """Add one row and a note."""
    context.add(GpuResult("fine", 3.0, "ms", "the floor 2.7 ms", 0.9, 0.87))
    context.note("a note")


def crash(context: PartContext) -> None:
    """Add one row, and fail."""
    context.add(GpuResult("before the crash", 1.0, "ms"))
    for i in range(100):
        print(f"line {i}")
    raise RuntimeError("the kernel is broken")


def stuck(context: PartContext) -> None:
    """Never end."""
    time.sleep(3600)
