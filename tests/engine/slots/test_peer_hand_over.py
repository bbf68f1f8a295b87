"""A sequence is handed over through the arena of the other worker, which is not trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from tests.engine.conftest import request
from tests.engine.slots.served import (
    FRAMES,
    PROMPT,
    ServedEngine,
    open_sequence,
    serving,
    shape_of,
)

MakeEngine = Callable[..., Engine]


def map_arena(decode: ServedEngine, prefill: ServedEngine, arena: int = 9) -> None:
    fd = prefill.arena.readonly_fd()
    decode.slot_sender.send_descriptor(fd)
    os.close(fd)
    layout = prefill.arena.layout
    decode.slot(m.MapArena(arena, layout.slot_bytes, layout.slots))


def read_slot(decode: ServedEngine, handle: int, frame: m.KVFrame, **changes: int) -> None:
    where = handle, frame.sequence, frame.slot, frame.piece, frame.nbytes, Codec.RAW
    arena = changes.get("arena", 9)
    generation = changes.get("generation", frame.generation)
    decode.slot(m.Ingest(*where, arena, generation, changes.get("checksum", frame.checksum)))


def test_hand_over_through_the_arena_of_the_other_worker(
    make_engine: MakeEngine, tiny_folder: Path, expected: list[int]
) -> None:
    source, engine = make_engine(), make_engine()
    with (
        serving(source, tiny_folder, shape_of(source)) as prefill,
        serving(engine, tiny_folder, shape_of(engine)) as decode,
    ):
        map_arena(decode, prefill)
        open_sequence(decode, 7)
        prefill.slot(m.Grant(1, 99))
        size = prefill.arena.shape.slot_bytes
        prefill.send(m.Prefill(1, request("1", PROMPT), size, Codec.RAW))
        for index in range(FRAMES):
            prefill.until(lambda index=index: len(prefill.frames(1)) > index)  # type: ignore[misc]
            frame = prefill.frames(1)[index]
            read_slot(decode, 7, frame)
            decode.until(lambda index=index: m.SlotRead(7, index) in decode.events)  # type: ignore[misc]
            prefill.slot(m.SlotsFree([frame.slot]))
        prefill.until(lambda: bool(prefill.tokens(1)))
        first = prefill.tokens(1)
        decode.send(m.Join(7, first[0], FRAMES))
        decode.until(lambda: len(first + decode.tokens(7)) == len(expected))
        assert first + decode.tokens(7) == expected
        assert len(decode.free) == 3 and not decode.of(m.SlotsFree)
        decode.slot(m.UnmapArena(9))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"generation": 4}, "filled again"),
        ({"checksum": 1}, "another checksum"),
        ({"arena": 8}, "not mapped"),
    ],
)
def test_frame_that_was_not_sent_so_fails_the_sequence(
    make_engine: MakeEngine, tiny_folder: Path, change: dict[str, int], why: str
) -> None:
    source, engine = make_engine(), make_engine()
    with (
        serving(source, tiny_folder, shape_of(source)) as prefill,
        serving(engine, tiny_folder, shape_of(engine)) as decode,
    ):
        map_arena(decode, prefill)
        open_sequence(decode, 7)
        prefill.slot(m.Grant(1, 1))
        size = prefill.arena.shape.slot_bytes
        prefill.send(m.Prefill(1, request("1", PROMPT), size, Codec.RAW))
        frame = prefill.wait(m.KVFrame, 1)
        read_slot(decode, 7, frame, **change)
        read_slot(decode, 7, frame)  # a later one is of no use, and is answered for
        failed = decode.wait(m.ReceiveFailed, 7)
        assert why in failed.why and failed.by_carrier == (why == "not mapped")
        decode.until(lambda: decode.events.count(m.SlotRead(7, 0)) == 2)
        assert len(decode.of(m.ReceiveFailed)) == 1
        decode.until(lambda: engine.manager.available == 64, "the pages")
