"""A deadline for calls that know none."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from protocol.errors import StartupError


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raises StartupError within the block once ``seconds`` are over. In the main thread only, and
    as soon as it is back in Python."""

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise StartupError(f"{what} within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
