"""Flow control: which transfer gets the next slot, and whose silence counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.ipc.shared_memory import ArenaShape
from kvtransfer.credits import CreditWindow, InboundSlots, choose_transfer

SLOTS = 32


def window(total: int = 200, due: int = 0) -> CreditWindow:
    made = CreditWindow(total)
    made.set_due(due)
    return made


def granted(windows: list[CreditWindow], slots: int = SLOTS) -> list[int]:
    """Grant all free slots; return how many each transfer holds."""
    for _ in range(slots - sum(window.held for window in windows)):
        if (chosen := choose_transfer(windows, slots)) is None:
            break
        chosen.grant()
    return [window.held for window in windows]


def test_idle_transfers_hold_one_slot_each_and_half_of_all_at_most() -> None:
    assert granted([window() for _ in range(5)]) == [1] * 5
    assert sum(granted([window() for _ in range(40)])) == SLOTS // 2


def test_the_one_of_40_that_is_computed_gets_the_slots() -> None:
    windows = [window() for _ in range(40)]
    assert sum(granted(windows)) == 16
    windows[-1].set_due(200)
    held = granted(windows)
    assert held[-1] == 16 and sum(held[:-1]) == 16, "it had none, and the others hold on"
    assert granted([*(window() for _ in range(39)), window(due=200)])[-1] == 16


def test_flowing_transfers_share_equally_and_none_takes_more_than_half() -> None:
    assert granted([window(due=200) for _ in range(4)]) == [8] * 4
    assert granted([window(due=200), window(total=3, due=3)]) == [16, 3]
    assert granted([window(due=200), window(due=200), window(due=2)]) == [15, 15, 2]
    many = granted([window(due=200) for _ in range(20)])
    assert set(many) == {1, 2} and sum(many) == SLOTS


@given(
    totals=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), max_size=12),
    slots=st.integers(1, 40),
)
def test_no_transfer_holds_more_than_its_frames_or_share(
    totals: list[tuple[int, int]], slots: int
) -> None:
    windows = [window(total, due) for total, due in totals]
    held = granted(windows, slots)
    for w, count in zip(windows, held, strict=True):
        assert count <= min(w.total, max(1, w.due), max(1, slots // 2))
    assert sum(held) <= slots
    flowing = [(w.due, count) for w, count in zip(windows, held, strict=True) if w.due]
    for due, count in flowing:  # who has less than another one has all that it can use
        assert count == min(due, slots // 2 or 1) or all(other <= count + 1 for _, other in flowing)


def test_only_a_sender_with_a_credit_and_a_due_frame_counts_as_stalled() -> None:
    now = 100.0
    made = CreditWindow(3, clock=lambda: now)
    made.grant()
    now = 200.0
    assert made.stalled_s() == 0.0, "its prompt waits to be computed"
    made.set_due(2)
    now = 203.0
    assert made.stalled_s() == 3.0 and made.starved_s() == 0.0
    made.arrive()
    now = 204.0
    assert made.stalled_s() == 0.0 and made.starved_s() == 1.0, "no slot is free here"
    made.grant()
    now = 206.0
    assert made.stalled_s() == 2.0
    made.arrive()
    now = 300.0
    assert made.stalled_s() == made.starved_s() == 0.0, "the rest is not computed yet"
    made.set_due(9)
    made.grant()
    assert made.due == 3 and made.stalled_s() == 0.0
    made.set_due(1)
    assert made.due == 3, "it never falls"


def test_slots_go_round() -> None:
    arena = SimpleNamespace(shape=ArenaShape(inbound=8))
    session: Any = SimpleNamespace(inbound=list(range(8)), on_inbound_free=None, arena=arena)
    slots = InboundSlots(session)
    got: dict[str, list[int]] = {"a": [], "b": []}
    first, second = window(total=20, due=20), window(total=20, due=20)
    slots.add(first, got["a"].append)
    assert len(got["a"]) == 4
    slots.add(second, got["b"].append)
    assert len(got["b"]) == 4 and not session.inbound
    first.arrive()
    session.inbound.append(got["a"][0])
    session.on_inbound_free()
    assert (len(got["a"]), len(got["b"])) == (5, 4), "the one that holds fewer"
    slots.remove(first)
    slots.release(got["a"][1:])
    assert len(session.inbound) == 4, "the second one has half of them"
    second.arrive()
    slots.serve()
    assert len(got["b"]) == 5 and len(session.inbound) == 3
