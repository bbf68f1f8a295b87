"""Gives blocking calls of Ray and Ray Serve a deadline: both wait without end for what hangs.

A call runs in a daemon thread. One that misses its deadline is abandoned: its thread goes on, and
if it still does when the process ends, `connected_to_ray` leaves out Ray's own exit handlers, which
would wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import StartupError

CONTROLLER_S = 30.0
"""Deadline of a single call of Serve's controller, which answers within milliseconds unless the
machine is overloaded."""

T = TypeVar("T")


class _CallThread(threading.Thread):
    """The thread of a call that has not returned."""


def call_within(deadline_s: float, what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises.

    Raises StartupError at the deadline, which names ``what``, the service that is called."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # the caller's thread raises it
            answers.put((None, error))

    _CallThread(target=run, daemon=True, name=what).start()
    try:
        result, error = answers.get(timeout=max(0.0, deadline_s))
    except queue.Empty:
        raise StartupError(f"{what} does not answer within {deadline_s:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # what the call returned


def is_call_running() -> bool:
    """Return whether a call of this process runs: outside `call_within`, an abandoned one."""
    return any(isinstance(thread, _CallThread) for thread in threading.enumerate())
