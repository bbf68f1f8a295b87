"""Sequences arrive, fail, are dropped, join and decode, while copies end in any order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Phase
from tests.engine.conftest import drain
from tests.engine.process.copied_world import (
    SLOTS,
    World,
    assert_nothing_left,
    new_world,
)


@given(seed=st.integers(0, 10**6))
def test_no_slot_is_lost_or_freed_twice(tiny: DecoderModel, seed: int) -> None:
    """Sequences arrive, fail, are dropped, join and decode, while copies end in any order."""
    draw = random.Random(seed)
    world = random_world(tiny, draw.choice([1, 2, 4]))
    free_slots, given_out = list(range(SLOTS)), 0
    progress: dict[int, int] = {}  # next frame by handle
    handles = iter(range(1, 100))
    texts: dict[int, list[int]] = {}
    for _ in range(draw.randrange(10, 120)):
        action = draw.random()
        if action < 0.15 and len(progress) < 4:
            handle = next(handles)
            world.expect(handle)
            start = world.engine.scheduler.sequences[handle].cached // 32
            progress[handle] = start
        elif action < 0.45 and progress and free_slots:
            handle = draw.choice(list(progress))
            index = progress[handle]
            if index < 5:
                slot = free_slots.pop(draw.randrange(len(free_slots)))
                given_out += 1
                world.ingest(handle, index, slot)
                progress[handle] += 1
                if draw.random() < 0.05:
                    world.slots[slot] = 255
            elif not world.copies.hold(join := m.Join(handle, world.first_token)):
                world.released.append(join)
                del progress[handle]
            else:
                del progress[handle]
        elif action < 0.5 and progress:
            handle = draw.choice(list(progress))
            assert not world.copies.hold(m.Drop(handle))
            world.engine.drop(handle)
            del progress[handle]
        elif action < 0.8:
            started = world.device.fetches + world.device.scatters
            if waiting := [work for work in started if not work.is_done()]:
                draw.choice(waiting).finish()
        elif world.copies.busy:
            before = len(world.freed)
            world.poll()
            free_slots += world.freed[before:]
        settle(world, progress, texts)
    world.finish()
    settle(world, progress, texts)
    for handle, tokens in drain(world.engine).items():
        texts.setdefault(handle, []).extend(tokens)
    assert len(world.freed) == given_out
    assert len(set(free_slots)) == len(free_slots)
    assert_nothing_left(world)
    for text in texts.values():
        assert [world.first_token, *text] == world.text


def settle(world: World, progress: dict[int, int], texts: dict[int, list[int]]) -> None:
    """Apply what was released, forget what failed, and run a step."""
    for command in world.released:
        assert isinstance(command, m.Join)
        sequence = world.engine.scheduler.sequences.get(command.handle)
        if sequence is not None:
            assert sequence.phase is Phase.RECEIVING
            world.engine.join(command.handle, command.token)
    world.released.clear()
    for event in world.events:
        assert isinstance(event, m.ReceiveFailed)
        progress.pop(event.handle, None)
    world.events.clear()
    if plan := world.engine.plan():
        for token in world.engine.run(plan):
            texts.setdefault(token.handle, []).append(token.token)


_WORLDS: dict[str, World] = {}


def random_world(tiny: DecoderModel, inbound_slots: int) -> World:
    """Return a fresh world; the frames and the text are computed once."""
    from bench.lib.engines import engine_config
    from engine.scheduling.step_policy import plan_decode_step

    def make() -> Engine:
        sizes = engine_config(pages=64, max_batch=8, chunk=64, max_model_len=1024)
        return Engine(tiny, sizes, plan_decode_step)

    known = _WORLDS.setdefault("known", new_world(make))
    return World(make(), known.pieces, known.frames, known.first_token, known.text, inbound_slots)
