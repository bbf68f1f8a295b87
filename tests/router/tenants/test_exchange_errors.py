"""The exchange of usage goes on after an error that nobody expected."""

from __future__ import annotations

import asyncio

import pytest

from router.tenants.peer_usage import UsageRecord
from tests.router.tenants.test_usage_exchange import FakeLeases, Now, Router


async def test_an_unexpected_error_does_not_end_the_exchange(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.tenants.usage_exchange.EXCHANGE_S", 0.0)
    errors: list[Exception] = [ValueError("one"), ValueError("two"), KeyError("three")]

    class Odd(FakeLeases):
        async def all(self) -> list[UsageRecord]:
            if errors:
                raise errors.pop(0)
            return await super().all()

    leases = Odd()
    router = Router(leases, "one", Now())
    router.exchange.start()
    async with asyncio.timeout(5):
        while "one" not in leases.blobs:
            await asyncio.sleep(0)
    await router.exchange.close()
    told = [record for record in caplog.records if "unexpectedly" in record.getMessage()]
    assert len(told) == 2, "each kind once"
