"""Deadlines of calls that may hang."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

import pytest

from cluster.serve import bounded_call
from cluster.serve.bounded_call import call_within
from protocol.errors import StartupError


def test_a_call_returns_or_raises_what_it_did() -> None:
    assert call_within(5.0, "Ray", lambda: 7) == 7

    def fail() -> NoReturn:
        raise KeyError("x")

    with pytest.raises(KeyError):
        call_within(5.0, "Ray", fail)


def test_a_call_that_hangs_is_given_up_at_its_deadline() -> None:
    never = threading.Event()
    with pytest.raises(StartupError, match="Ray Serve does not answer within 0 s"):
        call_within(0.05, "Ray Serve", never.wait)
    assert bounded_call.is_call_running()
    never.set()
    until = time.monotonic() + 10.0
    while bounded_call.is_call_running() and time.monotonic() < until:
        time.sleep(0.01)
    assert not bounded_call.is_call_running()
