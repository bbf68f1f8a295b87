"""A record that is kept alive: what its process says of a Redis that is away for a while."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from protocol.registry.directory import AutoscalerRecord
from protocol.registry.leases import LeaseRenewer, Leases

RECORD = AutoscalerRecord(instance="a" * 32, model="m", metrics_endpoint="", pid=1)


class Renewed:
    """What leases are made of. ``away``: Redis does not answer."""

    def __init__(self) -> None:
        self.away = False
        self.asked = 0

    async def renew(self, record: AutoscalerRecord) -> bool:
        self.asked += 1
        if self.away:
            raise RedisConnectionError("nobody listens")
        return True

    async def remove(self, instance: str) -> None: ...

    async def times(self, more: int) -> None:
        """Until it was asked so often again, and somebody could act on the answer."""
        wanted = self.asked + more
        async with asyncio.timeout(5):
            while self.asked < wanted:
                await asyncio.sleep(0.001)


async def test_a_loss_and_its_end_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.registry.leases.RENEW_S", 0.002)
    caplog.set_level(logging.INFO)
    redis = Renewed()
    presence = LeaseRenewer(cast("Leases[AutoscalerRecord]", redis), lambda: RECORD)
    await presence.start()
    await redis.times(3)
    assert not caplog.messages
    for _ in range(2):
        caplog.clear()
        redis.away = True
        await redis.times(4)
        [lost] = caplog.messages
        assert lost == "the lease is not renewed, Redis does not answer: nobody listens"
        redis.away = False
        await redis.times(4)
        [_, back] = caplog.messages
        assert back.startswith("the lease is renewed, Redis answers again after 0.")
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
    await presence.end()
