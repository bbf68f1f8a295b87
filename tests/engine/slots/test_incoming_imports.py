"""Imports: the blocks that are complete when they end are cached."""

from __future__ import annotations

import pytest
import torch

from engine.ipc import messages as m
from engine.slots.incoming import RejectedSequence
from tests.engine.slots.copied_world import MakeEngine, World, assert_nothing_left, new_world


@pytest.fixture
def world(make_engine: MakeEngine) -> World:
    return new_world(make_engine)


def test_import_ends_after_its_frames_and_caches_them(world: World) -> None:
    assert world.import_(3) == (0, 4)
    for index in (2, 0, 1):
        world.ingest(3, index)
    end = m.EndImport(3, 3)
    world.incoming.wait(end)
    world.advance()
    assert world.apply() == []
    world.finish()
    assert world.apply() == [end]
    assert world.engine.scheduler.take_ended_imports() == [(3, 96)]
    assert_nothing_left(world)


def test_import_keeps_the_blocks_before_the_first_gap(world: World) -> None:
    world.import_(3)
    for index in (3, 0, 1):
        world.ingest(3, index)
        world.finish()
    world.incoming.wait(m.EndImport(3, 3))
    world.apply()
    assert world.engine.scheduler.take_ended_imports() == [(3, 64)]
    assert world.engine.manager.available == 64


def test_import_that_ends_early_caches_no_frame_in_flight(world: World) -> None:
    world.import_(3)
    world.ingest(3, 0)
    world.advance()
    world.device.fetches[0].finish()
    world.advance()
    world.ingest(3, 1)
    world.advance()
    world.engine.end_import(3)  # as the scheduler does for its pages
    assert world.engine.scheduler.take_ended_imports() == [(3, 32)]
    world.finish()
    assert len(world.device.scattered) == 1 and world.freed == [0, 1]
    assert_nothing_left(world)


def test_invalid_frame_of_an_import_keeps_the_blocks_before_it(world: World) -> None:
    world.frames[1] = torch.full_like(world.frames[1], 255)
    world.import_(3)
    for index in (0, 1, 2):
        world.ingest(3, index)
    world.finish()
    assert world.apply() == [RejectedSequence(3)]
    assert world.engine.scheduler.take_ended_imports() == [(3, 32)]
    assert [type(e) for e in world.events] == [m.ReceiveFailed]
    assert [f.piece for f in world.device.scattered] == world.pieces[:1]
