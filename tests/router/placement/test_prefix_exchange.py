"""Prompts that one router has sent are prefixes on their way for the others, through Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.local.redis_server import EmbeddedRedis
from protocol.block_keys import BLOCK_TOKENS, block_keys
from protocol.kv_events import FIELD
from protocol.registry.redis_client import connect
from router.placement.ledger import QueuedPrompts, WorkLedger
from router.placement.prefix_exchange import PrefixExchange, SentPrompt

KEYS = block_keys(b"r" * 16, [7] * 40 * BLOCK_TOKENS)


class ExchangingRouter:
    """The ledger of a router, and its part of the exchange."""

    def __init__(self, client: Any, name: str, clock: Callable[[], float]) -> None:
        self.has_others = True
        self.ledger = WorkLedger(clock)
        self.exchange = PrefixExchange(client, "test", name, self.ledger, lambda: self.has_others)
        self.exchange.start()

    def send(self, uncached: int, keys: list[bytes] = KEYS, digest: int = 7) -> None:
        tokens = uncached * BLOCK_TOKENS
        about = {"tokens": tokens, "seconds": 1.0, "kv_tokens": 0, "priority": 0.0}
        ticket = self.ledger.open("p0", "d0", **about, keys=keys, digest=digest)  # type: ignore[arg-type]
        self.exchange.announce(ticket.prefix, 1.0, digest)

    @property
    def known(self) -> dict[str, int]:
        return {name: blocks for name, (blocks, _) in self.ledger.expected.match(KEYS).items()}


class ExchangeSetting:
    """A Redis and two routers. ``now`` is the time of both."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.server = EmbeddedRedis(folder)
        self.server.start()
        self.client = connect(self.server.url)
        self.one, self.two = (
            ExchangingRouter(self.client, name, lambda: self.now) for name in ("one", "two")
        )

    async def close(self) -> None:
        for router in (self.one, self.two):
            await router.exchange.close()
        await self.client.aclose()
        self.server.stop()

    async def send_raw(self, data: bytes) -> None:
        await self.client.xadd("baton:test:expected", {FIELD: data})


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[ExchangeSetting]:
    found = ExchangeSetting(tmp_path)
    await asyncio.sleep(0.1)  # both listen
    yield found
    await found.close()


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("uncached", [40, 25, 3])
async def test_another_router_knows_the_prompt(setting: ExchangeSetting, uncached: int) -> None:
    setting.one.send(uncached)
    await until(lambda: setting.two.known == {"p0": 40})
    (found,) = setting.two.ledger.expected.match(KEYS).values()
    assert found[1].tokens == uncached * BLOCK_TOKENS and not found[1].computed
    assert setting.two.ledger.expected.match(KEYS[:30]).get("p0", (30,))[0] == 30
    other = block_keys(b"o" * 16, [7] * 40 * BLOCK_TOKENS)
    assert setting.two.ledger.expected.match(other) == {}


async def test_it_is_forgotten_after_a_while(setting: ExchangeSetting) -> None:
    setting.one.send(40)
    await until(lambda: bool(setting.two.known))
    setting.now = 3.9  # twice the predicted second, and two for the events
    assert setting.two.known == {"p0": 40}
    setting.now = 4.1
    assert setting.two.known == {}
    assert len(setting.two.ledger.expected) == 0


async def test_nothing_is_sent_without_other_routers(setting: ExchangeSetting) -> None:
    setting.one.has_others = False
    setting.one.send(40)
    await asyncio.sleep(0.3)
    assert setting.two.known == {}
    assert not await setting.client.exists("baton:test:expected")


async def test_prompts_count_in_the_queue_of_other_routers(setting: ExchangeSetting) -> None:
    """Also those with no prefix to share, until the worker reports them."""
    setting.two.ledger.report("p0", 0)
    queue = setting.two.ledger.queue("p0")
    setting.one.send(40, digest=1)
    setting.one.send(10, [], digest=2)  # a fetched prefix
    setting.one.send(5, digest=3)  # on its way to the same worker already
    await until(lambda: queue.other_prompts == 3)
    assert queue.others == 55 * BLOCK_TOKENS
    assert setting.two.known == {"p0": 40}
    setting.two.ledger.report("p0", 50 * BLOCK_TOKENS, 2, latest=(1, 2))
    assert (queue.others, queue.other_prompts) == (55 * BLOCK_TOKENS, 3)
    setting.two.ledger.report("p0", 0, latest=(1, 2, 3))
    assert (queue.others, queue.other_prompts) == (0, 0)
    setting.one.send(40, digest=0)  # of a router that does not say which
    await asyncio.sleep(0.1)
    assert queue.others == 0
    assert "p1" not in setting.two.ledger.queues


async def test_garbage_is_skipped(setting: ExchangeSetting) -> None:
    def sent(**changes: Any) -> bytes:
        about = {"first": 0, "tokens": 40, "level": 0.0, "seconds": 9.0, "keys": b"".join(KEYS)}
        return msgspec.msgpack.encode(SentPrompt("three", "p1", **{**about, **changes}))

    for bad in (b"", b"\xc1", sent(level=float("nan")), sent(seconds=float("nan"))):
        await setting.send_raw(bad)
    for bad in (b"\xdc\xff" * 9, b"\x91" * 3000, sent(first=8, keys=KEYS[0])):
        await setting.send_raw(bad)
    await setting.send_raw(sent().replace(b"three", b"\xff\xffree"))
    for bad in (sent(seconds=1e9), sent(keys=KEYS[0][1:]), sent(first=-8)):
        await setting.send_raw(bad)
    await setting.client.xadd("baton:test:expected", {b"other": b"field"})
    await setting.send_raw(sent())
    await until(lambda: setting.two.known == {"p1": 40})
    await until(lambda: setting.one.known == {"p1": 40})


async def test_own_knowledge_takes_the_place_of_a_hint(setting: ExchangeSetting) -> None:
    setting.one.send(40)
    await until(lambda: bool(setting.two.known))
    setting.two.send(40)
    ((_, prefix),) = setting.two.ledger.expected.match(KEYS).values()
    assert not prefix.of_other
    setting.now = 60.0  # the hint is over, and the prompt is still computed
    assert setting.two.known == {"p0": 40}


async def test_a_hint_takes_nothing_from_own_work(setting: ExchangeSetting) -> None:
    setting.one.send(40)
    await until(lambda: bool(setting.two.known))
    ((_, hint),) = setting.two.ledger.expected.match(KEYS).values()
    setting.two.send(30, block_keys(b"n" * 16, [7] * 1000))
    queue = setting.two.ledger.queue("p0")
    assert queue.beside(hint) == QueuedPrompts(30 * BLOCK_TOKENS, 1)
    queue.report(70 * BLOCK_TOKENS, 2)  # the worker's report has both
    assert queue.beside(hint) == QueuedPrompts(30 * BLOCK_TOKENS, 1)


async def test_redis_may_fail(setting: ExchangeSetting, caplog: pytest.LogCaptureFixture) -> None:
    await setting.client.delete("baton:test:expected")
    await setting.client.set("baton:test:expected", "no stream")
    setting.one.send(40)
    await until(lambda: "cannot be exchanged" in caplog.text)
    await asyncio.sleep(0.4)  # both have read, too
    await setting.client.delete("baton:test:expected")
    stale = msgspec.msgpack.encode(SentPrompt("three", "p9", 0, 40, 0.0, 9.0, b"".join(KEYS), 1))
    await setting.send_raw(stale)  # in their pauses after an error
    await asyncio.sleep(1.2)
    setting.one.send(40, block_keys(b"n" * 16, [7] * 320))
    setting.two.send(40)
    await until(lambda: setting.one.known == {"p0": 40} and len(setting.two.ledger.expected) > 5)
    assert "p9" not in setting.two.known
