"""Frames in flight: when a slot is free, when a sequence goes on, and what a drop leaves behind."""

from __future__ import annotations

import pytest
import torch

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.slots.incoming import RejectedSequence
from protocol.errors import TransferFailed
from tests.engine.conftest import request
from tests.engine.slots.copied_world import (
    FRAMES,
    PROMPT,
    MakeEngine,
    World,
    assert_nothing_left,
    new_world,
)


@pytest.fixture
def world(make_engine: MakeEngine) -> World:
    return new_world(make_engine)


def test_join_waits_until_every_frame_is_in_its_pages(world: World) -> None:
    world.expect(1)
    world.ingest(1, 3)
    world.ingest(1, 1)
    world.advance()
    join = m.Join(1, world.first_token, FRAMES)
    world.incoming.wait(join)
    for index in (2, 0, 4):
        world.ingest(1, index)
    world.advance()
    world.device.fetches[0].finish()
    world.advance()
    assert world.apply() == [] and len(world.device.scattered) == 2
    world.device.fetches[1].finish()
    world.advance()
    assert world.apply() == [], "the last frame waits for staging memory"
    world.finish()
    assert world.apply() == [join]
    assert world.continued(1) == world.text
    assert sorted(world.freed) == [0, 1, 2, 3, 4]
    assert_nothing_left(world)


def test_join_that_comes_after_the_last_frame_is_released_at_once(world: World) -> None:
    world.expect(1)
    for index in range(FRAMES):
        world.ingest(1, index)
        world.finish()
    lease = world.engine.scheduler.sequences[1].lease
    assert lease is not None and lease.frames == FRAMES
    join = m.Join(1, world.first_token, FRAMES)
    world.incoming.wait(join)
    assert world.apply() == [join]


def test_join_comes_before_the_frames_that_were_sent_earlier(world: World) -> None:
    """The two sockets have no common order."""
    world.expect(1)
    join = m.Join(1, world.first_token, FRAMES)
    world.incoming.wait(join)
    for index in range(FRAMES):
        assert world.apply() == []
        world.ingest(1, index)
        world.finish()
    assert world.apply() == [join]


def test_slot_of_the_arena_is_free_when_its_frame_is_written(world: World) -> None:
    world.expect(1)
    world.ingest(1, 0)
    world.ingest(1, 1)
    world.advance()
    assert world.freed == []
    world.device.fetches[0].finish()
    world.advance()
    assert world.freed == [0, 1]
    world.slots.zero_()  # the front may fill the slots again
    for index in (2, 3, 4):
        world.ingest(1, index)
    world.finish()
    world.incoming.wait(m.Join(1, world.first_token, FRAMES))
    world.apply()
    assert world.continued(1) == world.text


def test_a_later_fetch_that_ends_first_waits_for_the_earlier_one(world: World) -> None:
    world.expect(1)
    for index in (0, 1):
        world.ingest(1, index)
        world.advance()
    world.device.fetches[1].finish()
    world.advance()
    assert world.freed == [] and world.device.scattered == []
    world.device.fetches[0].finish()
    world.advance()
    assert world.freed == [0, 1]
    assert [f.piece for f in world.device.scattered] == world.pieces[:2]


def test_frames_wait_for_staging_memory(make_engine: MakeEngine) -> None:
    world = new_world(make_engine, staging_slots=2)
    world.expect(1)
    for index in range(FRAMES):
        world.ingest(1, index)
    world.advance()
    world.advance()
    assert len(world.device.fetches) == 1 and world.incoming.queued == 3
    world.finish()
    assert world.freed == [0, 1, 2, 3, 4]
    assert_nothing_left(world)


def test_frames_wait_for_the_steps_before_their_pages_were_given(world: World) -> None:
    """A step that was launched before may still write to the pages. Other sequences go on."""
    world.device.steps_run = True
    world.expect(1)
    world.device.steps_run = False
    world.expect(2)
    world.ingest(1, 0, slot=5)
    world.ingest(2, 1, slot=6)
    world.advance()
    world.device.fetches[0].finish()
    world.advance()
    assert world.freed == [6] and world.incoming.queued == 1
    world.device.steps[0].finish()
    world.finish()
    assert world.freed == [6, 5]


def test_drop_frees_slots_exactly_once_wherever_the_frames_are(world: World) -> None:
    world.expect(1)
    for index in (0, 1):  # written
        world.ingest(1, index)
    world.advance()
    world.device.fetches[0].finish()
    world.advance()
    world.ingest(1, 2)  # being fetched
    world.advance()
    world.ingest(1, 3)  # queued
    world.incoming.wait(m.Join(1, 5, 4))
    world.engine.drop(1)
    world.advance()
    assert world.freed == [0, 1, 3]
    world.finish()
    world.ingest(1, 4)  # came too late
    world.finish()
    assert world.freed == [0, 1, 3, 2, 4] and world.events == [] and world.items == []
    assert len(world.device.scattered) == 2, "a dropped sequence has no pages to write"
    assert world.engine.manager.available == 64
    assert_nothing_left(world)


def test_dropped_sequences_are_forgotten(world: World) -> None:
    for handle in range(1, 20):
        world.expect(handle)
        world.ingest(handle, 0)
        world.engine.drop(handle)
        world.finish()
    assert world.incoming.sequences == 1


def test_frame_of_an_unknown_sequence_is_answered(world: World) -> None:
    world.ingest(9, 0)
    world.incoming.ingest(m.Ingest(9, 4, 0, world.pieces[0], 10, Codec.RAW, arena=3))
    world.finish()
    assert world.sent == [m.SlotsFree([0]), m.SlotRead(9, 4)]


def test_invalid_frame_ends_its_sequence_alone(world: World) -> None:
    world.frames.append(world.frames[1].clone())
    world.pieces.append(world.pieces[1])
    world.frames[5].view(torch.float32)[7] = float("nan")
    world.expect(1)
    world.expect(2)
    before = world.engine.pool.tensor.clone()  # type: ignore[attr-defined]
    for index in (0, 5, 2):
        world.ingest(1, index)
    world.ingest(2, 0, slot=7)
    world.incoming.wait(m.Join(1, world.first_token, 3))
    world.finish()
    [failed] = world.events
    assert isinstance(failed, m.ReceiveFailed)
    assert failed.handle == 1 and "not finite" in failed.why
    assert world.apply() == [RejectedSequence(1)], "and the Join is forgotten"
    assert 1 not in world.engine.scheduler.sequences and 2 in world.engine.scheduler.sequences
    assert world.freed == [0, 5, 2, 7]
    after = world.engine.pool.tensor  # type: ignore[attr-defined]
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    for index in (1, 2, 3, 4):
        world.ingest(2, index)
        world.finish()
    world.incoming.wait(m.Join(2, world.first_token, FRAMES))
    world.apply()
    assert world.continued(2) == world.text
    assert_nothing_left(world)


def test_invalid_frame_is_reported_as_the_pool_reports_it(world: World) -> None:
    bad = world.frames[0].clone()
    bad.view(torch.float32)[7] = 1e9
    world.frames[0] = bad
    world.expect(1)
    world.expect(2)
    with pytest.raises(TransferFailed) as refused:
        world.engine.write(2, world.pieces[0], bad)
    world.ingest(1, 0)
    world.finish()
    assert world.events == [m.ReceiveFailed(1, str(refused.value))]


@pytest.mark.parametrize(
    ("piece", "more_bytes"),
    [
        (KVPiece(0, 3, 1, 1), 4),  # another number of bytes
        (KVPiece(1, 3, 1, 1), 0),  # a layer too many
        (KVPiece(-1, 3, 1, 1), 0),
        (KVPiece(0, 3, -1, 1), 0),
        (KVPiece(0, 3, 40, 1), 0),  # a block without a page
        (KVPiece(0, 3, 1, 1, 1, 2), 0),  # more heads than there are
        (KVPiece(0, 3, 1, 1, 1, 0), 0),  # all heads, and not from the first one on
    ],
)
def test_frame_that_does_not_fit_touches_no_page(
    world: World, piece: KVPiece, more_bytes: int
) -> None:
    assert world.engine.format.layers == 3
    world.expect(1)
    nbytes = world.engine.format.piece_bytes(piece, Codec.RAW) + more_bytes
    world.incoming.ingest(m.Ingest(1, 0, 3, piece, nbytes, Codec.RAW))
    world.finish()
    [failed] = world.events
    assert isinstance(failed, m.ReceiveFailed) and "does not fit" in failed.why
    assert world.freed == [3] and not world.device.scattered


def test_cached_blocks_are_never_written(world: World) -> None:
    """Other sequences read them."""
    world.engine.generate(5, request("5", PROMPT, max_tokens=1))
    while plan := world.engine.plan():
        world.engine.run(plan)
    world.expect(1)
    world.ingest(1, 0)
    world.finish()
    assert [type(e) for e in world.events] == [m.ReceiveFailed] and not world.device.scattered
