"""Paced engines: each step lasts as long as it would on a declared device.

Engines that share a few cores make each other slower. A paced engine computes each step and then
sleeps until the time that a declared device takes has passed. A step begins when the last one
ended, unless the engine was idle in between, so that work between two steps counts for the second.
A step that takes longer than declared is late; with few late steps, the cluster behaves like one of
such devices.

    seconds = step + row*rows + kv_token*kv + prompt_token*u + prompt_pair*u*(m + u/2)

as in ``engine/scheduling/step_time.py``.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.scheduling.step_time import StepTimeModel, StepTimer
from protocol.performance.step_model import StepModel, StepWork

VARIABLE = "BATON_BENCH_PACED"
"""The environment variable that holds a ``Device`` as JSON."""

TOLERANCE = 0.05
"""Relative excess over the declared time from which on a step counts as late."""

_SUFFIX = ".lateness"
_FIGURES = struct.Struct("=4d")


class Device(msgspec.Struct, frozen=True):
    """A declared device: step coefficients in seconds, and the folder of lateness files."""

    coefficients: tuple[float, float, float, float, float]
    tallies: str

    @property
    def step_time(self) -> StepModel:
        return StepModel(*self.coefficients)

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the processes of a cluster."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def declared() -> Device:
    """Read the device from the environment. Raises KeyError or msgspec.DecodeError."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Device)


class Lateness(NamedTuple):
    """Sums over steps: their number, the late ones, declared seconds and excess seconds."""

    steps: float = 0.0
    late: float = 0.0
    declared_s: float = 0.0
    excess_s: float = 0.0

    @property
    def late_share(self) -> float:
        return self.late / self.steps if self.steps else 0.0

    @property
    def excess_share(self) -> float:
        return self.excess_s / self.declared_s if self.declared_s else 0.0

    def plus(self, other: Lateness) -> Lateness:
        return Lateness(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, earlier: Lateness) -> Lateness:
        return Lateness(*(a - b for a, b in zip(self, earlier, strict=True)))


class LatenessFile:
    """Lateness of one engine in a memory-mapped file, which outlives a kill of the engine."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FIGURES.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIGURES.size)
        self._now = Lateness()

    def step(self, declared_s: float, took_s: float) -> None:
        late = took_s > declared_s * (1 + TOLERANCE)
        excess_s = max(0.0, took_s - declared_s)
        self._now = self._now.plus(Lateness(1.0, float(late), declared_s, excess_s))
        _FIGURES.pack_into(self._map, 0, *self._now)


def open_lateness_file(folder: Path) -> LatenessFile:
    """Create the lateness file of this process in ``folder``."""
    return LatenessFile(folder / f"{os.getpid()}{_SUFFIX}")


def lateness(folder: Path) -> Lateness:
    """Add up the lateness of all engines that wrote to ``folder``."""
    total = Lateness()
    for path in folder.glob(f"*{_SUFFIX}"):
        total = total.plus(Lateness(*_FIGURES.unpack(path.read_bytes())))
    return total


class PacedTimer(StepTimer):
    """Makes steps last as long as declared, and lets ``model`` learn the declared times."""

    def __init__(
        self,
        model: StepTimeModel,
        device: StepModel,
        record: Callable[[float, float], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(model, clock)
        self._device = device
        self._record = record  # seconds: declared, taken
        self._sleep = sleep
        self._start = 0.0
        self._busy = False

    def begin(self, *, ahead: bool = False) -> None:
        if not self._busy:
            self._start = self._clock()
        self._busy = True

    def end(self, work: StepWork, *, done: bool, before_s: float = 0.0) -> None:
        """Sleep until the declared time of the step has passed, and record how long it took."""
        seconds = self._device.seconds(work)
        left = self._start + seconds - self._clock()
        if left > 0:
            self._sleep(left)
        now = self._clock()
        self._record(seconds, now - self._start)
        self._model.observe(work, now - self._start)
        self._start = now

    def idle(self) -> None:
        self._busy = False
