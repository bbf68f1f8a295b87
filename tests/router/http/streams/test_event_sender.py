"""What goes to the client of a stream, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from router.http.streams import event_sender
from router.http.streams.event_sender import EventSender
from tests.router.conftest import until

EVERY_S = 0.1


class Client:
    """The receiving end of a stream; ``reads`` is cleared while it does not read."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.got: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.stuck = 0
        self._beats = 0
        self.sender = EventSender(
            *(self._send, self._send, lambda: {"type": "head"}, self._beat),
            *(every_s, self._on_stuck),
        )

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self.got.append(message.get("body", b"head"))

    def _beat(self) -> bytes:
        self._beats += 1
        return b"beat %d" % self._beats

    def _on_stuck(self) -> None:
        self.stuck += 1


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client()
    yield client
    client.sender.close()


async def test_head_comes_soon_and_keep_alives_follow(client: Client) -> None:
    await client.sender.open(b"")
    assert client.got == []
    await until(lambda: len(client.got) >= 3)
    assert client.got == [b"head", b"beat 1", b"beat 2"]


async def test_opening_takes_the_head_along_at_once(client: Client) -> None:
    await client.sender.open(b"created")
    assert client.got == [b"head", b"created"]


async def test_a_stream_with_events_gets_no_keep_alives(client: Client) -> None:
    await client.sender.open(b"")
    for _ in range(12):
        await asyncio.sleep(EVERY_S / 4)
        await client.sender.send(b"event")
    assert client.got == [b"head"] + 12 * [b"event"]


async def test_close_stops_keep_alives(client: Client) -> None:
    await client.sender.open(b"")
    await client.sender.send(b"last", more=False)
    client.sender.close()
    client.sender.close()
    await asyncio.sleep(3 * EVERY_S)
    assert client.got == [b"head", b"last"]


async def test_nothing_piles_up_for_a_client_that_does_not_read(client: Client) -> None:
    await client.sender.open(b"created")
    client.reads.clear()
    await asyncio.sleep(6 * EVERY_S)
    sending = asyncio.create_task(client.sender.send(b"event"))
    await asyncio.sleep(6 * EVERY_S)
    client.reads.set()
    await sending
    assert client.got == [b"head", b"created", b"beat 1", b"event"]


async def test_an_event_that_waits_for_long_is_reported(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_sender, "STUCK_S", 2 * EVERY_S)
    await client.sender.open(b"created")
    client.reads.clear()
    sending = asyncio.create_task(client.sender.send(b"event"))
    await asyncio.sleep(EVERY_S)
    assert client.stuck == 0
    await asyncio.sleep(4 * EVERY_S)
    assert client.stuck == 1
    sending.cancel()


async def test_a_send_that_waits_for_a_moment_after_a_silence_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_sender, "STUCK_S", 1.8 * EVERY_S)
    client = Client(every_s=4 * EVERY_S)
    await client.sender.open(b"created")
    await asyncio.sleep(5.6 * EVERY_S)
    client.reads.clear()
    sending = asyncio.create_task(client.sender.send(b"event"))
    await asyncio.sleep(0.8 * EVERY_S)  # the timer fires within this time
    client.reads.set()
    await sending
    assert client.stuck == 0
    client.sender.close()


async def test_no_silence_is_longer_than_the_setting_where_the_timer_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_sender, "STUCK_S", 0.2)
    client = Client(every_s=1.0)
    began_s = asyncio.get_running_loop().time()
    await client.sender.open(b"created")
    await until(lambda: client.got == [b"head", b"created", b"beat 1"])
    assert 0.7 < asyncio.get_running_loop().time() - began_s < 1.4
    client.sender.close()
