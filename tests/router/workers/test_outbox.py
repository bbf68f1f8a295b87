"""Submits and cancels that wait to be written keep their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.wire import wire_pb2 as pb
from router.workers import outbox as outbox_module
from router.workers.outbox import Outbox


def submit(name: str, tokens: int = 1) -> pb.Submit:
    return pb.Submit(request=pb.Request(id=name, prompt=[100_000] * tokens))


def test_a_cancel_never_overtakes_its_submit_however_much_waits() -> None:
    """Over 4 MiB in front: the submit stays behind, and once went out after its cancel."""
    outbox = Outbox()
    for i in range(40):
        outbox.submit(submit(str(i), 100_000))  # 300 kB each
    for i in range(20, 37):
        outbox.cancel(str(i))
    sent: list[str] = []
    cancelled: list[str] = []
    while outbox:
        message = outbox.next_message()
        sent += [s.request.id for s in message.submit]
        cancelled += message.cancel
    assert sent == [str(i) for i in (*range(20), *range(37, 40))]
    assert not cancelled, "the worker never hears of what was cancelled before it was written"


def test_cancels_of_written_submits_wait_for_no_other_submit() -> None:
    outbox = Outbox()
    outbox.submit(submit("written"))
    outbox.next_message()
    for i in range(40):
        outbox.submit(submit(str(i), 100_000))
    outbox.cancel("written")
    assert list(outbox.next_message().cancel) == ["written"]


def test_a_submit_larger_than_a_message_goes_alone() -> None:
    outbox = Outbox()
    for name, tokens in (("small", 1), ("large", 2_000_000), ("next", 1)):
        outbox.submit(submit(name, tokens))
    messages = [[s.request.id for s in outbox.next_message().submit] for _ in range(3)]
    assert messages == [["small"], ["large"], ["next"]]
    assert not outbox


@given(st.lists(st.sampled_from(["submit", "cancel", "write"]), max_size=60), st.randoms())
def test_the_worker_computes_exactly_what_was_not_cancelled(ops: list[str], random: object) -> None:
    outbox, names, live = Outbox(), iter(map(str, range(1000))), set()
    at_worker: set[str] = set()
    outbox_module.MESSAGE_BYTES, limit = 60, outbox_module.MESSAGE_BYTES
    try:
        for op in [*ops, *["write"] * len(ops)]:
            if op == "submit":
                outbox.submit(submit(name := next(names), 3))
                live.add(name)
            elif op == "cancel" and live:
                outbox.cancel(name := random.choice(sorted(live)))  # type: ignore[attr-defined]
                live.discard(name)
            elif op == "write":
                message = outbox.next_message()  # as decode_worker/service.py reads it
                at_worker |= {s.request.id for s in message.submit}
                assert at_worker >= set(message.cancel)
                at_worker -= set(message.cancel)
    finally:
        outbox_module.MESSAGE_BYTES = limit
    assert at_worker == live and not outbox


def test_a_stream_that_ends_names_what_was_never_written() -> None:
    outbox = Outbox()
    outbox.submit(submit("written"))
    outbox.next_message()
    outbox.submit(submit("waiting"))
    assert outbox.clear() == {"waiting"}
    assert not outbox
