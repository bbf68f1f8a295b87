"""How fast KV comes while a receiver waits for it alone, and for how long receivers wait."""

from __future__ import annotations

import pytest

from kvtransfer.traffic import MEASURED_WAITS, MIN_MEASURED_BYTES, KVWaitMeter


class FakeLink:
    """A meter on a clock of its own, and the bytes that have come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.received = 0
        self.meter = KVWaitMeter(lambda: self.now)

    def wait(self, nbytes: int, seconds: float) -> None:
        with self.meter.waiting(lambda: self.received):
            self.now += seconds
            self.received += nbytes


def test_link_rate_is_the_best_of_the_recent_waits() -> None:
    link = FakeLink()
    assert link.meter.best_bytes_per_s is None
    link.wait(MIN_MEASURED_BYTES - 1, 1e-6)  # measures latency
    assert link.meter.best_bytes_per_s is None
    link.wait(10 << 20, 1.0)
    link.wait(5 << 20, 1.0)
    assert link.meter.best_bytes_per_s == pytest.approx(10 << 20)
    for _ in range(MEASURED_WAITS):
        link.wait(1 << 20, 1.0)
    assert link.meter.best_bytes_per_s == pytest.approx(1 << 20), "a link that has become slower"


def test_waiting_time_is_summed_over_the_receivers() -> None:
    link = FakeLink()
    first, second = (link.meter.waiting(lambda: 0) for _ in range(2))
    with first:
        link.now = 1.0
        with second:
            link.now = 3.0
            assert link.meter.waited_s == 1.0 + 2 * 2.0
        link.now = 4.0
    link.now = 9.0
    assert link.meter.waited_s == 6.0, "only while they wait"
    with pytest.raises(ValueError, match="broke"), link.meter.waiting(lambda: 1 << 30):
        raise ValueError("broke")
    assert link.meter.best_bytes_per_s is None, "a failed transfer measures no rate"
