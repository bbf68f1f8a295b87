"""Credits of one transfer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.inbound_transfer import OPEN, START, Window


@given(total=st.integers(0, 40), data=st.data())
def test_every_frame_is_asked_for_once_and_few_at_a_time(total: int, data: st.DataObject) -> None:
    window = Window(total)
    asked = arrived = 0
    asked += window.to_ask()
    assert asked == min(START, total)
    while arrived < asked:
        for _ in range(asked - arrived):
            if data.draw(st.booleans()):
                window.granted()
        window.arrived()
        arrived += 1
        asked += window.to_ask()
        assert asked - arrived <= OPEN
    assert arrived == asked == total


def test_only_a_sender_with_a_credit_can_stall() -> None:
    now = 100.0
    window = Window(3, clock=lambda: now)
    assert window.to_ask() == 2
    now = 200.0
    assert window.stalled_s() == 0.0  # no slot was free yet: not the sender's fault
    window.granted()
    now = 203.0
    assert window.stalled_s() == 3.0
    window.granted()
    assert window.stalled_s() == 3.0
    window.arrived()
    assert window.stalled_s() == 0.0
    window.arrived()
    now = 300.0
    assert window.stalled_s() == 0.0
