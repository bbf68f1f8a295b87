"""What a client of a closed loop does when it is refused."""

from __future__ import annotations

import asyncio

import pytest

from bench.lib import http_load
from bench.lib.http_load import Arrival, LoadClient, StreamTiming


@pytest.mark.parametrize("status", [429, 503])
def test_refused_client_waits_before_it_sends_again(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    async def refuse(*_: object) -> StreamTiming:
        return StreamTiming(0.0, status, 0.01, retry_after_s=3.0 if not rests else 0.0)

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(LoadClient, "_send", refuse)
    monkeypatch.setattr(asyncio, "sleep", rest)
    arrivals = [Arrival(0.0, [1], 1)] * 3
    found = asyncio.run(LoadClient("http://pool").closed_loop(arrivals, 1, 60.0))
    assert rests == [3.0, http_load.REST_S, http_load.REST_S]
    assert found.rate == 0.0 and len(found.answers) == 3
