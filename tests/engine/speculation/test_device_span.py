"""The time of a GPU's work is read from its own clock, and never waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.speculation.device_span import DeviceSpan


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class DeviceEvent:
    """An event of a GPU that begins a span's work at 10 ms and completes it after 4 ms."""

    passed = False
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        DeviceEvent.recorded += 1
        self.at_ms = 10.0 + 4.0 * ((DeviceEvent.recorded - 1) % 2)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: DeviceEvent) -> float:
        return end.at_ms - self.at_ms


def test_a_span_on_a_cpu_is_measured_by_the_clock() -> None:
    clock = Clock()
    span = DeviceSpan(clock)
    assert span.seconds == 0.0
    span.begin(torch.device("cpu"))
    clock.now = 0.25
    span.end()
    clock.now = 9.0
    assert span.seconds == 0.25 and span.left_s == 0.0
    span.clear()
    assert span.seconds == span.left_s == 0.0


def test_a_span_on_a_gpu_is_measured_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    event: Any = DeviceEvent
    monkeypatch.setattr(torch.cuda, "Event", event)
    clock = Clock()
    span = DeviceSpan(clock)
    for _ in range(2):
        monkeypatch.setattr(DeviceEvent, "passed", False)
        span.begin(torch.device("cuda"))
        clock.now += 0.001
        span.end()
        assert span.seconds == pytest.approx(0.001)  # launched, not completed
        assert span.left_s == 0.0
        monkeypatch.setattr(DeviceEvent, "passed", True)
        assert span.seconds == pytest.approx(0.004)
        assert span.left_s == pytest.approx(0.003)  # after it was launched
    span.clear()
    assert span.seconds == 0.0
