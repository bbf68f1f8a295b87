"""Which transfer gets the next slot, and when a transfer is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.kv_format import Codec, KVPiece
from engine.slots.egress import EgressQueue, OutgoingFrame

PAGES = list(range(100, 300))


def pieces_of(blocks: int) -> list[KVPiece]:
    return [KVPiece(0, 1, block, 1) for block in range(blocks)]


def split(blocks: int) -> Callable[[int], list[KVPiece]]:
    return lambda first: pieces_of(blocks)[first:]


def new_queue(slots: int, *handles: int, blocks: int = 8, computed: int = 8) -> EgressQueue:
    """Return a queue with transfers that are granted all their frames."""
    queue = EgressQueue(range(slots))
    for handle in handles:
        queue.offer(handle, split(blocks), Codec.RAW)
        queue.grant(handle, blocks)
        queue.publish(handle, PAGES, computed)
    return queue


def take_all(queue: EgressQueue) -> list[OutgoingFrame]:
    taken = []
    while (frame := queue.take()) is not None:
        taken.append(frame)
    return taken


def test_slow_receiver_does_not_delay_other_transfers() -> None:
    queue = new_queue(4, 1, 2)
    first = take_all(queue)
    assert [f.handle for f in first] == [1, 2, 1, 2]
    queue.free([first[0].slot])
    assert [(f.handle, f.sequence) for f in take_all(queue)] == [(1, 2)]


def test_transfers_that_wait_for_their_first_block_take_no_share() -> None:
    """40 were started; the one that is computed gets all slots."""
    queue = new_queue(8, *range(1, 41), blocks=200, computed=0)
    queue.publish(17, PAGES, 200)
    sent: list[OutgoingFrame] = []
    while frames := take_all(queue):
        assert len(frames) == 8 and {f.handle for f in frames} == {17}
        sent += frames
        queue.free([f.slot for f in frames])
    assert [f.sequence for f in sent] == list(range(200)) and sent[-1].last


def test_a_transfer_that_holds_slots_keeps_its_share() -> None:
    queue = new_queue(4, 1)
    held = take_all(queue)
    assert len(held) == queue.held == 4
    queue.offer(2, split(8), Codec.RAW)
    queue.grant(2, 8)
    queue.publish(2, PAGES, 8)
    queue.free([held[0].slot, held[1].slot])
    assert queue.held == 2
    assert [f.handle for f in take_all(queue)] == [2, 2], "1 holds its half"


def test_frame_names_the_pages_of_its_blocks() -> None:
    queue = EgressQueue([5])
    queue.offer(1, lambda _: [KVPiece(2, 3, 4, 2)], Codec.FP8)
    queue.grant(1, 1)
    queue.publish(1, PAGES, 5)
    assert queue.take() is None, "one of its two blocks is computed"
    queue.publish(1, PAGES, 6)
    piece = KVPiece(2, 3, 4, 2)
    assert queue.take() == OutgoingFrame(1, 0, 5, piece, [104, 105], Codec.FP8, last=True)


def test_grants_may_come_before_the_offer_and_after_its_end() -> None:
    queue = EgressQueue(range(4))
    queue.grant(1, 2)
    assert queue.take() is None
    queue.offer(1, split(3), Codec.RAW)
    queue.publish(1, PAGES, 3)
    assert [f.sequence for f in take_all(queue)] == [0, 1]
    queue.end_by_loop(1)
    queue.grant(1, 5)
    assert queue.take() is None and queue.transfers == 1
    queue.end_by_front(1)
    assert queue.transfers == 0


def test_front_that_ends_a_transfer_before_its_offer_gets_no_frame() -> None:
    queue = EgressQueue(range(4))
    queue.grant(1, 2)
    queue.end_by_front(1)
    queue.offer(1, split(3), Codec.RAW)
    queue.publish(1, PAGES, 3)
    assert queue.take() is None and queue.transfers == 1
    queue.end_by_loop(1)
    assert queue.transfers == 0


def test_slots_of_a_forgotten_transfer_come_back() -> None:
    queue = new_queue(2, 1)
    held = take_all(queue)
    queue.end_by_loop(1)
    queue.end_by_front(1)
    queue.free([f.slot for f in held])
    queue.offer(2, split(2), Codec.RAW)
    queue.grant(2, 2)
    queue.publish(2, PAGES, 2)
    assert len(take_all(queue)) == 2


@given(data=st.data())
def test_every_transfer_ends_and_none_holds_more_than_its_share(data: st.DataObject) -> None:
    """Calls come in any order; at the end all frames were sent, each once and in order."""
    slots = data.draw(st.integers(1, 6))
    queue = EgressQueue(range(slots))
    blocks: list[int] = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    calls = [(kind, h) for h in range(len(blocks)) for kind in ("offer", "grant", "publish")]
    held: list[OutgoingFrame] = []
    sent: list[OutgoingFrame] = []
    order = data.draw(st.permutations(calls))
    picks = data.draw(st.randoms())
    for kind, handle in order:
        if kind == "offer":
            queue.offer(handle, split(blocks[handle]), Codec.RAW)
        elif kind == "grant":
            queue.grant(handle, blocks[handle])
        else:
            queue.publish(handle, PAGES, blocks[handle])
        while picks.random() < 0.5 and (frame := queue.take()) is not None:
            held.append(frame)
        if held and picks.random() < 0.5:
            frame = held.pop(picks.randrange(len(held)))
            queue.free([frame.slot])
            sent.append(frame)
    for handle, count in enumerate(blocks):  # publications before the offer were of no use
        queue.publish(handle, PAGES, count)
    while (frame := queue.take()) is not None or held:
        held += [frame] if frame is not None else []
        queue.free([held[0].slot])
        sent.append(held.pop(0))
    for handle, count in enumerate(blocks):
        sequences = sorted(f.sequence for f in sent if f.handle == handle)
        assert sequences == list(range(count))
        queue.end_by_front(handle)
        queue.end_by_loop(handle)
    assert queue.transfers == 0


@pytest.mark.parametrize("offered_first", [True, False])
def test_what_the_receiver_has_is_left_out(offered_first: bool) -> None:
    queue = EgressQueue(range(4))
    if offered_first:
        queue.offer(1, split(5), Codec.RAW)
    queue.skip(1, 3)
    if not offered_first:
        queue.offer(1, split(5), Codec.RAW)
    queue.grant(1, 5)
    queue.publish(1, PAGES, 5)
    assert [(f.sequence, f.piece.block, f.last) for f in take_all(queue)] == [
        (0, 3, False),
        (1, 4, True),
    ]


def test_a_frame_that_was_sent_cannot_be_skipped() -> None:
    queue = new_queue(1, 1, blocks=3)
    assert queue.take() is not None
    queue.skip(1, 2)
    queue.free([0])
    frame = queue.take()
    assert frame is not None and frame.piece.block == 1
