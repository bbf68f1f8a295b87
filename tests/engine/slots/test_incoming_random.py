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
from tests.engine.slots.copied_world import FRAMES, SLOTS, World, assert_nothing_left, new_world


@given(seed=st.integers(0, 10**6))
def test_no_slot_is_lost_or_freed_twice(tiny: DecoderModel, seed: int) -> None:
    draw = random.Random(seed)
    world = random_world(tiny, draw.choice([1, 2, 4]))
    free_slots, given_out = list(range(SLOTS)), 0
    missing: dict[int, list[int]] = {}  # frames that were not given, by handle
    counts: dict[int, int] = {}
    handles = iter(range(1, 100))
    texts: dict[int, list[int]] = {}
    for _ in range(draw.randrange(10, 120)):
        action = draw.random()
        if action < 0.15 and len(missing) < 4:
            handle = next(handles)
            world.device.steps_run = draw.random() < 0.3
            world.expect(handle)
            start = world.engine.scheduler.sequences[handle].cached // 32
            missing[handle] = draw.sample(range(start, FRAMES), FRAMES - start)
            counts[handle] = len(missing[handle])
        elif action < 0.45 and missing and free_slots:
            handle = draw.choice(list(missing))
            if missing[handle]:
                slot = free_slots.pop(draw.randrange(len(free_slots)))
                given_out += 1
                world.ingest(handle, missing[handle].pop(), slot)
                if draw.random() < 0.05:
                    world.slots[slot] = 255
            else:
                world.incoming.wait(m.Join(handle, world.first_token, counts[handle]))
                del missing[handle]
        elif action < 0.5 and missing:
            handle = draw.choice(list(missing))
            world.engine.drop(handle)
            del missing[handle]
        elif action < 0.8:
            started = world.device.fetches + world.device.steps
            if waiting := [work for work in started if not work.is_done()]:
                draw.choice(waiting).finish()
        else:
            before = len(world.freed)
            world.advance()
            free_slots += world.freed[before:]
        settle(world, missing, texts)
    world.finish()
    settle(world, missing, texts)
    for handle, tokens in drain(world.engine).items():
        texts.setdefault(handle, []).extend(tokens)
    assert len(world.freed) == given_out
    assert len(set(free_slots)) == len(free_slots)
    assert_nothing_left(world)
    for text in texts.values():
        assert [world.first_token, *text] == world.text


def settle(world: World, missing: dict[int, list[int]], texts: dict[int, list[int]]) -> None:
    """Apply what was released, forget what failed, and run a step."""
    for item in world.items:
        sequence = world.engine.scheduler.sequences.get(item.handle)
        assert sequence is None or sequence.phase is Phase.RECEIVING
        if not isinstance(item, m.Join):
            missing.pop(item.handle, None)
    world.apply()
    if plan := world.engine.plan():
        for token in world.engine.run(plan):
            texts.setdefault(token.handle, []).append(token.token)


_WORLDS: dict[str, World] = {}


def random_world(tiny: DecoderModel, staging_slots: int) -> World:
    """Return a fresh world; the frames and the text are computed once."""
    from bench.lib.engines import engine_config
    from engine.scheduling.step_policy import plan_decode_step

    def make() -> Engine:
        sizes = engine_config(pages=64, max_batch=8, chunk=64, max_model_len=1024)
        return Engine(tiny, sizes, plan_decode_step)

    known = _WORLDS.setdefault("known", new_world(make))
    return World(make(), known.pieces, known.frames, known.first_token, known.text, staging_slots)
