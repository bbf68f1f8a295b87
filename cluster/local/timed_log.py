"""Gives the log lines of a process their date and time: replicas and engines do it at their start.

Their standard error is the log that `baton logs` prints and that outlives the run.
"""

from __future__ import annotations

import logging
import time

_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def log_with_times() -> None:
    """Write warnings, and what loggers named ``baton`` report, to standard error with the time."""
    root = logging.getLogger()
    if any(isinstance(handler, _TimedHandler) for handler in root.handlers):
        return
    root.addHandler(_TimedHandler())
    logging.getLogger("baton").setLevel(logging.INFO)


class _TimedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic at run time
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", _TIME_FORMAT))
        # Ray and Ray Serve have handlers of their own.
        self.addFilter(lambda record: record.name.partition(".")[0] != "ray")


def with_time(text: str) -> str:
    """Return a line as processes with ``log_with_times`` write it now."""
    return f"{time.strftime(_TIME_FORMAT)} {text}"
