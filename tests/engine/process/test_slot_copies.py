"""Frames in flight: when a slot is free, when a sequence goes on, and what a drop leaves behind."""

from __future__ import annotations

import pytest
import torch

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.slot_copies import StreamedCopies
from protocol.errors import TransferFailed
from tests.engine.conftest import drain, request
from tests.engine.process.copied_world import (
    PROMPT,
    MakeEngine,
    World,
    assert_nothing_left,
    new_world,
)
from tests.engine.process.fake_copies import FakeCopyDevice, FakeSender


@pytest.fixture
def world(make_engine: MakeEngine) -> World:
    return new_world(make_engine)


def test_join_waits_until_every_frame_is_in_its_pages(world: World) -> None:
    world.expect(1)
    world.ingest(1, 0)
    world.ingest(1, 1)
    world.poll()
    for index in (2, 3):
        world.ingest(1, index)
    world.poll()
    join = m.Join(1, world.first_token)
    world.ingest(1, 4)
    assert world.copies.hold(join)
    world.poll()
    world.device.fetches[0].finish()
    assert world.poll().released == [] and len(world.device.scattered) == 2
    world.device.fetches[1].finish()
    assert world.poll().released == [], "the last frame waits for staging memory"
    world.device.scatters[0].finish()
    world.poll()
    world.device.fetches[2].finish()
    assert world.poll().released == [join]
    assert not world.copies.hold(join)
    assert world.continued(1) == world.text
    world.finish()
    assert sorted(world.freed) == [0, 1, 2, 3, 4]


def test_slot_of_the_arena_is_free_when_its_copy_is_complete(world: World) -> None:
    world.expect(1)
    world.ingest(1, 0)
    world.ingest(1, 1)
    world.poll()
    assert world.freed == []
    world.device.fetches[0].finish()
    assert world.inbound.deliver() == [m.SlotsFree([0, 1])]  # without the loop
    world.slots.zero_()  # the front may fill the slots again
    for index in (2, 3, 4):
        world.ingest(1, index)
    world.finish()
    assert world.continued(1) == world.text


def test_a_later_fetch_that_ends_first_waits_for_the_earlier_one(world: World) -> None:
    world.expect(1)
    for index in (0, 1):
        world.ingest(1, index)
        world.poll()
    world.device.fetches[1].finish()
    world.poll()
    assert world.freed == [] and world.device.scattered == []
    world.device.fetches[0].finish()
    world.poll()
    assert world.freed == [0, 1]
    assert [f.piece for f in world.device.scattered] == world.pieces[:2]
    assert len(world.device.scatters) == 1, "one launch for all that has come"


def test_frames_wait_for_staging_memory(make_engine: MakeEngine) -> None:
    world = new_world(make_engine, inbound_slots=2)
    world.expect(1)
    for index in range(5):
        world.ingest(1, index)
    world.poll()
    world.device.fetches[0].finish()
    world.poll()
    assert world.freed == [0, 1] and len(world.device.fetches) == 1
    assert world.copies.busy
    world.device.scatters[0].finish()  # only then may its staging slots be written again
    world.poll()
    assert len(world.device.fetches) == 2
    world.finish()
    assert world.freed == [0, 1, 2, 3, 4]
    assert world.continued(1) == world.text


def test_drop_frees_slots_exactly_once_wherever_the_frames_are(world: World) -> None:
    world.expect(1)
    for index in (0, 1):  # scattered
        world.ingest(1, index)
    world.poll()
    world.device.fetches[0].finish()
    world.poll()
    world.ingest(1, 2)  # being fetched
    world.poll()
    world.ingest(1, 3)  # queued
    assert world.copies.hold(m.Join(1, 5))
    assert not world.copies.hold(m.Drop(1))
    world.engine.drop(1)
    world.poll()
    assert world.freed == [0, 1, 3]
    world.finish()
    assert world.freed == [0, 1, 3, 2] and world.events == [] and world.released == []
    assert len(world.device.scattered) == 2, "a dropped sequence has no pages to write"
    assert world.engine.manager.available == 64
    assert_nothing_left(world)


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
    join = m.Join(1, world.first_token)
    assert world.copies.hold(join)
    world.poll()
    world.device.finish_all()
    progress = world.poll()
    [failed] = [e for e in progress.events if isinstance(e, m.ReceiveFailed)]
    assert failed.handle == 1 and "not finite" in failed.why
    assert 1 not in world.engine.scheduler.sequences and 2 in world.engine.scheduler.sequences
    assert progress.released == [join], "the server ignores it: its sequence is gone"
    assert world.freed == [0, 5, 2, 7]
    after = world.engine.pool.tensor  # type: ignore[attr-defined]
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    for index in (1, 2, 3, 4):
        world.ingest(2, index)
        world.finish()
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


def test_import_ends_after_its_frames_and_caches_them(world: World) -> None:
    wanted = request("fetch", PROMPT)
    assert world.engine.import_(3, wanted) == (0, 4)
    for index in (0, 1, 2):
        world.ingest(3, index)
    end = m.EndImport(3)
    assert world.copies.hold(end)
    world.poll()
    world.device.fetches[0].finish()
    assert world.poll().released == [end]
    world.engine.end_import(3)
    assert world.engine.scheduler.take_ended_imports() == [(3, 96)]
    world.finish()
    assert_nothing_left(world)


def test_import_that_ends_early_caches_no_frame_in_flight(world: World) -> None:
    assert world.engine.import_(3, request("fetch", PROMPT)) == (0, 4)
    world.ingest(3, 0)
    world.poll()
    world.device.fetches[0].finish()
    world.poll()
    world.ingest(3, 1)
    world.poll()
    world.engine.end_import(3)  # as the scheduler does for its pages
    assert world.engine.scheduler.take_ended_imports() == [(3, 32)]
    world.finish()
    assert len(world.device.scattered) == 1 and world.freed == [0, 1]
    assert_nothing_left(world)


def test_invalid_frame_of_an_import_keeps_the_blocks_before_it(world: World) -> None:
    world.frames[1] = torch.full_like(world.frames[1], 255)
    assert world.engine.import_(3, request("fetch", PROMPT)) == (0, 4)
    for index in (0, 1, 2):
        world.ingest(3, index)
    world.finish()
    assert world.engine.scheduler.take_ended_imports() == [(3, 32)]
    assert [type(e) for e in world.events] == [m.ReceiveFailed]
    assert [f.piece for f in world.device.scattered] == world.pieces[:1]


# ---- out of the pool ----------------------------------------------------------------------------


def test_frame_is_sent_when_it_lies_in_its_slot(world: World, make_engine: MakeEngine) -> None:
    source = make_engine()
    slots = torch.zeros_like(world.slots)
    device, sender = FakeCopyDevice(source, slots), FakeSender()
    copies = StreamedCopies(source, device, FakeSender(), sender)
    source.prefill(1, request("1", PROMPT, max_tokens=8))
    drain(source)
    batches = [[0, 1, 2], [3, 4]]
    sent: list[list[m.KVFrame]] = []
    for batch in batches:
        frames = []
        for index in batch:
            piece = world.pieces[index]
            nbytes = copies.fill_slot(1, piece, index, Codec.RAW)
            frames.append(m.KVFrame(1, index, index, piece, nbytes, last=index == 4))
        assert copies.offer(frames) == ()
        sent.append(frames)
    source.drop(1)  # its pages may be written by the next step, which comes after the gather
    source.pool.tensor.fill_(7.0)  # type: ignore[attr-defined]
    device.gathers[1].finish()
    assert sender.deliver() == [], "frames of a transfer stay in order"
    device.gathers[0].finish()
    assert sender.deliver() == sent[0] + sent[1]
    for index, frame in enumerate(world.frames):
        assert torch.equal(slots[index, : len(frame)], frame)
    assert not copies.busy
