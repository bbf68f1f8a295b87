"""What has expired is computed no further, at whatever stage it is."""

from __future__ import annotations

import math

import pytest

from engine.scheduling.deadlines import DeadlineQueue
from engine.scheduling.sequence import Phase, Sequence
from protocol.requests import Request


def sequence(
    handle: int, first_s: float = 0.0, next_s: float = 0.0, phase: Phase = Phase.WAITING
) -> Sequence:
    request = Request(
        id=str(handle), prompt=(1, 2, 3), first_token_s=first_s, token_timeout_s=next_s
    )
    return Sequence(handle, request, phase, arrived_s=100.0)


class World:
    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.queue = DeadlineQueue(self.sequences)

    def add(self, new: Sequence) -> Sequence:
        self.queue.add(new)  # as the engine does: before the scheduler has it
        self.sequences[new.handle] = new
        return new


@pytest.mark.parametrize(
    "phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.WAITING_ROW], ids=lambda p: p.name
)
def test_expires_in_every_phase_that_computes(phase: Phase) -> None:
    world = World()
    world.add(sequence(1, 5.0, phase=phase))
    assert world.queue.take_expired(104.9) == []
    assert world.queue.take_expired(105.0) == [1]
    assert world.queue.take_expired(200.0) == []


def test_without_a_deadline_nothing_expires() -> None:
    world = World()
    world.add(sequence(1))
    assert world.queue.take_expired(math.inf) == []


def test_a_sequence_that_draws_tokens_goes_on_and_one_that_stands_still_expires() -> None:
    world = World()
    late, early = (world.add(sequence(i, 5.0, 60.0, Phase.PREFILL)) for i in (1, 2))
    early.tokens.append(7)
    assert late.token_due_s == 105.0
    assert world.queue.take_expired(110.0) == [1]
    for now_s in (170.0, 230.0, 290.0):
        early.tokens.append(7)
        assert world.queue.take_expired(now_s) == []
    assert world.queue.take_expired(349.0) == []
    assert world.queue.take_expired(350.0) == [2]


def test_without_a_limit_between_tokens_a_sequence_is_forgotten_at_its_first_one() -> None:
    world = World()
    world.add(sequence(1, 5.0)).tokens.append(7)
    assert world.queue.take_expired(110.0) == []
    assert not world.queue._heap


def test_what_is_held_for_a_peer_is_left_to_its_call() -> None:
    world = World()
    held = world.add(sequence(1, 5.0, phase=Phase.HELD))
    assert world.queue.take_expired(105.0) == []
    held.phase = Phase.DECODE
    assert world.queue.take_expired(106.5) == [1]


def test_sequences_that_have_ended_are_forgotten() -> None:
    world = World()
    for handle in range(10_000):
        world.add(sequence(handle, 600.0))
        if handle >= 10:
            del world.sequences[handle]
    assert len(world.queue._heap) < 200
    assert world.queue.take_expired(1e6) == list(range(10))
