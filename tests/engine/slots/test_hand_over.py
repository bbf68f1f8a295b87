"""Two engine servers hand sequences over through their slots, beside their steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_format import Codec
from engine.kv_cache.kv_frames import FrameCopy
from engine.scheduling.step_policy import StepPlan
from engine.slots.devices import CpuCopies
from protocol.errors import EngineDied
from tests.engine.conftest import drain, request
from tests.engine.grammars import regex
from tests.engine.slots.served import (
    FRAMES,
    PROMPT,
    ServedEngine,
    open_sequence,
    prefill_frames,
    serving,
    shape_of,
)

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize("seed", range(3))
def test_text_after_a_hand_over_is_the_same_whatever_the_order_of_the_frames(
    make_engine: MakeEngine, tiny_folder: Path, expected: list[int], seed: int
) -> None:
    source = make_engine()
    with serving(source, tiny_folder, shape_of(source)) as prefill:
        frames = prefill_frames(prefill, 1)
        first = prefill.tokens(1)
        prefill.until(lambda: source.manager.available == 64, "its blocks")
    assert [f.sequence for f, _ in frames] == list(range(FRAMES))
    random.Random(seed).shuffle(frames)
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as decode:
        open_sequence(decode, 7)
        early = seed == 1  # Join may be applied before the last frame was read
        if early:
            decode.send(m.Join(7, first[0], FRAMES))
        for frame, payload in frames:
            decode.put(7, frame, payload)
        if not early:
            decode.send(m.Join(7, first[0], FRAMES))
        decode.until(lambda: len(first + decode.tokens(7)) == len(expected))
        decode.until(lambda: len(decode.free) == 3, "all slots")
        assert first + decode.tokens(7) == expected
        assert m.Joined(7) in decode.events
    assert engine.manager.available == 64


def test_frames_are_copied_while_a_step_runs(
    make_engine: MakeEngine, tiny_folder: Path, sent: list[tuple[m.KVFrame, bytes]]
) -> None:
    """The loop stands still in a step; frames leave and arrive all the same."""
    engine = make_engine()
    shape = shape_of(engine)
    in_step, go_on = threading.Event(), threading.Event()
    run = engine.run

    def run_slowly(plan: StepPlan) -> list[TokenOut]:
        drawn = run(plan)
        if any(s.handle == 9 for s in plan.decode):
            in_step.set()
            assert go_on.wait(20)
        return drawn

    engine.run = run_slowly  # type: ignore[method-assign]
    with serving(engine, tiny_folder, shape) as served:
        open_sequence(served, 7)
        served.send(m.Prefill(1, request("1", PROMPT[::-1]), shape.slot_bytes, Codec.RAW))
        served.until(lambda: bool(served.tokens(1)))
        served.send(m.Generate(9, request("9", [5] * 40)))
        assert in_step.wait(20)
        served.slot(m.Grant(1, FRAMES))
        served.until(lambda: len(served.frames(1)) == 2, "frames in both slots")
        served.slot(m.SlotsFree([f.slot for f in served.frames(1)]))
        served.until(lambda: len(served.frames(1)) == 4)
        for frame, payload in sent:
            served.put(7, frame, payload)
        served.until(lambda: len(served.free) == 3, "all slots")
        lease = engine.scheduler.sequences[7].lease
        assert lease is not None and lease.frames == FRAMES
        go_on.set()
        served.send(m.Drop(7), m.Drop(1))


def test_other_sequences_go_on_while_a_frame_is_copied(
    make_engine: MakeEngine, tiny_folder: Path, sent: list[tuple[m.KVFrame, bytes]]
) -> None:
    engine = make_engine()
    shape = shape_of(engine)
    copying, go_on = threading.Event(), threading.Event()

    class SlowCopies(CpuCopies):
        def scatter(self, frame: FrameCopy) -> None:
            copying.set()
            assert go_on.wait(20)
            super().scatter(frame)

    def slow(_arena: Arena) -> SlowCopies:
        return SlowCopies(engine.pool, torch.zeros(1, shape.slot_bytes, dtype=torch.uint8))

    with serving(engine, tiny_folder, shape, slow) as decode:
        open_sequence(decode, 7)
        for frame, payload in sent[:2]:
            decode.put(7, frame, payload)
        decode.send(m.Join(7, 5, 2))
        assert copying.wait(20)
        decode.send(m.Generate(2, request("2", [9] * 40, max_tokens=6)))
        decode.until(lambda: len(decode.tokens(2)) == 6, "no step waits for a copy")
        assert len(decode.free) == 1 and not decode.of(m.Joined)
        go_on.set()
        decode.wait(m.Joined, 7)
        decode.until(lambda: len(decode.free) == 3)


def test_computed_chunks_are_told_before_the_last(
    make_engine: MakeEngine, tiny_folder: Path
) -> None:
    engine = make_engine()  # chunks of 64 tokens
    with serving(engine, tiny_folder, shape_of(engine)) as prefill:
        prefill_frames(prefill, 1)
        assert [e.tokens for e in prefill.of(m.Computed)] == [64, 128]
        kinds = [type(e) for e in prefill.events]
        assert kinds.index(m.Started) < kinds.index(m.KVFrame)
        assert kinds.index(m.Started) < kinds.index(m.Computed) < kinds.index(m.TokensDrawn)


def test_front_hears_of_an_export_before_its_frames(
    make_engine: MakeEngine, tiny_folder: Path
) -> None:
    engine = make_engine()
    engine.generate(1, request("1", PROMPT))
    drain(engine)
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        for handle in range(4, 24):
            frame_bytes = served.arena.shape.slot_bytes
            served.slot(m.Grant(handle, 9))
            served.send(m.Export(handle, request("x", PROMPT), frame_bytes, Codec.RAW))
            frame = served.wait(m.KVFrame, handle)
            order = [e for e in served.events if getattr(e, "handle", None) == handle]
            assert isinstance(order[0], m.Started)
            served.send(m.Drop(handle))
            served.slot(m.EndOffer(handle))
            count = len(served.frames(handle))
            served.slot(m.SlotsFree([f.slot for f in served.frames(handle)]))
            assert frame.sequence == 0 and count >= 1
            served.events.clear()
            collect_late_frames(served)


def collect_late_frames(served: ServedEngine) -> None:
    """Empty the slots of frames that were on their way when their transfer ended."""
    while served.poll(0.02):
        pass
    served.slot(m.SlotsFree([f.slot for f in served.of(m.KVFrame)]))
    served.events.clear()


def test_invalid_frame_fails_the_sequence_before_it_joins(
    make_engine: MakeEngine, tiny_folder: Path, sent: list[tuple[m.KVFrame, bytes]]
) -> None:
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as decode:
        open_sequence(decode, 7)
        frame, payload = sent[0]
        decode.send(m.Join(7, 5, 1))
        decode.put(7, frame, b"\xff" * 8 + payload[8:])
        failed = decode.wait(m.ReceiveFailed, 7)
        assert "not finite" in failed.why
        decode.until(lambda: len(decode.free) == 3)
        decode.until(lambda: engine.manager.available == 64, "the pages")
        assert not decode.of(m.Joined) and not decode.of(m.TokensDrawn)


def test_dropped_sequence_frees_its_pages_and_slots(
    make_engine: MakeEngine, tiny_folder: Path, sent: list[tuple[m.KVFrame, bytes]]
) -> None:
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as decode:
        open_sequence(decode, 7)
        for frame, payload in sent[:2]:
            decode.put(7, frame, payload)
        decode.send(m.Join(7, 5, 5), m.Drop(7))
        for frame, payload in sent[2:]:
            decode.put(7, frame, payload)
        decode.until(lambda: len(decode.free) == 3)
        decode.until(lambda: engine.manager.available == 64, "the pages")
        assert not decode.of(m.Joined) and not decode.of(m.ReceiveFailed)


def test_import_is_cached_and_ends(
    make_engine: MakeEngine, tiny_folder: Path, sent: list[tuple[m.KVFrame, bytes]]
) -> None:
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as decode:
        decode.send(m.Import(3, request("fetch", PROMPT)))
        started = decode.wait(m.ImportStarted, 3)
        assert (started.cached_blocks, started.blocks) == (0, 4)
        decode.send(m.EndImport(3, 4))
        for frame, payload in reversed(sent[:4]):
            decode.put(3, frame, payload)
        assert decode.wait(m.ImportEnded, 3).cached_tokens == 128


def test_offers_are_forgotten_however_they_end(make_engine: MakeEngine, tiny_folder: Path) -> None:
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        size = served.arena.shape.slot_bytes
        queue = served.server._copies._outgoing.queue
        wanted = request("1", PROMPT)
        refused = request("2", [99999])  # not in the vocabulary
        compiled = request("3", PROMPT, grammar=regex("[a-z]+"))
        for handle, each in ((1, wanted), (2, refused), (3, compiled), (4, wanted)):
            served.slot(m.Grant(handle, 3))
            served.send(m.Prefill(handle, each, size, Codec.RAW))
        served.send(m.Drop(3), m.Drop(4))
        served.wait(m.RequestRefused, 2)
        served.wait(m.KVFrame, 1)
        served.send(m.Drop(1))
        for handle in range(1, 5):
            served.slot(m.Grant(handle, 1), m.EndOffer(handle))
        served.until(lambda: queue.transfers == 0, "the offers")


def test_thread_that_fails_ends_the_server_with_the_reason(
    make_engine: MakeEngine, tiny_folder: Path
) -> None:
    engine = make_engine()
    with (
        pytest.raises(EngineDied, match="copying KV failed: AssertionError: slot 4 was"),
        serving(engine, tiny_folder, shape_of(engine)) as served,
    ):
        served.slot(m.SlotsFree([4]))
        with pytest.raises(EOFError):
            served.until(lambda: False)
