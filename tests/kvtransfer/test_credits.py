"""Flow control of one transfer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.receiver import CREDITS_AT_START, CREDITS_WHILE_FLOWING, CreditWindow


@given(total=st.integers(0, 40), data=st.data())
def test_every_slot_is_requested_once_and_few_at_a_time(total: int, data: st.DataObject) -> None:
    window = CreditWindow(total)
    requested = arrived = 0
    requested += window.request_slots()
    assert requested == min(CREDITS_AT_START, total)
    while arrived < requested:
        for _ in range(requested - arrived):
            if data.draw(st.booleans()):
                window.granted()
        window.arrived()
        arrived += 1
        requested += window.request_slots()
        assert requested - arrived <= CREDITS_WHILE_FLOWING
    assert arrived == requested == total


def test_only_a_sender_that_holds_a_credit_counts_as_stalled() -> None:
    now = 100.0
    window = CreditWindow(3, clock=lambda: now)
    assert window.request_slots() == 2
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
