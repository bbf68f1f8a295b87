"""The progress of a run on a terminal, four times a second; elsewhere nothing is drawn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.serve.client import Clock
from bench.serve.loop import Loop

EVERY_S = 0.25
WINDOW = 8
"""Looks over which the rate is taken: 2 s."""


class Bar:
    """Shows a loop. ``total``: requests to come; None: as many as ``duration_s`` brings."""

    def __init__(self, console: Console, total: int | None, duration_s: float | None) -> None:
        self._total = total
        self._duration_s = duration_s
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # when, requests done
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total or duration_s, state="")

    @contextlib.contextmanager
    def watching(self, loop: Loop, clock: Clock) -> Iterator[None]:
        with self._progress:
            drawing = asyncio.get_running_loop().create_task(self._draw(loop, clock))
            try:
                yield
            finally:
                drawing.cancel()
                self._look(loop, clock())

    async def _draw(self, loop: Loop, clock: Clock) -> None:
        while not self._progress.disable:
            self._look(loop, clock())
            await asyncio.sleep(EVERY_S)

    def _look(self, loop: Loop, now: float) -> None:
        self._seen.append((now, loop.done))
        then, done = self._seen[0]
        rate = (loop.done - done) / (now - then) if now > then else 0.0
        of = f" of {self._total}" if self._total else ""
        self._progress.update(
            self._task,
            completed=loop.done if self._total else now,
            state=f"{loop.done}{of} done, {rate:.1f}/s, {loop.in_flight} in flight,"
            f" {loop.failed} failed",
        )
        self._progress.refresh()
