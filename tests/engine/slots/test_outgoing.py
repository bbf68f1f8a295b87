"""Frames on their way out: order, staging memory, and the steps that compute their blocks."""

from __future__ import annotations

import pytest
import torch
import xxhash

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.slots.devices import arena_slots
from engine.slots.outgoing import ComputedBlocks, OutgoingFrames
from tests.engine.conftest import drain, request
from tests.engine.slots.copied_world import PROMPT, MakeEngine, World, new_world
from tests.engine.slots.fake_copies import FakeCopyDevice

SLOTS = 3


class Sending:
    """An engine that has computed PROMPT, and the frames that leave it."""

    def __init__(self, engine: Engine, pieces: list[KVPiece], staging_slots: int) -> None:
        self.engine = engine
        size = engine.format.piece_bytes(pieces[0], Codec.RAW)
        self.arena = Arena.create(ArenaShape(slot_bytes=size, inbound=1, outbound=SLOTS))
        self.slots = arena_slots(self.arena)
        self.device = FakeCopyDevice(engine, self.slots, staging_slots)
        self.device.batch = 2
        self.sent: list[m.Event] = []
        self.ended = False  # the step loop has said so, and the thread has not heard it yet
        self.outgoing = OutgoingFrames(
            engine.format, self.device, self.arena, self.slots, self.sent.append, self._hear_loop
        )
        engine.prefill(1, request("1", PROMPT, max_tokens=8))
        drain(engine)
        self.outgoing.queue.offer(1, lambda _: pieces, Codec.RAW)
        self.outgoing.queue.grant(1, len(pieces))

    def _hear_loop(self) -> None:
        if self.ended:
            self.outgoing.queue.end_by_loop(1)

    def publish(self) -> None:
        pages = self.engine.scheduler.sequences[1].pages
        self.outgoing.publish(ComputedBlocks(1, pages, 5, self.device.fence()))

    @property
    def frames(self) -> list[m.KVFrame]:
        return [event for event in self.sent if isinstance(event, m.KVFrame)]


@pytest.fixture
def world(make_engine: MakeEngine) -> World:
    return new_world(make_engine)


def sending(make_engine: MakeEngine, world: World, staging_slots: int = 4) -> Sending:
    return Sending(make_engine(), world.pieces, staging_slots)


def test_frame_is_sent_when_it_lies_in_its_slot(make_engine: MakeEngine, world: World) -> None:
    p = sending(make_engine, world)
    p.publish()
    p.outgoing.advance()
    p.outgoing.advance()
    assert len(p.device.gathers) == 2, "two batches are in flight"
    p.device.gathers[1].finish()
    p.outgoing.advance()
    assert p.sent == [], "frames of a transfer stay in order"
    slots = [1, 2, 3]
    assert [p.arena.generation(slot) % 2 for slot in slots] == [1, 1, 1], "they are being filled"
    p.device.gathers[0].finish()
    p.outgoing.advance()
    assert [f.sequence for f in p.frames] == [0, 1, 2]
    for frame, expected in zip(p.frames, world.frames, strict=False):
        data = p.slots[frame.slot][: frame.nbytes]
        assert torch.equal(data, expected)
        assert frame.checksum == xxhash.xxh3_64_intdigest(data.numpy().tobytes())
        assert frame.generation == p.arena.generation(frame.slot) == 2


def test_frames_leave_after_the_step_that_computes_them(
    make_engine: MakeEngine, world: World
) -> None:
    """On a GPU a step is still running when the loop has launched it."""
    p = sending(make_engine, world)
    p.device.steps_run = True
    p.publish()
    p.outgoing.advance()
    assert not p.device.gathers and p.outgoing.awaits_steps
    p.device.steps[0].finish()
    p.outgoing.advance()
    assert len(p.device.gathers) == 1 and not p.outgoing.awaits_steps


def test_slots_and_staging_memory_are_used_again(make_engine: MakeEngine, world: World) -> None:
    p = sending(make_engine, world, staging_slots=1)
    p.publish()
    received: list[torch.Tensor] = []
    while len(received) < len(world.frames):
        assert p.outgoing.advance()
        p.device.finish_all()
        p.outgoing.advance()
        for frame in p.frames[len(received) :]:
            received.append(p.slots[frame.slot][: frame.nbytes].clone())
            p.outgoing.queue.free([frame.slot])
    assert all(torch.equal(a, b) for a, b in zip(received, world.frames, strict=True))
    assert p.frames[-1].last and not any(f.last for f in p.frames[:-1])
    assert len({(f.slot, f.generation) for f in p.frames}) == len(p.frames)


def test_frame_whose_pages_may_be_used_again_is_not_sent(
    make_engine: MakeEngine, world: World
) -> None:
    p = sending(make_engine, world)
    p.publish()
    p.outgoing.advance()
    p.ended = True  # while the copy runs
    p.device.finish_all()
    p.outgoing.advance()
    assert p.sent == []
    p.outgoing.advance()
    p.outgoing.queue.end_by_front(1)
    p.outgoing.queue.offer(2, lambda _: world.pieces, Codec.RAW)
    p.outgoing.queue.grant(2, 9)
    pages = p.engine.scheduler.sequences[1].pages
    p.outgoing.publish(ComputedBlocks(2, pages, 5, p.device.fence()))
    while p.outgoing.advance():
        p.device.finish_all()
    assert len(p.frames) == SLOTS, "all slots are free for another transfer"
