"""Pages that are made to be costly, and our own."""

from __future__ import annotations

import asyncio

import pytest

from router.generation.metrics import RouterMetrics
from router.overview.prometheus_text import (
    MAX_LINE_CHARS,
    MAX_LINES,
    MAX_SAMPLES,
    SLICE_CHARS,
    drop_unused_lines,
    parse_page,
    read_page,
)
from router.placement.snapshot import Objectives


async def test_our_pages_are_whole() -> None:
    metrics = RouterMetrics("m" * 200, Objectives(2.0, 0.1), "r")
    body = metrics.page()
    assert await read_page(body) == parse_page(drop_unused_lines(body.decode()))
    assert body.count(b"\n") < MAX_LINES / 4


async def test_labels_may_hold_any_character() -> None:
    label = "a\u2028b\x0bc\u0085\x1c"
    page = await read_page(f'baton_x{{y="{label}"}} 1\n'.encode())
    assert page["baton_x"][0].labels == {"y": label}


async def test_others_run_between_slices() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    body = b"a 1\n" * MAX_SAMPLES
    await read_page(body)
    running.cancel()
    assert turns >= len(body) / SLICE_CHARS


@pytest.mark.parametrize(
    "body",
    [
        b"a 1\n" * (MAX_SAMPLES + 1),
        b"\n" * (MAX_LINES + 1),
        b'a{b="' + b"c" * MAX_LINE_CHARS + b'"} 1\n',
        b"a" * (MAX_LINE_CHARS + 1),
    ],
)
async def test_what_would_cost_too_much(body: bytes) -> None:
    with pytest.raises(ValueError, match="more than"):
        await read_page(body)
