"""Measures the share of the machine that processes other than the benchmark use."""

from __future__ import annotations

import contextlib
import time

import psutil


class OtherLoad:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._machine_s = _machine_seconds()
        self._own_s = _own_seconds()

    def cores(self) -> float:
        """Return how many cores other processes have used on average."""
        others_s = _machine_seconds() - self._machine_s - (_own_seconds() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._began))


def _machine_seconds() -> float:
    """Return the seconds that all cores have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its living children."""
    own = psutil.Process()
    found = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = process.cpu_times()
            found += times.user + times.system
    return found
