from __future__ import annotations

from router.pick import DecodeView, PrefillView, load, order_prefill, pick_decode


def decode(instance: str, **changes: int) -> DecodeView:
    view = DecodeView(instance, 0, 0, 0, 0, 1000, 1000, False)
    return view._replace(**changes)  # type: ignore[arg-type]


def test_own_work_is_not_counted_twice() -> None:
    assert load(decode("a", own=5, reported=7, own_at_report=4)) == 5 + 3
    assert load(decode("a", own=5, reported=2, own_at_report=4)) == 5


def test_the_least_loaded_decode_worker_takes_it() -> None:
    views = [decode("a", own=2), decode("b", own=0, reported=1), decode("c", own=3)]
    assert pick_decode(views, 10) == "b"


def test_queued_prompts_break_a_tie() -> None:
    assert pick_decode([decode("a", queued_tokens=9), decode("b")], 10) == "b"


def test_a_full_worker_comes_after_one_with_room_but_still_serves() -> None:
    full, busy = decode("a", kv_free=5), decode("b", own=9)
    assert pick_decode([full, busy], 10) == "b"
    assert pick_decode([full], 10) == "a"


def test_a_worker_that_failed_this_request_is_the_last_resort() -> None:
    views = [decode("a"), decode("b", own=9, kv_free=1)]
    assert pick_decode(views, 10, {"a"}) == "b"
    assert pick_decode(views[:1], 10, {"a"}) == "a"


def test_a_draining_worker_takes_nothing() -> None:
    assert pick_decode([decode("a", draining=True)], 10) is None


def test_prefill_workers_by_outstanding_tokens_at_most_three() -> None:
    views = [
        PrefillView("a", 100, 0, False),
        PrefillView("b", 0, 50, False),
        PrefillView("c", 0, 0, True),
        PrefillView("d", 0, 10, False),
        PrefillView("e", 500, 0, False),
    ]
    assert order_prefill(views) == ["d", "b", "a"]
