"""A page of metrics that came from a network, parsed on a loop that streams run on.

bytes --too many lines, or too long ones?--> no page
      +--slices of SLICE characters, others run between them--> Page
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from router.overview.figures import Page, parse, slim

LINES = 4096
SAMPLES = 2048
"""Ours have 500 and 200. What is kept of a page stays in memory for a window."""
LINE = 1024
"""Characters; parsing a line takes time that grows faster than the line."""
SLICE = 1024
"""Characters that are parsed at once: within 2 ms, where they are made to be slow."""


async def read(body: bytes, slim: Callable[[str], str] = slim) -> Page:
    """``slim``: leaves the lines that are wanted. Raises ValueError for what is no page of ours."""
    if body.count(b"\n") > LINES:
        raise ValueError(f"more than {LINES} lines")
    text = slim(body.decode(errors="replace"))
    page: Page = {}
    for part in _slices(text.split("\n")):
        for name, samples in parse(part).items():
            page.setdefault(name, []).extend(samples)
        await asyncio.sleep(0)
    return page


def _slices(lines: list[str]) -> Iterator[str]:
    """Raises ValueError where lines are too many, or too long."""
    if len(lines) > SAMPLES + 1:  # the last one is empty
        raise ValueError(f"more than {SAMPLES} samples")
    part, size = list[str](), 0
    for line in lines:
        if len(line) > LINE:
            raise ValueError(f"a line of more than {LINE} characters")
        if part and size + len(line) >= SLICE:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    yield "\n".join(part)
