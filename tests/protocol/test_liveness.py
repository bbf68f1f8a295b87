"""Silence of a peer is noticed; time in which this process itself stood still does not count."""

from __future__ import annotations

import asyncio
import time

import pytest

from protocol import liveness
from protocol.liveness import PAUSE_EFFECT_S, PAUSE_S, SILENCE_S, SilenceDetector


async def test_silence_is_noticed_after_its_limit() -> None:
    began = time.monotonic()
    await SilenceDetector().wait_for_silence(0.5)
    assert 0.5 <= time.monotonic() - began < 1.5


async def test_peer_that_is_heard_is_not_silent() -> None:
    silence = SilenceDetector()
    waiting = asyncio.create_task(silence.wait_for_silence(0.5))
    for _ in range(10):
        await asyncio.sleep(0.1)
        silence.heard()
    assert not waiting.done()
    await waiting


async def test_time_in_which_this_process_stood_still_is_not_silence_of_the_peer() -> None:
    silence = SilenceDetector()
    waiting = asyncio.create_task(silence.wait_for_silence(0.75))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await waiting


class Clock:
    """Seconds that a test sets, and checks that it lets happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._check = asyncio.Event()
        monkeypatch.setattr("protocol.liveness.asyncio.sleep", self._sleep)
        self._yield = asyncio.sleep

    async def _sleep(self, seconds: float) -> None:
        self._check.clear()
        await self._check.wait()

    async def check(self, after_s: float = liveness._CHECK_S) -> None:
        """Let the next check come ``after_s`` later."""
        self.now += after_s
        self._check.set()
        for _ in range(3):
            await self._yield(0)


async def test_own_pause_is_noticed_before_and_after_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yielding = asyncio.sleep
    clock = Clock(monkeypatch)
    clock._yield = yielding
    silence = SilenceDetector(lambda: clock.now)
    assert not silence.after_own_pause()
    waiting = asyncio.create_task(silence.wait_for_silence(1000.0))
    await yielding(0)
    for _ in range(20):
        await clock.check(liveness._CHECK_S + PAUSE_S / 2)  # busy, not paused
    assert not silence.after_own_pause()
    clock.now += 5.0  # SIGSTOP: what broke meanwhile is reported before the check runs
    assert silence.after_own_pause()
    await clock.check(0.0)
    for _ in range(8):  # 2 s
        await clock.check()
    assert silence.after_own_pause()
    for _ in range(4):
        await clock.check()
    assert not silence.after_own_pause()
    waiting.cancel()


def test_a_peer_that_is_silent_after_the_pause_is_silent_itself() -> None:
    assert PAUSE_EFFECT_S < SILENCE_S
