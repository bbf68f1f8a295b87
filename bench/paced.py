"""Devices that are declared: how long each step of an engine is made to last, and whether it could.

A few cores cannot be many machines: another engine on them makes all the others slower. A paced
engine computes each step in truth, and then sleeps until the time is over that a declared device
would have taken. A step begins when the last one ended, unless the engine was idle in between, so
what an engine does between two steps belongs to the second. A step that was not ready in its time
is *late*; with few of those, the cluster behaves as one of such devices would.

    seconds = step + row*rows + kv_token*kv + prompt_token*u + prompt_pair*u*(m + u/2)

as in ``engine/step_time.py``.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.step_time import Coefficients, StepTimeModel, StepTimer, Work

VARIABLE = "BATON_BENCH_PACED"
"""Of the environment: a ``Device`` as JSON."""

TOLERANCE = 0.05
"""A step is late when it took so much longer than declared."""

_SUFFIX = ".tally"
_FIGURES = struct.Struct("=4d")


class Device(msgspec.Struct, frozen=True):
    """``coefficients`` in seconds; ``tallies``: the folder that tells of late steps."""

    coefficients: tuple[float, float, float, float, float]
    tallies: str

    @property
    def step_time(self) -> Coefficients:
        return Coefficients(*self.coefficients)

    def environment(self) -> dict[str, str]:
        """What a cluster's processes are to be started with."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def declared() -> Device:
    """Of the environment. Raises KeyError, msgspec.DecodeError."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Device)


class Lateness(NamedTuple):
    """Sums over steps: their number, those that were late, seconds as declared, and beyond."""

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


class Tally:
    """Lateness of one engine, in a mapped file: it outlives a kill."""

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


def own_tally(folder: Path) -> Tally:
    """Of this process."""
    return Tally(folder / f"{os.getpid()}{_SUFFIX}")


def lateness(folder: Path) -> Lateness:
    """Of all engines so far."""
    total = Lateness()
    for path in folder.glob(f"*{_SUFFIX}"):
        total = total.plus(Lateness(*_FIGURES.unpack(path.read_bytes())))
    return total


class PacedTimer(StepTimer):
    """Makes steps last as long as declared, and has ``model`` learn that."""

    def __init__(
        self,
        model: StepTimeModel,
        device: Coefficients,
        told: Callable[[float, float], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(model, clock)
        self._device = device
        self._told = told  # seconds: declared, taken
        self._sleep = sleep
        self._start = 0.0
        self._busy = False

    def begin(self) -> None:
        if not self._busy:
            self._start = self._clock()
        self._busy = True

    def end(self, work: Work, *, done: bool) -> None:
        """Return when the step is over."""
        seconds = self._device.seconds(work)
        left = self._start + seconds - self._clock()
        if left > 0:
            self._sleep(left)
        now = self._clock()
        self._told(seconds, now - self._start)
        self._model.observe(work, now - self._start)
        self._start = now

    def idle(self) -> None:
        self._busy = False
