"""What the router does on its event loop for each chunk of a stream, and for a long prompt.

Work is counted (functions entered, blocks hashed), not timed: a busy machine changes no count.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol import block_keys as keys_module
from protocol.block_keys import BLOCK_TOKENS, KEYS_AT_ONCE
from protocol.registry.directory import ModelInfo
from router.settings import RouterSettings
from tests.router.conftest import MODEL, Start, running
from tests.router.fake_worker import outputs

COUNTED = ("/router/", "/starlette/", "/fastapi/", "/protocol/")
MOST_CALLS = 45
"""Functions and coroutines that may be entered for a chunk of a plain chat stream."""


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Count how often functions of the router, or of what it is built on, are entered; coroutines
    and generators count each time that they go on."""
    count = [0]

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/tests/" not in path and any(part in path for part in COUNTED):
            count[0] += 1

    sys.setprofile(on_event)
    try:
        yield count
    finally:
        sys.setprofile(None)


async def test_a_chunk_of_a_stream_takes_few_calls(start: Start) -> None:
    cluster = await start(outputs(delay=0.001))
    counts, chunks = [], []
    for tokens in (20, 20, 120):  # the first warms up
        with counted_calls() as count:
            answer = await cluster.chat(max_tokens=tokens, ignore_eos=True, stream=True)
        counts.append(count[0])
        chunks.append(answer.text.count("data: "))
    each = (counts[2] - counts[1]) / (chunks[2] - chunks[1])
    assert 10 < each <= MOST_CALLS, each


async def test_a_long_prompt_is_hashed_in_turns_with_other_requests(
    settings: RouterSettings, model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = [0]  # blocks in each turn of the event loop

    def counting(*arguments: Any, **named: Any) -> Any:
        hashed[-1] += 1
        return hashlib.blake2b(*arguments, **named)

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            hashed.append(0)

    long = msgspec.structs.replace(model_info, max_model_len=1 << 17)
    prompt = [7] * (3 * KEYS_AT_ONCE * BLOCK_TOKENS)
    async with running(settings, long, outputs()) as cluster:
        monkeypatch.setattr(keys_module, "hashlib", SimpleNamespace(blake2b=counting))
        ticking = asyncio.create_task(tick())
        answer = await cluster.post(prompt=prompt, max_tokens=2, model=MODEL)
        ticking.cancel()
    assert answer.status_code == 200, answer.text
    assert sum(hashed) >= 3 * KEYS_AT_ONCE
    assert max(hashed) <= KEYS_AT_ONCE + 1  # one more for the root
