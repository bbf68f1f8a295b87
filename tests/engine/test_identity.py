"""The numerics contract: text does not depend on what else runs, or on how the prompt came in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec, split_into_pieces
from engine.model.decoder import DecoderModel
from protocol.requests import Request
from tests.engine.conftest import drain, load_model
from tests.engine.families import save
from tests.engine.schedules import Arrival, Schedule, ScheduleRunner, schedules


@pytest.fixture(scope="module")
def lives(tiny: DecoderModel) -> ScheduleRunner:
    return ScheduleRunner(tiny)


def everybody(step: int = 0, **changes: int) -> tuple[Arrival, ...]:
    base = {"priority": 0, "emitted": 0.0, "cancel_after": None, **changes}
    return tuple(Arrival(i, step * i, **base) for i in range(32))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("step", [0, 2])
def test_32_requests_together_give_the_text_of_each_alone(
    lives: ScheduleRunner, chunk: int, step: int
) -> None:
    lives.check(Schedule(everybody(step), 256, chunk, 32, (1.0,)))


def test_preempted_requests_give_the_text_of_each_alone(lives: ScheduleRunner) -> None:
    before = lives.preempted
    lives.check(Schedule(everybody(), 12, 64, 8, (1.0,)))
    assert lives.preempted > before


def test_requests_preempted_by_urgent_ones_give_the_text_of_each_alone(
    lives: ScheduleRunner,
) -> None:
    before = lives.preempted
    calm = tuple(Arrival(i, 0, 5, 0.0, None) for i in range(8))
    urgent = tuple(Arrival(i, 6 + i, -5, 0.0, None) for i in range(8, 24))
    lives.check(Schedule(calm + urgent, 256, 64, 8, (1.0,)))  # rows are short, pages are not
    assert lives.preempted > before


def test_preempted_sequence_on_its_former_row_gives_the_same_text(lives: ScheduleRunner) -> None:
    """Preempted while alone in the decode batch, and back before anybody else has decoded."""
    crowd = tuple(Arrival(i, 0, 0, 0.0, None) for i in (0, *range(10, 16)))
    urgent = Arrival(9, 3, -5, 0.0, None)
    assert lives.requests[9].sampling.max_tokens == 1
    lives.check(Schedule((*crowd, urgent), 8, 16, 1, (0.1,)))


def test_schedules_share_prefixes(lives: ScheduleRunner) -> None:
    before = lives.shared_tokens
    lives.check(Schedule(everybody(), 256, 512, 32, (1.0,)))
    assert lives.shared_tokens > before


@settings(max_examples=settings.default.max_examples // 2)
@given(schedule=schedules())
def test_any_schedule_gives_the_same_text(lives: ScheduleRunner, schedule: Schedule) -> None:
    """Arrivals, priorities, cancellations, resumed requests, engine sizes and step times."""
    lives.check(schedule)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3-moe"])
def test_any_schedule_with_windows_and_experts_gives_the_same_text(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    others = ScheduleRunner(load_model(save(tmp_path_factory.mktemp(family), family)))
    others.check(Schedule(everybody(), 12, 64, 8, (1.0,)))
    others.check(Schedule(everybody(2), 256, 512, 32, (1.0, 60.0)))
    assert others.preempted


def test_resumed_request_continues_with_the_same_text(lives: ScheduleRunner) -> None:
    for wanted, whole in zip(lives.requests[:12], lives.alone, strict=False):
        for at in range(1, len(whole), 7):
            engine = lives.engine()
            engine.generate(0, wanted.resumed(whole[:at]))
            assert drain(engine)[0] == whole[at:]


def hand_over(p: Engine, d: Engine, wanted: Request, frame_bytes: int) -> list[int]:
    """Prefill on one engine, move the missing blocks, decode on the other."""
    cached = d.receive(0, wanted) // 32
    d.reserve(0)
    p.prefill(0, wanted)
    first = drain(p)[0]
    d.plan()
    assert [s.handle for s in d.scheduler.take_reserved()] == [0]
    page_layer = p.format.block_layer_bytes(Codec.RAW)
    for piece in split_into_pieces(cached, p.computed_blocks(0), 3, page_layer, frame_bytes):
        frame = torch.zeros(frame_bytes, dtype=torch.uint8)
        size = p.read(0, piece, frame)
        assert size == piece.bytes(page_layer) <= frame_bytes
        d.write(0, piece, frame[:size])
    p.drop(0)
    if wanted.sampling.max_tokens == 1:
        d.drop(0)
        return first
    d.join(0, first[0])
    return first + drain(d)[0]


@pytest.mark.parametrize("frame_bytes", [8192, 16384, 1 << 20])
def test_transferred_sequence_gives_the_text_of_one_alone(
    lives: ScheduleRunner, frame_bytes: int
) -> None:
    p, d = lives.engine(), lives.engine()
    for wanted, whole in zip(lives.requests[:12], lives.alone, strict=False):
        assert hand_over(p, d, wanted, frame_bytes) == whole
        # Again: now both hold the prefix, and only what is missing travels.
        assert hand_over(p, d, wanted, frame_bytes) == whole
    assert p.manager.available == d.manager.available == 64
