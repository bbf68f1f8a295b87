"""A choice ends when it waits for a token, and not while it gets some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from router.generation.token_timer import TokenTimer

STEP_S = 0.05

MakeTimer = Callable[[float, float], "Watched"]


class Watched:
    """A timer, and what it asks for."""

    def __init__(self, first_s: float, next_s: float) -> None:
        self.last = 0.0
        self.is_behind = False
        self.reasons: list[str] = []
        arrived = time.perf_counter()
        self.timer = TokenTimer(
            *(arrived, first_s, next_s, lambda: self.last, lambda: self.is_behind),
            self.reasons.append,
        )

    def token(self) -> None:
        self.last = time.perf_counter()


@pytest.fixture
def make() -> Iterator[MakeTimer]:
    made = []

    def new(first_s: float, next_s: float) -> Watched:
        made.append(Watched(first_s, next_s))
        return made[-1]

    yield new
    for watched in made:
        watched.timer.cancel()


async def test_first_token_is_due_from_the_arrival(make: MakeTimer) -> None:
    watched = make(STEP_S, 60.0)
    watched.timer.start()
    assert 0 < watched.timer.left_s <= STEP_S
    await asyncio.sleep(2 * STEP_S)
    assert watched.reasons == ["the first token was not generated within 0.05 s"]


async def test_progress_moves_the_limit_and_silence_does_not(make: MakeTimer) -> None:
    watched = make(60.0, 2 * STEP_S)
    watched.timer.start()
    watched.timer.first_token_came()
    for _ in range(6):
        watched.token()
        await asyncio.sleep(STEP_S)
    assert not watched.reasons
    await asyncio.sleep(1.5 * STEP_S)
    assert watched.reasons == ["no further token was generated within 0.1 s"]


async def test_a_client_that_is_behind_has_limits_of_its_own(make: MakeTimer) -> None:
    watched = make(60.0, STEP_S)
    watched.timer.first_token_came()
    watched.token()
    watched.is_behind = True
    await asyncio.sleep(3 * STEP_S)
    assert not watched.reasons
    watched.is_behind = False
    await asyncio.sleep(2 * STEP_S)
    assert watched.reasons


async def test_a_cancelled_timer_reports_nothing(make: MakeTimer) -> None:
    watched = make(STEP_S, STEP_S)
    watched.timer.cancel()
    watched.timer.start()
    watched.timer.cancel()
    watched.timer.cancel()
    await asyncio.sleep(2 * STEP_S)
    assert not watched.reasons
