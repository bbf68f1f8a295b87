"""The process of one part: ``python -m bench.gpu.part ROWS_FILE JOB``, started by the runner.

It calls the part's function with a ``PartContext``, through which the function writes its rows. A
row is on disk as soon as it is measured, so that the runner has it whatever happens later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec
import torch

from bench.lib.roofline import MachineLimits, measure
from engine.execution.gpu_memory import prepare_gpu

FULL_READ, FULL_GEMM = 4 << 30, 8192
TINY_READ, TINY_GEMM = 1 << 20, 128


class GpuResult(msgspec.Struct, frozen=True):
    """One figure. ``ratio`` compares it with ``against`` and is better if larger; ``aim`` is the
    ratio that it should reach."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    aim: float | None = None


class PartNote(msgspec.Struct, frozen=True):
    """A text that the runner prints, such as a profile or a case that does not fit."""

    note: str


class PartJob(msgspec.Struct, frozen=True):
    """What the runner tells a part. ``bandwidth`` (bytes/s) and ``rate`` (operations/s) are those
    that the part ``limits`` has measured, or 0."""

    target: str
    device: str
    tiny: bool = False
    profile: bool = False
    bandwidth: float = 0.0
    rate: float = 0.0


class PartContext:
    """The job of one part, and where its rows go."""

    def __init__(self, job: PartJob, path: Path) -> None:
        self.job = job
        self.tiny = job.tiny
        # A GPU is set up as in an engine process.
        on_gpu = job.device.startswith("cuda")
        self.device = prepare_gpu(job.device) if on_gpu else torch.device(job.device)
        self.dtype = torch.float32 if self.on_cpu else torch.bfloat16
        self._file = path.open("ab", buffering=0)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def limits(self) -> MachineLimits:
        """The measured limits of the device; they are measured here if no part has done so."""
        if self.job.bandwidth and self.job.rate:
            return MachineLimits(self.job.bandwidth, self.job.rate)
        return self.measure_limits()

    def measure_limits(self) -> MachineLimits:
        """Measure the bandwidth of a large copy and the rate of a large product."""
        read, gemm = (TINY_READ, TINY_GEMM) if self.tiny else (FULL_READ, FULL_GEMM)
        return measure(read, gemm, self.dtype, self.device)

    def add(self, *rows: GpuResult) -> None:
        for row in rows:
            self._write(row)

    def note(self, text: str) -> None:
        """Have the runner print ``text``."""
        self._write(PartNote(text))

    def _write(self, line: GpuResult | PartNote) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def synchronize(self) -> None:
        """Wait for everything that was launched on the device."""
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)


def main() -> None:
    path, text = sys.argv[1:]
    job = msgspec.json.decode(text, type=PartJob)
    if job.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is imported
    module, _, function = job.target.partition(":")
    measure_part: Callable[[PartContext], None] = getattr(importlib.import_module(module), function)
    torch.set_grad_enabled(False)
    if job.device == "cpu":
        torch.set_num_threads(1)
    measure_part(PartContext(job, Path(path)))


if __name__ == "__main__":
    main()
