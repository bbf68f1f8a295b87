"""Measures how long a device works, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class DeviceSpan:
    """The time from ``begin`` to ``end``. A GPU computes after the host has launched its work, so
    its own clock is read: events in the stream of the work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._host_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._on_gpu = False

    def clear(self) -> None:
        """Forget the last span: ``seconds`` is 0 until the next one ends."""
        self._host_s, self._on_gpu = 0.0, False

    def begin(self, device: torch.device) -> None:
        """Begin a span of work on ``device``."""
        self._began = self._clock()
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            if self._events is None:
                self._events = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
            self._events[0].record()

    def end(self) -> None:
        """End the span."""
        self._host_s = self._clock() - self._began
        if self._on_gpu and self._events is not None:
            self._events[1].record()

    @property
    def left_s(self) -> float:
        """Seconds for which a GPU worked on after the host had launched the span; 0 on a CPU."""
        return max(0.0, self.seconds - self._host_s)

    @property
    def seconds(self) -> float:
        """Seconds of the last span. On a GPU that has not completed the work yet, these are the
        seconds of launching it."""
        if not self._on_gpu or self._events is None or not self._events[1].query():
            return self._host_s
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1e3
