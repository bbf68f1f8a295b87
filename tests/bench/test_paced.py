"""Steps that last as long as a declared device's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.paced import (
    VARIABLE,
    Device,
    Lateness,
    LatenessFile,
    PacedTimer,
    declared,
    lateness,
    open_lateness_file,
)
from engine.scheduling.step_time import StepTimeModel
from protocol.performance.step_model import StepModel, StepWork

DEVICE = StepModel(0.03, 3e-3, 2e-6, 1e-3, 1e-7)
FOUR = StepWork(4, 1000)


class Time:
    """Passes when somebody computes or sleeps; ``oversleeps``: a sleep is so much longer."""

    def __init__(self, oversleeps: float = 0.0) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._oversleeps = oversleeps

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self._oversleeps


def timer(time: Time, model: StepTimeModel) -> tuple[PacedTimer, list[tuple[float, float]]]:
    told: list[tuple[float, float]] = []

    def note(declared_s: float, took_s: float) -> None:
        told.append((declared_s, took_s))

    return PacedTimer(model, DEVICE, note, time, time.sleep), told


def test_a_step_is_stretched_to_what_is_declared() -> None:
    time = Time()
    paced, told = timer(time, StepTimeModel())
    paced.begin()
    time.now += 0.01
    paced.end(FOUR, done=True)
    seconds = DEVICE.seconds(FOUR)
    assert seconds == pytest.approx(0.03 + 4 * 3e-3 + 1000 * 2e-6)
    assert time.slept == [pytest.approx(seconds - 0.01)]
    assert told[0] == pytest.approx((seconds, seconds))


def test_what_lies_between_two_steps_belongs_to_the_second_unless_it_was_idle() -> None:
    time = Time()
    paced, told = timer(time, StepTimeModel())
    for pause in ("busy", "idle"):
        paced.begin()
        paced.end(FOUR, done=True)
        time.now += 0.02
        if pause == "idle":
            paced.idle()
    paced.begin()
    paced.end(FOUR, done=True)
    seconds = DEVICE.seconds(FOUR)
    assert time.slept == [pytest.approx(s) for s in (seconds, seconds - 0.02, seconds)]
    assert [took for _, took in told] == [pytest.approx(seconds)] * 3


def test_a_step_that_takes_longer_is_told_and_not_slept_through() -> None:
    time = Time()
    paced, told = timer(time, StepTimeModel())
    paced.begin()
    time.now += 0.2
    paced.end(FOUR, done=True)
    assert time.slept == []
    assert told[0] == pytest.approx((DEVICE.seconds(FOUR), 0.2))


def test_the_engines_model_learns_the_declared_device() -> None:
    model, time = StepTimeModel(), Time()
    paced, _ = timer(time, model)
    for i in range(200):
        paced.begin()
        time.now += 0.001
        chunk = 64 * (i % 3)
        paced.end(StepWork(i % 7, 90 * (i % 5), chunk, chunk * chunk / 2), done=True)
    assert model.known is not None
    for work in (FOUR, StepWork(0, 0, 128, 128 * 64), StepWork(8, 4000)):
        assert model.known.seconds(work) == pytest.approx(DEVICE.seconds(work), rel=0.05)


def test_tallies_of_all_engines_are_added_up_and_late_is_beyond_the_tolerance(
    tmp_path: Path,
) -> None:
    for lateness_file in (
        open_lateness_file(tmp_path),
        LatenessFile(tmp_path / "another.lateness"),
    ):
        for took in (0.1, 0.104, 0.15):
            lateness_file.step(0.1, took)
    found = lateness(tmp_path)
    assert found == pytest.approx(Lateness(6, 2, 0.6, 2 * 0.054))
    assert found.late_share == pytest.approx(1 / 3)
    assert found.excess_share == pytest.approx(0.18)
    assert found.since(found) == Lateness()
    assert Lateness().late_share == Lateness().excess_share == 0.0


def test_a_device_goes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device((0.03, 3e-3, 2e-6, 1e-3, 1e-7), "/tmp/tallies")
    monkeypatch.setenv(VARIABLE, device.environment()[VARIABLE])
    assert declared() == device
    assert declared().step_time == DEVICE
