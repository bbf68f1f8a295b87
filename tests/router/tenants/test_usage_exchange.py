"""Several routers hold one tenant to its limits; what they read from Redis is not trusted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from redis.exceptions import RedisError

from cluster.local.redis_server import EmbeddedRedis
from protocol.registry.leases import Leases
from protocol.registry.redis_client import connect
from router.common.errors import ApiError
from router.tenants.peer_usage import (
    ACTIVE_S,
    RECORD_BYTES,
    TENANTS_MAX,
    OwnReport,
    PeerReports,
    ReportedUsage,
    UsageRecord,
    is_valid_usage,
)
from router.tenants.quotas import TenantQuotas
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.usage import TenantUsage, UsageBook
from router.tenants.usage_exchange import EXCHANGE_S, UsageExchange, usage_leases

ACME = Tenant("acme", limits=TenantLimits(8, 600, 60_000))


class FakeLeases(Leases[UsageRecord]):
    """Records in this process, encoded as in Redis. Refuses everything while ``down``."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.down = False

    def _check(self) -> None:
        if self.down:
            raise RedisError("OOM command not allowed when used memory > 'maxmemory'")

    async def renew(self, record: UsageRecord) -> bool:
        self._check()
        self.blobs[record.instance] = msgspec.msgpack.encode(record)
        return True

    async def all(self) -> list[UsageRecord]:
        self._check()
        return [msgspec.msgpack.decode(b, type=UsageRecord) for b in self.blobs.values()]

    async def remove(self, instance: str) -> None:
        self._check()
        self.blobs.pop(instance, None)


class Now:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Router:
    """The tenants' part of one router."""

    def __init__(self, leases: Leases[UsageRecord], name: str, clock: Now) -> None:
        self.quotas, self.book = TenantQuotas(clock), UsageBook()
        self.book.listen(self.quotas.on_others)
        self.quotas.set_tenants([ACME])
        known = ("acme", "free").__contains__
        self.exchange = UsageExchange(leases, name, self.book, self.quotas, known, clock)

    def ask(self, tokens: int = 0) -> bool:
        try:
            self.quotas.check_rates(ACME)
            self.quotas.take_prompt(ACME, tokens)
        except ApiError:
            return False
        self.book.add("acme", TenantUsage(1, tokens))
        return True


async def minutes_of_flood(count: int, tokens: int, seed: int) -> list[int]:
    """Return the requests that pass in each of 10 minutes, of 40 that come each second."""
    clock, leases, rng = Now(), FakeLeases(), Random(seed)
    routers = [Router(leases, f"r{number}", clock) for number in range(count)]
    passed = [0] * 10
    looks = [rng.uniform(0, EXCHANGE_S) for _ in routers]
    start = clock.now
    while clock.now < start + 599.9:
        clock.now += 0.025
        for number, router in enumerate(routers):
            if clock.now - start >= looks[number]:
                looks[number] += EXCHANGE_S
                await router.exchange.exchange()
        passed[int((clock.now - start) // 60)] += rng.choice(routers).ask(tokens)
    return passed


@pytest.mark.parametrize("tokens", [0, 400])
async def test_four_routers_hold_a_tenant_to_its_rates_together(tokens: int) -> None:
    rate = 600 if not tokens else 150  # requests per minute that the limits allow
    alone, together = [await minutes_of_flood(count, tokens, seed=1) for count in (1, 4)]
    assert sum(alone[1:]) == pytest.approx(9 * rate, rel=0.02)
    assert sum(together[1:]) == pytest.approx(9 * rate, rel=0.1)
    assert all(minute == pytest.approx(rate, rel=0.1) for minute in together[2:]), together
    assert together[0] <= 2.2 * rate, "a full bucket and a minute, once for all routers"


async def test_concurrency_over_routers() -> None:
    clock, leases = Now(), FakeLeases()
    one, two = Router(leases, "one", clock), Router(leases, "two", clock)
    one.quotas.enter(ACME, 6)
    for router in (one, two):
        await router.exchange.exchange()
    two.quotas.enter(ACME, 2)
    with pytest.raises(ApiError, match="8 choices are running"):
        two.quotas.enter(ACME, 1)
    leases.down = True
    for seconds in (1.0, 10.0):  # reports of a Redis that is gone count for a moment
        clock.now += seconds
        with pytest.raises(RedisError):
            await two.exchange.exchange()
        two.exchange._on_failure(RedisError("gone"))
        assert two.quotas._quotas["acme"].running_elsewhere == (6 if seconds < 5 else 0)


async def test_a_redis_that_hangs_stops_nobody_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.tenants.usage_exchange._REDIS_S", 0.01)
    monkeypatch.setattr("router.tenants.usage_exchange.EXCHANGE_S", 0.001)
    calls = 0

    class Hanging(FakeLeases):
        async def all(self) -> list[UsageRecord]:
            nonlocal calls
            calls += 1
            await asyncio.Event().wait()
            raise AssertionError

        async def remove(self, instance: str) -> None:
            await asyncio.Event().wait()

    router = Router(Hanging(), "one", Now())
    router.exchange.start()
    async with asyncio.timeout(5):
        while calls < 3:
            assert router.ask(0) or calls
            await asyncio.sleep(0.001)
        await router.exchange.close()
        await router.exchange.close()
    told = [r for r in caplog.records if "not exchanged" in r.getMessage()]
    assert len(told) == 1, "once, not each time"


async def test_a_router_that_comes_back_is_counted_from_its_start() -> None:
    clock, leases = Now(), FakeLeases()
    heard: list[tuple[str, TenantUsage]] = []
    reader = Router(leases, "reader", clock)
    reader.book.listen(lambda name, usage: heard.append((name, usage)))

    async def reports(name: str, *amounts: int) -> None:
        for amount in amounts:
            usage = ReportedUsage(amount, 2 * amount, 3 * amount, float(amount), 1)
            await leases.renew(UsageRecord(instance=name, tenants={"acme": usage}))
            clock.now += 0.5
            await reader.exchange.exchange()

    await reports("a", 10**6, 10**6 + 2, 10**6 + 2, 5)
    await reports("b", 7, 8)
    assert [usage.requests for _, usage in heard] == [2, 5, 1]
    assert heard[0] == ("acme", TenantUsage(2, 4, 6, 2.0))


async def test_what_nobody_can_have_served_is_bounded_or_ignored() -> None:
    clock, heard = Now(), dict[str, TenantUsage]()
    peers = PeerReports("me", {"acme"}.__contains__)
    huge = ReportedUsage(2**53, 2**53, 2**53, 2.0**53, 2**53)
    empty = UsageRecord(instance="evil", tenants={})
    peers.differences([empty], clock.now)
    full = UsageRecord(instance="evil", tenants={"acme": huge, "nobody": huge})
    mine = UsageRecord(instance="me", tenants={"acme": huge})
    heard = peers.differences([full, mine], clock.now + 0.5)
    assert list(heard) == ["acme"], "unknown names would be remembered for ever"
    assert heard["acme"].output_tokens <= 5e6 and heard["acme"].service <= 5e5
    assert peers.running([full, mine]) == {"acme": 1 << 15}
    crowd = [UsageRecord(instance=f"i{n}", tenants={"acme": huge}) for n in range(5000)]
    for later in (1.0, 2.0):
        peers.differences(crowd, clock.now + later)
    assert len(peers._peers) <= 1024
    peers.differences([], clock.now + 1000)
    assert not peers._peers


@pytest.mark.parametrize(
    ("usage", "valid"),
    [
        ((1, 2, 3, 4.0, 5), True),
        ((-1, 2, 3, 4.0, 5), False),
        ((1, 2**54, 3, 4.0, 5), False),
        ((1, 2, 3, -0.5, 5), False),
        ((1, 2, 3, math.nan, 5), False),
        ((1, 2, 3, math.inf, 5), False),
        ((1, 2, 3, 4.0, -5), False),
    ],
)
def test_records_are_checked(usage: tuple[int, int, int, float, int], valid: bool) -> None:
    record = UsageRecord(instance="a", tenants={"acme": ReportedUsage(*usage)})
    assert is_valid_usage(record) is valid
    crowd = {f"t{n}": ReportedUsage(1, 2, 3, 4.0, 5) for n in range(TENANTS_MAX + 1)}
    assert not is_valid_usage(UsageRecord(instance="a", tenants=crowd))
    assert not is_valid_usage(UsageRecord(instance="a" * 257, tenants={}))


def test_a_record_holds_the_active_tenants_and_is_bounded() -> None:
    book, report = UsageBook(), OwnReport("me")

    def record(now: float, running: dict[str, int] | None = None) -> UsageRecord:
        return report.record(book.own(), book.take_changed(), running or {}, now)

    for number in range(TENANTS_MAX + 500):
        book.add(f"t{number}", TenantUsage(2**50, 2**50, 2**50, 2.0**50))
    full = record(0.0)
    assert 900 < len(full.tenants) <= TENANTS_MAX
    assert len(msgspec.msgpack.encode(full)) <= RECORD_BYTES
    assert record(ACTIVE_S + 1).tenants == {}
    book.add("t5", TenantUsage(2, output_tokens=3))
    later = record(ACTIVE_S + 2, {"t9": 4, "new": 1})
    assert later.tenants == {
        "t5": ReportedUsage(2, 0, 3, 0.0, 0),  # since it became active again
        "t9": ReportedUsage(0, 0, 0, 0.0, 4),
        "new": ReportedUsage(0, 0, 0, 0.0, 1),
    }
    assert len(msgspec.msgpack.encode(later)) < 100
    book.retain({"t5"})
    assert set(record(ACTIVE_S + 3).tenants) == {"t5"}
    assert len(report._known) <= 1


# ---- a real Redis --------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_through_redis_whatever_it_holds_and_while_it_is_full(
    server: EmbeddedRedis,
) -> None:
    client = connect(server.url)
    clock = Now()
    one, two = [Router(usage_leases(client, "test"), name, clock) for name in ("one", "two")]
    both = (one, two)

    async def exchanged() -> None:
        clock.now += 0.5
        for router in both:
            await router.exchange.exchange()

    try:
        for name, blob in {"a": b"\x81" * 4000, "b": b"x", "c": b"\xc1", "d": b""}.items():
            await client.sadd("baton:test:usages", name)
            await client.set(f"baton:test:usage:{name}", blob)
        await exchanged()
        assert all(one.ask(7) for _ in range(100))
        await exchanged()
        assert two.quotas.headers(ACME)["x-ratelimit-remaining-requests"] == "500"
        await client.config_set("maxmemory", "1")  # it is read, and writes nothing
        assert all(one.ask(7) for _ in range(100))
        await exchanged()
        await exchanged()
        assert "500" < two.quotas.headers(ACME)["x-ratelimit-remaining-requests"] < "520"
        await client.config_set("maxmemory", "0")
        await exchanged()
        await exchanged()
        assert "400" < two.quotas.headers(ACME)["x-ratelimit-remaining-requests"] < "430"
        one.exchange.start()
        await asyncio.sleep(0.01)
        await one.exchange.close()
        assert [r.instance for r in await usage_leases(client, "test").all()] == ["two"]
    finally:
        await client.aclose()
