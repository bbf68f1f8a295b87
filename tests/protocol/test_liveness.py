"""Silence of a peer is noticed; time in which this process itself stood still does not count."""

from __future__ import annotations

import asyncio
import time

from protocol.liveness import SilenceDetector


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
