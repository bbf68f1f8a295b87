"""Silence is that of the other end, never our own."""

from __future__ import annotations

import asyncio
import time

from protocol.liveness import Silence


async def test_silence_lasts() -> None:
    began = time.monotonic()
    await Silence().lasts(0.5)
    assert 0.5 <= time.monotonic() - began < 1.5


async def test_whoever_is_heard_is_not_silent() -> None:
    silence = Silence()
    waiting = asyncio.create_task(silence.lasts(0.5))
    for _ in range(10):
        await asyncio.sleep(0.1)
        silence.heard()
    assert not waiting.done()
    await waiting


async def test_standing_still_ourselves_is_no_silence_of_others() -> None:
    silence = Silence()
    waiting = asyncio.create_task(silence.lasts(0.75))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await waiting
